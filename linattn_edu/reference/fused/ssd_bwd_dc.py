"""The backward pass of Mamba-2: what tokens read of the states, of all heads of a group at once."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def ssd_bwd_dc(
    C: Tensor,
    gc: Tensor,
    h: Tensor,
    dh: Tensor,
    dy: Tensor,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the states before the chunks: of chapters 15, 17 and 19.

    Args:
        C, gc, seq_idx: as in ssd_fwd.  h: [B, NT, H, N, P] of ssd_states.
        dh: the same of ssd_states_bwd.  dy: [B, T, H, P], gradient of y.
    Returns:
        dC [B, T, G, N] and dgc [B, T, H], parts from which ssd_bwd_dx goes on; dlast [B, NT, H],
        the gradient of a chunk's last log decay where it decays the state (natural units); in fp32
        (fp64 for fp64 input).
    Source: chapters 15, 17 and 19.
    """
    dtype = compute_dtype(C, gc, h, dh, dy)
    T, H = dy.shape[1:3]
    e, _, _, a = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, dY = (to_chunks(y.to(dtype), chunk_size) for y in (repeat_heads(C, H), dy))
    h, dh = (y.to(dtype).transpose(1, 2) for y in (h, dh))
    # eq:ssd-dc-inter   inter = diag(e) dY h^T
    inter = e * (dY @ h.mT)
    # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
    dgc = (e * dY * (C_ @ h)).sum(-1)
    # eq:ssd-dlast   dlast = a <h, dh>
    dlast = (a * h * dh).sum((-1, -2)).transpose(1, 2).contiguous()
    return sum_heads(from_chunks(inter, T), C.shape[2]), from_chunks(dgc, T), dlast
