"""Stage solve: the inverse of each chunk's unit lower-triangular matrix, without the gate."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks

BLOCK = 8


def solve(k: Tensor, beta: Tensor, *, chunk_size: int) -> Tensor:
    """Invert I + L in each chunk, L = diag(beta) tril(K K^T, -1).

    The gate is not in it: the gated inverse is A * G (chapter 03).

    Args:
        k: [B, T, H, K], ``beta * |k|^2 <= 2`` (unit norm).  beta: [B, T, HV].  chunk_size: C.
    Returns:
        A [B, T, HV, C] in k.dtype: row i of a chunk is row i of (I + L)^-1.
    Source: arXiv:2406.06484 (WY form), chapter 03.
    """
    dtype = compute_dtype(k, beta)
    T, HV = beta.shape[1:]
    K = to_chunks(repeat_heads(k, HV).to(dtype), chunk_size)
    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L = to_chunks(beta.to(dtype), chunk_size)[..., None] * (K @ K.mT).tril(-1)
    return from_chunks(unit_lower_inverse(L), T).to(k.dtype)


def solve_tril(A: Tensor) -> Tensor:
    """Invert I + A for the strictly lower-triangular matrix of each chunk.

    Args:
        A: [B, T, H, C], row i of a chunk is row i of its matrix; what stands on or above the
            diagonal is not read.
    Returns:
        (I + A)^-1 [B, T, H, C] in fp32 (fp64 for fp64 input).
    Source: chapter 03.
    """
    L = to_chunks(A.to(compute_dtype(A)), A.shape[-1])
    return from_chunks(unit_lower_inverse(L.tril(-1)), A.shape[1])


def solve_tril_bwd(X: Tensor, dX: Tensor) -> Tensor:
    """The adjoint of solve_tril: dA = -tril(X^T dX X^T, -1), X = (I + A)^-1.

    Args:
        X, dX: [B, T, H, C].
    Returns:
        dA [B, T, H, C] in X.dtype.
    Source: chapters 08 and 10.
    """
    X_, dX = (to_chunks(x.to(X.dtype), X.shape[-1]) for x in (X, dX))
    return from_chunks(-(X_.mT @ dX @ X_.mT).tril(-1), X.shape[1])


def unit_lower_inverse(L: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower-triangular L [..., C, C], C = 2, 4, 8, ...

    Substitution inside the 8 x 8 diagonal blocks, then block merges that double the block.
    """
    C, size = L.shape[-1], min(BLOCK, L.shape[-1])
    L_, eye = diagonal_blocks(L, size), torch.eye(size, dtype=L.dtype, device=L.device)
    X = eye[:1].expand(*L_.shape[:-2], 1, size)
    for r in range(1, size):
        # eq:delta-substitution   x_r = e_r - sum_{j < r} L_rj x_j
        X = torch.cat([X, eye[r] - L_[..., r : r + 1, :r] @ X], -2)
    while size < C:
        L_21 = diagonal_blocks(L, 2 * size)[..., size:, :size]
        X_11, X_22 = X[..., 0::2, :, :], X[..., 1::2, :, :]
        # eq:delta-merge   X_21 = -X_22 L_21 X_11, for all pairs of neighbours
        X_21 = -X_22 @ L_21 @ X_11
        above = torch.cat([X_11, torch.zeros_like(X_11)], -1)
        X = torch.cat([above, torch.cat([X_21, X_22], -1)], -2)
        size *= 2
    return X[..., 0, :, :]


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal of x [..., C, C], a view of it [..., C / size, size, size]."""
    n = x.shape[-1] // size
    x = x.unflatten(-1, (n, size)).unflatten(-3, (n, size))
    return x.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
