"""The adjoints of output and of wy where their operands have the gate in them already."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import by_width, chunk_args, row, strength, value_table
from linattn_edu.kernels.tiles import (
    as_factor,
    cast,
    chunk_of,
    dot,
    gated,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_output_bwd_kernel(
    v_new_ptr,  # [B, T, HV, V]
    h_ptr,  # [B, NT, HV, K, V]
    do_ptr,  # [B, T, HV, V]
    dqg_ptr,  # [B, T, HV, K] out
    dP_ptr,  # [B, T, HV, BT] out
    scale,
    cu_ptr, chunks_ptr, T,  # of chunk_of
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.kda_bwd.kda_output_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    NV: tl.constexpr = (V + BV - 1) // BV
    i = first * HV + i_h
    i_S = (i_c * HV + i_h) * K * V
    o_t = tl.arange(0, BT)
    b_dP = tl.zeros([BT, BT], dtype=tl.float32)
    for j_v in tl.static_range(NV):
        o_v = j_v * BV + tl.arange(0, BV)
        b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_v = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        # eq:kda-dp   dP = scale tril(dO v_new^T)
        b_dP = dot(b_do, tl.trans(b_v), b_dP)
    b_dP = tl.where(o_t[:, None] >= o_t[None, :], scale * b_dP, 0.0)
    store_tile(dP_ptr + i * BT, b_dP, o_t, o_t, HV * BT, n_t, BT)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        for j_v in tl.static_range(NV):
            o_v = j_v * BV + tl.arange(0, BV)
            if NV > 1:
                b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
            # eq:kda-dqg   dqg = scale dO h^T
            b_dq = dot(b_do, tl.trans(b_h), b_dq)
        store_tile(dqg_ptr + i * K, scale * b_dq, o_t, o_k, HV * K, n_t, K)


@triton.jit(do_not_specialize=["T"])
def kda_wy_bwd_kernel(
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV], or None
    write_ptr,  # [B, T, HV, V] in the place of beta, or None
    A_ptr,  # [B, T, HV, BT]
    h_ptr,  # [B, NT, HV, K, V]
    v_new_ptr,  # [B, T, HV, V]
    dh_ptr,  # [B, NT, HV, K, V]
    dv_new_ptr,  # [B, T, HV, V]
    dkb_ptr,  # [B, T, HV, K] out, fp32
    dkg_ptr,  # [B, T, HV, K] out
    dv_ptr,  # [B, T, HV, V] out
    dL_ptr,  # [B, T, HV, BT] out
    dbeta_ptr,  # [B, T, HV] out; with write [B, T, HV, V]
    dgl_ptr,  # [B, NT, HV, K] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.kda_bwd.kda_wy_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    NV: tl.constexpr = (V + BV - 1) // BV
    i = first * HV + i_h
    i_S = (i_c * HV + i_h) * K * V
    o_t = tl.arange(0, BT)
    b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    if write_ptr is None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)
        b_dbeta = tl.zeros([BT], dtype=tl.float32)
    b_dL = tl.zeros([BT, BT], dtype=tl.float32)
    for j_v in tl.static_range(NV):
        o_v = j_v * BV + tl.arange(0, BV)
        b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_dv = load_tile(dv_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        # eq:kda-z   Z = A^T dv_new
        b_Z = dot(tl.trans(b_A), b_dv)
        if write_ptr is None:
            b_dbeta += tl.sum(as_factor(b_Z, b_v_new.dtype) * b_v.to(tl.float32), 1)
        else:
            store_tile(dbeta_ptr + i * V, b_Z * b_v.to(tl.float32), o_t, o_v, HV * V, n_t, V)
        # eq:kda-dv   dV = diag(beta) Z
        if write_ptr is None:
            store_tile(dv_ptr + i * V, b_beta[:, None] * b_Z, o_t, o_v, HV * V, n_t, V)
        else:
            b_w = gated(b_Z, write_ptr + i * V, o_t, o_v, HV * V, n_t, V)
            store_tile(dv_ptr + i * V, b_w, o_t, o_v, HV * V, n_t, V)
        # eq:kda-dl   dL = -tril(Z v_new^T, -1)
        b_Z = cast(b_Z, b_v_new.dtype)
        b_dL = dot(b_Z, tl.trans(b_v_new), b_dL)
    if write_ptr is None:
        tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)
    b_dL = tl.where(o_t[:, None] > o_t[None, :], -b_dL, 0.0)
    store_tile(dL_ptr + i * BT, b_dL, o_t, o_t, HV * BT, n_t, BT)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_dkb = tl.zeros([BT, BK], dtype=tl.float32)
        b_dkg = tl.zeros([BT, BK], dtype=tl.float32)
        b_dgl = tl.zeros([BK], dtype=tl.float32)
        for j_v in tl.static_range(NV):
            o_v = j_v * BV + tl.arange(0, BV)
            if NV > 1:
                b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
                b_dv = load_tile(dv_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
                b_Z = cast(dot(tl.trans(b_A), b_dv), b_v_new.dtype)
            b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
            b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
            # eq:kda-dkb   dkb = -Z S^T
            b_dkb = dot(b_Z, tl.trans(b_h), b_dkb)
            # eq:kda-dkg   dkg = v_new dS^T
            b_dkg = dot(b_v_new, tl.trans(b_dh), b_dkg)
            # eq:kda-dgl   dgl = rowsum(dS * S)
            b_dgl += tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
        store_tile(dkb_ptr + i * K, -b_dkb, o_t, o_k, HV * K, n_t, K)
        store_tile(dkg_ptr + i * K, b_dkg, o_t, o_k, HV * K, n_t, K)
        tl.store(dgl_ptr + (i_c * HV + i_h) * K + o_k, b_dgl, mask=o_k < K)


CONFIGS = value_table(row(4, 2, BK=64, BV=256))


def kda_output_bwd(
    v_new: Tensor, h: Tensor, do: Tensor, *, scale: float, chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch kda_output_bwd_kernel; arguments and result as in the reference."""
    B, T, HV, V = v_new.shape
    K = h.shape[3]
    dqg = v_new.new_empty(B, T, HV, K)
    dP = v_new.new_empty(B, T, HV, chunk_size, dtype=torch.float32)
    NT, *chunks = chunk_args(v_new, chunk_size, packing)
    kda_output_bwd_kernel[(NT * HV,)](
        v_new, h, do, dqg, dP, scale, *chunks, T, HV, K, V, BT=chunk_size,
        **by_width(CONFIGS, v_new),
    )  # fmt: skip
    return dqg, dP


def kda_wy_bwd(
    v: Tensor, beta: Tensor, A: Tensor, h: Tensor, v_new: Tensor, dh: Tensor, dv_new: Tensor, *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch kda_wy_bwd_kernel; arguments and result as in the reference."""
    B, T, HV, V = v.shape
    K, chunk_size = h.shape[3], A.shape[-1]
    # half of dbeta: where v and k S cancel it is all digits that 16 bit would round off
    dkb, dkg = (v.new_empty(B, T, HV, K, dtype=dtype) for dtype in (torch.float32, v_new.dtype))
    dv, dL = torch.empty_like(v), torch.empty_like(A)
    dbeta = torch.empty_like(beta, dtype=torch.float32 if beta.ndim == 3 else None)
    dgl = v.new_empty(*h.shape[:4], dtype=torch.float32)
    NT, *chunks = chunk_args(v, chunk_size, packing)
    kda_wy_bwd_kernel[(NT * HV,)](
        v, *strength(beta), A, h, v_new, dh, dv_new, dkb, dkg, dv, dL, dbeta, dgl,
        *chunks, T, HV, K, V, BT=chunk_size, **by_width(CONFIGS, v_new),
    )  # fmt: skip
    return dkb, dkg, dv, dL, dbeta, dgl
