"""Stage wy_bwd: the adjoint of what a chunk writes, and of the keys that go through the state."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import by_width, chunk_args, row, value_table
from linattn_edu.kernels.tiles import (
    as_factor,
    cast,
    chunk_of,
    decay_matrix,
    decay_matrix_transposed,
    dot,
    load_gate,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def wy_bwd_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    A_ptr,  # [B, T, HV, BT]
    h_ptr,  # [B, NT, HV, K, V]
    v_new_ptr,  # [B, T, HV, V]
    dh_ptr,  # [B, NT, HV, K, V]
    dv_new_ptr,  # [B, T, HV, V]
    dk_ptr,  # [B, T, H, K] added to
    dv_ptr,  # [B, T, HV, V] out
    dbeta_ptr,  # [B, T, HV] out
    dgc_ptr,  # [B, T, HV] added to
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one key head, value head after value head.  Grid (NT * H).

    Reference: linattn_edu.reference.delta.wy_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_k = (first * H + i_h) * K
    o_t = tl.arange(0, BT)
    last = tl.minimum(BT, n_t) - 1
    b_KK = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(K, BK)):
        b_k = load_tile(k_ptr + i_k, o_t, j * BK + tl.arange(0, BK), H * K, n_t, K)  # [BT, BK]
        b_KK = dot(b_k, tl.trans(b_k), b_KK)

    for i_g in range(HV // H):
        i_hv = i_h * (HV // H) + i_g
        i = first * HV + i_hv
        i_S = (i_c * HV + i_hv) * K * V
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)
        b_last = tl.load(gc_ptr + i + last * HV)
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)
        b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)
        b_AGT = tl.trans(b_A).to(tl.float32) * decay_matrix_transposed(b_gc, o_t)
        b_AGT = cast(b_AGT, b_A.dtype)
        b_dL = tl.zeros([BT, BT], dtype=tl.float32)
        b_dbeta = tl.zeros([BT], dtype=tl.float32)
        for j_v in tl.static_range(NV):
            o_v = j_v * BV + tl.arange(0, BV)
            b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_dv = load_tile(dv_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            # eq:delta-z   Z = (A * G)^T dv_new
            b_Z = dot(b_AGT, b_dv)
            b_dbeta += tl.sum(as_factor(b_Z, b_v.dtype) * b_v.to(tl.float32), 1)
            # eq:delta-dv   dV = diag(beta) Z
            store_tile(dv_ptr + i * V, b_beta[:, None] * b_Z, o_t, o_v, HV * V, n_t, V)
            # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
            b_Z = cast(b_Z, b_v_new.dtype)
            b_dL = dot(b_Z, tl.trans(b_v_new), b_dL)
        b_dL *= decay_matrix(b_gc, o_t)
        b_dL = tl.where(o_t[:, None] > o_t[None, :], -b_dL, 0.0)
        b_N = b_beta[:, None] * b_dL
        b_N = cast(b_N + tl.trans(b_N), b_v_new.dtype)
        # eq:delta-dbeta   dbeta = rowsum(Z * W) + rowsum(X), W = V - diag(2^gc) K S, X = dL * K K^T
        X = b_dL * b_KK
        b_dbeta += tl.sum(X, 1)
        # eq:delta-dgc-wy   dgc += k dk_read + rowsum(diag(beta) X) - colsum(diag(beta) X)
        X *= b_beta[:, None]
        b_dgc = load_row(dgc_ptr + i, o_t, HV, n_t) + tl.sum(X, 1) - tl.sum(X, 0)
        b_through = tl.zeros([1], dtype=tl.float32)
        for j in range(tl.cdiv(K, BK)):
            o_k = j * BK + tl.arange(0, BK)
            b_state = tl.zeros([BT, BK], dtype=tl.float32)
            b_ZS = tl.zeros([BT, BK], dtype=tl.float32)
            b_dSS = tl.zeros([BK], dtype=tl.float32)
            for j_v in tl.static_range(NV):
                o_v = j_v * BV + tl.arange(0, BV)
                if NV > 1:
                    b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
                    b_dv = load_tile(dv_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
                    b_Z = cast(dot(b_AGT, b_dv), b_v_new.dtype)
                b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
                b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
                # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
                b_state = dot(b_v_new, tl.trans(b_dh), b_state)
                # eq:delta-dk-read   dK = -diag(beta 2^gc) Z S^T
                b_ZS = dot(b_Z, tl.trans(b_h), b_ZS)
                b_dSS += tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
            b_state *= tl.exp2(b_last - b_gc)[:, None]
            b_ZS *= tl.exp2(b_gc)[:, None]
            b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            b_dk = load_tile(dk_ptr + i_k, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
            # eq:delta-dgc-state   dgc_i -= k_i dk_i; dgc_last += sum k_i dk_i + 2^gc_last <dS, S>
            b_t = tl.where(o_t == last, 0.0, tl.sum(b_k.to(tl.float32) * b_state, 1))
            # [:, None]: the sum of a vector of sums stops Triton 3.7.1's compiler for Blackwell
            b_through += tl.sum(b_t[:, None], 0) + tl.exp2(b_last) * tl.sum(b_dSS[:, None], 0)
            b_read = tl.sum(b_k.to(tl.float32) * b_ZS, 1)
            b_dbeta -= b_read
            b_dgc -= b_t + b_beta * b_read
            # eq:delta-dk   dK += dK_state + dK_read + (N + N^T) K, N = diag(beta) dL
            b_dk = dot(b_N, b_k, b_dk + b_state - b_beta[:, None] * b_ZS)
            store_tile(dk_ptr + i_k, b_dk, o_t, o_k, H * K, n_t, K)
        b_dgc += tl.where(o_t == last, b_through, 0.0)
        tl.store(dgc_ptr + i + o_t * HV, b_dgc, mask=o_t < n_t)
        tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)
        if HV > H:
            tl.debug_barrier()  # the next head reads what other threads stored


CONFIGS = value_table(row(4, 2, BK=64, BV=256))


def wy_bwd(
    k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, A: Tensor, h: Tensor, v_new: Tensor, dh: Tensor,
    dv_new: Tensor, dk: Tensor, dgc: Tensor, *, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch wy_bwd_kernel; arguments and result as in the reference, but dk and dgc are added to
    in place.
    """
    _, T, H, K = k.shape
    HV, V = v.shape[2:]
    chunk_size = A.shape[-1]
    config = by_width(CONFIGS, v)
    dv, dbeta = torch.empty_like(v), torch.empty_like(gc)
    NT, *chunks = chunk_args(k, chunk_size, packing)
    wy_bwd_kernel[(NT * H,)](
        k, v, beta, gc, A, h, v_new, dh, dv_new, dk, dv, dbeta, dgc,
        *chunks, T, H, HV, K, V, BT=chunk_size, **config,
    )  # fmt: skip
    return dk.to(k.dtype), dv, dbeta, dgc
