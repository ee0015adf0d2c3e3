"""The backward pass of Kimi Delta Attention in fused kernels, on rows that have the gate in them.

The keys and queries are multiplied by their gates once; then the states and their gradients are
carried as in Gated DeltaNet, and one kernel reads both for all that is left to find.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, map_args, piece_of
from linattn_edu.kernels.delta.cp_merge_bwd import cp_merge_bwd
from linattn_edu.kernels.delta.gate_cumsum import cumulative
from linattn_edu.kernels.delta.kda_intra import halve
from linattn_edu.kernels.delta.kda_intra_bwd import (
    CONFIGS,
    GROUP,
    NEAR_CONFIGS,
    are_near,
    kda_intra_bwd,
    kda_intra_bwd_kernel,
    middle,
)
from linattn_edu.kernels.fused.gdn_bwd import fits as hold
from linattn_edu.kernels.fused.kda_fwd import kda_fused_scan_map
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.pieces import Pieces, pieces_of
from linattn_edu.kernels.tiles import (
    block,
    cast,
    cdiv,
    chunk_args,
    chunk_of,
    columns_of,
    device_of,
    dot,
    entry,
    in_words,
    load_gates,
    load_row,
    load_tile,
    load_vector,
    of_generation,
    shared_dtype,
    states,
    store_tile,
)
from linattn_edu.packing import Packing

try:
    from linattn_edu.kernels.gluon import gdn_scan, gdn_scans, kda_scans
    from linattn_edu.kernels.gluon import kda_intra_bwd as kda_intra_bwd_gluon
except Exception as error:  # a Triton whose Gluon has other names
    gdn_scan = gdn_scans = kda_intra_bwd_gluon = kda_scans = support.left_out(error)


@triton.jit(do_not_specialize=["T"])
def kda_gates_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV, K] natural log; with A_log or a bound, the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [HV * K] or None
    gc_ptr,  # [B, T, HV, K] out: log2, cumulative within a chunk
    kd_ptr,  # [B, T, HV, K] out
    kg_ptr,  # [B, T, HV, K] out
    qg_ptr,  # [B, T, HV, K] out
    bound,  # lower bound of the gate, or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: BK channels of one chunk of one head.  Grid (NT * HV * K / BK).

    Reference: linattn_edu.reference.fused.kda_bwd.kda_gates.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    o_k = tl.program_id(0) % NK * BK + tl.arange(0, BK)
    i_h, _, first, n_t = chunk_of(tl.program_id(0) // NK, cu_ptr, chunks_ptr, T, HV, BT)
    i_k, i = (first * H + i_h // (HV // H)) * K, (first * HV + i_h) * K
    o_t = tl.arange(0, BT)
    b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_q = load_tile(q_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_g = load_tile(g_ptr + i, o_t, o_k, HV * K, n_t, K).to(tl.float32)  # [BT, BK]
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_g = cumulative(b_g, A_log_ptr, bias_ptr, bound, i_h * K + o_k, HV * K, K)
    store_tile(gc_ptr + i, b_g, o_t, o_k, HV * K, n_t, K)
    b_last = tl.sum(tl.where(o_t[:, None] == tl.minimum(BT, n_t) - 1, b_g, 0.0), 0)
    b_e = tl.exp2(b_g)
    # eq:kda-kd   kd = 2^gc * K
    store_tile(kd_ptr + i, b_e * b_k.to(tl.float32), o_t, o_k, HV * K, n_t, K)
    # eq:kda-kg   kg = 2^(gc_last - gc) * K
    b_r = tl.exp2(b_last[None, :] - b_g) * b_k.to(tl.float32)
    store_tile(kg_ptr + i, b_r, o_t, o_k, HV * K, n_t, K)
    # eq:kda-qg   qg = 2^gc * Q
    store_tile(qg_ptr + i, b_e * b_q.to(tl.float32), o_t, o_k, HV * K, n_t, K)


@triton.jit(do_not_specialize=["T"])
def kda_scan_states(
    kg_ptr,  # [B, T, HV, K]
    kd_ptr,  # [B, T, HV, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    A_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    h_ptr,  # [B, NT, HV, K, V] out: state entering each chunk
    v_new_ptr,  # [B, T, HV, V] out
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    STEP: tl.constexpr,  # one of so many programs of the grid, the last of them
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.kda_bwd.kda_fused_scans.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0) // STEP, cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    kg_ptr += (first * HV + i_h) * K
    kd_ptr += (first * HV + i_h) * K
    gc_ptr += (first * HV + i_h) * K
    v_ptr += (first * HV + i_h) * V
    v_new_ptr += (first * HV + i_h) * V
    A_ptr += (first * HV + i_h) * BT
    beta_ptr += first * HV + i_h
    h_ptr += (i_c * HV + i_h) * K * V

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if h0_ptr is not None:
        b_S += load_tile(h0_ptr + i_nh * K * V, o_k, o_v, V, K, V).to(tl.float32)
    # the load of a chunk's gates runs one chunk ahead: the state waits for them
    o_last = (tl.minimum(BT, n_seq) - 1) * HV * K
    b_last = load_vector(gc_ptr + o_last, o_k, tl.where(n_seq > 0, K, 0))
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_h = cast(b_S, kd_ptr.dtype.element_ty)
        store_tile(h_ptr, b_h, o_k, o_v, V, K, V)
        b_kd = load_tile(kd_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_A = load_tile(A_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_kg = load_tile(kg_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_beta = load_row(beta_ptr, o_t, HV, n_t)  # [BT]
        b_a = tl.exp2(b_last)[:, None]
        o_last = (tl.minimum(2 * BT, n_t) - 1) * HV * K
        b_last = load_vector(gc_ptr + o_last, o_k, tl.where(n_t > BT, K, 0))

        # eq:delta-residual   W = V - kd S
        b_W = b_v.to(tl.float32) - dot(b_kd, b_h)
        # eq:delta-v-new   v_new = A diag(beta) W
        b_v = cast(dot(b_A, cast(b_beta[:, None] * b_W, b_A.dtype)), b_kg.dtype)
        store_tile(v_new_ptr, b_v, o_t, o_v, HV * V, n_t, V)
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        b_S = dot(tl.trans(b_kg), b_v, b_S * b_a)

        kg_ptr += BT * HV * K
        kd_ptr += BT * HV * K
        gc_ptr += BT * HV * K
        v_ptr += BT * HV * V
        v_new_ptr += BT * HV * V
        A_ptr += BT * HV * BT
        beta_ptr += BT * HV
        h_ptr += HV * K * V


@triton.jit
def kda_scan_bwd_step(
    b_dS, qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, scale, i_h,
    first, n_t, o_t, o_k, o_v, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """dS^T [BV, BK], back through the chunk of head i_h that begins with token `first`.

    Returns Z^T and dV^T [BV, BT], and the next dS^T; transposed as in fused_bwd.
    """
    i = first * HV + i_h
    b_h = cast(b_dS, kg_ptr.dtype.element_ty)
    b_kg = load_tile(kg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_qg = load_tile(qg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
    b_kd = load_tile(kd_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    b_last = load_vector(gc_ptr + (i + (tl.minimum(BT, n_t) - 1) * HV) * K, o_k, K)  # [BK]
    b_do = tl.trans(b_do)
    # eq:kda-dv-out   dv_new = scale P^T dO
    b_dv = scale * dot(b_do, b_P)
    # eq:delta-dv-new   dv_new += kg dS
    b_dv = dot(b_h, tl.trans(b_kg), b_dv)
    # eq:kda-z   Z = A^T dv_new
    b_Z = dot(cast(b_dv, b_A.dtype), b_A)
    # eq:kda-dv   dV = diag(beta) Z
    b_dv = b_beta[None, :] * b_Z
    # eq:fused-ds   dS <- diag(2^gc_last) dS + qg^T scale dO - kd^T dV
    b_do = cast(b_do.to(tl.float32) * scale, b_qg.dtype)
    b_dS = dot(b_do, b_qg, b_dS * tl.exp2(b_last)[None, :])
    b_dS = dot(cast(-b_dv, b_kd.dtype), b_kd, b_dS)
    return b_Z, b_dv, b_dS


@triton.jit(do_not_specialize=["T"])
def kda_scan_bwd(
    qg_ptr,  # [B, T, HV, K]
    kg_ptr,  # [B, T, HV, K]
    kd_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT]
    A_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    dht_ptr,  # [N, HV, K, V] or None
    dh_ptr,  # [B, NT, HV, K, V] out: gradient of the state leaving each chunk
    Z_ptr,  # [B, T, HV, V] out
    dv_ptr,  # [B, T, HV, V] out
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    STEP: tl.constexpr,  # one of so many programs of the grid, the first of them
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.kda_bwd.kda_fused_scans.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0) // STEP, cu_ptr, offsets_ptr, T, HV, V, BT, BV
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
        i_S = ((i_c + i_b) * HV + i_h) * K * V
        store_tile(dh_ptr + i_S, tl.trans(b_h), o_k, o_v, V, K, V)
        b_Z, b_dv, b_dS = kda_scan_bwd_step(
            b_dS, qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, scale, i_h,
            begin, n_t, o_t, o_k, o_v, HV, K, V, BT,
        )  # fmt: skip
        i = (begin * HV + i_h) * V
        b_Z = tl.trans(cast(b_Z, Z_ptr.dtype.element_ty))
        store_tile(Z_ptr + i, b_Z, o_t, o_v, HV * V, n_t, V)
        b_dv = tl.trans(cast(b_dv, dv_ptr.dtype.element_ty))
        store_tile(dv_ptr + i, b_dv, o_t, o_v, HV * V, n_t, V)
    store_tile(dh0_ptr + i_nh * K * V, tl.trans(b_dS), o_k, o_v, V, K, V)


@triton.jit(do_not_specialize=["T"])
def kda_fused_scans_kernel(
    qg_ptr,  # [B, T, HV, K]
    kg_ptr,  # [B, T, HV, K]
    kd_ptr,  # [B, T, HV, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT]
    A_ptr,  # [B, T, HV, BT]
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
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The programs of kda_scan_states, and those of kda_scan_bwd, which take longer.

    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.fused.kda_bwd.kda_fused_scans.
    """
    if tl.program_id(0) % 2 == 1:
        kda_scan_states(
            kg_ptr, kd_ptr, v_ptr, beta_ptr, gc_ptr, A_ptr, h0_ptr, h_ptr, v_new_ptr, cu_ptr,
            offsets_ptr, T, 2, HV, K, V, BT, BK, BV,
        )  # fmt: skip
    else:
        kda_scan_bwd(
            qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, dht_ptr, dh_ptr, Z_ptr,
            dv_ptr, dh0_ptr, scale, cu_ptr, offsets_ptr, T, 2, HV, K, V, BT, BK, BV,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def kda_fused_scan_map_bwd_kernel(
    qg_ptr,  # [B, T, HV, K]
    kg_ptr,  # [B, T, HV, K]
    kd_ptr,  # [B, T, HV, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT]
    A_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    dht_ptr,  # [NP, HV, K, V] or None
    map_ptr,  # [NP, HV, K, W] out: dS_ext, and dM where W is V + K
    scale,
    rows_ptr,  # [NP] or None
    cu_ptr,  # [N + 1] or None
    T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [dS_ext | dM] of one head, back through a piece.

    Grid (NP * HV * W / BV).  Reference:
    linattn_edu.reference.fused.kda_bwd.kda_fused_scan_map_bwd.
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
        _, _, b_dS = kda_scan_bwd_step(
            b_dS, qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, scale, i_h,
            begin, n_t, o_t, o_k, o_v, HV, K, V, BT,
        )  # fmt: skip
    store_tile(map_ptr + i_ph * K * W, tl.trans(b_dS), o_k, o_v, W, K, W)


@triton.jit(do_not_specialize=["T"])
def kda_reads_bwd_kernel(
    v_ptr,  # [B, T, HV, V]
    h_ptr,  # [B, NT, HV, K, V]
    v_new_ptr,  # [B, T, HV, V]
    do_ptr,  # [B, T, HV, V]
    dh_ptr,  # [B, NT, HV, K, V]
    Z_ptr,  # [B, T, HV, V]
    dqg_ptr,  # [B, T, HV, K] out
    dP_ptr,  # [B, T, HV, BT] out
    dkb_ptr,  # [B, T, HV, K] out
    dkg_ptr,  # [B, T, HV, K] out
    dL_ptr,  # [B, T, HV, BT] out
    dbeta_ptr,  # [B, T, HV] out
    dgl_ptr,  # [B, NT, HV, K] out
    scale,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.kda_bwd.kda_reads_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i = first * HV + i_h
    i_S = (i_c * HV + i_h) * K * V
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    b_Z = load_tile(Z_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_dbeta = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
    tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)
    # eq:kda-dp   dP = scale tril(dO v_new^T)
    b_dP = scale * dot(b_do, tl.trans(b_v_new))
    b_dP = tl.where(o_t[:, None] >= o_t[None, :], b_dP, 0.0)
    store_tile(dP_ptr + i * BT, b_dP, o_t, o_t, HV * BT, n_t, BT)
    # eq:kda-dl   dL = -tril(Z v_new^T, -1)
    b_dL = tl.where(o_t[:, None] > o_t[None, :], -dot(b_Z, tl.trans(b_v_new)), 0.0)
    store_tile(dL_ptr + i * BT, b_dL, o_t, o_t, HV * BT, n_t, BT)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        # eq:kda-dqg   dqg = scale dO h^T
        b_x = scale * dot(b_do, tl.trans(b_h))
        store_tile(dqg_ptr + i * K, b_x, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dkb   dkb = -Z S^T
        b_x = -dot(b_Z, tl.trans(b_h))
        store_tile(dkb_ptr + i * K, b_x, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dkg   dkg = v_new dS^T
        b_x = dot(b_v_new, tl.trans(b_dh))
        store_tile(dkg_ptr + i * K, b_x, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dgl   dgl = rowsum(dS * S)
        b_dgl = tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
        tl.store(dgl_ptr + (i_c * HV + i_h) * K + o_k, b_dgl, mask=o_k < K)


@triton.jit(do_not_specialize=["T"])
def kda_fused_intra_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    h_ptr,  # [B, NT, HV, K, V]
    v_new_ptr,  # [B, T, HV, V]
    do_ptr,  # [B, T, HV, V]
    dh_ptr,  # [B, NT, HV, K, V]
    Z_ptr,  # [B, T, HV, V]
    dP_ptr,  # [B, T, HV, PW] out: of chunks with channels that are not near; Z may be here
    dL_ptr,  # [B, T, HV, PW] out: as dP
    dgl_ptr,  # [B, NT, HV, K] out: all that dgc_last gets
    dq_ptr,  # [B, T, HV, K] out; dqg of channels that are not near
    dk_ptr,  # [B, T, HV, K] out; dkb of channels that are not near
    dbeta_ptr,  # [B, T, HV] out, without the channels that are not near
    dgc_ptr,  # [B, T, HV, K] out; dkg of channels that are not near
    near_ptr,  # [B, NT, HV, NG] out: whether the channels of a group are near
    scale,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BN: tl.constexpr,  # all channels, in whole groups
    PW: tl.constexpr,  # from head to head of dP and dL
):  # fmt: skip
    """One program: one chunk of one head, its channels that are near.  Grid (NT * HV).

    What kda_intra_bwd reads of the others is stored in the place of what it writes.

    Reference: linattn_edu.reference.fused.kda_bwd.kda_fused_intra_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i = first * HV + i_h
    i_S = (i_c * HV + i_h) * K * V
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    gc_ptr += i * K
    dgl_ptr += (i_c * HV + i_h) * K
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    last = tl.minimum(BT, n_t) - 1
    b_Z = load_tile(Z_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)[:, None]
    NG: tl.constexpr = (K + GROUP - 1) // GROUP
    o_n = tl.arange(0, BN // GROUP)
    b_near = are_near(gc_ptr, HV * K, n_t, K, BT, BN)
    tl.store(near_ptr + (i_c * HV + i_h) * NG + o_n, b_near, mask=o_n < NG)
    near = tl.sum(b_near.to(tl.int32) << o_n, 0)  # a bit for each group
    far = tl.sum((o_n < NG).to(tl.int32) << o_n, 0) & ~near
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    b_dbeta = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
    # eq:kda-dp   dP = scale tril(dO v_new^T)
    b_dP = scale * dot(b_do, tl.trans(b_v_new))
    b_dP_ii = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dP, 0.0), 1)[:, None]
    # eq:kda-dl   dL = -tril(Z v_new^T, -1)
    b_dL = -dot(b_Z, tl.trans(b_v_new))
    below = o_t[:, None] > o_t[None, :]
    if far != 0:
        b_x = tl.where(o_t[:, None] >= o_t[None, :], b_dP, 0.0)
        store_tile(dP_ptr + i * PW, b_x, o_t, o_t, HV * PW, n_t, BT)
        store_tile(dL_ptr + i * PW, tl.where(below, b_dL, 0.0), o_t, o_t, HV * PW, n_t, BT)
    b_dP = cast(tl.where(below, b_dP, 0.0), dtype)
    b_dL = cast(tl.where(below, b_dL, 0.0), dtype)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        is_near = (near >> (j * BK // GROUP)) & 1 != 0
        b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_ga = load_vector(gc_ptr + middle(n_t, BT) * HV * K, o_k, K)
        b_gl = load_vector(gc_ptr + last * HV * K, o_k, K)
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_g = load_gates(gc_ptr, o_t, o_k, HV * K, n_t, K) - b_ga[None, :]  # [BT, BK]
        # eq:kda-dqg   dqg = scale dO h^T
        b_dqg = scale * dot(b_do, tl.trans(b_h))
        # eq:kda-dkb   dkb = -Z S^T
        b_dkb = -dot(b_Z, tl.trans(b_h))
        # eq:kda-dkg   dkg = v_new dS^T
        b_dkg = dot(b_v_new, tl.trans(b_dh))
        # eq:kda-dgl   dgl = rowsum(dS * S)
        b_dgl = tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
        b_E = tl.exp2(b_g)
        b_F = tl.exp2(-b_g)
        b_kF = cast(b_k * b_F, dtype)
        b_qE = cast(b_q * b_E, dtype)
        b_kE = cast(b_k * b_E * b_beta, dtype)
        # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
        b_r = dot(tl.trans(b_dL), b_kE, dot(tl.trans(b_dP), b_qE))
        # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
        b_x = dot(b_dP, b_kF)
        # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
        b_y = dot(b_dL, b_kF)
        # with the rounded operands, what i gains is what j loses, term by term
        b_dgc = b_qE.to(tl.float32) * b_x + b_kE.to(tl.float32) * b_y
        b_dgc -= b_kF.to(tl.float32) * b_r

        # eq:kda-outer   dQ += 2^gc * dqg, Y += 2^gc * dkb, R += 2^(gc_last - gc) * dkg
        b_e = b_E * tl.exp2(b_ga)[None, :]
        b_u = b_e * b_dqg
        b_dq = b_E * b_x + b_u
        b_dgc += b_q * b_u
        b_u = b_e * b_dkb
        b_Y = b_E * b_y + b_u
        b_dgc += b_k * b_beta * b_u
        # not by b_F, so that it is right of channels that are not near, too
        b_u = tl.exp2((b_gl - b_ga)[None, :] - b_g) * b_dkg
        b_R = b_F * b_r + b_u
        # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
        b_u = b_k * tl.where(o_t[:, None] == last, 0.0, b_u)
        b_dgl = tl.exp2(b_gl) * b_dgl + tl.sum(b_u, 0)
        tl.store(dgl_ptr + o_k, b_dgl, mask=o_k < K)
        b_dgc += tl.where(o_t[:, None] == last, b_dgl[None, :], 0.0) - b_u
        # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
        b_dgc = tl.where(is_near, b_dgc, b_dkg)
        store_tile(dgc_ptr + i * K, b_dgc, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dbeta   dbeta += rowsum(K * Y)
        b_dbeta += tl.where(is_near, tl.sum(b_k * b_Y, 1), 0.0)
        # eq:kda-dk   dk = diag(beta) Y + R + diag(dP) Q
        b_R = tl.where(is_near, b_R + b_beta * b_Y + b_dP_ii * b_q, b_dkb)
        store_tile(dk_ptr + i * K, b_R, o_t, o_k, HV * K, n_t, K)
        b_dq = tl.where(is_near, b_dq + b_dP_ii * b_k, b_dqg)
        store_tile(dq_ptr + i * K, b_dq, o_t, o_k, HV * K, n_t, K)
    tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)


BV = 64  # rows of dS^T: a product of fewer would leave tensor cores idle
GATES_OPTIONS = {"BK": 64, "num_warps": 4}
SCAN_OPTIONS = {"num_warps": 4, "num_stages": 2}
INTRA_OPTIONS = {"BK": 16, "num_warps": 4, "num_stages": 2}
READS_OPTIONS = {"BK": 64, "num_warps": 4, "num_stages": 2}


# tokens of a sequence times heads: with fewer the host decides how long a call takes. Not a batch:
# the last bits are not those of the stages one by one
LEAST = 1 << 14


def fits(q: Tensor, v: Tensor, chunk_size: int, packed: bool) -> bool:
    """Whether both passes of these are faster in fused stages: on a GPU where the kernels in Gluon
    run. In plain Triton the chains, longer by a product, take what the other kernels save. And
    where no more memory is needed than by the stages. The interpreter runs whatever the kernels
    hold.
    """
    if not hold(q, v) or not q.is_cuda:
        return hold(q, v)
    _, T, HV, V = v.shape
    return (
        kda_scans is not None
        and not packed
        and q.dtype == torch.bfloat16
        and q.shape[2] == HV
        and T * HV >= LEAST
        and T % chunk_size == 0
        and device_of(q)[0] == "hopper"
        and (q.shape[-1], V, chunk_size) == (gdn_scans.HEAD, gdn_scans.HEAD, gdn_scan.CHUNK)
        and support.available().usable
    )


def kda_gates(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch kda_gates_kernel; arguments and result as in the reference."""
    T, H, K = k.shape[1:]
    HV = g.shape[2]
    gc = torch.empty_like(g, dtype=torch.float32)
    kd, kg, qg = (torch.empty_like(g, dtype=k.dtype) for _ in range(3))
    NT, *chunks = chunk_args(k, chunk_size, packing)
    kda_gates_kernel[(NT * HV * cdiv(K, GATES_OPTIONS["BK"]),)](
        q, k, g, A_log, dt_bias, gc, kd, kg, qg, lower_bound, *chunks, T, H, HV, K, BT=chunk_size,
        **GATES_OPTIONS,
    )  # fmt: skip
    return gc, kd, kg, qg


def kda_fused_scans(
    qg: Tensor,
    kg: Tensor,
    kd: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    A: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    scale: float,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:
    """Launch the kernels that suit the GPU; arguments and result as in the reference."""
    HV, K = kg.shape[2:]
    V, C = v.shape[-1], A.shape[-1]
    pieces = pieces_of(kg, HV, V, C, packing)
    if pieces.several:
        maps = kda_fused_scan_map(kg, kd, v, beta, gc, A, pieces=pieces)
        initial_state = pieces.entering(cp_merge, maps, initial_state)
        given = qg, kg, kd, beta, gc, P, A, do
        maps = kda_fused_scan_map_bwd(*given, scale=scale, pieces=pieces)
        dht = pieces.entering(cp_merge_bwd, maps, dht)
    h, dh = (kg.new_empty(*states(kg, C, packing), HV, K, V) for _ in range(2))
    v_new, Z, dv = (torch.empty_like(v) for _ in range(3))
    dh0 = gc.new_empty(pieces.N, HV, K, V)
    programs = pieces.N * HV * cdiv(V, BV)
    # whether they pay was asked when this set was taken; of do only the address may differ from v's
    gluon = kda_scans is not None and all(kda_scans.runs(kg, x, P, A, packing) for x in (v, do))
    given = qg, kg, kd, v, beta, gc, P, A, do, initial_state, dht, h, v_new, dh, Z, dv, dh0, scale
    forth = kg, kd, v, beta, gc, A, initial_state, h, v_new, pieces
    back = qg, kg, kd, beta, gc, P, A, do, dht, dh, Z, dv, dh0, scale, pieces
    if gluon and programs < device_of(kg)[1]:
        done = support.attempt(kda_scans.kda_scans_gluon, *given, pieces)
    else:
        done = gluon and support.attempt(kda_scans.kda_scan_states_gluon, *forth)
        done = done and support.attempt(kda_scans.kda_scan_bwd_gluon, *back)
    if not done:
        kda_fused_scans_kernel[(2 * programs,)](
            *given, pieces.cu_seqlens, pieces.chunk_offsets, pieces.T, HV, K, V, BT=C, BK=block(K),
            BV=BV, **SCAN_OPTIONS,
        )  # fmt: skip
    return h, v_new, dh, Z, dv, pieces.first(dh0)


def kda_fused_scan_map_bwd(
    qg: Tensor,
    kg: Tensor,
    kd: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    transition: bool = True,
    packing: Packing | None = None,
    rows: Tensor | None = None,
    pieces: Pieces | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch kda_fused_scan_map_bwd_kernel; arguments and result as in the reference.

    packing, rows, pieces: as in piece_map.
    """
    HV, K = kg.shape[2:]
    V = do.shape[-1]
    NP, cu_seqlens, T = map_args(kg, packing, rows, pieces)
    W = V + K if transition else V
    maps = gc.new_empty(NP, HV, K, W)
    kda_fused_scan_map_bwd_kernel[(NP * HV * cdiv(W, BV),)](
        qg, kg, kd, beta, gc, P, A, do, dht, maps, scale, rows, cu_seqlens, T, HV, K, V, W,
        BT=A.shape[-1], BK=block(K), BV=BV, **SCAN_OPTIONS,
    )  # fmt: skip
    return maps[..., :V], maps[..., V:] if transition else None


def kda_reads_bwd(
    v: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    *,
    scale: float,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:
    """Launch kda_reads_bwd_kernel; arguments and result as in the reference."""
    B, T, HV, V = v.shape
    K = h.shape[3]
    dqg, dkb, dkg = (v.new_empty(B, T, HV, K) for _ in range(3))
    dP, dL = (v.new_empty(B, T, HV, chunk_size) for _ in range(2))
    dbeta = v.new_empty(B, T, HV, dtype=torch.float32)
    dgl = v.new_empty(*h.shape[:4], dtype=torch.float32)
    NT, *chunks = chunk_args(v, chunk_size, packing)
    kda_reads_bwd_kernel[(NT * HV,)](
        v, h, v_new, do, dh, Z, dqg, dP, dkb, dkg, dL, dbeta, dgl, scale, *chunks, T, HV, K, V,
        BT=chunk_size, BV=block(V), **READS_OPTIONS,
    )  # fmt: skip
    return dqg, dP, dkb, dkg, dL, dbeta, dgl


def kda_fused_intra_bwd(
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
    """Launch kda_fused_intra_bwd_kernel or that in Gluon, and kda_intra_bwd_kernel for the channels
    that are not near; arguments and result as in the reference, but Z is overwritten.

    Where kda_intra_bwd has no kernel of its own for near channels, or a loop over columns of 16
    could not be pipelined, it is kda_reads_bwd and kda_intra_bwd.
    """
    if k.dtype not in of_generation(NEAR_CONFIGS, device_of(k)[0]) or not in_words(k, v):
        options = {"scale": scale, "chunk_size": chunk_size, "packing": packing}
        dqg, dP, dkb, dkg, dL, dbeta, dgl = kda_reads_bwd(v, h, v_new, do, dh, Z, **options)
        parts = dP, dL, dqg, dkb, dkg, dgl, dbeta
        return kda_intra_bwd(q, k, beta, gc, *parts, packing=packing)
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    dq, dk = (v.new_empty(B, T, HV, K, dtype=shared_dtype(q, HV)) for _ in range(2))
    dbeta, dgc = v.new_empty(B, T, HV, dtype=torch.float32), torch.empty_like(gc)
    dgl = v.new_empty(*h.shape[:4], dtype=torch.float32)
    if 2 * chunk_size <= V:  # a chunk's Z is read before dP and dL are written
        dP, dL, width = Z, Z[..., chunk_size:], V
    else:
        (dP, dL), width = (v.new_empty(B, T, HV, chunk_size) for _ in range(2)), chunk_size
    NT, *chunks = chunk_args(v, chunk_size, packing)
    near = k.new_empty(NT * HV, cdiv(K, GROUP.value), dtype=torch.int8)
    tensors = q, k, v, beta, gc, h, v_new, do, dh, Z
    gluon, given = kda_intra_bwd_gluon, (*tensors, dgl, dq, dk, dbeta, dgc, near, scale)
    if not (
        gluon is not None
        and gluon.fits(*tensors, chunk_size, packing is not None)
        and support.attempt(gluon.kda_intra_bwd_gluon, *given)
    ):
        kda_fused_intra_bwd_kernel[(NT * HV,)](
            *tensors, dP, dL, dgl, dq, dk, dbeta, dgc, near, scale, *chunks, T, H, HV, K, V,
            BT=chunk_size, BV=block(V), BN=max(block(K), GROUP.value), PW=width, **INTRA_OPTIONS,
        )  # fmt: skip
    kda_intra_bwd_kernel[(NT * HV * (chunk_size // 16),)](
        q, k, beta, gc, dP, dL, dq, dk, dgc, dgl, dq, dk, dbeta, dgc, near, *chunks, T, H, HV, K,
        BT=chunk_size, HALVE=halve(k.dtype), PW=width, SUMMED=True, **entry(CONFIGS, k).launch(K),
    )  # fmt: skip
    if H < HV:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dbeta, dgc
