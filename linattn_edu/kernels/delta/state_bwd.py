"""Stage state_bwd: carry the gradient of the state back through the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge_bwd import cp_merge_bwd, piece_map_bwd
from linattn_edu.kernels.pieces import by_maps, over_ranks, whole_of
from linattn_edu.kernels.routes import scan_launch
from linattn_edu.kernels.rows import CHANNEL_CONFIGS, THREE, row, scan_table, states, whole
from linattn_edu.kernels.tiles import (
    cast,
    columns_of,
    documents,
    dot,
    first_state,
    load_gate,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def state_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K], or None with w: no v_new
    w_ptr,  # [B, T, HV, K] or None
    gc_ptr,  # [B, T, HV] log2
    do_ptr,  # [B, T, HV, V]
    dv_out_ptr,  # [B, T, HV, V]: the part of dv_new that output_bwd found; or None
    dht_ptr,  # [N, HV, K, V] or None
    seq_ptr,  # [B, T] or None
    dh_ptr,  # [B, NT, HV, K, V] out: gradient of the state leaving each chunk
    dv_ptr,  # [B, T, HV, V] out, or None
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    cu_ptr, offsets_ptr, T,  # of columns_of
    stride_t,  # of gc, between tokens
    stride_h,  # and between heads
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    WHOLE: tl.constexpr,  # every chunk has BT tokens
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.state_bwd.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0), cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    NT = tl.cdiv(n_seq, BT)
    first += (NT - 1) * BT
    q_ptr += (first * H + i_h // (HV // H)) * K
    do_ptr += (first * HV + i_h) * V
    if k_ptr is not None:
        k_ptr += (first * H + i_h // (HV // H)) * K
        w_ptr += (first * HV + i_h) * K
        dv_ptr += (first * HV + i_h) * V
        dv_out_ptr += (first * HV + i_h) * V
    if seq_ptr is not None:
        seq_ptr += first
    gc_ptr += first * stride_t + i_h * stride_h
    dh_ptr += ((i_c + NT - 1) * HV + i_h) * K * V

    o_t, o_k, o_v, b_dS = first_state(dht_ptr, i_nh, i_v, K, V, BT, BK, BV, False)

    # the load of what a chunk decays by runs one chunk ahead, as in state
    o_last = (n_seq - (NT - 1) * BT - 1) * stride_t
    b_last = tl.load(gc_ptr + o_last, mask=n_seq > 0, other=0.0)
    for i_t in range(NT):
        n_t = BT if WHOLE else n_seq - (NT - 1 - i_t) * BT
        b_h = cast(b_dS, dh_ptr.dtype.element_ty)
        store_tile(dh_ptr, b_h, o_k, o_v, V, K, V)

        b_a = tl.exp2(b_last)
        b_gc = load_gate(gc_ptr, o_t, stride_t, n_t)  # [BT]
        # eq:delta-dv-new   dv_new += diag(2^(gc_last - gc)) K dS
        if k_ptr is not None:
            b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            b_dv = load_tile(dv_out_ptr, o_t, o_v, HV * V, n_t, V).to(tl.float32)  # [BT, BV]
            b_dv += tl.exp2(b_last - b_gc)[:, None] * dot(b_k, b_h)
            store_tile(dv_ptr, b_dv, o_t, o_v, HV * V, n_t, V)
        b_last = tl.load(gc_ptr - stride_t, mask=i_t < NT - 1, other=0.0)

        # eq:delta-ds   dS <- 2^gc_last dS + scale (diag(2^gc) Q)^T dO - w^T dv_new
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_do = load_tile(do_ptr, o_t, o_v, HV * V, n_t, V).to(tl.float32)  # [BT, BV]
        b_e = tl.exp2(b_gc) * scale
        if seq_ptr is not None:
            b_id, before, end = documents(seq_ptr, NT - 1 - i_t, o_t, n_t)
            b_e = tl.where(b_id == before, b_e, 0.0)
            b_a = tl.where(end == before, b_a, 0.0)
            seq_ptr -= BT
        b_do *= b_e[:, None]
        b_dS = dot(tl.trans(b_q), cast(b_do, b_q.dtype), b_dS * b_a)
        if w_ptr is not None:
            b_w = load_tile(w_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
            b_dS = dot(tl.trans(b_w), cast(-b_dv, b_w.dtype), b_dS)

        q_ptr -= BT * H * K
        do_ptr -= BT * HV * V
        if k_ptr is not None:
            k_ptr -= BT * H * K
            w_ptr -= BT * HV * K
            dv_ptr -= BT * HV * V
            dv_out_ptr -= BT * HV * V
        gc_ptr -= BT * stride_t
        dh_ptr -= HV * K * V

    store_tile(dh0_ptr + i_nh * K * V, b_dS, o_k, o_v, V, K, V)


@triton.jit(do_not_specialize=["T"])
def kda_state_bwd_kernel(
    qg_ptr, kg_ptr, w_ptr,  # [B, T, HV, K]
    gc_ptr,  # [B, T, HV, K] log2
    do_ptr,  # [B, T, HV, V]
    P_ptr,  # [B, T, HV, BT]
    dht_ptr,  # [N, HV, K, V] or None
    dh_ptr,  # [B, NT, HV, K, V] out: gradient of the state leaving each chunk
    dv_ptr,  # [B, T, HV, V] out
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    cu_ptr, offsets_ptr, T,  # of columns_of
    stride_t,  # of gc, between tokens
    stride_h,  # and between heads
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """state_bwd_kernel with a gate for each row of dS, and its whole dv_new.

    Grid (N * HV * V / BV).  Reference: linattn_edu.reference.delta.state_bwd.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0), cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    NT = tl.cdiv(n_seq, BT)
    gc_ptr += first * stride_t + i_h * stride_h
    o_t, o_k, o_v, b_dS = first_state(dht_ptr, i_nh, i_v, K, V, BT, BK, BV, False)

    # the load of what a chunk decays by runs one chunk ahead, as in state
    b_last = load_vector(gc_ptr + (n_seq - 1) * stride_t, o_k, tl.where(n_seq > 0, K, 0))
    for i_t in range(NT):
        i_b = NT - 1 - i_t  # of the chunk, back from the last
        i, n_t = (first + i_b * BT) * HV + i_h, n_seq - i_b * BT
        b_h = cast(b_dS, dh_ptr.dtype.element_ty)
        store_tile(dh_ptr + ((i_c + i_b) * HV + i_h) * K * V, b_h, o_k, o_v, V, K, V)

        b_a = tl.exp2(b_last)[:, None]
        # eq:kda-dv-out   dv_new = scale P^T dO
        # eq:delta-dv-new   dv_new += kg dS
        b_k = load_tile(kg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_dv = scale * dot(tl.trans(b_P), b_do)
        b_dv = dot(b_k, b_h, b_dv)
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
        o_last = (i_b * BT - 1) * stride_t
        b_last = load_vector(gc_ptr + o_last, o_k, tl.where(i_b > 0, K, 0))

        # eq:delta-ds   dS <- diag(2^gc_last) dS + scale qg^T dO - w^T dv_new
        b_q = load_tile(qg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_do = b_do.to(tl.float32) * scale
        b_dS = dot(tl.trans(b_q), cast(b_do, b_q.dtype), b_dS * b_a)
        b_w = load_tile(w_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_dS = dot(tl.trans(b_w), cast(-b_dv, b_w.dtype), b_dS)

    store_tile(dh0_ptr + i_nh * K * V, b_dS, o_k, o_v, V, K, V)


CONFIGS = scan_table(
    ampere={128: [row(4, 1, BV=32)], 256: [row(4, 1, BV=16)]},
    hopper={128: THREE, 256: [row(4, 2, BV=32), row(4, 2, BV=16)]},
    ahead=2,
)


# without w, as in state
FREE = scan_table(
    ampere={128: [row(4, 2, BV=32)], 256: [row(4, 1, BV=16)]},
    hopper={128: [row(8, 3, BV=64)], 256: [row(4, 2, BV=32), row(4, 2, BV=16)]},
)


def state_bwd(
    q: Tensor, k: Tensor | None, w: Tensor | None, gc: Tensor, do: Tensor, dv_new: Tensor | None,
    dht: Tensor | None = None, seq_idx: Tensor | None = None, P: Tensor | None = None, *,
    scale: float, chunk_size: int, packing: Packing | None = None,
    maps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch the kernel that suits the gates; arguments and result as in the reference.

    maps: of ssd_ends_bwd, of the pieces that are then scanned side by side.
    """
    H, K = q.shape[2:]
    HV, V = do.shape[2:]
    given, options = (q, k, w, gc, do, dv_new, None, P), {"scale": scale, "chunk_size": chunk_size}
    if maps is not None:
        pieces = over_ranks(q, HV, V, chunk_size, packing)
        dht = pieces.through(cp_merge_bwd, tuple(x.flatten(0, 1) for x in maps), dht)
    else:
        pieces = by_maps(q, HV, V, chunk_size, packing) if seq_idx is None else whole_of(q, packing)
        dht = pieces.entering(cp_merge_bwd, piece_map_bwd, given, dht, **options)
    dh = q.new_empty(*states(q, chunk_size, packing), HV, K, V)
    dv_out, dv_new = dv_new, None if w is None else torch.empty_like(do)
    dh0 = q.new_empty(pieces.N, HV, K, V, dtype=torch.float32)
    table = FREE if w is None else CONFIGS if P is None else CHANNEL_CONFIGS
    grid, config = scan_launch(table, q, pieces.N * HV, V)
    places = *pieces.places, *gc.stride()[1:3]
    if P is not None:
        kda_state_bwd_kernel[grid](
            q, k, w, gc, do, P, dht, dh, dv_new, dh0, scale, *places, HV, K, V, BT=chunk_size,
            **config,
        )  # fmt: skip
        return dh, dv_new, pieces.first(dh0)
    state_bwd_kernel[grid](
        q, k, w, gc, do, dv_out, dht, seq_idx, dh, dv_new, dh0, scale, *places, H, HV, K, V,
        BT=chunk_size, WHOLE=w is None and whole(q, chunk_size, packing), **config,
    )  # fmt: skip
    return dh, dv_new, pieces.first(dh0)
