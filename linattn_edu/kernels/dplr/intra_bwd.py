"""Stages dplr_rows_bwd and dplr_intra_bwd: from the scans' gradients to those of all tensors."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.kda_intra import FAR, halves, halving, pairs
from linattn_edu.kernels.delta.kda_intra_bwd import NEAR
from linattn_edu.kernels.dplr.intra import launch_of, load_readers, load_rows
from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.tiles import (
    cast,
    chunk_of,
    dot,
    load_gates,
    load_row,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def dplr_rows_bwd_kernel(
    v_ptr, e_ptr, do_ptr, dx_ptr,  # [B, T, H, V]
    h_ptr, dh_ptr,  # [B, NT, H, K, V]
    dab_ptr, dak_ptr, dqb_ptr, dqk_ptr,  # [B, T, H, BT] out
    dqg_ptr, dkg_ptr, dag_ptr, dbg_ptr,  # [B, T, H, K] out
    dgl_ptr,  # [B, NT, H, K] out, fp32
    scale,
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * H).

    Reference: linattn_edu.reference.dplr.intra_bwd.dplr_rows_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    i, i_S = first * H + i_h, (i_c * H + i_h) * K * V
    o_t = tl.arange(0, BT)
    b_ab, b_ak = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    b_qb, b_qk = tl.zeros([BT, BT], tl.float32), tl.zeros([BT, BT], tl.float32)
    for j_v in range(tl.cdiv(V, BV)):
        o_v = j_v * BV + tl.arange(0, BV)
        b_v = tl.trans(load_tile(v_ptr + i * V, o_t, o_v, H * V, n_t, V))  # [BV, BT]
        b_e = tl.trans(load_tile(e_ptr + i * V, o_t, o_v, H * V, n_t, V))  # [BV, BT]
        b_do = load_tile(do_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
        b_dx = load_tile(dx_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
        # eq:dplr-dab   dab = tril(dx e^T, -1), dak = tril(dx v^T, -1)
        b_ab, b_ak = dot(b_dx, b_e, b_ab), dot(b_dx, b_v, b_ak)
        # eq:dplr-dqb   dqb = scale tril(dO e^T), dqk = scale tril(dO v^T)
        b_qb, b_qk = dot(b_do, b_e, b_qb), dot(b_do, b_v, b_qk)
    strict, low = o_t[:, None] > o_t[None, :], o_t[:, None] >= o_t[None, :]
    store_tile(dab_ptr + i * BT, tl.where(strict, b_ab, 0.0), o_t, o_t, H * BT, n_t, BT)
    store_tile(dak_ptr + i * BT, tl.where(strict, b_ak, 0.0), o_t, o_t, H * BT, n_t, BT)
    store_tile(dqb_ptr + i * BT, tl.where(low, scale * b_qb, 0.0), o_t, o_t, H * BT, n_t, BT)
    store_tile(dqk_ptr + i * BT, tl.where(low, scale * b_qk, 0.0), o_t, o_t, H * BT, n_t, BT)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q, b_k = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
        b_a, b_b = tl.zeros([BT, BK], tl.float32), tl.zeros([BT, BK], tl.float32)
        b_dgl = tl.zeros([BK], tl.float32)
        for j_v in range(tl.cdiv(V, BV)):
            o_v = j_v * BV + tl.arange(0, BV)
            b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
            b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
            # eq:kda-dgl   dgl = rowsum(dS * S)
            b_dgl += tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
            b_h, b_dh = tl.trans(b_h), tl.trans(b_dh)
            # eq:dplr-drows   dqg = scale dO h^T, dkg = v dh^T, dag = dx h^T, dbg = e dh^T
            b_q = dot(load_tile(do_ptr + i * V, o_t, o_v, H * V, n_t, V), b_h, b_q)
            b_a = dot(load_tile(dx_ptr + i * V, o_t, o_v, H * V, n_t, V), b_h, b_a)
            b_k = dot(load_tile(v_ptr + i * V, o_t, o_v, H * V, n_t, V), b_dh, b_k)
            b_b = dot(load_tile(e_ptr + i * V, o_t, o_v, H * V, n_t, V), b_dh, b_b)
        store_tile(dqg_ptr + i * K, scale * b_q, o_t, o_k, H * K, n_t, K)
        store_tile(dkg_ptr + i * K, b_k, o_t, o_k, H * K, n_t, K)
        store_tile(dag_ptr + i * K, b_a, o_t, o_k, H * K, n_t, K)
        store_tile(dbg_ptr + i * K, b_b, o_t, o_k, H * K, n_t, K)
        tl.store(dgl_ptr + (i_c * H + i_h) * K + o_k, b_dgl, mask=o_k < K)


@triton.jit
def dscores(dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, i, j, b_rows, m, n_t, stride):
    """[16, 16] where m and in rows that have 1, else 0: rows of block i, of dab and dak one token
    later, columns of block j of a chunk of n_t tokens.
    """
    o, b_rows = tl.arange(0, 16), b_rows[:, None] > 0.5
    o_i = i * 16 + o
    b_ab = load_tile(dab_ptr + stride + j * 16, o_i, o, stride, n_t - 1, 16)
    b_ak = load_tile(dak_ptr + stride + j * 16, o_i, o, stride, n_t - 1, 16)
    b_qb = load_tile(dqb_ptr + j * 16, o_i, o, stride, n_t, 16)
    b_qk = load_tile(dqk_ptr + j * 16, o_i, o, stride, n_t, 16)
    # in two steps: one mask of both Triton 3.9 does not compile for all layouts
    b_ab, b_ak = tl.where(b_rows, b_ab, 0.0), tl.where(b_rows, b_ak, 0.0)
    b_qb, b_qk = tl.where(b_rows, b_qb, 0.0), tl.where(b_rows, b_qk, 0.0)
    b_ab, b_ak = tl.where(m, b_ab, 0.0), tl.where(m, b_ak, 0.0)
    return b_ab, b_ak, tl.where(m, b_qb, 0.0), tl.where(m, b_qk, 0.0)


@triton.jit
def written(D, b_q, b_a, b_k, b_b, b_e, b_db, b_dk, b_dgc, dtype: tl.constexpr):
    """dB, dK and what of dgc, with what q and a read; b_e: factors of the writers k and b."""
    b_ab, b_ak, b_qb, b_qk = D
    # eq:dplr-writers   dB_j += sum_i>j (dqb_ij q_i 2^gc_i + dab_ij a_i 2^gp_i) 2^-gc_j
    b_u = dot(tl.trans(b_ab), b_a, dot(tl.trans(b_qb), b_q))
    b_w = dot(tl.trans(b_ak), b_a, dot(tl.trans(b_qk), b_q))
    # with the rounded operands, what i gains is what j loses, term by term
    b_dgc -= cast(b_b * b_e, dtype).to(tl.float32) * b_u
    b_dgc -= cast(b_k * b_e, dtype).to(tl.float32) * b_w
    return b_db + b_e * b_u, b_dk + b_e * b_w, b_dgc


@triton.jit
def writers(q_ptr, a_ptr, gc_ptr, dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, b_k, b_b, b_g, b_near, n_b,
            o_k, n_t, stride, at, K, dtype: tl.constexpr, HALVE: tl.constexpr):  # fmt: skip
    """dB and dK of block n_b, and what of dgc, from rows that read it after a decay."""
    o = tl.arange(0, 16)
    b_db, b_dk, b_dgc = tl.zeros_like(b_k), tl.zeros_like(b_k), tl.zeros_like(b_k)
    # the near rows of the block itself, and those of the blocks below
    for c in range(n_b if HALVE == FAR else n_b + 1, tl.cdiv(n_t, 16)):
        b_E = load_vector(gc_ptr + c * 16 * stride, o_k, K)[None, :]
        b_q, b_a = load_readers(q_ptr, a_ptr, c * 16 + o, o_k, stride, n_t, K)
        b_e = tl.exp2(load_gates(gc_ptr, c * 16 + o, o_k, stride, n_t, K) - b_E)
        D = dscores(
            dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, c, n_b, tl.where(c == n_b, b_near, 1.0),
            (c * 16 + o)[:, None] > (n_b * 16 + o)[None, :], n_t, at,
        )  # fmt: skip
        b_db, b_dk, b_dgc = written(
            D, cast(b_q * b_e, dtype), cast(b_a * b_e, dtype), b_k, b_b,
            tl.exp2(tl.minimum(b_E - b_g, NEAR)), b_db, b_dk, b_dgc, dtype,
        )  # fmt: skip
    # its far rows, in halves: the second reads, the first wrote
    for s in range(4 - 4 * tl.min(b_near).to(tl.int32)):
        b_q, b_a = load_readers(q_ptr, a_ptr, n_b * 16 + o, o_k, stride, n_t, K)
        b_e = load_gates(gc_ptr, n_b * 16 + halves(o, s)[0], o_k, stride, n_t, K)
        b_e = tl.exp2(-tl.abs(b_g - b_e))
        D = dscores(dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, n_b, n_b, 1 - b_near, pairs(o, s), n_t, at)
        b_db, b_dk, b_dgc = written(
            D, cast(b_q * b_e, dtype), cast(b_a * b_e, dtype), b_k, b_b, b_e, b_db, b_dk, b_dgc,
            dtype,
        )  # fmt: skip
    return b_db, b_dk, b_dgc


@triton.jit
def read(D, b_k, b_b, b_x, b_y):
    """What the rows of q and of a have read of k and b, added to b_x and b_y."""
    b_ab, b_ak, b_qb, b_qk = D
    # eq:dplr-readers   dQ_i += sum_j<i (dqb_ij b_j + dqk_ij k_j) 2^(gc_i - gc_j)
    return dot(b_qk, b_k, dot(b_qb, b_b, b_x)), dot(b_ak, b_k, dot(b_ab, b_b, b_y))


@triton.jit
def readers(k_ptr, b_ptr, gc_ptr, dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, b_q, b_a, b_g, b_dgc, b_near,
            n_b, o_k, n_t, stride, at, K, dtype: tl.constexpr, HALVE: tl.constexpr):  # fmt: skip
    """dQ and dA of the readers of block n_b, and dgc with their part, from what they read."""
    o, zero = tl.arange(0, 16), tl.zeros_like(b_q)
    b_x, b_y = zero, zero
    b_E = load_vector(gc_ptr + n_b * 16 * stride, o_k, K)[None, :]
    for c in range(n_b + 1 if HALVE == FAR else n_b):
        b_k, b_b = load_rows(k_ptr, b_ptr, c * 16 + o, o_k, stride, n_t, K)
        b_e = b_E - load_gates(gc_ptr, c * 16 + o, o_k, stride, n_t, K)
        b_e = tl.exp2(tl.minimum(b_e, NEAR))
        D = dscores(
            dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, n_b, c, tl.where(c == n_b, b_near, 1.0),
            (n_b * 16 + o)[:, None] > (c * 16 + o)[None, :], n_t, at,
        )  # fmt: skip
        b_x, b_y = read(D, cast(b_k * b_e, dtype), cast(b_b * b_e, dtype), b_x, b_y)
    b_e = tl.exp2(b_g - b_E)
    b_dgc += cast(b_q * b_e, dtype).to(tl.float32) * b_x
    b_dgc += cast(b_a * b_e, dtype).to(tl.float32) * b_y
    b_dq, b_da = b_e * b_x, b_e * b_y
    for s in range(4 - 4 * tl.min(b_near).to(tl.int32)):
        b_k, b_b = load_rows(k_ptr, b_ptr, n_b * 16 + o, o_k, stride, n_t, K)
        b_e = load_gates(gc_ptr, n_b * 16 + halves(o, s)[0], o_k, stride, n_t, K)
        b_e = tl.exp2(-tl.abs(b_g - b_e))
        D = dscores(dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, n_b, n_b, 1 - b_near, pairs(o, s), n_t, at)
        b_x, b_y = read(D, cast(b_k * b_e, dtype), cast(b_b * b_e, dtype), zero, zero)
        b_dgc += cast(b_q * b_e, dtype).to(tl.float32) * b_x
        b_dgc += cast(b_a * b_e, dtype).to(tl.float32) * b_y
        b_dq, b_da = b_dq + b_e * b_x, b_da + b_e * b_y
    return b_dq, b_da, b_dgc


@triton.jit
def through_last(k_ptr, b_ptr, gc_ptr, dkg_ptr, dbg_ptr, b_gl, o_k, n_t, stride, last, K):
    """colsum(B * dB_outer + K * dK_outer) over a chunk but for its last token."""
    o = tl.arange(0, 16)
    b_sum = tl.zeros([o_k.shape[0]], tl.float32)
    for c in range(last // 16 + 1):
        o_c = c * 16 + o
        b_k, b_b = load_rows(k_ptr, b_ptr, o_c, o_k, stride, last, K)
        b_dk, b_db = load_rows(dkg_ptr, dbg_ptr, o_c, o_k, stride, last, K)
        b_e = tl.exp2(b_gl - load_gates(gc_ptr, o_c, o_k, stride, n_t, K))
        b_sum += tl.sum((b_k * b_dk + b_b * b_db) * b_e, 0)
    return b_sum


@triton.jit(do_not_specialize=["T"])
def dplr_intra_bwd_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr,  # [B, T, H, K]
    gc_ptr,  # [B, T, H, K] log2
    dab_ptr, dak_ptr, dqb_ptr, dqk_ptr,  # [B, T, H, BT]
    dqg_ptr, dkg_ptr, dag_ptr, dbg_ptr,  # [B, T, H, K]
    dgl_ptr,  # [B, NT, H, K]
    dq_ptr, dk_ptr, da_ptr, db_ptr,  # [B, T, H, K] out
    dgc_ptr,  # [B, T, H, K] out, fp32
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
    HALVE: tl.constexpr,  # rows of the blocks on the diagonal: those that are FAR, or ALL
):  # fmt: skip
    """One program: 16 rows of one chunk of one head, those of a and da one token later.
    Grid (NT * H * BT / 16).

    Reference: linattn_edu.reference.dplr.intra_bwd.dplr_intra_bwd.
    """
    NB: tl.constexpr = BT // 16
    n_b = tl.program_id(0) % NB
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0) // NB, cu_ptr, chunks_ptr, T, H, BT)
    if n_b * 16 >= n_t:
        return
    n_t = tl.minimum(n_t, BT)
    i, i_s, at = (first * H + i_h) * K, (first * H + i_h) * BT, H * K
    q_ptr, k_ptr, a_ptr, b_ptr, gc_ptr = q_ptr + i, k_ptr + i, a_ptr + i, b_ptr + i, gc_ptr + i
    dqg_ptr, dkg_ptr, dag_ptr, dbg_ptr = dqg_ptr + i, dkg_ptr + i, dag_ptr + i, dbg_ptr + i
    dab_ptr, dak_ptr, dqb_ptr, dqk_ptr = dab_ptr + i_s, dak_ptr + i_s, dqb_ptr + i_s, dqk_ptr + i_s
    o = tl.arange(0, 16)
    o_i = n_b * 16 + o
    last = n_t - 1
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    # of readers and writers with the same gate, which no decay is between
    b_qb = load_row(dqb_ptr, o_i, H * BT + 1, n_t)[:, None]
    b_qk = load_row(dqk_ptr, o_i, H * BT + 1, n_t)[:, None]
    b_ab = load_row(dab_ptr + H * BT, o_i, H * BT + 1, last)[:, None]
    b_ak = load_row(dak_ptr + H * BT, o_i, H * BT + 1, last)[:, None]
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_g = load_gates(gc_ptr, o_i, o_k, at, n_t, K)  # [16, BK]
        b_near = tl.zeros([16], dtype=tl.float32)
        if HALVE == FAR:
            b_up = b_g - load_vector(gc_ptr + n_b * 16 * at, o_k, K)[None, :]
            b_near = tl.where(tl.min(b_up, 1) >= -NEAR, 1.0, 0.0)
        # what stands in a block's rows as writers is stored before they read: fewer registers
        b_k, b_b = load_rows(k_ptr, b_ptr, o_i, o_k, at, n_t, K)  # [16, BK]
        b_db, b_dk, b_dgc = writers(
            q_ptr, a_ptr, gc_ptr, dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, b_k, b_b, b_g, b_near, n_b,
            o_k, n_t, at, H * BT, K, dtype, HALVE,
        )  # fmt: skip
        b_gl = load_vector(gc_ptr + last * at, o_k, K)[None, :]
        b_w, b_u = load_rows(dkg_ptr, dbg_ptr, o_i, o_k, at, n_t, K)
        b_w, b_u = tl.exp2(b_gl - b_g) * b_w, tl.exp2(b_gl - b_g) * b_u
        end = o_i[:, None] == last
        b_dgc -= tl.where(end, 0.0, b_k * b_w + b_b * b_u)
        b_q, b_a = load_readers(q_ptr, a_ptr, o_i, o_k, at, n_t, K)  # [16, BK]
        store_tile(dk_ptr + i, b_dk + b_w + b_qk * b_q + b_ak * b_a, o_i, o_k, at, n_t, K)
        store_tile(db_ptr + i, b_db + b_u + b_qb * b_q + b_ab * b_a, o_i, o_k, at, n_t, K)
        b_dq, b_da, b_dgc = readers(
            k_ptr, b_ptr, gc_ptr, dab_ptr, dak_ptr, dqb_ptr, dqk_ptr, b_q, b_a, b_g, b_dgc, b_near,
            n_b, o_k, n_t, at, H * BT, K, dtype, HALVE,
        )  # fmt: skip
        # eq:dplr-outer   dQ = 2^gc * dqg, dA = 2^gp * dag, dB = 2^(gc_last - gc) * dbg; dK likewise
        b_x, b_y = load_readers(dqg_ptr, dag_ptr, o_i, o_k, at, n_t, K)
        b_x, b_y = tl.exp2(b_g) * b_x, tl.exp2(b_g) * b_y
        # eq:dplr-dgc   dgc = Q * dQ - K * dK - B * dB, and A * dA of the token behind
        b_dgc += b_q * b_x + b_a * b_y
        b_k, b_b = load_rows(k_ptr, b_ptr, o_i, o_k, at, n_t, K)
        store_tile(dq_ptr + i, b_dq + b_x + b_qb * b_b + b_qk * b_k, o_i, o_k, at, n_t, K)
        store_tile(da_ptr + i + at, b_da + b_y + b_ab * b_b + b_ak * b_k, o_i, o_k, at, last, K)
        if last // 16 == n_b:
            # eq:dplr-dgc-last   dgc_last += colsum(B * dB_outer + K * dK_outer) + 2^gc_last dgl
            b_sum = through_last(
                k_ptr, b_ptr, gc_ptr, dkg_ptr, dbg_ptr, b_gl, o_k, n_t, at, last, K
            )
            b_sum += tl.sum(tl.exp2(b_gl), 0) * load_vector(dgl_ptr + (i_c * H + i_h) * K, o_k, K)
            b_dgc += tl.where(end, b_sum[None, :], 0.0)
        store_tile(dgc_ptr + i, b_dgc, o_i, o_k, at, n_t, K)
        if n_b == 0:  # a of the first token has read the state alone
            tl.store(da_ptr + i + o_k, load_vector(dag_ptr, o_k, K), mask=o_k < K)


# of dplr_intra_bwd, see launch_of
CONFIGS = {
    "turing": {2: row(4, 1, BK=32), 4: row(1, 1, BK=16)},
    "ampere": {2: row(2, 1, BK=32), 4: row(1, 1, BK=16)},
    "hopper": {2: {64: row(2, 2, BK=32), 128: row(4, 2, BK=128)}, 4: row(1, 1, BK=16)},
}
# generation -> bytes of an element -> row of dplr_rows_bwd
ROWS = {
    "turing": {2: row(4, 1, BK=32, BV=32), 4: row(4, 1, BK=16, BV=32)},
    "ampere": {2: row(4, 1, BK=32, BV=32), 4: row(4, 1, BK=32, BV=32)},
    "hopper": {2: row(4, 4, BK=64, BV=32), 4: row(4, 1, BK=32, BV=32)},
}


def dplr_rows_bwd(
    v: Tensor, e: Tensor, do: Tensor, dx: Tensor, h: Tensor, dh: Tensor,
    *, scale: float, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch dplr_rows_bwd_kernel; arguments and result as in the reference."""
    (B, T, H, V), K = v.shape, h.shape[3]
    scores = [v.new_empty(B, T, H, chunk_size) for _ in range(4)]
    rows = [v.new_empty(B, T, H, K) for _ in range(4)]
    dgl = v.new_empty(h.shape[:4], dtype=torch.float32)
    NT, *chunks = chunk_args(v, chunk_size, packing)
    dplr_rows_bwd_kernel[(NT * H,)](
        v, e, do, dx, h, dh, *scores, *rows, dgl, scale, *chunks, T, H, K, V, BT=chunk_size,
        **entry(ROWS, v).launch(),
    )  # fmt: skip
    return *scores, *rows, dgl


def dplr_intra_bwd(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, gc: Tensor,
    dab: Tensor, dak: Tensor, dqb: Tensor, dqk: Tensor,
    dqg: Tensor, dkg: Tensor, dag: Tensor, dbg: Tensor, dgl: Tensor,
    *, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch dplr_intra_bwd_kernel; arguments and result as in the reference."""
    (_, T, H, K), chunk_size = q.shape, dab.shape[-1]
    grads = [torch.empty_like(x) for x in (q, k, a, b)]
    dgc = torch.empty_like(gc)
    NT, *chunks = chunk_args(q, chunk_size, packing)
    dplr_intra_bwd_kernel[(NT * H * (chunk_size // 16),)](
        q, k, a, b, gc, dab, dak, dqb, dqk, dqg, dkg, dag, dbg, dgl, *grads, dgc, *chunks, T, H, K,
        BT=chunk_size, HALVE=halving(q.dtype), **launch_of(CONFIGS, q),
    )  # fmt: skip
    return *grads, dgc
