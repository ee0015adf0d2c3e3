"""Stage solve: the inverse of each chunk's unit lower-triangular matrix, without the gate."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import block, device_of, dot, load_row, load_tile, row, store_tile


@triton.jit
def unit_lower_inverse(L, BT: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of a strictly lower-triangular tile [BT, BT]."""
    NB: tl.constexpr = BT // 16
    i, b = tl.arange(0, 16), tl.arange(0, NB)
    diagonal = b[:, None, None, None] == b[None, None, :, None]
    D = tl.sum(tl.where(diagonal, tl.reshape(L, (NB, 16, NB, 16)), 0.0), 2)  # [NB, 16, 16]
    X = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros_like(D)
    for r in range(1, 16):
        # eq:delta-substitution   x_r = e_r - sum_{j < r} L_rj x_j
        b_l = tl.sum(tl.where((i == r)[None, :, None], D, 0.0), 1)  # [NB, 16]
        b_x = tl.sum(b_l[:, :, None] * X, 1)  # [NB, 16]
        X = tl.where((i == r)[None, :, None], X - b_x[:, None, :], X)
    X = tl.reshape(tl.where(diagonal, X[:, :, None, :], 0.0), (BT, BT))

    if BT > 16:
        X = merge(X, L, 16, BT, PRECISION)
    if BT > 32:
        X = merge(X, L, 32, BT, PRECISION)
    return X


@triton.jit
def merge(X, L, SIZE: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of diagonal blocks of 2 SIZE from those of SIZE."""
    block = tl.arange(0, BT) // SIZE
    joined = (block[:, None] == block[None, :] + 1) & (block[:, None] // 2 == block[None, :] // 2)
    # eq:delta-merge   X <- X - X L_m X, L_m the blocks that join two neighbours
    XL = dot(X, tl.where(joined, L, 0.0), precision=PRECISION)
    return X - dot(XL, X, precision=PRECISION)


@triton.jit(do_not_specialize=["T"])
def solve_kernel(
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    A_ptr,  # [B, T, HV, BT] out
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: one chunk of one head.  Grid (B * NT * HV).

    Reference: linattn_edu.reference.delta.solve.
    """
    pid = tl.program_id(0).to(tl.int64)
    NT = tl.cdiv(T, BT)
    i_h, i_t, i_b = pid % HV, pid // HV % NT, pid // HV // NT
    first = i_b * T + i_t * BT
    n_t = (T - i_t * BT).to(tl.int32)
    k_ptr += (first * H + i_h // (HV // H)) * K
    o_t = tl.arange(0, BT)

    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        b_k = load_tile(k_ptr, o_t, i_k * BK + tl.arange(0, BK), H * K, n_t, K)  # [BT, BK]
        L = dot(b_k, tl.trans(b_k), L)
    b_beta = load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)
    L = tl.where(o_t[:, None] > o_t[None, :], b_beta[:, None] * L, 0.0)

    A = unit_lower_inverse(L, BT, PRECISION)
    store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)


# generation -> bytes of an element -> row
CONFIGS = {
    "turing": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "ampere": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "hopper": {2: row(4, 1, BK=128), 4: row(4, 1, BK=64)},
}


def solve(k: Tensor, beta: Tensor, *, chunk_size: int) -> Tensor:
    """Launch solve_kernel; arguments and result as in the reference."""
    B, T, H, K = k.shape
    HV = beta.shape[-1]
    A = k.new_empty(B, T, HV, chunk_size)
    config = CONFIGS[device_of(k)[0]][k.element_size()].launch()
    config["BK"] = min(config["BK"], block(K))
    solve_kernel[(B * triton.cdiv(T, chunk_size) * HV,)](
        k, beta, A, T, H, HV, K, BT=chunk_size,
        PRECISION="tf32x3" if k.element_size() == 4 else "tf32", **config,
    )  # fmt: skip
    return A
