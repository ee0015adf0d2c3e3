"""Stage output_bwd: the adjoint of output."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import by_width, chunk_args, row, shared_dtype, value_table
from linattn_edu.kernels.tiles import (
    cast,
    chunk_of,
    decay_matrix,
    decay_matrix_transposed,
    dot,
    load_gate,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def output_bwd_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_new_ptr,  # [B, T, HV, V]
    h_ptr,  # [B, NT, HV, K, V]
    gc_ptr,  # [B, T, HV] log2
    do_ptr,  # [B, T, HV, V]
    dq_ptr, dk_ptr,  # [B, T, H, K] out
    dv_ptr,  # [B, T, HV, V] out
    dgc_ptr,  # [B, T, HV] out
    scale,
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one q/k head, value head after value head.  Grid (NT * H).

    Matrices that a product needs transposed are computed so: see chapter 08.
    Reference: linattn_edu.reference.delta.output_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    NV: tl.constexpr = (V + BV - 1) // BV
    i_qk = (first * H + i_h) * K
    o_t = tl.arange(0, BT)
    b_MT = tl.zeros([BT, BT], dtype=tl.float32)  # K Q^T
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_MT = dot(b_k, tl.trans(b_q), b_MT)

    for i_g in range(HV // H):
        i = first * HV + i_h * (HV // H) + i_g
        i_S = (i_c * HV + i_h * (HV // H) + i_g) * K * V
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)
        GT = decay_matrix_transposed(b_gc, o_t) * scale
        b_PT = cast(b_MT * GT, do_ptr.dtype.element_ty)
        b_dM = tl.zeros([BT, BT], dtype=tl.float32)
        b_dMT = tl.zeros([BT, BT], dtype=tl.float32)
        for j_v in tl.static_range(NV):
            o_v = j_v * BV + tl.arange(0, BV)
            b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_v = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            # eq:delta-dv-out   dv_new = scale P^T dO
            store_tile(dv_ptr + i * V, dot(b_PT, b_do), o_t, o_v, HV * V, n_t, V)
            # eq:delta-dm   dM = scale (dO v_new^T) * G
            b_dM = dot(b_do, tl.trans(b_v), b_dM)
            b_dMT = dot(b_v, tl.trans(b_do), b_dMT)
        b_dM *= decay_matrix(b_gc, o_t) * scale
        b_dMT *= GT
        # without the diagonal, which is in both sums of dgc and would only be rounded
        b_flow = tl.where(o_t[:, None] != o_t[None, :], b_dMT * b_MT, 0.0)
        b_dgc = tl.sum(b_flow, 0) - tl.sum(b_flow, 1)
        b_dM, b_dMT = cast(b_dM, b_do.dtype), cast(b_dMT, b_do.dtype)
        for j in range(tl.cdiv(K, BK)):
            o_k = j * BK + tl.arange(0, BK)
            b_dq = tl.zeros([BT, BK], dtype=tl.float32)
            for j_v in tl.static_range(NV):
                o_v = j_v * BV + tl.arange(0, BV)
                if NV > 1:
                    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
                b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
                b_dq = dot(b_do, tl.trans(b_h), b_dq)
            b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            # eq:delta-dq-inter   scale diag(2^gc) dO h^T
            b_dq *= (tl.exp2(b_gc) * scale)[:, None]
            # eq:delta-dgc-out   dgc = rowsum(Q * inter) + rowsum(dM * M) - colsum(dM * M)
            b_dgc += tl.sum(b_q.to(tl.float32) * b_dq, 1)
            # eq:delta-dq   dQ = inter + dM K
            b_dq = dot(b_dM, b_k, b_dq)
            # eq:delta-dk-out   dK = dM^T Q
            b_dk = dot(b_dMT, b_q)
            if i_g > 0:
                b_dq += load_tile(dq_ptr + i_qk, o_t, o_k, H * K, n_t, K).to(tl.float32)
                b_dk += load_tile(dk_ptr + i_qk, o_t, o_k, H * K, n_t, K).to(tl.float32)
            store_tile(dq_ptr + i_qk, b_dq, o_t, o_k, H * K, n_t, K)
            store_tile(dk_ptr + i_qk, b_dk, o_t, o_k, H * K, n_t, K)
        tl.store(dgc_ptr + i + o_t * HV, b_dgc, mask=o_t < n_t)
        if HV > H:
            tl.debug_barrier()  # the next head reads what other threads stored


CONFIGS = value_table(row(4, 3, BK=64, BV=256))


def output_bwd(
    q: Tensor, k: Tensor, v_new: Tensor, h: Tensor, gc: Tensor, do: Tensor, *, scale: float,
    chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch output_bwd_kernel; arguments and result as in the reference."""
    _, T, H, K = q.shape
    HV, V = v_new.shape[2:]
    config = by_width(CONFIGS, v_new)
    partial = shared_dtype(q, HV)
    dq, dk = (torch.empty_like(q, dtype=partial) for _ in range(2))
    dv_new, dgc = torch.empty_like(v_new), torch.empty_like(gc)
    NT, *chunks = chunk_args(q, chunk_size, packing)
    output_bwd_kernel[(NT * H,)](
        q, k, v_new, h, gc, do, dq, dk, dv_new, dgc,
        scale, *chunks, T, H, HV, K, V, BT=chunk_size, **config,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv_new, dgc
