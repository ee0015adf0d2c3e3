"""Stage chunk_state: what each chunk adds to the state."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, repeat_heads, to_chunks


def chunk_state(
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> Tensor:
    """The state after a chunk that started from zero.

        s = (diag(r * step) B)^T X,   r_j = 2^(gc_last - gc_j)

    Args:
        B: [B, T, G, N].  x: [B, T, H, P].  step, gc: [B, T, H] of chunk_cumsum.
        seq_idx: [B, T], the document of each token, or None: r is zero for other documents than
            the last token's.
    Returns:
        s [B, NT, H, N, P] in fp32 (fp64 for fp64 input).
    Source: arXiv:2405.21060 section 6, chapter 13.
    """
    dtype = compute_dtype(B, x, step, gc)
    _, _, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    B, x, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(B, x.shape[2]), x, step[..., None])
    )
    # eq:ssd-chunk-state   s = (diag(r * step) B)^T X
    return ((r * step * B).mT @ x).transpose(1, 2).contiguous()
