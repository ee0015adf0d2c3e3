"""The cumulative sum inside each chunk, forwards or backwards."""

from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def cumsum(x: Tensor, *, chunk_size: int, reverse: bool = False, scale: float = 1.0) -> Tensor:
    """y_i = scale times the sum over j <= i (reverse: j >= i) of x_j inside i's chunk.

    Args:
        x: [B, T, D].  chunk_size: C.
    Returns:
        y [B, T, D] in fp32 (fp64 for fp64 input).
    Source: chapters 02 and 12.
    """
    y = to_chunks(x.to(compute_dtype(x)), chunk_size)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    y = y.flip(-1).cumsum(-1).flip(-1) if reverse else y.cumsum(-1)
    return scale * from_chunks(y, x.shape[1])
