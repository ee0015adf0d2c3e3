"""The forward pass in fused kernels: all that needs no state (scores, resolvent), then the scan.

Against the five stages nothing of size [T, K] or [T, V] is written between kernels: w, u, v_new and
the states h stay on the chip.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, map_args, piece_of
from linattn_edu.kernels.delta.solve import (
    invert_columns,
    kkt,
    merge,
    merge_precision,
    quarters,
    unit_lower_inverse,
)
from linattn_edu.kernels.delta.warm_up import span_of, warm_up
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.pieces import Pieces, pieces_of
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_args,
    chunk_of,
    columns_of,
    decay_matrix,
    device_of,
    dot,
    entry,
    load_gate,
    load_row,
    load_tile,
    of_generation,
    row,
    scan_launch,
    scan_table,
    store_tile,
    whole,
)
from linattn_edu.packing import Packing

try:
    from linattn_edu.kernels.gluon import gdn_intra, gdn_scan
except Exception as error:  # a Triton whose Gluon has other names
    gdn_intra = gdn_scan = support.left_out(error)


@triton.jit(do_not_specialize=["T"])
def scores_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one q/k head, for all its value heads.  Grid (NT * H).

    Reference: linattn_edu.reference.fused.gdn_fwd.intra_chunk.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    q_ptr += (first * H + i_h) * K
    k_ptr += (first * H + i_h) * K
    o_t = tl.arange(0, BT)

    b_QK = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_QK = dot(b_q, tl.trans(b_k), b_QK)
    for i_g in range(HV // H):
        i = first * HV + i_h * (HV // H) + i_g
        # eq:delta-decay-matrix   G = 2^(gc_i - gc_j), i >= j
        G = decay_matrix(load_gate(gc_ptr + i, o_t, HV, n_t), o_t)
        # eq:delta-intra   P = Q K^T * G
        store_tile(P_ptr + i * BT, b_QK * G, o_t, o_t, HV * BT, n_t, BT)


@triton.jit(do_not_specialize=["T"])
def resolvent_kernel(
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    R_ptr,  # [B, T, HV, BT] out
    A_ptr,  # [B, T, HV, BT] out, A * G with GATED; or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.gdn_fwd.intra_chunk.
    """
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    k_ptr += (first * H + i_h // (HV // H)) * K
    o_t = tl.arange(0, BT)

    b_beta = load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)
    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L = kkt(k_ptr, b_beta, H * K, n_t, K, BT, BK)
    A = unit_lower_inverse(L, BT, PRECISION)
    if A_ptr is not None and not GATED:
        store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)
    # eq:delta-resolvent   R = (A * G) diag(beta)
    A *= decay_matrix(load_gate(gc_ptr + first * HV + i_h, o_t, HV, n_t), o_t)
    if A_ptr is not None and GATED:
        store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)
    R = A * b_beta[None, :]
    store_tile(R_ptr + (first * HV + i_h) * BT, R, o_t, o_t, HV * BT, n_t, BT)


@triton.jit
def three_quarters(q_ptr, k_ptr, stride, n_t, S: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Three quarters [S, S] of Q K^T, of 2 S rows: all but the upper right one."""
    o = tl.arange(0, S)
    b_11 = tl.zeros([S, S], dtype=tl.float32)
    b_21 = tl.zeros([S, S], dtype=tl.float32)
    b_22 = tl.zeros([S, S], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q1 = load_tile(q_ptr, o, o_k, stride, n_t, K)  # [S, BK]
        b_k1 = load_tile(k_ptr, o, o_k, stride, n_t, K)  # [S, BK]
        b_q2 = load_tile(q_ptr, S + o, o_k, stride, n_t, K)  # [S, BK]
        b_k2 = load_tile(k_ptr, S + o, o_k, stride, n_t, K)  # [S, BK]
        b_11 = dot(b_q1, tl.trans(b_k1), b_11)
        b_21 = dot(b_q2, tl.trans(b_k1), b_21)
        b_22 = dot(b_q2, tl.trans(b_k2), b_22)
    return b_11, b_21, b_22


@triton.jit
def stack_tiles(M1, M2, M3, M4):
    """[4, 8, 8] of tiles [8, 8]."""
    M = tl.join(tl.join(M1, M2), tl.join(M3, M4))
    return tl.reshape(tl.permute(M, (3, 2, 0, 1)), (4, 8, 8))


@triton.jit(do_not_specialize=["T"])
def intra_chunk_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT] out
    R_ptr,  # [B, T, HV, BT] out
    A_ptr,  # [B, T, HV, BT] out, A * G with GATED; or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr,
    WHOLE: tl.constexpr,  # every chunk has BT tokens
):  # fmt: skip
    """scores_kernel and resolvent_kernel in one, for chunks of 64.

    One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.gdn_fwd.intra_chunk.
    """
    S: tl.constexpr = BT // 2
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    n_t = BT if WHOLE else n_t
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    beta_ptr += first * HV + i_h
    gc_ptr += first * HV + i_h
    P_ptr += (first * HV + i_h) * BT
    R_ptr += (first * HV + i_h) * BT
    o = tl.arange(0, S)

    # eq:delta-decay-matrix   G = 2^(gc_i - gc_j), i >= j
    b_gc1 = load_gate(gc_ptr, o, HV, n_t)
    b_gc2 = load_gate(gc_ptr, S + o, HV, n_t)
    # eq:delta-intra   P = Q K^T * G
    P11, P21, P22 = three_quarters(q_ptr, k_ptr, H * K, n_t, S, K, BK)
    P21 *= tl.exp2(b_gc2[:, None] - b_gc1[None, :])
    store_tile(P_ptr, P11 * decay_matrix(b_gc1, o), o, o, HV * BT, n_t, BT)
    store_tile(P_ptr, tl.zeros_like(P11), o, S + o, HV * BT, n_t, BT)
    store_tile(P_ptr, P21, S + o, o, HV * BT, n_t, BT)
    store_tile(P_ptr, P22 * decay_matrix(b_gc2, o), S + o, S + o, HV * BT, n_t, BT)

    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L11, L21, L22 = three_quarters(k_ptr, k_ptr, H * K, n_t, S, K, BK)
    L21 *= load_row(beta_ptr, S + o, HV, n_t)[:, None]
    D1, M1, D2 = quarters(L11, 16)
    D3, M2, D4 = quarters(L22, 16)
    o_i = tl.arange(0, 2)[:, None] * 32 + 16 + tl.arange(0, 16)[None, :]
    M21 = tl.permute(tl.join(M1, M2), (2, 0, 1))
    M21 *= load_row(beta_ptr, o_i, HV, n_t)[:, :, None]
    a1, b1, c1 = quarters(D1, 8)
    a2, b2, c2 = quarters(D2, 8)
    a3, b3, c3 = quarters(D3, 8)
    a4, b4, c4 = quarters(D4, 8)
    D11, D21, D22 = (
        stack_tiles(a1, a2, a3, a4),
        stack_tiles(b1, b2, b3, b4),
        stack_tiles(c1, c2, c3, c4),
    )
    X = invert_columns(D11, D21, D22, beta_ptr, HV, n_t, 4)
    X = merge(X, M21, 16, BT, PRECISION)
    A = tl.reshape(merge(X, L21[None, :, :], S, BT, PRECISION), (BT, BT))
    # eq:delta-resolvent   R = (A * G) diag(beta)
    o_t = tl.arange(0, BT)
    if A_ptr is not None and not GATED:
        store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)
    A *= decay_matrix(load_gate(gc_ptr, o_t, HV, n_t), o_t)
    if A_ptr is not None and GATED:
        store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)
    R = A * load_row(beta_ptr, o_t, HV, n_t)[None, :]
    store_tile(R_ptr, R, o_t, o_t, HV * BT, n_t, BT)


@triton.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT]
    R_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [N, HV, K, V] out, or None
    scale,
    warm_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_fwd.scan.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0), cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    skip, i_end = 0, i_nh
    if warm_ptr is not None:
        first, n_seq, _, skip, i_end = span_of(
            i_nh, first, n_seq, i_c, warm_ptr, cu_ptr, T, N, HV, BT, False
        )
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    v_ptr += (first * HV + i_h) * V
    o_ptr += (first * HV + i_h) * V
    P_ptr += (first * HV + i_h) * BT
    R_ptr += (first * HV + i_h) * BT
    gc_ptr += first * HV + i_h

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = tl.zeros([BK, BV], dtype=tl.float32)
    if h0_ptr is not None:
        b_S += load_tile(h0_ptr + i_nh * K * V, o_k, o_v, V, K, V).to(tl.float32)

    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_R = load_tile(R_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_P = load_tile(P_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV)
        b_h = cast(b_S, b_k.dtype)

        # eq:delta-residual   W = V - diag(2^gc) K S
        b_W = b_v.to(tl.float32) - tl.exp2(b_gc)[:, None] * dot(b_k, b_h)
        # eq:delta-v-new   v_new = R W
        b_v = dot(b_R, cast(b_W, b_R.dtype))
        # eq:delta-inter   diag(2^gc) Q S
        b_o = tl.exp2(b_gc)[:, None] * dot(b_q, b_h)
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = scale * dot(b_P, cast(b_v, b_P.dtype), b_o)
        store_tile(o_ptr, b_o, o_t, o_v, HV * V, tl.where(i_t < skip, 0, n_t), V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_v *= tl.exp2(b_last - b_gc)[:, None]
        b_S = dot(tl.trans(b_k), cast(b_v, b_k.dtype), b_S * tl.exp2(b_last))

        q_ptr += BT * H * K
        k_ptr += BT * H * K
        v_ptr += BT * HV * V
        o_ptr += BT * HV * V
        P_ptr += BT * HV * BT
        R_ptr += BT * HV * BT
        gc_ptr += BT * HV

    if ht_ptr is not None:
        store_tile(ht_ptr + i_end * K * V, b_S, o_k, o_v, V, tl.where(i_end < 0, 0, K), V)


@triton.jit(do_not_specialize=["T", "N"])
def scan_transposed_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2
    P_ptr,  # [B, T, HV, BT]
    R_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [N, HV, K, V] out, or None
    scale,
    warm_ptr,  # [N, HV] or None
    cu_ptr,  # [N + 1] or None
    offsets_ptr,  # [N + 1] or None
    T,
    N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """scan_kernel with S^T [BV, BK] in the place of S, and the same sums in the same order.

    What a product makes is the first operand of the next and stays in registers: the shared memory
    of two programs fits a multiprocessor, and one works while the other waits.

    Grid (N * HV * V / BV).  Reference: linattn_edu.reference.fused.gdn_fwd.scan.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0), cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    skip, i_end = 0, i_nh
    if warm_ptr is not None:
        first, n_seq, _, skip, i_end = span_of(
            i_nh, first, n_seq, i_c, warm_ptr, cu_ptr, T, N, HV, BT, False
        )
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = tl.zeros([BV, BK], dtype=tl.float32)
    if h0_ptr is not None:
        b_S += tl.trans(load_tile(h0_ptr + i_nh * K * V, o_k, o_v, V, K, V)).to(tl.float32)

    for i_t in range(tl.cdiv(n_seq, BT)):
        begin, n_t = first + i_t * BT, n_seq - i_t * BT
        i, i_qk = begin * HV + i_h, (begin * H + i_h // (HV // H)) * K
        b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_R = load_tile(R_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        b_h, b_e = cast(b_S, b_k.dtype), tl.exp2(b_gc)[None, :]

        # eq:delta-residual   W = V - diag(2^gc) K S
        b_W = tl.trans(b_v).to(tl.float32) - b_e * dot(b_h, tl.trans(b_k))
        # eq:delta-v-new   v_new = R W
        b_new = dot(cast(b_W, b_R.dtype), tl.trans(b_R))
        # eq:delta-inter   diag(2^gc) Q S
        b_o = b_e * dot(b_h, tl.trans(b_q))
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = scale * dot(cast(b_new, b_P.dtype), tl.trans(b_P), b_o)
        b_o = tl.trans(cast(b_o, o_ptr.dtype.element_ty))
        n_o = tl.where(i_t < skip, 0, n_t)
        store_tile(o_ptr + i * V, b_o, o_t, o_v, HV * V, n_o, V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_new *= tl.exp2(b_last - b_gc)[None, :]
        b_S = dot(cast(b_new, b_k.dtype), b_k, b_S * tl.exp2(b_last))

    if ht_ptr is not None:
        n_k = tl.where(i_end < 0, 0, K)
        store_tile(ht_ptr + i_end * K * V, tl.trans(b_S), o_k, o_v, V, n_k, V)


@triton.jit(do_not_specialize=["T"])
def scan_map_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2
    R_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [NP, HV, K, V] or None
    beta_ptr,  # [B, T, HV], where R is without it; or None
    map_ptr,  # [NP, HV, K, W] out: S_ext, and M where W is V + K
    rows_ptr,  # [NP] or None
    cu_ptr,  # [N + 1] or None
    T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [S_ext | M] of one head, through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.fused.gdn_fwd.scan_map.
    """
    i_v, i_ph, i_h, first, n_seq = piece_of(tl.program_id(0), rows_ptr, cu_ptr, T, HV, W, BT, BV)
    k_ptr += (first * H + i_h // (HV // H)) * K
    v_ptr += (first * HV + i_h) * V
    R_ptr += (first * HV + i_h) * BT
    gc_ptr += first * HV + i_h
    if beta_ptr is not None:
        beta_ptr += first * HV + i_h

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    # eq:cp-ext   S_ext: the state after the piece, from zero
    # eq:cp-transition   M: the same with v = 0, from I
    b_S = tl.where(o_k[:, None] + V == o_v[None, :], 1.0, 0.0)
    if h0_ptr is not None:
        b_S += load_tile(h0_ptr + i_ph * K * V, o_k, o_v, V, K, V).to(tl.float32)
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_R = load_tile(R_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV)
        b_W = b_v.to(tl.float32) - tl.exp2(b_gc)[:, None] * dot(b_k, cast(b_S, b_k.dtype))
        if beta_ptr is not None:
            b_W *= load_row(beta_ptr, o_t, HV, n_t)[:, None]
            beta_ptr += BT * HV
        b_v = dot(b_R, cast(b_W, b_R.dtype)) * tl.exp2(b_last - b_gc)[:, None]
        b_S = dot(tl.trans(b_k), cast(b_v, b_k.dtype), b_S * tl.exp2(b_last))
        k_ptr += BT * H * K
        v_ptr += BT * HV * V
        R_ptr += BT * HV * BT
        gc_ptr += BT * HV
    store_tile(map_ptr + i_ph * K * W, b_S, o_k, o_v, W, K, W)


# generation -> bytes of an element -> row
SCORES_CONFIGS = {
    "turing": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "ampere": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "hopper": {2: row(2, 3, BK=64), 4: row(4, 1, BK=32)},
}
# one warp, as in solve
RESOLVENT_CONFIGS = {
    "turing": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "ampere": {2: row(1, 1, BK=64), 4: row(4, 1, BK=32)},
    "hopper": {2: row(1, 3, BK=64), 4: row(4, 1, BK=32)},
}
# both in one, where that is faster and has run on a GPU: 16 bit, chunks of 64, a key head for each
# value head, since each of those has its own program; keys -> row
INTRA_CONFIGS = {"hopper": {2: {64: row(1, 3, BK=32, maxnreg=168), 128: row(1, 3, BK=64)}}}
SCAN_CONFIGS = scan_table(
    ampere={128: [row(4, 1, BV=32)], 256: [row(4, 1, BV=16)]},
    # never 1 stage in 16 bit with BV < 64: miscompiled by ptxas 12.8, see tiles.UNPIPELINED
    hopper={
        128: [row(4, 3, BV=64), row(4, 3, BV=32), row(4, 3, BV=16)],
        256: [row(4, 2, BV=64), row(4, 2, BV=32), row(4, 2, BV=16)],
    },
)


# with a third chunk in flight there would be no room for a second program
TRANSPOSED = {"num_warps": 4, "num_stages": 2}


def crowded(k: Tensor, programs: int, config: dict[str, int]) -> bool:
    """Whether scan_transposed_kernel, whose products are 64 rows high, has two programs for many a
    multiprocessor; with one it would be the slower of the two. Measured for keys of more than 64.
    """
    generation, processors = device_of(k)
    fits = generation in ("hopper", "blackwell") and k.element_size() == 2
    return fits and config["BK"] == 128 and config["BV"] == 64 and 2 * programs >= 3 * processors


def intra_chunk(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    *,
    chunk_size: int,
    return_inverse: bool = False,
    gated: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the kernel or the two that suit the GPU; arguments and result as in the reference."""
    B, T, H, K = k.shape
    HV = beta.shape[-1]
    NT, *chunks = chunk_args(k, chunk_size, packing)
    P, R = (q.new_empty(B, T, HV, chunk_size) for _ in range(2))
    A = torch.empty_like(R) if return_inverse else None
    if gdn_intra is not None and gdn_intra.fits(q, k, chunk_size):
        given = q, k, beta, gc, P, R, A, gated, packing
        if support.attempt(gdn_intra.intra_gluon, *given):
            return P, R, A
    options = {"BT": chunk_size, "PRECISION": merge_precision(k.dtype), "GATED": gated}
    rows = of_generation(INTRA_CONFIGS, device_of(k)[0]).get(k.element_size(), {})
    if K in rows and chunk_size == 64 and H == HV:
        intra_chunk_kernel[(NT * HV,)](
            q, k, beta, gc, P, R, A, *chunks, T, H, HV, K,
            WHOLE=whole(k, chunk_size, packing), **options, **rows[K].launch(K),
        )  # fmt: skip
        return P, R, A
    config = entry(SCORES_CONFIGS, k).launch(K)
    scores_kernel[(NT * H,)](q, k, gc, P, *chunks, T, H, HV, K, BT=chunk_size, **config)
    config = entry(RESOLVENT_CONFIGS, k).launch(K)
    resolvent_kernel[(NT * HV,)](k, beta, gc, R, A, *chunks, T, H, HV, K, **options, **config)
    return P, R, A


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gc: Tensor,
    P: Tensor,
    R: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float,
    output_final_state: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the scan that suits the GPU; arguments and result as in the reference."""
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    C = P.shape[-1]
    in_gluon = gdn_scan is not None and gdn_scan.fits(q, k, v, P, R, packing)
    pieces = pieces_of(q, HV, V, C, packing)
    warm = [None]
    if pieces.several:
        maps = scan_map(k, v, gc, R, pieces=pieces)
        initial_state = pieces.entering(cp_merge, maps, initial_state)
    else:
        options = {"chunk_size": C, "packing": packing, "choice": not in_gluon}
        pieces, warm = warm_up(k, R, gc, V, **options)
        initial_state = pieces.placed(initial_state)
    o = torch.empty_like(v)
    last = q.new_empty(pieces.N, HV, K, V, dtype=torch.float32) if output_final_state else None
    if in_gluon:
        given = q, k, v, gc, P, R, initial_state, o, last, scale
        if support.attempt(gdn_scan.scan_gluon, *given, *warm, pieces):
            return o, pieces.last(last)
    for i, skipped in enumerate(warm):
        heads = (pieces.batch if i else pieces.N) * HV
        _, config = scan_launch(SCAN_CONFIGS, k, heads, V)
        programs = pieces.N * HV * cdiv(V, config["BV"])
        full = crowded(k, programs, config)
        kernel = scan_transposed_kernel if full else scan_kernel
        kernel[(programs,)](
            q, k, v, gc, P, R, initial_state, o, last, scale, skipped, pieces.cu_seqlens,
            pieces.chunk_offsets, pieces.T, pieces.N, H, HV, K, V, BT=C,
            **(config | TRANSPOSED if full else config),
        )  # fmt: skip
    return o, pieces.last(last)


def scan_map(
    k: Tensor,
    v: Tensor,
    gc: Tensor,
    R: Tensor,
    initial_state: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    transition: bool = True,
    packing: Packing | None = None,
    rows: Tensor | None = None,
    pieces: Pieces | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch scan_map_kernel; arguments and result as in the reference.

    packing, rows, pieces: as in piece_map.
    """
    H, K = k.shape[2:]
    HV, V = v.shape[2:]
    NP, cu_seqlens, T = map_args(k, packing, rows, pieces)
    W = V + K if transition else V
    maps = gc.new_empty(NP, HV, K, W)
    grid, config = scan_launch(SCAN_CONFIGS, k, NP * HV, W)
    scan_map_kernel[grid](
        k, v, gc, R, initial_state, beta, maps, rows, cu_seqlens, T, H, HV, K, V, W, BT=R.shape[-1],
        **config,
    )  # fmt: skip
    return maps[..., :V], maps[..., V:] if transition else None
