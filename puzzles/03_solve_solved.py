"""Chapter 03, stage solve: invert I + L in each chunk.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 03

k [B, T, H, K] of unit length, beta [B, T, HV]. Out: A [B, T, HV, C], whose rows are those of each
chunk's (I + L)^-1; L_ij = beta_i k_i k_j^T for i > j, and 0 elsewhere. The gate is not in it. Value
head j reads key head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.reference.tiles import from_chunks, repeat_heads, to_chunks


def solve_torch(k, beta, *, chunk_size):
    T, HV = beta.shape[1:]
    K, b = to_chunks(repeat_heads(k, HV), chunk_size), to_chunks(beta, chunk_size)
    # eq:delta-kkt
    L = b[..., None] * (K @ K.mT).tril(-1)  # blank: [B, HV, NT, C, C]
    A = torch.eye(chunk_size, dtype=k.dtype).expand_as(L).clone()
    for r in range(1, chunk_size):
        # eq:delta-substitution
        x = (L[..., r, None, :r] @ A[..., :r, :]).squeeze(-2)  # blank: sum over j < r of L_rj x_j
        A[..., r, :] -= x
    return from_chunks(A, T)


@triton.jit
def solve_kernel(k_ptr, beta_ptr, A_ptr, T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * HV)."""
    i_h, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, HV, BT)
    i, o_t, o_k = first * HV + i_h, tl.arange(0, BT), tl.arange(0, BK)
    i_k = (first * H + i_h // (HV // H)) * K
    b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    # eq:delta-kkt
    b_L = b_beta[:, None] * dot(b_k, tl.trans(b_k))  # blank: [BT, BT], not yet triangular
    b_L = tl.where(o_t[:, None] > o_t[None, :], b_L, 0.0)  # blank: strictly lower triangular
    b_A = tl.where(o_t[:, None] == o_t[None, :], 1.0, 0.0)  # I
    for r in range(1, BT):
        # eq:delta-substitution
        row = o_t[:, None] == r
        b_l = tl.sum(tl.where(row, b_L, 0.0), 0)  # [BT], row r of L
        b_x = tl.sum(b_l[:, None] * b_A, 0)  # blank: [BT], sum over j of L_rj x_j
        b_A = tl.where(row, b_A - b_x[None, :], b_A)  # blank: row r is done, the others stay
    store_tile(A_ptr + i * BT, b_A, o_t, o_t, HV * BT, n_t, BT)


def solve_triton(k, beta, *, chunk_size):
    (B, T, H, K), HV = k.shape, beta.shape[2]
    A = k.new_empty(B, T, HV, chunk_size)
    solve_kernel[(B * cdiv(T, chunk_size) * HV,)](
        k, beta, A, T, H, HV, K, BT=chunk_size, BK=block(K)
    )
    return A


# hint 1
# I + L is lower triangular with ones on its diagonal. Row r of the equation (I + L) A = I holds
# only rows of A up to r, and row r itself with the factor one. So the rows come out one after the
# other, from the first, which is the first row of I, and nothing is divided.
#
# hint 2
# L is K times K transposed, row i times beta_i, cut to what lies strictly below the diagonal. Row r
# of A is row r of I less a vector times a matrix: the first r entries of row r of L times the first
# r rows of A. The kernel has no way to pick a row of a tile, so it sums over all rows with the
# others set to zero. It multiplies row r of L, as a column, with all of A and sums over the rows:
# L_rj is zero for j >= r, so rows that are not done yet do not count.
#
# hint 3
# PyTorch:
#     L = b[..., None] * (...).tril(-1)
#     x = (L[..., r, None, :r] @ ...).squeeze(-2)
# Kernel:
#     b_L = b_beta[:, None] * dot(b_k, ...)
#     b_L = tl.where(o_t[:, None] > ..., b_L, 0.0)
#     b_x = tl.sum(b_l[:, None] * ..., 0)
#     b_A = tl.where(row, b_A - ..., b_A)
