"""Chapter 10, stage wy_bwd: the adjoint of the triangular system that a chunk's writes solve.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 10

The values that a chunk writes solve (I + L * G) v_new = diag(beta) W with L = diag(beta)
tril(K K^T, -1) and W = V - diag(2^gc) K S. k, v, beta, gc, A [B, T, HV, C] = (I + L)^-1: the
arguments of stage wy; h [B, NT, HV, K, V] and v_new [B, T, HV, V] of stage state; dh like h, the
gradient of the state that leaves each chunk, and dv_new, of stage state_bwd; dk_out [B, T, H, K],
what stage output_bwd found. Out: dk [B, T, H, K], dv [B, T, HV, V], dbeta [B, T, HV], whole. The
gradient of the gate, a part of this stage in the library, is left out.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import (
    block,
    cast,
    cdiv,
    chunk_of,
    dot,
    load_gate,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, sum_heads, to_chunks


def wy_bwd_torch(k, v, beta, gc, A, h, v_new, dh, dv_new, dk_out):
    (T, H), HV, C = k.shape[1:3], gc.shape[2], A.shape[3]
    K, V, b, gc, A, v_new, dv_new = (
        to_chunks(x, C)
        for x in (repeat_heads(k, HV), v, beta[..., None], pad_gate(gc, C), A, v_new, dv_new)
    )  # [B, HV, NT, C, ...]; b has a last axis of one
    S, dS = h.transpose(1, 2), dh.transpose(1, 2)  # [B, HV, NT, K, V]
    G, e = decay_matrix(gc), torch.exp2(gc)[..., None]
    r = torch.exp2(gc[..., -1:] - gc)[..., None]  # decay from each token to the chunk's end
    # eq:delta-z
    Z = (A * G).mT @ dv_new  # blank: the gradient of diag(beta) W, [B, HV, NT, C, V]
    # eq:delta-dv
    dV = b * Z
    # eq:delta-dl
    dL = -(Z @ v_new.mT).tril(-1) * G  # blank: [B, HV, NT, C, C]
    # eq:delta-dbeta
    W = V - e * (K @ S)  # blank: each value less what the decayed state holds under its key
    dbeta = (Z * W).sum(-1) + (dL * (K @ K.mT)).sum(-1)  # blank: [B, HV, NT, C]
    # eq:delta-dk
    N = b * dL  # the gradient of K K^T
    dK = r * (v_new @ dS.mT) - b * e * (Z @ S.mT)  # through the two states
    dK = dK + (N + N.mT) @ K  # blank: and through K K^T, [B, HV, NT, C, K]
    dk = dk_out + sum_heads(from_chunks(dK, T), H)
    return dk, from_chunks(dV, T), from_chunks(dbeta, T)


@triton.jit
def wy_bwd_kernel(k_ptr, v_ptr, beta_ptr, gc_ptr, A_ptr, h_ptr, v_new_ptr, dh_ptr, dv_new_ptr,
                  dk_out_ptr, dk_ptr, dv_ptr, dbeta_ptr,
                  T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: a chunk of a key head, value head after value head.  Grid (B * NT * H)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_k = (first * H + i_h) * K
    b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_dk = load_tile(dk_out_ptr + i_k, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
    b_KK = dot(b_k, tl.trans(b_k))  # [BT, BT]
    for i_hv in range(i_h * (HV // H), (i_h + 1) * (HV // H)):
        i, i_S = first * HV + i_hv, (i_c * HV + i_hv) * K * V
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_dv_new = load_tile(dv_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_S = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dS = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        G, b_e, b_r = decay_tile(b_gc, o_t), tl.exp2(b_gc)[:, None], tl.exp2(b_last - b_gc)[:, None]
        # eq:delta-z
        b_AG = cast(b_A * G, b_v.dtype)
        b_Z = dot(tl.trans(b_AG), b_dv_new)  # blank: [BT, BV]
        # eq:delta-dv
        b_dv = b_beta[:, None] * b_Z  # blank: [BT, BV]
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
        # eq:delta-dl
        b_z = cast(b_Z, b_v.dtype)
        b_dL = tl.where(o_t[:, None] > o_t[None, :], -dot(b_z, tl.trans(b_v_new)) * G, 0.0)
        # eq:delta-dbeta
        b_W = b_v - b_e * dot(b_k, b_S)
        b_dbeta = tl.sum(b_Z * b_W, 1) + tl.sum(b_dL * b_KK, 1)  # blank: [BT]
        tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)
        # eq:delta-dk
        b_N = b_beta[:, None] * b_dL
        b_dk += b_r * dot(b_v_new, tl.trans(b_dS))  # blank: through the state that leaves, [BT, BK]
        b_dv = cast(b_dv, b_v.dtype)
        b_dk -= b_e * dot(b_dv, tl.trans(b_S))  # blank: through the state that enters, [BT, BK]
        b_dk += dot(cast(b_N + tl.trans(b_N), b_k.dtype), b_k)
    store_tile(dk_ptr + i_k, b_dk, o_t, o_k, H * K, n_t, K)


def wy_bwd_triton(k, v, beta, gc, A, h, v_new, dh, dv_new, dk_out):
    (B, T, H, K), (HV, V), C = k.shape, v.shape[2:], A.shape[3]
    dk, dv, dbeta = (torch.empty_like(x) for x in (k, v, beta))
    wy_bwd_kernel[(B * cdiv(T, C) * H,)](
        k, v, beta, gc, A, h, v_new, dh, dv_new, dk_out, dk, dv, dbeta,
        T, H, HV, K, V, BT=C, BK=block(K), BV=block(V),
    )  # fmt: skip
    return dk, dv, dbeta


# hint 1
# The adjoint of a system is the transposed system. If M x = y, then dy = M^-T dx and dM = - dy x^T:
# one more use of the inverse, and an outer product. Here x is v_new, the right-hand side y is
# diag(beta) W, M is I + L * G, and its inverse A * G is known. From dy and dM everything else
# follows by the rules for products.
#
# hint 2
# Z = (A * G)^T dv_new is the gradient of diag(beta) W; V gets diag(beta) Z. The matrix gets - Z
# v_new^T, of which L sees what lies strictly below the diagonal, times G. beta stands in two
# places: beta_i times row i of W, which gives the row sum of Z * W, and beta_i times row i of
# tril(K K^T, -1), which gives the row sum of dL * K K^T. K K^T holds K twice, so its gradient N
# acts as (N + N^T) K. K also stands in W, with minus 2^gc_i, and in the state that leaves, with
# 2^(gc_last - gc_i).
#
# hint 3
# PyTorch:
#     Z = (A * G).mT @ ...
#     dL = -(Z @ ...).tril(-1) * G
#     W = V - e * (...)
#     dbeta = (Z * ...).sum(-1) + (dL * ...).sum(-1)
#     dK = dK + (N + ...) @ K
# Kernel:
#     b_Z = dot(tl.trans(...), b_dv_new)
#     b_dv = b_beta[:, None] * ...
#     b_dbeta = tl.sum(b_Z * ..., 1) + tl.sum(b_dL * ..., 1)
#     b_dk += b_r * dot(b_v_new, ...)
#     b_dk -= b_e * dot(b_dv, ...)
