"""What the fused passes need of a chunk by itself: the scores and the resolvent."""

from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.reference.tiles import (
    chosen,
    compute_dtype,
    from_chunks,
    halves,
    repeat_heads,
    to_chunks,
)


def intra_chunk(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    *,
    chunk_size: int,
    return_inverse: bool = False,
    gated: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The two C x C matrices of each chunk, which need no state.

        P = Q K^T * G
        R = (A * G) diag(beta),  A = (I + diag(beta) tril(K K^T, -1))^-1

    Args:
        q, k: [B, T, H, K]. beta: [B, T, HV]. gc: [B, T, HV] from gate_cumsum (log2).
    Returns:
        P, R and, with return_inverse, A (else None), each [B, T, HV, C] in q.dtype: row i of a
        chunk is row i of its matrix. The backward pass starts from A, or, fused, from P and, in A's
        place with gated, A * G.
    Source: chapter 06.
    """
    dtype = compute_dtype(q, k, beta, gc)
    T, HV = beta.shape[1:]
    Q, K, b, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), beta[..., None], gc)
    )
    # eq:delta-decay-matrix   G = 2^(gc_i - gc_j), i >= j
    G = decay_matrix(gc)
    # eq:delta-intra   P = Q K^T * G
    P = (Q @ K.mT) * G
    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L = b * (K @ K.mT).tril(-1)
    A = unit_lower_inverse(L)
    # eq:delta-resolvent   R = (A * G) diag(beta)
    R = A * G * b.mT
    P, R, A = (from_chunks(x, T).to(q.dtype) for x in (P, R, A * G if gated else A))
    return P, R, A if return_inverse else None


def intra_halves(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    only: tuple[Tensor, Tensor] | None = None,
    made: tuple[Tensor, Tensor] | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """P and A * G of intra_chunk as sums of two numbers of 16 bit, for beta beyond 1.

    With keys alike and beta near 2 the rows of A alternate: what is summed with them cancels, and
    one rounding of A is as large as the output.

    Args:
        Those of intra_chunk.
        only: Of `those`, the heads that cancel. made: P and A * G of the others.
    Returns:
        P, A * G, and what rounding has cut off from the two, each [B, T, HV, C] in q.dtype.
    Source: chapter 03.
    """
    wide = [x.to(compute_dtype(q, k, beta, gc)) for x in (q, k, beta, gc)]
    P, _, AG = intra_chunk(*wide, chunk_size=chunk_size, return_inverse=True, gated=True)
    (P, P_low), (AG, AG_low) = (halves(x, q.dtype) for x in (P, AG))
    if made is not None:
        P, AG = (chosen(only[0], x, y) for x, y in zip((P, AG), made, strict=True))
    return P, AG, P_low, AG_low
