"""Stage state: carry the state through the chunks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, piece_map
from linattn_edu.kernels.pieces import by_maps, whole_of
from linattn_edu.kernels.routes import scan_launch
from linattn_edu.kernels.rows import THREE, row, scan_table, states, whole
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
def state_kernel(
    k_ptr,  # [B, T, H, K]
    w_ptr,  # [B, T, HV, K], or None: v_new = u
    u_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2; or [B, T, HV, K], and k has HV heads and is decayed already
    h0_ptr,  # [N, HV, K, V] or None
    gs_ptr,  # [B, T, HV] log2, or None: gc
    seq_ptr,  # [B, T] or None
    h_ptr,  # [B, NT, HV, K, V] out: state entering each chunk
    v_new_ptr,  # [B, T, HV, V] out, or None with w
    ht_ptr,  # [N, HV, K, V] out, or None
    cu_ptr, offsets_ptr, T,  # of columns_of
    stride_t,  # of gc and gs, between tokens
    stride_h,  # and between heads
    others,  # programs of the grid before these
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHANNEL: tl.constexpr,  # a gate for each row of S
    WHOLE: tl.constexpr,  # every chunk has BT tokens
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.state.
    """
    i_v, i_nh, i_h, first, n_seq, i_c = columns_of(
        tl.program_id(0) - others, cu_ptr, offsets_ptr, T, HV, V, BT, BV
    )
    k_ptr += (first * H + i_h // (HV // H)) * K
    u_ptr += (first * HV + i_h) * V
    if w_ptr is not None:
        w_ptr += (first * HV + i_h) * K
        v_new_ptr += (first * HV + i_h) * V
    if gs_ptr is not None:
        gs_ptr += first * stride_t + i_h * stride_h
    if seq_ptr is not None:
        seq_ptr += first
    gc_ptr += first * stride_t + i_h * stride_h
    h_ptr += (i_c * HV + i_h) * K * V

    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, False)

    if CHANNEL:  # the load of a chunk's gates runs one chunk ahead: the state waits for them
        n_k = tl.where(n_seq > 0, K, 0)
        b_last = load_vector(gc_ptr + (tl.minimum(BT, n_seq) - 1) * stride_t, o_k, n_k)
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = BT if WHOLE else n_seq - i_t * BT
        store_tile(h_ptr, b_S, o_k, o_v, V, K, V)

        # eq:delta-v-new   v_new = u - w S
        if w_ptr is None:
            b_v = load_tile(u_ptr, o_t, o_v, HV * V, n_t, V).to(tl.float32)  # [BT, BV]
        else:
            b_w = load_tile(w_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
            b_u = load_tile(u_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_v = b_u.to(tl.float32) - dot(b_w, cast(b_S, b_w.dtype))
            store_tile(v_new_ptr, b_v, o_t, o_v, HV * V, n_t, V)

        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        if CHANNEL:
            b_a = tl.exp2(b_last)[:, None]
            n_k = tl.where(n_t > BT, K, 0)
            b_last = load_vector(gc_ptr + (tl.minimum(2 * BT, n_t) - 1) * stride_t, o_k, n_k)
        else:
            b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * stride_t)
            b_a = tl.exp2(b_last)
            if gs_ptr is None:
                b_r = tl.exp2(b_last - load_gate(gc_ptr, o_t, stride_t, n_t))  # [BT]
            else:
                b_r = tl.exp2(b_last - load_gate(gs_ptr, o_t, stride_t, n_t))  # [BT]
                gs_ptr += BT * stride_t
            if seq_ptr is not None:
                b_id, before, end = documents(seq_ptr, i_t, o_t, n_t)
                b_r = tl.where(b_id == end, b_r, 0.0)
                b_a = tl.where(end == before, b_a, 0.0)
                seq_ptr += BT
            b_v *= b_r[:, None]
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_S = dot(tl.trans(b_k), cast(b_v, b_k.dtype), b_S * b_a)

        k_ptr += BT * H * K
        u_ptr += BT * HV * V
        if w_ptr is not None:
            w_ptr += BT * HV * K
            v_new_ptr += BT * HV * V
        gc_ptr += BT * stride_t
        h_ptr += HV * K * V

    if ht_ptr is not None:
        store_tile(ht_ptr + i_nh * K * V, b_S, o_k, o_v, V, K, V)


CONFIGS = scan_table(
    ampere={128: [row(4, 2, BV=32)], 256: [row(4, 1, BV=32)]},
    hopper={128: THREE, 256: [row(4, 2, BV=32), row(4, 2, BV=16)]},
    ahead=3,
)

# without w a program's chunks do not wait for each other but for one product: two programs on a
# multiprocessor hide that, and where heads are few three chunks in flight. Narrower tiles were
# slower: they read k again
FREE = scan_table(
    ampere={128: [row(4, 2, BV=32)], 256: [row(4, 1, BV=32)]},
    hopper={128: [row(4, 3, BV=64)], 256: [row(4, 2, BV=32), row(4, 2, BV=16)]},
)


def state(
    k: Tensor, w: Tensor | None, u: Tensor, gc: Tensor, initial_state: Tensor | None = None,
    gs: Tensor | None = None, seq_idx: Tensor | None = None, *, chunk_size: int,
    output_final_state: bool = False, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch state_kernel; arguments and result as in the reference."""
    H, K = k.shape[2:]
    HV, V = u.shape[2:]
    pieces = by_maps(k, HV, V, chunk_size, packing) if seq_idx is None else whole_of(k, packing)
    given = k, w, u, gc, None, gs
    initial_state = pieces.entering(
        cp_merge, piece_map, given, initial_state, chunk_size=chunk_size
    )
    h = k.new_empty(*states(k, chunk_size, packing), HV, K, V)
    v_new = None if w is None else torch.empty_like(u)
    last = k.new_empty(pieces.N, HV, K, V, dtype=torch.float32) if output_final_state else None
    grid, config = scan_launch(CONFIGS if w is not None else FREE, k, pieces.N * HV, V)
    state_kernel[grid](
        k, w, u, gc, initial_state, gs, seq_idx, h, v_new, last, *pieces.places, *gc.stride()[1:3],
        0, H, HV, K, V, BT=chunk_size, CHANNEL=gc.ndim == 4,
        WHOLE=w is None and whole(k, chunk_size, packing), **config,
    )  # fmt: skip
    return h, v_new, pieces.last(last)
