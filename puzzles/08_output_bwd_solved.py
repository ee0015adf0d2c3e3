"""Chapter 08, stage output_bwd: the adjoint of output.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 08

q, k, v_new, h, gc: the arguments of stage output; do [B, T, HV, V], the gradient of
o = scale (diag(2^gc) Q h + P v_new), P = M * G, M = Q K^T. Out: dq, dk [B, T, H, K], summed over
the value heads of each q/k head; dv_new [B, T, HV, V]; dgc [B, T, HV], the gradient of the
accumulated log in natural units, ln(2) gc.
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
    load_tile,
    store_tile,
)
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, sum_heads, to_chunks


def output_bwd_torch(q, k, v_new, h, gc, do, *, scale, chunk_size):
    (T, H), HV = q.shape[1:3], gc.shape[2]
    Q, K, V, dO, gc = (
        to_chunks(x, chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v_new, do, pad_gate(gc, chunk_size))
    )  # [B, HV, NT, C, ...]
    S, G, e = h.transpose(1, 2), decay_matrix(gc), torch.exp2(gc)[..., None]
    M = Q @ K.mT
    # eq:delta-dv-out
    dV = scale * (M * G).mT @ dO  # blank: [B, HV, NT, C, V]
    # eq:delta-dm
    dM = scale * (dO @ V.mT) * G  # blank: [B, HV, NT, C, C]
    # eq:delta-dq-inter
    inter = scale * e * (dO @ S.mT)  # blank: the part of dQ that comes through the state
    # eq:delta-dgc-out
    flow = dM * M  # entry (i, j) is the gradient of the exponent gc_i - gc_j
    dgc = (Q * inter).sum(-1) + flow.sum(-1) - flow.sum(-2)  # blank: [B, HV, NT, C]
    # eq:delta-dq
    dQ = inter + dM @ K
    # eq:delta-dk-out
    dK = dM.mT @ Q  # blank: [B, HV, NT, C, K]
    dq, dk = (sum_heads(from_chunks(x, T), H) for x in (dQ, dK))
    return dq, dk, from_chunks(dV, T), from_chunks(dgc, T)


@triton.jit
def output_bwd_kernel(q_ptr, k_ptr, v_new_ptr, h_ptr, gc_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr,
                      dgc_ptr, scale,
                      T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                      BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: a chunk of a q/k head, value head after value head.  Grid (B * NT * H)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_k = (first * H + i_h) * K
    b_q = load_tile(q_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_M = dot(b_q, tl.trans(b_k))  # [BT, BT]
    b_dq, b_dk = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
    for i_hv in range(i_h * (HV // H), (i_h + 1) * (HV // H)):
        i = first * HV + i_hv
        b_v = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_h = load_tile(h_ptr + (i_c * HV + i_hv) * K * V, o_k, o_v, V, K, V)  # [BK, BV]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        G = decay_tile(b_gc, o_t) * scale  # [BT, BT]
        # eq:delta-dv-out
        b_dv = dot(tl.trans(cast(b_M * G, b_do.dtype)), b_do)  # blank: [BT, BV]; the scale is in G
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
        # eq:delta-dm
        b_dM = dot(b_do, tl.trans(b_v)) * G  # blank: [BT, BT]
        # eq:delta-dq-inter
        b_inter = scale * tl.exp2(b_gc)[:, None] * dot(b_do, tl.trans(b_h))  # blank: [BT, BK]
        # eq:delta-dgc-out
        b_flow = b_dM * b_M
        b_dgc = tl.sum(b_q * b_inter, 1) + tl.sum(b_flow, 1) - tl.sum(b_flow, 0)  # blank: [BT]
        tl.store(dgc_ptr + i + o_t * HV, b_dgc, mask=o_t < n_t)
        # eq:delta-dq
        b_dM = cast(b_dM, b_k.dtype)
        b_dq += b_inter + dot(b_dM, b_k)
        # eq:delta-dk-out
        b_dk += dot(tl.trans(b_dM), b_q)  # blank: [BT, BK]
    store_tile(dq_ptr + i_k, b_dq, o_t, o_k, H * K, n_t, K)
    store_tile(dk_ptr + i_k, b_dk, o_t, o_k, H * K, n_t, K)


def output_bwd_triton(q, k, v_new, h, gc, do, *, scale, chunk_size):
    (B, T, H, K), (HV, V) = q.shape, v_new.shape[2:]
    dq, dk, dv, dgc = (torch.empty_like(x) for x in (q, k, v_new, gc))
    output_bwd_kernel[(B * cdiv(T, chunk_size) * H,)](
        q, k, v_new, h, gc, do, dq, dk, dv, dgc, scale,
        T, H, HV, K, V, BT=chunk_size, BK=block(K), BV=block(V), num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, dgc


# hint 1
# Every product of the forward pass gives two products of the backward pass: for Y = A B they are dA
# = dY B^T and dB = A^T dY. A factor that is multiplied entry by entry, such as G or the scale,
# multiplies the gradient entry by entry too. An exponent gc_i - gc_j gives its gradient to gc_i
# with a plus and to gc_j with a minus, so the gate gets row sums less column sums.
#
# hint 2
# P v_new gives dv_new = scale P^T dO and dP = scale dO v_new^T; P = M * G gives dM = dP * G; M = Q
# K^T gives dM K to Q and dM^T Q to K. diag(2^gc) Q h gives scale diag(2^gc) dO h^T to Q. The entry
# 2^(gc_i - gc_j) M_ij is its own derivative by the exponent, in natural units, so that flow = dM *
# M holds the gradients of the exponents. The first term adds the row sum of Q * inter. The
# transposes: `mT` in PyTorch, `tl.trans` in the kernel.
#
# hint 3
# PyTorch:
#     dV = scale * (M * G).mT @ ...
#     dM = scale * (dO @ ...) * G
#     inter = scale * e * (dO @ ...)
#     dgc = (Q * inter).sum(-1) + flow.sum(-1) - ...
#     dK = dM.mT @ ...
# Kernel:
#     b_dv = dot(tl.trans(...), b_do)
#     b_dM = dot(b_do, ...) * G
#     b_inter = scale * tl.exp2(b_gc)[:, None] * dot(b_do, ...)
#     b_dgc = tl.sum(b_q * b_inter, 1) + tl.sum(b_flow, 1) - ...
#     b_dk += dot(..., b_q)
