"""Stages dplr_scan, dplr_states and dplr_map: carry the state through the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import launch_map, piece_of
from linattn_edu.kernels.routes import by_kind, scan_launch
from linattn_edu.kernels.rows import UNPIPELINED, row, scan_table, sequence_args, states
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
def dplr_scan_kernel(
    qg_ptr,  # [B, T, H, K]; not read without o
    kg_ptr, ag_ptr, bg_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    gc_ptr,  # [B, T, H, K] log2
    M_ptr, ak_ptr,  # [B, T, H, BT]
    qb_ptr,  # [B, T, H, BT]; not read without o
    qk_ptr,  # [B, T, H, BT]; not read without o
    h0_ptr,  # [N, H, K, V] or None
    o_ptr,  # [B, T, H, V] out, or None
    ht_ptr,  # [N, H, K, W] out: the last state, and M_p where W is V + K; or None
    h_ptr,  # [B, NT, H, K, V] out in the place of o, or None
    e_ptr,  # [B, T, H, V] out, with h
    scale,
    offsets_ptr,  # [N + 1] or None
    rows_ptr,  # the sequences of cu_ptr that are gone through [N], or None: all
    cu_ptr, T,  # of sequence_of
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of ht_ptr
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [S | M_p] of one head, through all chunks.  Grid (N * H * W / BV).

    Reference: linattn_edu.reference.dplr.scan.
    """
    i_v, i_nh, i_h, first, n_seq = piece_of(tl.program_id(0), rows_ptr, cu_ptr, T, H, W, BT, BV)
    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, False)
    if W > V:
        b_S += tl.where(o_k[:, None] + V == o_v[None, :], 1.0, 0.0)
    if h_ptr is not None:
        i_c = sequence_of(i_nh // H, cu_ptr, offsets_ptr, T, BT)[2]
        h_ptr += (i_c * H + i_h) * K * V
    i = first * H + i_h  # of the chunk's first token
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_h = cast(b_S, kg_ptr.dtype.element_ty)
        b_v = load_tile(v_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
        # eq:dplr-e   e = M (ag S + ak v)
        b_ag = load_tile(ag_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_ak = load_tile(ak_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
        b_M = load_tile(M_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
        b_x = cast(dot(b_ag, b_h, dot(b_ak, b_v)), b_v.dtype)
        b_e = cast(dot(b_M, b_x), b_v.dtype)
        if o_ptr is not None:
            # eq:dplr-output   o = scale (qg S + qb e + qk v)
            b_qg = load_tile(qg_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            b_qk = load_tile(qk_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
            b_qb = load_tile(qb_ptr + i * BT, o_t, o_t, H * BT, n_t, BT)  # [BT, BT]
            b_o = scale * dot(b_qb, b_e, dot(b_qk, b_v, dot(b_qg, b_h)))
            store_tile(o_ptr + i * V, b_o, o_t, o_v, H * V, n_t, V)
        if h_ptr is not None:
            store_tile(h_ptr, b_h, o_k, o_v, V, K, V)
            store_tile(e_ptr + i * V, b_e, o_t, o_v, H * V, n_t, V)
            h_ptr += H * K * V
        # eq:dplr-state   S <- diag(2^gc_last) S + bg^T e + kg^T v
        b_last = load_vector(gc_ptr + i * K + (tl.minimum(BT, n_t) - 1) * H * K, o_k, K)
        b_kg = load_tile(kg_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_bg = load_tile(bg_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_S *= tl.exp2(b_last)[:, None]
        b_S = dot(tl.trans(b_bg), b_e, dot(tl.trans(b_kg), b_v, b_S))
        i += BT * H
    if ht_ptr is not None:
        store_tile(ht_ptr + i_nh * K * ROW, b_S, o_k, o_v, ROW, K, min(W, ROW))


# a product of fewer than 64 columns in 4 warps that is not loaded ahead ends in an illegal access
# (see rows.UNPIPELINED): tiles of 16 columns have 2 warps
CONFIGS = scan_table(
    ampere={128: [row(4, 1, BV=32)], 256: [row(4, 1, BV=16)]},
    hopper={128: [row(4, 1, BV=64), UNPIPELINED], 256: [UNPIPELINED]},
)
CONFIGS["ampere"][4] |= {256: [row(8, 1, BV=16)]}  # 4 warps would spill more than the state


def table_of(W: int) -> dict | tuple:
    """The rows of a scan of W columns."""
    return CONFIGS if by_kind.dplr_scan_rows(W).takes == "table" else (UNPIPELINED,)


def dplr_scan(
    qg: Tensor, kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor,
    M: Tensor, ak: Tensor, qb: Tensor, qk: Tensor, initial_state: Tensor | None = None,
    *, scale: float, output_final_state: bool = False, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch dplr_scan_kernel for the outputs; arguments and result as in the reference."""
    N, cu_seqlens, offsets = sequence_args(v, packing)
    (T, H, K), V = kg.shape[1:], v.shape[-1]
    o = torch.empty_like(v)
    last = v.new_empty(N, H, K, V, dtype=torch.float32) if output_final_state else None
    grid, config = scan_launch(table_of(V), kg, N * H, V)
    dplr_scan_kernel[grid](
        qg, kg, ag, bg, v, gc, M, ak, qb, qk, initial_state, o, last, None, None, scale, offsets,
        None, cu_seqlens, T, H, K, V, V, V, BT=M.shape[-1], **config,
    )  # fmt: skip
    return o, last


def dplr_states(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    initial_state: Tensor | None = None, *, packing: Packing | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch dplr_scan_kernel for the states; arguments and result as in the reference."""
    N, cu_seqlens, offsets = sequence_args(v, packing)
    (T, H, K), V = kg.shape[1:], v.shape[-1]
    h, e = v.new_empty(*states(v, M.shape[-1], packing), H, K, V), torch.empty_like(v)
    grid, config = scan_launch(table_of(V), kg, N * H, V)
    dplr_scan_kernel[grid](
        kg, kg, ag, bg, v, gc, M, ak, ak, ak, initial_state, None, None, h, e, 1.0, offsets,
        None, cu_seqlens, T, H, K, V, V, V, BT=M.shape[-1], **config,
    )  # fmt: skip
    return h, e


def dplr_map(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    initial_state: Tensor | None = None, *, transition: bool = True, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch dplr_scan_kernel for the map; arguments and result as in the reference; which: of
    launch_map.
    """
    # eq:cp-ext   S_ext: the state after the piece, from zero
    # eq:cp-transition   M_p: the same with v = 0, from I
    W = v.shape[-1] + kg.shape[-1] * transition
    return launch_map(
        dplr_scan_kernel, table_of(W), (kg, kg, ag, bg, v, gc, M, ak, ak, ak, initial_state, None),
        v.shape[2:], x=kg, after=(None, 1.0, None), constants={"BT": M.shape[-1]}, numbers=False,
        transition=transition, **which,
    )  # fmt: skip
