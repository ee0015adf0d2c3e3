"""Chapter 07, stage kda_intra: what the tokens of a chunk read from each other, a gate a channel.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 07

q, k [B, T, H, K], beta [B, T, HV], gc [B, T, HV, K] (log2, accumulated in each chunk of C tokens).
Out: P [B, T, HV, C], the scores, whose entry (i, j) is the sum over channels d of q_id k_jd
2^(gc_id - gc_jd) for i >= j and 0 above; A [B, T, HV, C], the inverse of I + L, where L_ij is
beta_i times the same sum with k_id in place of q_id, for i > j. Value head j reads q/k head
j // (HV // H). Some channels of the check forget everything at one token: 2^-gc does not fit
float32 there.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.delta.solve import unit_lower_inverse as inverse_tile
from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    chunk_of,
    load_gates,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def kda_intra_torch(q, k, beta, gc, *, chunk_size):
    T, HV = beta.shape[1:]
    Q, K, b, gc = (
        to_chunks(x, chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), beta, pad_gate(gc, chunk_size))
    )  # [B, HV, NT, C, ...]
    i = torch.arange(chunk_size)[:, None]
    P, L = [], []
    for j in range(chunk_size):
        k_j, gc_j = K[..., j, None, :], gc[..., j, None, :]  # [B, HV, NT, 1, K]
        decay = torch.exp2((gc - gc_j).masked_fill(i < j, -torch.inf))  # blank: 0 for tokens i < j
        # eq:kda-scores
        column = (Q * decay * k_j).sum(-1)  # blank: column j of P, [B, HV, NT, C]
        P.append(column)
        # eq:kda-kk
        column = b * (K * decay * k_j).sum(-1)  # blank: column j of L, with a diagonal
        L.append(column)
    # eq:kda-inverse
    A = unit_lower_inverse(torch.stack(L, -1).tril(-1))
    return from_chunks(torch.stack(P, -1), T), from_chunks(A, T)


@triton.jit
def kda_intra_kernel(q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr,
                     T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                     BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head, a column of P and L at a time.  Grid (B * NT * HV)."""
    i_h, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, HV, BT)
    i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    b_q = load_tile(q_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_gc = load_gates(gc_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    b_P, b_L = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for j in range(BT):
        row, column = o_t[:, None] == j, o_t[None, :] == j
        b_gcj = tl.sum(tl.where(row, b_gc, 0.0), 0)[None, :]  # [1, BK], row j
        exponent = tl.where(o_t[:, None] >= j, b_gc - b_gcj, float("-inf"))  # blank: [BT, BK]
        b_kj = tl.sum(tl.where(row, b_k, 0.0), 0)[None, :] * tl.exp2(exponent)  # [BT, BK]
        # eq:kda-scores
        b_p = tl.sum(b_q * b_kj, 1)  # blank: [BT], column j of P
        b_P = tl.where(column, b_p[:, None], b_P)
        # eq:kda-kk
        b_l = b_beta * tl.sum(b_k * b_kj, 1)  # blank: [BT], column j of L, with a diagonal
        b_L = tl.where(column, b_l[:, None], b_L)
    # eq:kda-inverse
    b_A = inverse_tile(tl.where(o_t[:, None] > o_t[None, :], b_L, 0.0), BT, "tf32x3")
    store_tile(P_ptr + i * BT, b_P, o_t, o_t, HV * BT, n_t, BT)
    store_tile(A_ptr + i * BT, b_A, o_t, o_t, HV * BT, n_t, BT)


def kda_intra_triton(q, k, beta, gc, *, chunk_size):
    (B, T, H, K), HV = k.shape, beta.shape[2]
    P, A = k.new_empty(B, T, HV, chunk_size), k.new_empty(B, T, HV, chunk_size)
    kda_intra_kernel[(B * cdiv(T, chunk_size) * HV,)](
        q, k, beta, gc, P, A, T, H, HV, K, BT=chunk_size, BK=block(K)
    )
    return P, A


# hint 1
# With a gate for each channel the decay from token j to token i is a vector, and it stands inside
# the sum over channels. The sum is no longer a product of two matrices times a decay matrix. It
# would be one of (q * 2^gc) and (k * 2^-gc), but 2^-gc overflows. Taken one token j at a time, the
# exponent is a difference that is never positive for i >= j.
#
# hint 2
# For column j: subtract row j of gc from all rows, set the rows before j to minus infinity, take
# the power: a [C, K] matrix of decays. Times k_j it is what each later token meets of token j's
# key. Multiply entry by entry with Q and sum over the channels: column j of P. With K in place of
# Q, and times beta_i: column j of L.
#
# hint 3
# PyTorch:
#     decay = torch.exp2((gc - ...).masked_fill(..., -torch.inf))
#     column = (Q * ...).sum(-1)
#     column = b * (K * ...).sum(-1)
# Kernel:
#     exponent = tl.where(o_t[:, None] >= ..., b_gc - ..., float("-inf"))
#     b_p = tl.sum(b_q * ..., 1)
#     b_l = b_beta * tl.sum(b_k * ..., 1)
