"""Stage solve: the inverse of each chunk's unit lower-triangular matrix, without the gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.tiles import chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit
def kkt(k_ptr, b_beta, stride, n_t, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """L = diag(beta) tril(K K^T, -1), [BT, BT], of the chunk whose keys start at k_ptr."""
    o_t = tl.arange(0, BT)
    L = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        b_k = load_tile(k_ptr, o_t, i_k * BK + tl.arange(0, BK), stride, n_t, K)  # [BT, BK]
        L = dot(b_k, tl.trans(b_k), L)
    return tl.where(o_t[:, None] > o_t[None, :], b_beta[:, None] * L, 0.0)


@triton.jit
def unit_lower_inverse(L, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower-triangular tile [BT, BT] in fp32."""
    NB: tl.constexpr = BT // 8
    b = tl.arange(0, NB)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    D = tl.sum(tl.where(diagonal, tl.reshape(L, (NB, 8, NB, 8)), 0.0), 2)  # [NB, 8, 8]
    X = substitute(D)
    X = merge(X, lower_left(L, 8, BT), 8, BT, PRECISION)
    if BT > 16:
        X = merge(X, lower_left(L, 16, BT), 16, BT, PRECISION)
    if BT > 32:
        X = merge(X, lower_left(L, 32, BT), 32, BT, PRECISION)
    return tl.reshape(X, (BT, BT))


@triton.jit
def substitute(D):
    """The inverses of I + D for strictly lower-triangular blocks D [NB, 8, 8]."""
    i = tl.arange(0, 8)
    D = tl.permute(D, (0, 2, 1))  # so that a row of L meets the rows of X without a new layout
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(D)
    for r in range(1, 8):
        # eq:delta-substitution   x_r = e_r - sum_{j < r} L_rj x_j
        b_l = tl.sum(tl.where((i == r)[None, None, :], D, 0.0), 2)  # [NB, 8]
        b_x = tl.sum(b_l[:, :, None] * X, 1)  # [NB, 8]
        X = tl.where((i == r)[None, :, None], X - b_x[:, None, :], X)
    return X


@triton.jit
def lower_left(L, S: tl.constexpr, BT: tl.constexpr):
    """[NP, S, S]: of each block of 2 S on the diagonal of L [BT, BT] the lower left quarter."""
    NP: tl.constexpr = BT // (2 * S)
    p = tl.arange(0, NP)
    left, _ = tl.split(tl.permute(tl.reshape(L, (NP, 2, S, NP, 2, S)), (0, 2, 3, 5, 1, 4)))
    _, L21 = tl.split(left)  # [NP, S, NP, S]: lower left blocks
    return tl.sum(tl.where(p[:, None, None, None] == p[None, None, :, None], L21, 0.0), 2)


@triton.jit
def merge(X, L21, S: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """From the inverses [2 NP, S, S] of the diagonal blocks those of twice the size."""
    NP: tl.constexpr = BT // (2 * S)
    X1, X2 = tl.split(tl.permute(tl.reshape(X, (NP, 2, S, S)), (0, 2, 3, 1)))  # [NP, S, S]
    # eq:delta-merge   X_21 = -X_22 L_21 X_11
    if S < 16:  # tl.dot starts at 16
        X21 = tl.sum(X2[:, :, :, None] * L21[:, None, :, :], 2)
        X21 = tl.sum(X21[:, :, :, None] * X1[:, None, :, :], 2)
    else:
        X21 = dot(dot(X2, L21, precision=PRECISION), X1, precision=PRECISION)
    X = tl.join(tl.join(X1, -X21), tl.join(tl.zeros_like(X1), X2))  # [NP, S, S, row, column]
    return tl.reshape(tl.permute(X, (0, 3, 1, 4, 2)), (NP, 2 * S, 2 * S))


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    A_ptr,  # [B, T, HV, BT] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.solve.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    k_ptr += (first * H + i_h // (HV // H)) * K
    o_t = tl.arange(0, BT)

    b_beta = load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)
    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L = kkt(k_ptr, b_beta, H * K, n_t, K, BT, BK)
    A = unit_lower_inverse(L, BT, PRECISION)
    store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)


@triton.jit(do_not_specialize=["T"])
def solve_tril_kernel(
    L_ptr,  # [B, T, HV, BT]
    A_ptr,  # [B, T, HV, BT] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    HV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.solve.solve_tril.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    o_t = tl.arange(0, BT)
    L = load_tile(L_ptr + (first * HV + i_h) * BT, o_t, o_t, HV * BT, n_t, tl.minimum(n_t, BT))
    L = tl.where(o_t[:, None] > o_t[None, :], L.to(tl.float32), 0.0)
    A = unit_lower_inverse(L, BT, "tf32x3")
    store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)


# generation -> bytes of an element -> row. One warp where its registers hold the tile: the
# substitution is a chain of reductions, and within a warp these need no barrier.
CONFIGS = {
    "turing": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "ampere": {2: row(1, 1, BK=128), 4: row(4, 1, BK=32)},
    "hopper": {2: row(1, 1, BK=128), 4: row(4, 1, BK=32)},
}


def merge_precision(dtype: torch.dtype) -> str:
    """tf32 has the bits of fp16 but none to spare: only a bf16 result hides its rounding."""
    return "tf32" if dtype == torch.bfloat16 else "tf32x3"


def solve(k: Tensor, beta: Tensor, *, chunk_size: int, packing: Packing | None = None) -> Tensor:
    """Launch solve_kernel; arguments and result as in the reference."""
    B, T, H, K = k.shape
    HV = beta.shape[-1]
    A = k.new_empty(B, T, HV, chunk_size)
    config = entry(CONFIGS, k).launch(K)
    NT, *chunks = chunk_args(k, chunk_size, packing)
    solve_kernel[(NT * HV,)](
        k, beta, A, *chunks, T, H, HV, K, BT=chunk_size,
        PRECISION=merge_precision(k.dtype), **config,
    )  # fmt: skip
    return A


def solve_tril(A: Tensor, *, packing: Packing | None = None) -> Tensor:
    """Launch solve_tril_kernel; arguments and result as in the reference."""
    _, T, HV, C = A.shape
    X = torch.empty_like(A, dtype=torch.float32)
    NT, *chunks = chunk_args(A, C, packing)
    solve_tril_kernel[(NT * HV,)](A, X, *chunks, T, HV, BT=C, num_warps=4)
    return X
