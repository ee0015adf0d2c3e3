"""Stage chunk_scan_bwd_dstates: the gradient of the states that the outputs read."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, repeat_heads, to_chunks


def chunk_scan_bwd_dstates(
    C: Tensor, gc: Tensor, dy: Tensor, seq_idx: Tensor | None = None, *, chunk_size: int
) -> Tensor:
    """The gradient of h through diag(e) C h alone.

        dh_out = (diag(e) C)^T dY

    Args:
        C: [B, T, G, N].  gc: [B, T, H] (log2).  dy: [B, T, H, P], gradient of y.
        seq_idx: as in chunk_state.
    Returns:
        dh_out [B, NT, H, N, P] in fp32 (fp64 for fp64 input).
    Source: chapter 14.
    """
    dtype = compute_dtype(C, gc, dy)
    e, _, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C, dY = (to_chunks(y.to(dtype), chunk_size) for y in (repeat_heads(C, dy.shape[2]), dy))
    # eq:ssd-dstates   dh_out = (diag(e) C)^T dY
    return ((e * C).mT @ dY).transpose(1, 2).contiguous()
