"""Stage kda_intra: what the tokens of a chunk read from each other, with a gate a channel."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.solve import solve_tril
from linattn_edu.kernels.tiles import (
    cast,
    chunk_args,
    chunk_of,
    device_of,
    dot,
    load_gates,
    load_row,
    load_tile,
    row,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit
def halves(o_t, s):
    """(first row of the second block, whether in the second) in pairs of blocks of 2^s tokens."""
    return ((o_t >> s) | 1) << s, ((o_t >> s) & 1) == 1


@triton.jit
def pairs(o_t, s):
    """[BT, BT]: i in the second and j in the first block of the same pair."""
    anchor, second = halves(o_t, s)
    return (anchor[:, None] == anchor[None, :]) & second[:, None] & ~second[None, :]


@triton.jit(do_not_specialize=["T"])
def kda_scores_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT] out
    L_ptr,  # [B, T, HV, BT] out, fp32
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    FIRST: tl.constexpr,  # blocks of 2^FIRST tokens are left on the diagonal
    LAST: tl.constexpr,  # log2(BT)
):
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.kda_intra.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    gc_ptr += (first * HV + i_h) * K
    o_t = tl.arange(0, BT)
    diagonal = o_t[:, None] == o_t[None, :]

    b_P = tl.zeros([BT, BT], dtype=tl.float32)
    b_L = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        dtype: tl.constexpr = b_k.dtype
        b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
        b_g = load_gates(gc_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        # eq:kda-scores   P_ij = sum_d q_id k_jd 2^(gc_id - gc_jd), i >= j
        # eq:kda-kk   L_ij = beta_i sum_d k_id k_jd 2^(gc_id - gc_jd), i > j
        b_P += tl.where(diagonal, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        for s in range(FIRST, LAST):
            # 2^(gc_i - gc_a) 2^(gc_a - gc_j) with j < a <= i: no exponent is positive
            b_E = load_gates(gc_ptr, halves(o_t, s)[0], o_k, HV * K, n_t, K)
            b_E = tl.exp2(-tl.abs(b_g - b_E))
            b_kE = cast(b_k * b_E, dtype)
            m = pairs(o_t, s)
            b_P += tl.where(m, dot(cast(b_q * b_E, dtype), tl.trans(b_kE)), 0.0)
            b_L += tl.where(m, dot(b_kE, tl.trans(b_kE)), 0.0)
        if FIRST > 0:
            # the anchor is the block's first row: 2^(gc_a - gc_j) may be large, but is finite
            o_a = (o_t >> FIRST) << FIRST
            b_x = b_g - load_gates(gc_ptr, o_a, o_k, HV * K, n_t, K)
            b_kj = tl.trans(cast(b_k * tl.exp2(-b_x), dtype))
            m = (o_a[:, None] == o_a[None, :]) & (o_t[:, None] > o_t[None, :])
            b_P += tl.where(m, dot(cast(b_q * tl.exp2(b_x), dtype), b_kj), 0.0)
            b_L += tl.where(m, dot(cast(b_k * tl.exp2(b_x), dtype), b_kj), 0.0)
    b_L *= load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)[:, None]
    store_tile(P_ptr + (first * HV + i_h) * BT, b_P, o_t, o_t, HV * BT, n_t, BT)
    store_tile(L_ptr + (first * HV + i_h) * BT, b_L, o_t, o_t, HV * BT, n_t, BT)


# generation -> bytes of an element -> row. Narrower heads keep these tiles: see tiles.UNPIPELINED.
CONFIGS = {
    "turing": {2: row(4, 1, BK=32), 4: row(4, 1, BK=16)},
    "ampere": {2: row(4, 1, BK=32), 4: row(4, 1, BK=32)},
    "hopper": {2: row(4, 1, BK=32), 4: row(4, 1, BK=32)},
}


def first_level(dtype: torch.dtype, lower_bound: float | None) -> int:
    """log2 of the tokens of the diagonal blocks that one anchor serves: 0, none, or 4.

    With a lower bound of the log decay, the exponent in such a block of 16 is at most
    15 log2(e) |lower_bound|: that must leave fp32 and bf16 room, and fp16 has none.
    """
    if lower_bound is None or dtype == torch.float16:
        return 0
    return 4 if -15 * math.log2(math.e) * lower_bound < 110 else 0


def kda_intra(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    *,
    chunk_size: int,
    lower_bound: float | None = None,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch kda_scores_kernel and solve_tril; arguments and result as in the reference."""
    B, T, H, K = k.shape
    HV = beta.shape[-1]
    P = k.new_empty(B, T, HV, chunk_size)
    L = torch.empty_like(P, dtype=torch.float32)
    config = CONFIGS[device_of(k)[0]][k.element_size()].launch()
    NT, *chunks = chunk_args(k, chunk_size, packing)
    kda_scores_kernel[(NT * HV,)](
        q, k, beta, gc, P, L, *chunks, T, H, HV, K, BT=chunk_size,
        FIRST=first_level(k.dtype, lower_bound), LAST=chunk_size.bit_length() - 1, **config,
    )  # fmt: skip
    # eq:kda-inverse   A = (I + L)^-1
    return P, solve_tril(L, dtype=k.dtype, packing=packing)
