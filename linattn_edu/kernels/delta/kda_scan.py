"""Stage kda_scan: carry the state through the chunks and read the output on the way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, piece_map
from linattn_edu.kernels.pieces import by_maps
from linattn_edu.kernels.routes import scan_launch
from linattn_edu.kernels.rows import CHANNEL_CONFIGS as CONFIGS
from linattn_edu.kernels.tiles import (
    cast,
    columns_of,
    dot,
    first_state,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_scan_kernel(
    qg_ptr, kg_ptr, w_ptr,  # [B, T, HV, K]
    u_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [N, HV, K, V] out, or None
    scale,
    cu_ptr, offsets_ptr, T,  # of columns_of
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.kda_scan.
    """
    i_v, i_nh, i_h, first, n_seq, _ = columns_of(
        tl.program_id(0), cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, False)

    # the load of a chunk's gates runs one chunk ahead, as in state
    n_k = tl.where(n_seq > 0, K, 0)
    i_last = (first + tl.minimum(BT, n_seq) - 1) * HV + i_h
    b_last = load_vector(gc_ptr + i_last * K, o_k, n_k)
    for i_t in range(tl.cdiv(n_seq, BT)):
        i, n_t = (first + i_t * BT) * HV + i_h, n_seq - i_t * BT
        b_h = cast(b_S, kg_ptr.dtype.element_ty)
        # eq:delta-v-new   v_new = u - w S
        b_w = load_tile(w_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_u = load_tile(u_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_v = cast(b_u.to(tl.float32) - dot(b_w, b_h), b_u.dtype)
        # eq:delta-output   o = scale (inter + P v_new)
        b_q = load_tile(qg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_o = dot(b_q, b_h)
        b_o = scale * dot(b_P, b_v, b_o)
        store_tile(o_ptr + i * V, b_o, o_t, o_v, HV * V, n_t, V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_S *= tl.exp2(b_last)[:, None]
        n_k = tl.where(n_t > BT, K, 0)
        i_last = i + (tl.minimum(2 * BT, n_t) - 1) * HV
        b_last = load_vector(gc_ptr + i_last * K, o_k, n_k)
        b_k = load_tile(kg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_S = dot(tl.trans(b_k), b_v, b_S)

    if ht_ptr is not None:
        store_tile(ht_ptr + i_nh * K * V, b_S, o_k, o_v, V, K, V)


def kda_scan(
    qg: Tensor, kg: Tensor, w: Tensor, u: Tensor, gc: Tensor, P: Tensor,
    initial_state: Tensor | None = None, *, scale: float, output_final_state: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch kda_scan_kernel; arguments and result as in the reference."""
    HV, K = kg.shape[2:]
    V, chunk_size = u.shape[-1], P.shape[-1]
    pieces = by_maps(kg, HV, V, chunk_size, packing)
    initial_state = pieces.entering(
        cp_merge, piece_map, (kg, w, u, gc), initial_state, chunk_size=chunk_size
    )
    o = torch.empty_like(u)
    last = kg.new_empty(pieces.N, HV, K, V, dtype=torch.float32) if output_final_state else None
    grid, config = scan_launch(CONFIGS, kg, pieces.N * HV, V)
    kda_scan_kernel[grid](
        qg, kg, w, u, gc, P, initial_state, o, last, scale, *pieces.places, HV, K, V,
        BT=chunk_size, **config,
    )  # fmt: skip
    return o, pieces.last(last)
