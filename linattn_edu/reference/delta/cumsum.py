"""The cumulative sum inside each chunk, or of each sequence, forwards or backwards."""

from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def cumsum(x: Tensor, *, chunk_size: int, reverse: bool = False, scale: float = 1.0) -> Tensor:
    """y_i = scale times the sum over j <= i (reverse: j >= i) of x_j inside i's chunk.

    Args:
        x: [B, T, D].  chunk_size: C, a power of two for the kernel.
    Returns:
        y [B, T, D] in fp32 (fp64 for fp64 input).
    Source: chapters 02 and 12.
    """
    y = to_chunks(x.to(compute_dtype(x)), chunk_size)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    y = y.flip(-1).cumsum(-1).flip(-1) if reverse else y.cumsum(-1)
    return scale * from_chunks(y, x.shape[1])


def global_cumsum(x: Tensor, *, reverse: bool = False, scale: float = 1.0) -> Tensor:
    """y_i = scale times the sum over j <= i (reverse: j >= i) of x_j: `cumsum` of one chunk.

    Args:
        x: [B, T, D].
    Returns:
        y [B, T, D] in fp32 (fp64 for fp64 input).
    Source: chapters 02 and 12.
    """
    return cumsum(x, chunk_size=max(1, x.shape[1]), reverse=reverse, scale=scale)
