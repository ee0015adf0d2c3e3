"""Stage chunk_scan_bwd_da_cs: the adjoint of the scores by the decay."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def chunk_scan_bwd_da_cs(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    dy: Tensor,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> Tensor:
    """The gradient of gc through M = C B^T * G * step, below the diagonal.

        W_ij = M_ij (dY X^T)_ij for i > j,   dgc = rowsum(W) - colsum(W)

    Args:
        C, B, x, step, gc, seq_idx: as in chunk_scan.  dy: [B, T, H, P], gradient of y.
    Returns:
        dgc [B, T, H] in natural units, fp32 (fp64 for fp64 input).
    Source: chapter 19.
    """
    dtype = compute_dtype(C, B, x, step, gc, dy)
    T, H = x.shape[1:3]
    _, G, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, B_, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step)
    )
    # eq:ssd-dgc-scores   dgc = rowsum(W) - colsum(W), W = M * dY X^T below the diagonal
    W = ((C_ @ B_.mT) * G * step[..., None, :] * (dY @ X.mT)).tril(-1)
    return from_chunks(W.sum(-1) - W.sum(-2), T)
