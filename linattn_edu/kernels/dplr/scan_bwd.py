"""Stages dplr_scan_bwd, dplr_map_bwd: carry the gradient of the state back through the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import launch_map, piece_of
from linattn_edu.kernels.dplr.scan import table_of
from linattn_edu.kernels.routes import scan_launch
from linattn_edu.kernels.rows import sequence_args, states
from linattn_edu.kernels.tiles import (
    cast,
    dot,
    first_state,
    load_tile,
    load_vector,
    sequence_of,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def dplr_scan_bwd_kernel(
    qg_ptr, kg_ptr, ag_ptr, bg_ptr,  # [B, T, H, K]
    gc_ptr,  # [B, T, H, K] log2
    M_ptr, ak_ptr, qb_ptr, qk_ptr,  # [B, T, H, BT]
    do_ptr,  # [B, T, H, V]
    dht_ptr,  # [N, H, K, V] or None
    dx_ptr,  # [B, T, H, V] out, with dh
    dv_ptr,  # [B, T, H, V] out, with dh
    dh0_ptr,  # [N, H, K, W] out: the gradient of the first state, and dM_p where W is V + K
    dh_ptr,  # [B, NT, H, K, V] out, or None
    scale,
    offsets_ptr,  # [N + 1] or None
    rows_ptr,  # the sequences of cu_ptr that are gone through [N], or None: all
    cu_ptr, T,  # of sequence_of
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of dh0_ptr
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [dS | dM_p] of one head, back through all chunks.

    Grid (N * H * W / BV).  Reference: linattn_edu.reference.dplr.scan_bwd.
    """
    i_v, i_nh, i_h, first, n_seq = piece_of(tl.program_id(0), rows_ptr, cu_ptr, T, H, W, BT, BV)
    o_t, o_k, o_v, b_dS = first_state(dht_ptr, i_nh, i_v, K, V, BT, BK, BV, False)
    if W > V:
        b_dS += tl.where(o_k[:, None] + V == o_v[None, :], 1.0, 0.0)
    NT = tl.cdiv(n_seq, BT)
    if dh_ptr is not None:
        i_c = sequence_of(i_nh // H, cu_ptr, offsets_ptr, T, BT)[2]
        dh_ptr += ((i_c + NT) * H + i_h) * K * V
    i = first * H + i_h + NT * BT * H  # of the chunk's first token
    for i_t in range(NT):
        i -= BT * H
        n_t = n_seq - (NT - 1 - i_t) * BT
        b_dh = cast(b_dS, kg_ptr.dtype.element_ty)
        if dh_ptr is not None:
            dh_ptr -= H * K * V
            store_tile(dh_ptr, b_dh, o_k, o_v, V, K, V)
        b_do = load_tile(do_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
        # eq:dplr-dx   dx = M^T (scale qb^T dO + bg dS)
        b_qb = load_tile(qb_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
        b_bg = load_tile(bg_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_M = load_tile(M_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
        b_de = cast(dot(b_bg, b_dh, scale * dot(tl.trans(b_qb), b_do)), b_do.dtype)
        b_dx = cast(dot(tl.trans(b_M), b_de), b_do.dtype)
        if dh_ptr is not None:
            store_tile(dx_ptr + i * V, b_dx, o_t, o_v, H * V, n_t, V)
            # eq:dplr-dv   dv = scale qk^T dO + kg dS + ak^T dx
            b_qk = load_tile(qk_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
            b_kg = load_tile(kg_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            b_ak = load_tile(ak_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
            b_dv = dot(b_kg, b_dh, scale * dot(tl.trans(b_qk), b_do))
            store_tile(dv_ptr + i * V, dot(tl.trans(b_ak), b_dx, b_dv), o_t, o_v, H * V, n_t, V)
        # eq:dplr-ds   dS <- diag(2^gc_last) dS + scale qg^T dO + ag^T dx
        b_last = load_vector(gc_ptr + i * K + (tl.minimum(BT, n_t) - 1) * H * K, o_k, K)
        b_qg = load_tile(qg_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_ag = load_tile(ag_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_dS = tl.exp2(b_last)[:, None] * b_dS + scale * dot(tl.trans(b_qg), b_do)
        b_dS = dot(tl.trans(b_ag), b_dx, b_dS)
    store_tile(dh0_ptr + i_nh * K * ROW, b_dS, o_k, o_v, ROW, K, min(W, ROW))


def dplr_scan_bwd(
    qg: Tensor, kg: Tensor, ag: Tensor, bg: Tensor, gc: Tensor,
    M: Tensor, ak: Tensor, qb: Tensor, qk: Tensor, do: Tensor, dht: Tensor | None = None,
    *, scale: float, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch dplr_scan_bwd_kernel; arguments and result as in the reference."""
    N, cu_seqlens, offsets = sequence_args(do, packing)
    (T, H, K), V = kg.shape[1:], do.shape[-1]
    dh = do.new_empty(*states(do, M.shape[-1], packing), H, K, V)
    dx, dv = torch.empty_like(do), torch.empty_like(do)
    dh0 = do.new_empty(N, H, K, V, dtype=torch.float32)
    grid, config = scan_launch(table_of(V), kg, N * H, V)
    dplr_scan_bwd_kernel[grid](
        qg, kg, ag, bg, gc, M, ak, qb, qk, do, dht, dx, dv, dh0, dh, scale, offsets, None,
        cu_seqlens, T, H, K, V, V, V, BT=M.shape[-1], **config,
    )  # fmt: skip
    return dh, dx, dv, dh0


def dplr_map_bwd(
    qg: Tensor, kg: Tensor, ag: Tensor, bg: Tensor, gc: Tensor,
    M: Tensor, ak: Tensor, qb: Tensor, qk: Tensor, do: Tensor, dht: Tensor | None = None,
    *, scale: float, transition: bool = True, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch dplr_scan_bwd_kernel for the map; arguments and result as in the reference; which: of
    launch_map.
    """
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    # eq:cp-transition-bwd   dM_p: the same with dO = 0, from I
    given = qg, kg, ag, bg, gc, M, ak, qb, qk, do, dht, None, None
    W = do.shape[-1] + kg.shape[-1] * transition
    return launch_map(
        dplr_scan_bwd_kernel, table_of(W), given, do.shape[2:], x=kg, after=(scale, None),
        constants={"BT": M.shape[-1]}, numbers=False, transition=transition, **which,
    )  # fmt: skip
