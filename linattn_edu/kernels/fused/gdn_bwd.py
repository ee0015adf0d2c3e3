"""The backward pass in three fused kernels: the states again, their gradients, all that is left.

Two of them carry a state through the chunks and share nothing, so each reads only what it needs;
the third has a program for each chunk, and reads once what both have left.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, map_args, piece_of
from linattn_edu.kernels.delta.cp_merge_bwd import cp_merge_bwd
from linattn_edu.kernels.delta.warm_up import span_of, warm_up
from linattn_edu.kernels.fused.gdn_fwd import SCAN_CONFIGS, scan_map
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.pieces import Pieces, pieces_of, spans_of
from linattn_edu.kernels.tiles import (
    block,
    cast,
    cdiv,
    chunk_args,
    chunk_of,
    columns_of,
    decay_matrix,
    device_of,
    dot,
    load_gate,
    load_row,
    load_tile,
    scan_launch,
    states,
    store_tile,
)
from linattn_edu.packing import Packing

try:
    from linattn_edu.kernels.gluon import gdn_intra_bwd, gdn_scans
except Exception as error:  # a Triton whose Gluon has other names
    gdn_intra_bwd = gdn_scans = support.left_out(error)


@triton.jit(do_not_specialize=["T", "N"])
def scan_states_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    AG_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    h_ptr,  # [B, NT, HV, K, V] out: state entering each chunk
    v_new_ptr,  # [B, T, HV, V] out
    warm_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    N,
    STEP: tl.constexpr,  # one of so many programs of the grid, the last of them
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_bwd.scan_states.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0) // STEP, cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    skip = 0
    if warm_ptr is not None:
        first, n_seq, i_c, skip, _ = span_of(
            i_nh, first, n_seq, i_c, warm_ptr, cu_ptr, T, N, HV, BT, False
        )
    k_ptr += (first * H + i_h // (HV // H)) * K
    v_ptr += (first * HV + i_h) * V
    v_new_ptr += (first * HV + i_h) * V
    AG_ptr += (first * HV + i_h) * BT
    beta_ptr += first * HV + i_h
    gc_ptr += first * HV + i_h
    h_ptr += (i_c * HV + i_h) * K * V

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if h0_ptr is not None:
        b_S += load_tile(h0_ptr + i_nh * K * V, o_k, o_v, V, K, V).to(tl.float32)

    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_h = cast(b_S, k_ptr.dtype.element_ty)
        store_tile(h_ptr, b_h, o_k, o_v, V, tl.where(i_t < skip, 0, K), V)
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_AG = load_tile(AG_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr, o_t, HV, n_t)  # [BT]
        b_beta = load_row(beta_ptr, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV)

        # eq:delta-residual   W = V - diag(2^gc) K S
        b_W = b_v.to(tl.float32) - tl.exp2(b_gc)[:, None] * dot(b_k, b_h)
        # eq:delta-v-new   v_new = (A * G) diag(beta) W
        b_v = dot(b_AG, cast(b_beta[:, None] * b_W, b_AG.dtype))
        store_tile(v_new_ptr, b_v, o_t, o_v, HV * V, tl.where(i_t < skip, 0, n_t), V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_v *= tl.exp2(b_last - b_gc)[:, None]
        b_S = dot(tl.trans(b_k), cast(b_v, b_k.dtype), b_S * tl.exp2(b_last))

        k_ptr += BT * H * K
        v_ptr += BT * HV * V
        v_new_ptr += BT * HV * V
        AG_ptr += BT * HV * BT
        beta_ptr += BT * HV
        gc_ptr += BT * HV
        h_ptr += HV * K * V


@triton.jit
def scan_bwd_step(
    b_dS, q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, scale, i_h, first, n_t,
    o_t, o_k, o_v, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """dS^T [BV, BK], back through the chunk of head i_h that begins with token `first`.

    Returns Z^T and dV^T [BV, BT], and the next dS^T. Transposed, what a product makes is the first
    operand of the next: it stays in registers.
    """
    i, i_qk = first * HV + i_h, (first * H + i_h // (HV // H)) * K
    b_h = cast(b_dS, k_ptr.dtype.element_ty)
    b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_AG = load_tile(AG_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
    # eq:delta-dv-new   dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
    b_dv = tl.exp2(b_last - b_gc)[None, :] * dot(b_h, tl.trans(b_k))
    b_do = tl.trans(b_do).to(tl.float32) * scale
    b_dv = dot(cast(b_do, b_P.dtype), b_P, b_dv)
    # eq:delta-z   Z = (A * G)^T dv_new
    b_Z = dot(cast(b_dv, b_AG.dtype), b_AG)
    # eq:delta-dv   dV = diag(beta) Z
    b_dv = b_beta[None, :] * b_Z
    # eq:fused-ds   dS <- 2^gc_last dS + (diag(2^gc) Q)^T scale dO - (diag(2^gc) K)^T dV
    b_e = tl.exp2(b_gc)[None, :]
    b_dS = dot(cast(b_e * b_do, b_q.dtype), b_q, b_dS * tl.exp2(b_last))
    b_dS = dot(cast(-b_e * b_dv, b_k.dtype), b_k, b_dS)
    return b_Z, b_dv, b_dS


@triton.jit(do_not_specialize=["T", "N"])
def scan_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT]
    AG_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    dht_ptr,  # [N, HV, K, V] or None
    dh_ptr,  # [B, NT, HV, K, V] out: gradient of the state leaving each chunk
    Z_ptr,  # [B, T, HV, V] out
    dv_ptr,  # [B, T, HV, V] out
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    warm_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    N,
    STEP: tl.constexpr,  # one of so many programs of the grid, the first of them
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_bwd.scan_bwd.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        (tl.num_programs(0) - 1 - tl.program_id(0)) // STEP, cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    skip, i_end = 0, i_nh
    if warm_ptr is not None:
        first, n_seq, i_c, skip, i_end = span_of(
            i_nh, first, n_seq, i_c, warm_ptr, cu_ptr, T, N, HV, BT, True
        )
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_dS = tl.zeros([BV, BK], dtype=tl.float32)
    if dht_ptr is not None:
        b_dS += tl.trans(load_tile(dht_ptr + i_nh * K * V, o_k, o_v, V, K, V)).to(tl.float32)
    NT = tl.cdiv(n_seq, BT)
    for i_t in range(NT):
        i_b = NT - 1 - i_t  # of the chunk, back from the last
        begin, n_t = first + i_b * BT, n_seq - i_b * BT
        b_h = cast(b_dS, dh_ptr.dtype.element_ty)
        i_S, n_k = ((i_c + i_b) * HV + i_h) * K * V, tl.where(i_t < skip, 0, K)
        store_tile(dh_ptr + i_S, tl.trans(b_h), o_k, o_v, V, n_k, V)
        b_Z, b_dv, b_dS = scan_bwd_step(
            b_dS, q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, scale, i_h, begin, n_t,
            o_t, o_k, o_v, H, HV, K, V, BT,
        )  # fmt: skip
        i, n_t = begin * HV + i_h, tl.where(i_t < skip, 0, n_t)
        b_Z = tl.trans(cast(b_Z, Z_ptr.dtype.element_ty))
        store_tile(Z_ptr + i * V, b_Z, o_t, o_v, HV * V, n_t, V)
        b_dv = tl.trans(cast(b_dv, dv_ptr.dtype.element_ty))
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
    n_k = tl.where(i_end < 0, 0, K)
    store_tile(dh0_ptr + i_end * K * V, tl.trans(b_dS), o_k, o_v, V, n_k, V)


@triton.jit(do_not_specialize=["T", "N"])
def scans_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT]
    AG_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    h0_ptr,  # [N, HV, K, V] or None
    dht_ptr,  # [N, HV, K, V] or None
    h_ptr,  # [B, NT, HV, K, V] out
    v_new_ptr,  # [B, T, HV, V] out
    dh_ptr,  # [B, NT, HV, K, V] out
    Z_ptr,  # [B, T, HV, V] out
    dv_ptr,  # [B, T, HV, V] out
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    forth_ptr,  # [N, HV] or None
    back_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The programs of scan_bwd, which take longer, and those of scan_states.

    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.fused.gdn_bwd.scans.
    """
    if tl.program_id(0) % 2 == 0:
        scan_bwd_kernel(
            q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, dht_ptr, dh_ptr, Z_ptr, dv_ptr,
            dh0_ptr, scale, back_ptr, cu_ptr, offsets_ptr, T, N, 2, H, HV, K, V, BT, BK, BV,
        )  # fmt: skip
    else:
        scan_states_kernel(
            k_ptr, v_ptr, beta_ptr, gc_ptr, AG_ptr, h0_ptr, h_ptr, v_new_ptr, forth_ptr, cu_ptr,
            offsets_ptr, T, N, 2, H, HV, K, V, BT, BK, BV,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T", "i_g"])
def intra_chunk_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    h_ptr,  # [B, NT, HV, K, V]
    v_new_ptr,  # [B, T, HV, V]
    do_ptr,  # [B, T, HV, V]
    dh_ptr,  # [B, NT, HV, K, V]
    Z_ptr,  # [B, T, HV, V]
    dq_ptr,  # [B, T, H, K] out
    dk_ptr,  # [B, T, H, K] out
    dq_sum_ptr,  # [B, T, H, K] fp32: of the value heads before; or None: there is one
    dk_sum_ptr,  # [B, T, H, K] fp32, or None
    dbeta_ptr,  # [B, T, HV] out
    dgc_ptr,  # [B, T, HV] out
    scale,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    i_g,  # which value head of a q/k head
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,  # whether i_g is
):  # fmt: skip
    """One program: one chunk of value head i_g of a q/k head.  Grid (NT * H).

    Reference: linattn_edu.reference.fused.gdn_bwd.intra_chunk_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    i_qk = (first * H + i_h) * K
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    last = tl.minimum(BT, n_t) - 1
    i = first * HV + i_h * (HV // H) + i_g
    i_S = (i_c * HV + i_h * (HV // H) + i_g) * K * V
    b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)
    b_last = tl.load(gc_ptr + i + last * HV)
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)
    # 2^gc_last <dS, S> of whole tiles, while no other holds registers; below they come from L2
    o_S = tl.arange(0, BS)
    b_S = load_tile(h_ptr + i_S, o_S, o_v, V, K, V).to(tl.float32)
    b_dS = load_tile(dh_ptr + i_S, o_S, o_v, V, K, V).to(tl.float32)
    through = tl.exp2(b_last) * tl.sum(tl.sum(b_S * b_dS, 1), 0)
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_Z = load_tile(Z_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_dbeta = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
    G = decay_matrix(b_gc, o_t)
    # eq:delta-dm   dM = scale (dO v_new^T) * G
    below = o_t[:, None] > o_t[None, :]
    b_dM = dot(b_do, tl.trans(b_v_new)) * G * scale
    # no decay acts on the diagonal: it must not be in the sums of dgc, where it would cancel
    b_own = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dM, 0.0), 1)
    b_dM = cast(tl.where(below, b_dM, 0.0), b_do.dtype)
    # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
    b_dL = tl.where(below, -dot(b_Z, tl.trans(b_v_new)) * G, 0.0)
    b_NT = cast(tl.trans(b_beta[:, None] * b_dL), b_do.dtype)
    b_dL = cast(b_dL, b_do.dtype)
    b_dgc = tl.zeros([BT], dtype=tl.float32)
    b_KF = tl.zeros([BT], dtype=tl.float32)
    b_t = tl.zeros([BT], dtype=tl.float32)
    if not FIRST:  # an iteration ahead: at their place the loop would wait for them
        o_k = tl.arange(0, BK)
        b_dq_sum = load_tile(dq_sum_ptr + i_qk, o_t, o_k, H * K, n_t, K)
        b_dk_sum = load_tile(dk_sum_ptr + i_qk, o_t, o_k, H * K, n_t, K)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        # eq:delta-dq   dQ = scale diag(2^gc) dO S^T + dM K
        b_dq = dot(b_do, tl.trans(b_h)) * (tl.exp2(b_gc) * scale)[:, None]
        b_dq = dot(b_dM, b_k, b_dq)
        b_dgc += tl.sum(b_q.to(tl.float32) * b_dq, 1)
        b_dq += b_own[:, None] * b_k.to(tl.float32)
        if not FIRST:
            b_dq += b_dq_sum
            b_dq_sum = load_tile(dq_sum_ptr + i_qk, o_t, o_k + BK, H * K, n_t, K)
        if LAST:
            store_tile(dq_ptr + i_qk, b_dq, o_t, o_k, H * K, n_t, K)
        else:
            store_tile(dq_sum_ptr + i_qk, b_dq, o_t, o_k, H * K, n_t, K)
        # eq:fused-read   F = dL K - diag(2^gc) Z S^T
        b_F = dot(b_Z, tl.trans(b_h)) * -tl.exp2(b_gc)[:, None]
        b_F = dot(b_dL, b_k, b_F)
        # eq:fused-dbeta   dbeta = rowsum(Z * V) + rowsum(K * F)
        b_KF += tl.sum(b_k.to(tl.float32) * b_F, 1)
        # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
        b_dk = dot(b_v_new, tl.trans(b_dh)) * tl.exp2(b_last - b_gc)[:, None]
        b_t += tl.sum(b_k.to(tl.float32) * b_dk, 1)
        b_dk += b_own[:, None] * b_q.to(tl.float32) + b_beta[:, None] * b_F
        # eq:fused-write   D = dK_state + dM^T Q + (diag(beta) dL)^T K
        b_D = dot(b_NT, b_k, dot(tl.trans(b_dM), b_q))
        b_dgc -= tl.sum(b_k.to(tl.float32) * b_D, 1)
        # eq:fused-dk   dK = diag(beta) F + D
        b_dk += b_D
        if not FIRST:
            b_dk += b_dk_sum
            b_dk_sum = load_tile(dk_sum_ptr + i_qk, o_t, o_k + BK, H * K, n_t, K)
        if LAST:
            store_tile(dk_ptr + i_qk, b_dk, o_t, o_k, H * K, n_t, K)
        else:
            store_tile(dk_sum_ptr + i_qk, b_dk, o_t, o_k, H * K, n_t, K)
    # eq:fused-dgc   dgc = q dq + beta k f - k d; dgc_last += sum k dk + 2^gc_last <dS, S>
    b_t = tl.where(o_t == last, 0.0, b_t)
    # [:, None]: as in wy_bwd
    through += tl.sum(b_t[:, None], 0)
    b_dgc += b_beta * b_KF - b_t + tl.where(o_t == last, through, 0.0)
    b_dbeta = cast(b_dbeta + b_KF, dbeta_ptr.dtype.element_ty)
    tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)
    tl.store(dgc_ptr + i + o_t * HV, b_dgc, mask=o_t < n_t)


@triton.jit(do_not_specialize=["T"])
def scan_map_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT]
    AG_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    dht_ptr,  # [NP, HV, K, V] or None
    map_ptr,  # [NP, HV, K, W] out: dS_ext, and dM where W is V + K
    scale,
    rows_ptr,  # [NP] or None
    cu_ptr,  # [N + 1] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [dS_ext | dM] of one head, back through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.fused.gdn_bwd.scan_map_bwd.
    """
    i_v, i_ph, i_h, first, n_seq = piece_of(tl.program_id(0), rows_ptr, cu_ptr, T, HV, W, BT, BV)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    # eq:cp-transition-bwd   dM: the same with dO = 0, from I
    b_dS = tl.where(o_k[None, :] + V == o_v[:, None], 1.0, 0.0)
    if dht_ptr is not None:
        b_dS += tl.trans(load_tile(dht_ptr + i_ph * K * V, o_k, o_v, V, K, V)).to(tl.float32)
    NT = tl.cdiv(n_seq, BT)
    for i_t in range(NT):
        i_b = NT - 1 - i_t
        begin, n_t = first + i_b * BT, n_seq - i_b * BT
        _, _, b_dS = scan_bwd_step(
            b_dS, q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, scale, i_h, begin, n_t,
            o_t, o_k, o_v, H, HV, K, V, BT,
        )  # fmt: skip
    store_tile(map_ptr + i_ph * K * W, tl.trans(b_dS), o_k, o_v, W, K, W)


BV = 64  # rows of dS^T: a product of fewer would leave tensor cores idle
SCAN_OPTIONS = {"num_warps": 4, "num_stages": 2}


# 32: with 64 columns of K one program alone would fill a multiprocessor's shared memory. Two such
# programs leave no room for L1: a register that spills is read back from L2
INTRA_OPTIONS = {"BK": 32, "num_warps": 4}
INTRA_STAGES = 2, 3  # of K > 64, and of narrower heads


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether these kernels hold q's and v's heads on q's GPU; if not, the stages one by one."""
    K, V = q.shape[-1], v.shape[-1]
    hopper = device_of(q)[0] in ("hopper", "blackwell")
    return hopper and q.element_size() == 2 and K % 2 == 0 and K <= 128 and V <= 128


def scan_states(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    AG: Tensor,
    initial_state: Tensor | None = None,
    *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch scan_states_kernel; arguments and result as in the reference."""
    C = AG.shape[-1]
    gluon = _in_gluon(k, k, v, AG, AG, packing)
    pieces, warm, initial_state = _forth(k, v, beta, gc, AG, initial_state, packing, gluon)
    out = _states_out(k, v, C, packing)
    for i, skipped in enumerate(warm):
        _launch_states(gluon, pieces, skipped, i == 0, k, v, beta, gc, AG, initial_state, *out)
    return out


def _in_gluon(
    q: Tensor, k: Tensor, v: Tensor, P: Tensor, AG: Tensor, packing: Packing | None
) -> bool:
    """Whether a scan is taken in Gluon."""
    return gdn_scans is not None and gdn_scans.fits(q, k, v, P, AG, packing)


def _states_out(k: Tensor, v: Tensor, C: int, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """h and v_new, not written yet."""
    shape = *states(k, C, packing), v.shape[2], k.shape[-1], v.shape[-1]
    return k.new_empty(*shape), torch.empty_like(v)


def _forth(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    AG: Tensor,
    state: Tensor | None,
    packing: Packing | None,
    gluon: bool,
) -> tuple[Pieces, list[Tensor | None], Tensor | None]:
    """The pieces of scan_states, how far before each it begins, and the states that enter them."""
    C = AG.shape[-1]
    pieces = pieces_of(k, *v.shape[2:], C, packing)
    if pieces.several:
        maps = scan_map(k, v, gc, AG, None, beta, pieces=pieces)
        return pieces, [None], pieces.entering(cp_merge, maps, state)
    options = {"chunk_size": C, "choice": not gluon, "packing": packing}
    pieces, warm = warm_up(k, beta, gc, v.shape[-1], **options)
    return pieces, warm, pieces.placed(state)


def _launch_states(
    gluon: bool,
    pieces: Pieces,
    warm: Tensor | None,
    wide: bool,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    AG: Tensor,
    initial_state: Tensor | None,
    h: Tensor,
    v_new: Tensor,
) -> None:
    """Launch the kernel, in plain Triton with the tiles that suit pieces, or whole sequences."""
    given = k, v, beta, gc, AG, initial_state, h, v_new, warm, pieces
    if gluon and support.attempt(gdn_scans.scan_states_gluon, *given):
        return
    H, K = k.shape[2:]
    HV, V = v.shape[2:]
    _, config = scan_launch(SCAN_CONFIGS, k, (pieces.N if wide else pieces.batch) * HV, V)
    scan_states_kernel[(pieces.N * HV * cdiv(V, config["BV"]),)](
        k, v, beta, gc, AG, initial_state, h, v_new, warm, pieces.cu_seqlens, pieces.chunk_offsets,
        pieces.T, pieces.N, 1, H, HV, K, V, BT=AG.shape[-1], **config,
    )  # fmt: skip


def scan_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch scan_bwd_kernel; arguments and result as in the reference."""
    gluon = _in_gluon(q, k, do, P, AG, packing)
    pieces, warm, dht = _back(q, k, beta, gc, P, AG, do, dht, scale, packing, gluon)
    out = _back_out(q, gc, do, AG.shape[-1], pieces, packing)
    for skipped in warm:
        _launch_back(gluon, pieces, skipped, scale, q, k, beta, gc, P, AG, do, dht, *out)
    return *out[:3], pieces.first(out[3])


def _back_out(
    q: Tensor, gc: Tensor, do: Tensor, C: int, pieces: Pieces, packing: Packing | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh, Z, dv, and dh0 of each piece, not written yet."""
    K, (HV, V) = q.shape[-1], do.shape[2:]
    dh = q.new_empty(*states(q, C, packing), HV, K, V)
    return dh, torch.empty_like(do), torch.empty_like(do), gc.new_empty(pieces.N, HV, K, V)


def _back(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    packing: Packing | None,
    gluon: bool,
) -> tuple[Pieces, list[Tensor | None], Tensor | None]:
    """The pieces of scan_bwd, how far behind each it begins, and the gradients that leave them."""
    C = AG.shape[-1]
    pieces = pieces_of(k, *do.shape[2:], C, packing)
    if pieces.several:
        maps = scan_map_bwd(q, k, beta, gc, P, AG, do, scale=scale, pieces=pieces)
        return pieces, [None], pieces.entering(cp_merge_bwd, maps, dht)
    options = {"chunk_size": C, "back": True, "choice": not gluon, "packing": packing}
    pieces, warm = warm_up(k, beta, gc, do.shape[-1], **options)
    return pieces, warm, pieces.placed(dht, last=True)


def _launch_back(
    gluon: bool,
    pieces: Pieces,
    warm: Tensor | None,
    scale: float,
    q: Tensor,
    k: Tensor,
    *rest: Tensor | None,
) -> None:
    """Launch scan_bwd_kernel, or that in Gluon, on its tensors, the outputs last."""
    if gluon and support.attempt(gdn_scans.scan_bwd_gluon, q, k, *rest, scale, warm, pieces):
        return
    H, K = q.shape[2:]
    HV, V = rest[-1].shape[1], rest[-1].shape[-1]
    scan_bwd_kernel[(pieces.N * HV * cdiv(V, BV),)](
        q, k, *rest, scale, warm, pieces.cu_seqlens, pieces.chunk_offsets, pieces.T, pieces.N, 1,
        H, HV, K, V, BT=rest[3].shape[-1], BK=block(K), BV=BV, **SCAN_OPTIONS,
    )  # fmt: skip


def scans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    scale: float,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:
    """Launch scans_kernel, or that in Gluon; arguments and result as in the reference.

    Where either scan alone has a program for every multiprocessor, it is two launches, which
    choose their options each for itself: the same bits.
    """
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    C = AG.shape[-1]
    # of do only the address may differ from v's
    gluon = all(_in_gluon(q, k, x, P, AG, packing) for x in (v, do))
    pieces, ahead, initial_state = _forth(k, v, beta, gc, AG, initial_state, packing, gluon)
    _, behind, dht = _back(q, k, beta, gc, P, AG, do, dht, scale, packing, gluon)
    programs = pieces.N * HV * cdiv(V, BV)
    h, v_new = _states_out(k, v, C, packing)
    dh, Z, dv, dh0 = _back_out(q, gc, do, C, pieces, packing)
    given = q, k, v, beta, gc, P, AG, do, initial_state, dht, h, v_new, dh, Z, dv, dh0
    given = *given, scale, ahead[0], behind[0], pieces
    both = gluon and programs < device_of(q)[1] and ahead[0] is None
    if both and support.attempt(gdn_scans.scans_gluon, *given):
        ahead.pop()
    elif gluon or programs >= device_of(q)[1] or len(ahead) > 1:
        given = k, v, beta, gc, AG, initial_state, h, v_new
        _launch_states(gluon, pieces, ahead.pop(0), True, *given)
        given = q, k, beta, gc, P, AG, do, dht, dh, Z, dv, dh0
        _launch_back(gluon, pieces, behind.pop(0), scale, *given)
    if ahead:
        scans_kernel[(2 * programs,)](
            q, k, v, beta, gc, P, AG, do, initial_state, dht, h, v_new, dh, Z, dv, dh0,
            scale, *ahead, *behind, pieces.cu_seqlens, pieces.chunk_offsets, pieces.T, pieces.N,
            H, HV, K, V, BT=C, BK=block(K), BV=BV, **SCAN_OPTIONS,
        )  # fmt: skip
    return h, v_new, dh, Z, dv, pieces.first(dh0)


def scan_map_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    transition: bool = True,
    packing: Packing | None = None,
    rows: Tensor | None = None,
    pieces: Pieces | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch scan_map_bwd_kernel; arguments and result as in the reference.

    packing, rows, pieces: as in piece_map.
    """
    H, K = q.shape[2:]
    HV, V = do.shape[2:]
    NP, cu_seqlens, T = map_args(q, packing, rows, pieces)
    W = V + K if transition else V
    maps = gc.new_empty(NP, HV, K, W)
    scan_map_bwd_kernel[(NP * HV * cdiv(W, BV),)](
        q, k, beta, gc, P, AG, do, dht, maps, scale, rows, cu_seqlens, T, H, HV, K, V, W,
        BT=AG.shape[-1], BK=block(K), BV=BV, **SCAN_OPTIONS,
    )  # fmt: skip
    return maps[..., :V], maps[..., V:] if transition else None


def intra_chunk_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    *,
    scale: float,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel that suits the GPU; arguments and result as in the reference."""
    out = tuple(map(torch.empty_like, (q, k, beta, gc)))
    _launch_intra(q, k, v, beta, gc, h, v_new, do, dh, Z, *out, scale, chunk_size, packing)
    return out


def _launch_intra(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    dq: Tensor,
    dk: Tensor,
    dbeta: Tensor,
    dgc: Tensor,
    scale: float,
    chunk_size: int,
    packing: Packing | None,
) -> None:
    """Launch what writes dq, dk, dbeta and dgc. A program reads v_new and Z of its chunk whole
    before it writes dq and dk, which may lie in their place.
    """
    tensors = q, k, v, beta, gc, h, v_new, do, dh, Z, dq, dk, dbeta, dgc
    gluon = _intra_in_gluon(q, k, v, h, v_new, do, dh, Z, chunk_size=chunk_size, packing=packing)
    if gluon and support.attempt(gdn_intra_bwd.intra_bwd_gluon, *tensors, scale):
        return
    _, T, H, K = q.shape
    HV, V = v.shape[2:]
    sums = (None, None)
    if HV > H:
        sums = tuple(torch.empty_like(q, dtype=torch.float32) for _ in range(2))
    NT, *chunks = chunk_args(q, chunk_size, packing)
    for i_g in range(HV // H):
        intra_chunk_bwd_kernel[(NT * H,)](
            *tensors[:12], *sums, dbeta, dgc, scale, *chunks, T, i_g, H, HV, K, V,
            BT=chunk_size, BS=block(K), BV=block(V), FIRST=i_g == 0, LAST=i_g == HV // H - 1,
            num_stages=INTRA_STAGES[K <= 64], **INTRA_OPTIONS,
        )  # fmt: skip


def _intra_in_gluon(*tensors: Tensor, chunk_size: int, packing: Packing | None) -> bool:
    """Whether intra_chunk_bwd is taken in Gluon."""
    options = {"chunk_size": chunk_size, "packing": packing}
    return gdn_intra_bwd is not None and gdn_intra_bwd.fits(*tensors, **options)


def chunk_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    scale: float,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:
    """Launch scans and intra_chunk_bwd, on some heads after the others where that takes no longer;
    arguments and result as in the reference.
    """
    C = AG.shape[-1]
    gluon = all(_in_gluon(q, k, x, P, AG, packing) for x in (v, do))
    if gluon and _intra_in_gluon(q, k, v, do, chunk_size=C, packing=packing):
        # parts are views, which plain Triton does not take in the place of a kernel that fails
        parts = _parts(q, v, C) if support.tried() else 1
        if parts > 1:
            return _in_parts(parts, q, k, v, beta, gc, P, AG, do, initial_state, dht, scale)
    options = {"scale": scale, "packing": packing}
    h, v_new, dh, Z, dv, dh0 = scans(q, k, v, beta, gc, P, AG, do, initial_state, dht, **options)
    dq, dk = (v_new, Z) if q.shape == v.shape else map(torch.empty_like, (q, k))
    out = dq, dk, torch.empty_like(beta), torch.empty_like(gc)
    _launch_intra(q, k, v, beta, gc, h, v_new, do, dh, Z, *out, scale, C, packing)
    return dq, dk, dv, *out[2:], dh0


PART = 1 << 18  # tokens times heads, whose states take 128 MiB: less would not be worth launches


def _parts(q: Tensor, v: Tensor, C: int) -> int:
    """The most parts of the heads whose scans leave no more multiprocessors idle than all would."""
    (B, T, HV, V), H = v.shape, q.shape[2]
    pieces = pieces_of(v, HV, V, C, None)
    pieces = pieces if pieces.several else spans_of(v, HV, V, C, None)
    programs, processors = pieces.N * HV * cdiv(V, BV), device_of(q)[1]

    def rounds(parts: int) -> int:
        return parts * cdiv(programs // parts, processors)

    fine = (n for n in range(2, H + 1) if H % n == 0 and n * PART <= B * T * HV)
    return max((n for n in fine if rounds(n) <= rounds(1)), default=1)


def _in_parts(
    parts: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    initial_state: Tensor | None,
    dht: Tensor | None,
    scale: float,
) -> tuple[Tensor, ...]:
    """chunk_bwd in Gluon, on as many parts of the heads: the same bits."""
    pieces, (ahead,), entering = _forth(k, v, beta, gc, AG, initial_state, None, True)
    _, (behind,), leaving = _back(q, k, beta, gc, P, AG, do, dht, scale, None, True)
    dh0 = gc.new_empty(pieces.N, v.shape[2], q.shape[-1], v.shape[-1])
    tensors = q, k, v, beta, gc, P, AG, do
    out = tuple(map(torch.empty_like, tensors[:5]))
    for i in range(parts):
        heads = [x.chunk(parts, 2)[i] for x in (*tensors, *out)]
        given = ahead, behind, entering, leaving
        given = [x if x is None else x.chunk(parts, 1)[i].contiguous() for x in given]
        dh0.chunk(parts, 1)[i].copy_(_part(*heads, *given, scale, pieces))
    return *out, pieces.first(dh0)


def _part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dbeta: Tensor,
    dgc: Tensor,
    ahead: Tensor | None,
    behind: Tensor | None,
    entering: Tensor | None,
    leaving: Tensor | None,
    scale: float,
    pieces: Pieces,
) -> Tensor:
    """One of the parts, views of its heads: writes dq, dk, dv, dbeta, dgc. Returns dh0."""
    C = AG.shape[-1]
    h, v_new = _states_out(k, v, C, None)
    dh, Z = torch.empty_like(h), torch.empty_like(v_new)
    dh0 = gc.new_empty(pieces.N, *h.shape[2:])
    gdn_scans.scan_states_gluon(k, v, beta, gc, AG, entering, h, v_new, ahead, pieces)
    gdn_scans.scan_bwd_gluon(
        q, k, beta, gc, P, AG, do, leaving, dh, Z, dv, dh0, scale, behind, pieces
    )
    gdn_intra_bwd.intra_bwd_gluon(q, k, v, beta, gc, h, v_new, do, dh, Z, dq, dk, dbeta, dgc, scale)
    return dh0
