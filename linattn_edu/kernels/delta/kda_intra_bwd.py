"""Stage kda_intra_bwd: gradients of q, k, beta and the gate, from those of all that is gated."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.kda_intra import FAR, halves, halving, pairs
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.rows import (
    chunk_args,
    device_of,
    entry,
    of_generation,
    row,
    shared_dtype,
    strength,
)
from linattn_edu.kernels.tiles import (
    as_factor,
    block,
    cast,
    cdiv,
    chunk_of,
    dot_as,
    dot_halves,
    gated,
    in_halves,
    joined,
    listed,
    load_gates,
    load_row,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing

# as in kda_intra, but gradients need more room than keys: a factor of 2^66
NEAR = tl.constexpr(60.0)
GROUP = tl.constexpr(64)  # channels that are near together, or not


@triton.jit
def middle(n_t, BT: tl.constexpr):
    """The row of a chunk at which its near channels are anchored."""
    return tl.minimum(BT // 2, n_t - 1)


@triton.jit
def are_near(gc_ptr, stride, n_t, K, BT: tl.constexpr, BN: tl.constexpr):
    """[BN / GROUP]: whether no channel of a group fades by more than 2^NEAR to the chunk's middle
    or from it.  BN: all channels, which are loaded at once.
    """
    o_k = tl.arange(0, BN)
    b_ga = load_vector(gc_ptr + middle(n_t, BT) * stride, o_k, K)
    b_before = load_vector(gc_ptr, o_k, K) - b_ga
    b_after = b_ga - load_vector(gc_ptr + (tl.minimum(BT, n_t) - 1) * stride, o_k, K)
    b_most = tl.reshape(tl.maximum(b_before, b_after), (BN // GROUP, GROUP))
    return tl.max(b_most, 1) <= NEAR


@triton.jit
def near_sums(b_q, b_k, b_g, b_beta, b_dP, b_low, b_dL, b_dL_low, b_dqg, b_dkb, b_dkg, b_dgl, b_ga,
              b_gl, b_left, o_t, last, dtype: tl.constexpr):  # fmt: skip
    """dQ, Y, R, dgc and what 2^gc_last gets, of channels that are near: those of b_g = gc - b_ga.

    b_dP, b_low: both halves of dP where i > j.  b_dL_low: that of dL, or None; then q and k with
    the gate have none either.  b_left: 2^(gc_last - gc).
    """
    b_E = tl.exp2(b_g)
    b_F = tl.exp2(-b_g)
    b_kF, b_kF_low = in_halves(b_k * b_F, dtype)
    b_qE_low, b_kE_low, b_below = None, None, None
    if b_dL_low is None:
        b_qE, b_kE = cast(b_q * b_E, dtype), cast(b_k * b_E * b_beta, dtype)
    else:
        b_qE, b_kE = b_q * b_E, b_k * b_E * b_beta
        b_qE, b_qE_low = in_halves(b_qE, dtype)
        b_kE, b_kE_low = in_halves(b_kE, dtype)
        b_below = tl.trans(b_dL_low)
    # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
    b_r = dot_halves(tl.trans(b_dP), tl.trans(b_low), b_qE, b_qE_low)
    b_r = dot_halves(tl.trans(b_dL), b_below, b_kE, b_kE_low, b_r)
    # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
    b_x = dot_halves(b_dP, b_low, b_kF, b_kF_low)
    # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
    b_y = dot_halves(b_dL, b_dL_low, b_kF, b_kF_low)
    # with the operands as they were rounded, what i gains is what j loses, term by term
    b_dgc = joined(b_qE, b_qE_low) * b_x + joined(b_kE, b_kE_low) * b_y
    b_dgc -= joined(b_kF, b_kF_low) * b_r

    # eq:kda-outer   dQ += 2^gc * dqg, Y += 2^gc * dkb, R += 2^(gc_last - gc) * dkg
    b_e = b_E * tl.exp2(b_ga)[None, :]
    b_u = b_e * b_dqg
    b_dq = b_E * b_x + b_u
    b_dgc += b_q * b_u
    b_u = b_e * b_dkb
    b_Y = b_E * b_y + b_u
    b_dgc += b_k * b_beta * b_u
    b_u = b_left * b_dkg
    b_R = b_F * b_r + b_u
    # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
    b_u = b_k * tl.where(o_t[:, None] == last, 0.0, b_u)
    b_dgl = tl.exp2(b_gl) * b_dgl + tl.sum(b_u, 0)
    b_dgc += tl.where(o_t[:, None] == last, b_dgl[None, :], 0.0) - b_u
    return b_dq, b_Y, b_R, b_dgc, b_dgl


@triton.jit(do_not_specialize=["T"])
def kda_intra_bwd_near_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV], or None
    erase_ptr,  # [B, T, HV, K] in the place of beta, or None
    gc_ptr,  # [B, T, HV, K] log2
    dP_ptr,  # [B, T, HV, BT] fp32
    dL_ptr,  # [B, T, HV, BT]
    dqg_ptr, dkb_ptr, dkg_ptr,  # [B, T, HV, K]
    dgl_ptr,  # [B, NT, HV, K]
    dq_ptr, dk_ptr,  # [B, T, HV, K] out
    dbeta_ptr,  # [B, T, HV] added to; with erase [B, T, HV, K] out
    dgc_ptr,  # [B, T, HV, K] out
    near_ptr,  # [B, NT, HV, NG] out: whether the channels of a group are near
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
    BN: tl.constexpr,  # all channels, in whole groups
    FINE: tl.constexpr,  # everything is in fp32, and multiplied in two halves of bf16
):  # fmt: skip
    """One program: one chunk of one head, its channels that are near.  Grid (NT * HV).

    The others are computed too, if there are near ones, and not stored: without a branch the loads
    of the next channels need not wait until these are done.

    Reference: linattn_edu.reference.delta.kda_intra_bwd.
    """
    pid = listed(tl.program_id(0), items_ptr, 1)
    if pid < 0:
        return
    i_h, i_c, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, HV, BT)
    i = first * HV + i_h
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    gc_ptr += i * K
    o_t = tl.arange(0, BT)
    last = tl.minimum(BT, n_t) - 1
    NG: tl.constexpr = (K + GROUP - 1) // GROUP
    o_n = tl.arange(0, BN // GROUP)
    b_near = are_near(gc_ptr, HV * K, n_t, K, BT, BN)
    tl.store(near_ptr + (i_c * HV + i_h) * NG + o_n, b_near, mask=o_n < NG)
    near = tl.sum(b_near.to(tl.int32) << o_n, 0)  # a bit for each group
    if near == 0:
        return
    dtype: tl.constexpr = tl.bfloat16 if FINE else k_ptr.dtype.element_ty
    if erase_ptr is None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)[:, None]
        b_dbeta = load_row(dbeta_ptr + i, o_t, HV, n_t)
    b_dP_ii = load_row(dP_ptr + i * BT, o_t, HV * BT + 1, n_t)[:, None]
    b_dP = load_tile(dP_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_dP, b_low = in_halves(tl.where(o_t[:, None] > o_t[None, :], b_dP, 0.0), dtype)
    b_dL = load_tile(dL_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_dL_low = None
    if FINE:
        b_dL, b_dL_low = in_halves(b_dL, dtype)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        n_out = tl.where((near >> (j * BK // GROUP)) & 1 != 0, n_t, 0)  # rows that are stored
        b_ga = load_vector(gc_ptr + middle(n_t, BT) * HV * K, o_k, K)
        b_gl = load_vector(gc_ptr + last * HV * K, o_k, K)
        # loaded before they are needed: nothing else is there to wait behind
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_g = load_gates(gc_ptr, o_t, o_k, HV * K, n_t, K) - b_ga[None, :]  # [BT, BK]
        b_dqg = load_tile(dqg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_dkb = load_tile(dkb_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_dkg = load_tile(dkg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        if erase_ptr is not None:
            b_beta = load_tile(erase_ptr + i * K, o_t, o_k, HV * K, n_t, K).to(tl.float32)
        b_k, b_q = b_k.to(tl.float32), b_q.to(tl.float32)
        b_dgl = load_vector(dgl_ptr + (i_c * HV + i_h) * K, o_k, K)
        b_left = tl.exp2(-b_g) * tl.exp2(b_gl - b_ga)[None, :]
        b_dqg, b_dkb, b_dkg = b_dqg.to(tl.float32), b_dkb.to(tl.float32), b_dkg.to(tl.float32)
        b_dq, b_Y, b_R, b_dgc, _ = near_sums(
            b_q, b_k, b_g, b_beta, b_dP, b_low, b_dL, b_dL_low, b_dqg, b_dkb, b_dkg, b_dgl, b_ga,
            b_gl, b_left, o_t, last, dtype,
        )  # fmt: skip
        # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
        store_tile(dgc_ptr + i * K, b_dgc, o_t, o_k, HV * K, n_out, K)
        # eq:kda-dbeta   dbeta += rowsum(K * Y)
        if erase_ptr is None:
            b_dbeta += tl.where(n_out > 0, tl.sum(b_k * b_Y, 1), 0.0)
        else:
            store_tile(dbeta_ptr + i * K, b_k * b_Y, o_t, o_k, HV * K, n_out, K)
        # eq:kda-dk   dk = diag(beta) Y + R + diag(dP) Q
        b_R += b_beta * b_Y + b_dP_ii * b_q
        store_tile(dk_ptr + i * K, b_R, o_t, o_k, HV * K, n_out, K)
        store_tile(dq_ptr + i * K, b_dq + b_dP_ii * b_k, o_t, o_k, HV * K, n_out, K)
    if erase_ptr is None:
        tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)


@triton.jit(do_not_specialize=["T"])
def kda_intra_bwd_kernel(
    q_ptr, k_ptr, beta_ptr, erase_ptr, gc_ptr, dP_ptr, dL_ptr, dqg_ptr, dkb_ptr, dkg_ptr, dgl_ptr,
    dq_ptr, dk_ptr, dbeta_ptr, dgc_ptr,  # as of kda_intra_bwd_near_kernel; dP in 16 bit too
    near_ptr,  # [B, NT, HV, NG], or None: nothing is done yet
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
    HALVE: tl.constexpr,  # rows of the blocks on the diagonal: those that are FAR, or ALL
    PW: tl.constexpr,  # from head to head of dP and dL
    SUMMED: tl.constexpr,  # dgl is all that dgc_last gets
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: 16 rows of one chunk of one head.  Grid (NT * HV * BT / 16).

    Reference: linattn_edu.reference.delta.kda_intra_bwd.
    """
    NB: tl.constexpr = BT // 16
    pid = listed(tl.program_id(0), items_ptr, NB)
    b = pid % NB
    i_h, i_c, first, n_t = chunk_of(tl.maximum(pid, 0) // NB, cu_ptr, chunks_ptr, T, HV, BT)
    if (pid < 0) | (b * 16 >= n_t):
        return
    i = first * HV + i_h
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    gc_ptr += i * K
    if erase_ptr is None:
        beta_ptr += i
    dP_ptr += i * PW
    dL_ptr += i * PW
    if near_ptr is not None:
        NG: tl.constexpr = (K + GROUP - 1) // GROUP
        near_ptr += (i_c * HV + i_h) * NG
        far = False
        for group in tl.static_range(NG):
            far |= tl.load(near_ptr + group) == 0
        if not far:
            return
    o = tl.arange(0, 16)
    o_i = b * 16 + o
    last = tl.minimum(BT, n_t) - 1
    dtype: tl.constexpr = tl.float32 if PRECISION == "halves" else k_ptr.dtype.element_ty
    if erase_ptr is None:
        b_beta = load_row(beta_ptr, o_i, HV, n_t)[:, None]
    b_dP_ii = as_factor(load_row(dP_ptr, o_i, HV * PW + 1, n_t), dtype)[:, None]
    if erase_ptr is None:
        b_dbeta = load_row(dbeta_ptr + i, o_i, HV, n_t)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        n_out = n_t  # rows that are stored
        if near_ptr is not None:
            n_out = tl.where(tl.load(near_ptr + j * BK // GROUP) != 0, 0, n_t)
        b_k = load_tile(k_ptr, o_i, o_k, H * K, n_t, K).to(tl.float32)  # [16, BK]
        b_g = load_gates(gc_ptr, o_i, o_k, HV * K, n_t, K)  # [16, BK]
        if erase_ptr is not None:
            b_beta = load_tile(erase_ptr + i * K, o_i, o_k, HV * K, n_t, K).to(tl.float32)

        # the blocks below, which read these rows: each anchored at its own first row
        b_R = tl.zeros([16, BK], dtype=tl.float32)
        b_dgc = tl.zeros([16, BK], dtype=tl.float32)
        for c in range(b + 1, tl.minimum(NB, tl.cdiv(n_t, 16))):
            o_c = c * 16 + o
            b_ga = load_vector(gc_ptr + c * 16 * HV * K, o_k, K)[None, :]
            b_E = tl.exp2(load_gates(gc_ptr, o_c, o_k, HV * K, n_t, K) - b_ga)
            b_qE = cast(load_tile(q_ptr, o_c, o_k, H * K, n_t, K).to(tl.float32) * b_E, dtype)
            b_kE = load_tile(k_ptr, o_c, o_k, H * K, n_t, K).to(tl.float32) * b_E
            if erase_ptr is None:
                b_kE = cast(b_kE * load_row(beta_ptr, o_c, HV, n_t)[:, None], dtype)
            else:
                b_kE = cast(gated(b_kE, erase_ptr + i * K, o_c, o_k, HV * K, n_t, K), dtype)
            # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
            b_dP = cast(load_tile(dP_ptr + b * 16, o_c, o, HV * PW, n_t, 16), dtype)
            b_dL = load_tile(dL_ptr + b * 16, o_c, o, HV * PW, n_t, 16)
            b_x = dot_as(
                tl.trans(b_dL), b_kE, dot_as(tl.trans(b_dP), b_qE, None, PRECISION), PRECISION
            )
            b_F = tl.exp2(b_ga - b_g)
            b_R += b_F * b_x
            b_dgc -= cast(b_k * b_F, dtype).to(tl.float32) * b_x

        # the blocks to the left, which these rows read: anchored at the first of these
        b_ga = load_vector(gc_ptr + b * 16 * HV * K, o_k, K)[None, :]
        b_x = tl.zeros([16, BK], dtype=tl.float32)
        b_y = tl.zeros([16, BK], dtype=tl.float32)
        for c in range(b):
            o_j = c * 16 + o
            b_F = tl.exp2(b_ga - load_gates(gc_ptr, o_j, o_k, HV * K, n_t, K))
            b_kF = cast(load_tile(k_ptr, o_j, o_k, H * K, n_t, K).to(tl.float32) * b_F, dtype)
            # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
            b_dP = cast(load_tile(dP_ptr + c * 16, o_i, o, HV * PW, n_t, 16), dtype)
            b_x = dot_as(b_dP, b_kF, b_x, PRECISION)
            # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
            b_dL = load_tile(dL_ptr + c * 16, o_i, o, HV * PW, n_t, 16)
            b_y = dot_as(b_dL, b_kF, b_y, PRECISION)

        # the block on the diagonal, with the same anchor where the rows are close to it
        b_q = load_tile(q_ptr, o_i, o_k, H * K, n_t, K).to(tl.float32)  # [16, BK]
        b_dP = cast(load_tile(dP_ptr + b * 16, o_i, o, HV * PW, n_t, 16), dtype)
        b_dL = load_tile(dL_ptr + b * 16, o_i, o, HV * PW, n_t, 16)
        b_up = b_g - b_ga
        b_far = tl.min(b_up, 1)[:, None] < -NEAR
        b_F = tl.exp2(tl.minimum(-b_up, NEAR))
        b_E = tl.exp2(b_up)
        b_qE = cast(b_q * b_E, dtype)
        b_kE = cast(b_k * b_E * b_beta, dtype)
        if HALVE == FAR:
            # in two steps: Triton 3.9 compiles one mask of both only where K is a multiple of 8
            later = o[:, None] > o[None, :]
            b_dPn = tl.where(later, tl.where(b_far, 0.0, b_dP), 0.0)
            b_dLn = tl.where(later, tl.where(b_far, 0.0, b_dL), 0.0)
            b_kF = cast(b_k * b_F, dtype)
            b_x = dot_as(b_dPn, b_kF, b_x, PRECISION)
            b_y = dot_as(b_dLn, b_kF, b_y, PRECISION)
            b_r = dot_as(
                tl.trans(b_dLn), b_kE, dot_as(tl.trans(b_dPn), b_qE, None, PRECISION), PRECISION
            )
            b_R += b_F * b_r
            # with the rounded operands, what i gains is what j loses, term by term
            b_dgc -= b_kF.to(tl.float32) * b_r
        b_dgc += b_qE.to(tl.float32) * b_x
        b_dgc += b_kE.to(tl.float32) * b_y
        b_dq = b_E * b_x
        b_Y = b_E * b_y
        # the rows far from the anchor, in halves: the second reads (Y) what the first wrote (R)
        halvings = 4
        if HALVE == FAR:
            halvings *= tl.max(b_far.to(tl.int32))
            b_dP = tl.where(b_far, b_dP, 0.0)
            b_dL = tl.where(b_far, b_dL, 0.0)
        for s in range(halvings):
            anchor, second = halves(o, s)
            second = second[:, None]
            b_E = load_gates(gc_ptr, b * 16 + anchor, o_k, HV * K, n_t, K)
            b_E = tl.exp2(-tl.abs(b_g - b_E))
            b_qE = cast(b_q * b_E, dtype)
            b_kE = cast(b_k * b_E * tl.where(second, b_beta, 1.0), dtype)
            b_dPs = tl.where(pairs(o, s), b_dP, 0.0)
            b_dLs = tl.where(pairs(o, s), b_dL, 0.0)
            b_x = dot_as(b_dPs, b_kE, None, PRECISION)
            b_dq += b_E * b_x
            b_dgc += b_qE.to(tl.float32) * b_x
            b_x = dot_as(b_dLs, b_kE, None, PRECISION)
            b_x = dot_as(tl.trans(b_dLs), b_kE, b_x, PRECISION)
            b_x = dot_as(tl.trans(b_dPs), b_qE, b_x, PRECISION)
            b_dgc += b_kE.to(tl.float32) * tl.where(second, b_x, -b_x)
            b_x *= b_E
            b_Y += tl.where(second, b_x, 0.0)
            b_R += tl.where(second, 0.0, b_x)

        # eq:kda-outer   dQ += 2^gc * dqg, Y += 2^gc * dkb, R += 2^(gc_last - gc) * dkg
        b_E = tl.exp2(b_g)
        b_x = b_E * load_tile(dqg_ptr + i * K, o_i, o_k, HV * K, n_t, K).to(tl.float32)
        b_y = b_E * load_tile(dkb_ptr + i * K, o_i, o_k, HV * K, n_t, K).to(tl.float32)
        b_gl = load_vector(gc_ptr + last * HV * K, o_k, K)
        b_r = load_tile(dkg_ptr + i * K, o_i, o_k, HV * K, n_t, K).to(tl.float32)
        b_r *= tl.exp2(b_gl[None, :] - b_g)
        b_dq += b_x
        b_Y += b_y
        b_R += b_r
        b_r = tl.where(o_i[:, None] == last, 0.0, b_r)
        b_dgc += b_q * b_x + b_k * (b_beta * b_y - b_r)
        if b == last // 16:
            # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
            b_dgl = load_vector(dgl_ptr + (i_c * HV + i_h) * K, o_k, K)
            if not SUMMED:
                b_dgl = tl.exp2(b_gl) * b_dgl + tl.sum(b_k * b_r, 0)
            for c in range(0 if SUMMED else b):
                o_j = c * 16 + o
                b_r = load_tile(dkg_ptr + i * K, o_j, o_k, HV * K, n_t, K).to(tl.float32)
                b_r *= tl.exp2(b_gl[None, :] - load_gates(gc_ptr, o_j, o_k, HV * K, n_t, K))
                b_kj = load_tile(k_ptr, o_j, o_k, H * K, n_t, K).to(tl.float32)
                b_dgl += tl.sum(b_kj * b_r, 0)
            b_dgc += tl.where(o_i[:, None] == last, b_dgl[None, :], 0.0)

        # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
        store_tile(dgc_ptr + i * K, b_dgc, o_i, o_k, HV * K, n_out, K)
        # eq:kda-dbeta   dbeta += rowsum(K * Y)
        if erase_ptr is None:
            b_dbeta += tl.where(n_out > 0, tl.sum(b_k * b_Y, 1), 0.0)
        else:
            store_tile(dbeta_ptr + i * K, b_k * b_Y, o_i, o_k, HV * K, n_out, K)
        # eq:kda-dk   dk = diag(beta) Y + R + diag(dP) Q
        b_R += b_beta * b_Y + b_dP_ii * b_q
        store_tile(dk_ptr + i * K, b_R, o_i, o_k, HV * K, n_out, K)
        store_tile(dq_ptr + i * K, b_dq + b_dP_ii * b_k, o_i, o_k, HV * K, n_out, K)
    if erase_ptr is None:
        tl.store(dbeta_ptr + i + o_i * HV, b_dbeta, mask=o_i < n_t)


# generation -> bytes of an element -> row: few warps, as the products have 16 rows
CONFIGS = {
    "turing": {2: row(1, 1, BK=16), 4: row(1, 1, BK=16)},
    "ampere": {2: row(1, 1, BK=16, maxnreg=168), 4: row(1, 1, BK=16)},
    "hopper": {2: row(2, 2, BK=64), 4: row(1, 1, BK=16)},
}
# generation -> dtype -> row of the near channels, where a factor of 2^NEAR fits the dtype and one
# anchor was found to be faster
NEAR_CONFIGS = {"hopper": {torch.bfloat16: row(4, 1, BK=32)}}
# in halves, on Hopper
FINE, NEAR_FINE = row(2, 2, BK=32), row(4, 2, BK=32)


def kda_intra_bwd(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, dP: Tensor, dL: Tensor, dqg: Tensor,
    dkb: Tensor, dkg: Tensor, dgl: Tensor, dbeta: Tensor | None = None, *,
    packing: Packing | None = None, precision: str = "tf32x3",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch both kernels; arguments and result as in the reference, but dbeta is added to in
    place.
    """
    dq, dk = (torch.empty_like(dqg, dtype=shared_dtype(q, dP.shape[2])) for _ in range(2))
    dgc, dbeta = torch.empty_like(gc), torch.empty_like(beta) if dbeta is None else dbeta
    tensors = q, k, beta, gc, dP, dL, dqg, dkb, dkg, dgl, dq, dk, dbeta, dgc
    launch_intra_bwd(tensors, packing, precision, None)
    return *of_key_heads(dq, dk, q), dbeta, dgc


def of_key_heads(dq: Tensor, dk: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients [B, T, HV, K] of q and k, summed where value heads share one."""
    H = q.shape[2]
    if dq.shape[2] == H:
        return dq, dk
    return tuple(x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))


def launch_intra_bwd(
    tensors: tuple[Tensor, ...], packing: Packing | None, precision: str, items: Tensor | None
) -> None:
    """Launch both kernels on the tensors of kda_intra_bwd_near_kernel; items: of `listed`, or None:
    all.
    """
    q, k, beta, _, dP, *_ = tensors
    _, T, H, K = k.shape
    HV, chunk_size = dP.shape[2:]
    NT, *chunks = chunk_args(k, chunk_size, packing)
    sizes, near = (*chunks, T, H, HV, K), None
    fine = precision == "halves"
    if by_kind.kda_near(kind_of(q, HV, 0, chunk_size, packing), fine).takes == "anchored":
        config = NEAR_FINE if fine else of_generation(NEAR_CONFIGS, device_of(k)[0])[k.dtype]
        near = k.new_empty(NT * HV, cdiv(K, GROUP.value), dtype=torch.int8)
        kda_intra_bwd_near_kernel[(NT * HV,)](
            q, k, *strength(beta), *tensors[3:], near, items, *sizes, BT=chunk_size,
            BN=max(block(K), GROUP.value), FINE=fine, **config.launch(K),
        )  # fmt: skip
    launch_pairs(tensors, near, packing, chunk_size, chunk_size, False, precision, items)


def launch_pairs(
    tensors: tuple, near: Tensor | None, packing: Packing | None, C: int, width: int, summed: bool,
    precision: str, items: Tensor | None,
) -> None:  # fmt: skip
    """Launch kda_intra_bwd_kernel on its tensors; items: of `listed`, or None: all."""
    q, k, beta, *others = tensors
    (T, H, K), HV = k.shape[1:], others[-1].shape[2]
    NT, *chunks = chunk_args(k, C, packing)
    config = (FINE if precision == "halves" else entry(CONFIGS, k)).launch(K)
    if K % 16 and beta.ndim == 4:  # rows that are not aligned take more registers
        config = config | {"BK": min(config["BK"], 32)}
    kda_intra_bwd_kernel[(NT * HV * (C // 16),)](
        q, k, *strength(beta), *others, near, items, *chunks, T, H, HV, K, BT=C,
        HALVE=halving(k.dtype), PW=width, SUMMED=summed, PRECISION=precision, **config,
    )  # fmt: skip
