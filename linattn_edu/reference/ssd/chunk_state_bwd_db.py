"""Stage chunk_state_bwd_db: the adjoint of chunk_state by B, and by its decay."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def chunk_state_bwd_db(
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    ds: Tensor,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of B and of gc through s = (diag(r * step) B)^T X.

        dB_head = diag(r * step) X ds^T,   dB = sum of dB_head over the heads of a group
        m_j     = B_j . dB_head_j,   dgc_j = -m_j,   dlast = sum of m_j over the chunk

    Args:
        B, x, step, gc, seq_idx: as in chunk_state.  ds: [B, NT, H, N, P] of state_passing_bwd.
    Returns:
        dB_state [B, T, G, N]; dgc [B, T, H] and dlast [B, NT, H], natural units; all fp32 (fp64 for
        fp64 input).
    Source: chapter 16.
    """
    dtype = compute_dtype(B, x, step, gc, ds)
    T, H = x.shape[1:3]
    _, _, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    B_, X, step = (
        to_chunks(y.to(dtype), chunk_size) for y in (repeat_heads(B, H), x, step[..., None])
    )
    # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
    dB = r * step * (X @ ds.to(dtype).transpose(1, 2).mT)
    # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_head_j
    m = (B_ * dB).sum(-1)
    dlast = m.sum(-1).transpose(1, 2).contiguous()
    return sum_heads(from_chunks(dB, T), B.shape[2]), from_chunks(-m, T), dlast
