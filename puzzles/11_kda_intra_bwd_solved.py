"""Chapter 11, stage kda_intra_bwd: what the pairs of a chunk say about q, k, beta and the gate.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 11

q, k [B, T, H, K], beta [B, T, HV], gc [B, T, HV, K] (log2, accumulated in each chunk of C tokens);
dP and dL [B, T, HV, C], the gradients of P_ij = sum over d of q_id k_jd 2^(gc_id - gc_jd), i >= j,
and of L_ij = beta_i times the same sum with k_id in place of q_id, i > j; they are 0 where P and L
are. Out: dq, dk [B, T, H, K], dbeta [B, T, HV], and dgc [B, T, HV, K] in natural units. Value head
j reads q/k head j // (HV // H). Some channels of the check forget everything at one token: 2^-gc
does not fit float32 there. What P and L alone have to say is all that is asked for.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    chunk_of,
    load_gates,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, sum_heads, to_chunks


def kda_intra_bwd_torch(q, k, beta, gc, dP, dL):
    (T, H), (HV, C) = q.shape[1:3], dP.shape[2:]
    Q, K, b, gc, dP, dL = (
        to_chunks(x, C)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), beta[..., None], pad_gate(gc, C), dP, dL,
        )
    )  # fmt: skip
    i = torch.arange(C)[:, None]
    dQ, Y, R = torch.zeros_like(Q), torch.zeros_like(K), []
    for j in range(C):
        k_j, gc_j = K[..., j, None, :], gc[..., j, None, :]  # [B, HV, NT, 1, K]
        dP_j, dL_j = dP[..., j, None], dL[..., j, None]  # [B, HV, NT, C, 1]
        decay = torch.exp2((gc - gc_j).masked_fill(i <= j, -torch.inf))  # 0 but for tokens i > j
        # eq:kda-r
        R_j = (decay * (dP_j * Q + b * dL_j * K)).sum(-2)  # blank: of writer j, [B, HV, NT, K]
        R.append(R_j)
        # eq:kda-dq
        dQ = dQ + dP_j * decay * k_j  # blank: of all readers of j, [B, HV, NT, C, K]
        # eq:kda-y
        Y = Y + dL_j * decay * k_j  # blank: the same for L, without beta
    R = torch.stack(R, -2)
    # eq:kda-dgc
    dgc = Q * dQ + K * (b * Y - R)  # blank: [B, HV, NT, C, K]
    # eq:kda-dbeta
    dbeta = (K * Y).sum(-1)
    # eq:kda-dk
    own = dP.diagonal(dim1=-2, dim2=-1)[..., None]  # of a token's pair with itself, no decay in it
    dK = b * Y + R + own * Q  # blank: [B, HV, NT, C, K]
    dQ = dQ + own * K
    dq, dk = (sum_heads(from_chunks(x, T), H) for x in (dQ, dK))
    return dq, dk, from_chunks(dbeta, T), from_chunks(dgc, T)


@triton.jit
def kda_intra_bwd_kernel(q_ptr, k_ptr, beta_ptr, gc_ptr, dP_ptr, dL_ptr,
                         dq_ptr, dk_ptr, dbeta_ptr, dgc_ptr,
                         T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                         BT: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One program: a chunk of a q/k head, its value heads in turn.  Grid (B * NT * H)."""
    i_k, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    i_q = (first * H + i_k) * K
    b_q = load_tile(q_ptr + i_q, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_k = load_tile(k_ptr + i_q, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_dq, b_dk = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
    for n in range(HV // H):
        i = first * HV + i_k * (HV // H) + n
        b_gc = load_gates(gc_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)[:, None]  # [BT, 1]
        b_dP = load_tile(dP_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_dL = load_tile(dL_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_x, b_Y = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
        b_R = tl.zeros([BT, BK], tl.float32)
        for j in range(BT):
            row, column = o_t[:, None] == j, o_t[None, :] == j
            b_gcj = tl.sum(tl.where(row, b_gc, 0.0), 0)[None, :]  # [1, BK], row j
            b_kj = tl.sum(tl.where(row, b_k, 0.0), 0)[None, :]
            b_p = tl.sum(tl.where(column, b_dP, 0.0), 1)[:, None]  # [BT, 1], column j
            b_l = tl.sum(tl.where(column, b_dL, 0.0), 1)[:, None]
            b_E = tl.exp2(tl.where(o_t[:, None] > j, b_gc - b_gcj, float("-inf")))  # [BT, BK]
            # eq:kda-r
            b_r = tl.sum(b_E * (b_p * b_q + b_beta * b_l * b_k), 0)  # blank: [BK], row j of R
            b_R = tl.where(row, b_r[None, :], b_R)
            # eq:kda-dq
            b_x += b_p * b_E * b_kj  # blank: [BT, BK], dQ without the diagonal
            # eq:kda-y
            b_Y += b_l * b_E * b_kj  # blank: [BT, BK]
        # eq:kda-dgc
        b_dgc = b_q * b_x + b_k * (b_beta * b_Y - b_R)  # blank: [BT, BK]
        store_tile(dgc_ptr + i * K, b_dgc, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dbeta
        tl.store(dbeta_ptr + i + o_t * HV, tl.sum(b_k * b_Y, 1), mask=o_t < n_t)
        # eq:kda-dk
        b_own = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dP, 0.0), 1)[:, None]
        b_dk += b_beta * b_Y + b_R + b_own * b_q  # blank: what this value head adds, [BT, BK]
        b_dq += b_x + b_own * b_k
    store_tile(dq_ptr + i_q, b_dq, o_t, o_k, H * K, n_t, K)
    store_tile(dk_ptr + i_q, b_dk, o_t, o_k, H * K, n_t, K)


def kda_intra_bwd_triton(q, k, beta, gc, dP, dL):
    (B, T, H, K), (HV, C) = k.shape, dP.shape[2:]
    dq, dk, dbeta, dgc = (torch.empty_like(x) for x in (q, k, beta, gc))
    kda_intra_bwd_kernel[(B * cdiv(T, C) * H,)](
        q, k, beta, gc, dP, dL, dq, dk, dbeta, dgc, T, H, HV, K, BT=C, BK=block(K)
    )
    return dq, dk, dbeta, dgc


# hint 1
# Every pair (i, j) has a reader i and a writer j, and one decay for each channel. The reader's
# gradient is a sum over the writers before it, the writer's a sum over the readers after it. Go
# through the writers j: column j of dP and of dL gives row j of R at once, and adds a term to every
# later row of dQ and Y. The gate needs no sum of its own: where a reader is multiplied by its
# gradient, its gate has a plus in the exponent; where a writer is, a minus.
#
# hint 2
# R_j is the sum over i of decay_ij times (dP_ij q_i + beta_i dL_ij k_i): the chain rule of P and L
# for k_j. Its factors without q and k_i are those of dQ_i += dP_ij decay_ij k_j and Y_i += dL_ij
# decay_ij k_j. Y is without beta, so that dbeta_i = k_i . Y_i; as a reader of L, k_i gets beta_i
# Y_i. Then dK = beta Y + R, and with the diagonal of dP also dP_ii q_i. dgc = q dQ + k (beta Y -
# R), before the diagonal is added to dQ: a token's pair with itself has no decay.
#
# hint 3
# PyTorch:
#     R_j = (decay * (dP_j * ... + b * dL_j * ...)).sum(-2)
#     dQ = dQ + dP_j * decay * ...
#     Y = Y + dL_j * ...
#     dgc = Q * dQ + K * (...)
#     dK = b * Y + ... + own * Q
# Kernel:
#     b_r = tl.sum(b_E * (b_p * ... + b_beta * b_l * ...), 0)
#     b_x += b_p * b_E * ...
#     b_Y += b_l * ...
#     b_dgc = b_q * b_x + b_k * (...)
#     b_dk += b_beta * b_Y + ... + b_own * b_q
