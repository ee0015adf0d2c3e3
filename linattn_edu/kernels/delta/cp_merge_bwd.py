"""Stage cp_merge_bwd: the adjoints of the maps of pieces, and a chain of them, back in time."""

import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_join, launch_map, launch_merge, new_map, piece_of
from linattn_edu.kernels.rows import CHANNEL_CONFIGS, THREE, row, scan_table
from linattn_edu.kernels.tiles import cast, dot, load_gate, load_tile, load_vector, store_tile


@triton.jit(do_not_specialize=["T"])
def piece_map_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K], or None with w
    w_ptr,  # [B, T, HV, K] or None
    gc_ptr,  # [B, T, HV] log2; or [B, T, HV, K], and q and k are qg and kg of HV heads
    do_ptr,  # [B, T, HV, V]
    dv_ptr,  # [B, T, HV, V]: the part of dv_new that output_bwd found; or None
    P_ptr,  # [B, T, HV, BT], from which that part is made here; with gates [B, T, HV, K]
    dht_ptr,  # [NP, HV, K, V] or None
    map_ptr,  # [NP, HV, K, W] out: dS_ext, and dM where W is V + K
    number_ptr,  # [NP, HV] out: dM without w; or None
    scale,
    rows_ptr,  # [NP] or None
    cu_ptr,  # [N + 1] or None
    T,
    stride_t,  # of gc, between tokens
    stride_h,  # and between heads
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of map_ptr
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHANNEL: tl.constexpr,  # a gate for each row of dS
):  # fmt: skip
    """One program: BV columns of [dS_ext | dM] of one head, back through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.delta.cp_merge_bwd.piece_map_bwd.
    """
    i_v, i_ph, i_h, first, n_seq = piece_of(tl.program_id(0), rows_ptr, cu_ptr, T, HV, W, BT, BV)
    NT = tl.cdiv(n_seq, BT)
    first += (NT - 1) * BT
    q_ptr += (first * H + i_h // (HV // H)) * K
    do_ptr += (first * HV + i_h) * V
    if k_ptr is not None:
        k_ptr += (first * H + i_h // (HV // H)) * K
        w_ptr += (first * HV + i_h) * K
    if CHANNEL:
        P_ptr += (first * HV + i_h) * BT
    elif k_ptr is not None:
        dv_ptr += (first * HV + i_h) * V
    gc_ptr += first * stride_t + i_h * stride_h

    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    # eq:cp-transition-bwd   dM: the same with dO = 0, from I
    o_t, o_k, o_v, b_dS = new_map(dht_ptr, i_v, i_ph, K, K, V, BT, BK, BV)
    number = 1.0
    for i_t in range(NT):
        n_t = n_seq - (NT - 1 - i_t) * BT
        o_last = (tl.minimum(BT, n_t) - 1) * stride_t
        b_o = load_tile(do_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_do = b_o.to(tl.float32) * scale
        if CHANNEL:
            b_last = load_vector(gc_ptr + o_last, o_k, K)
            b_a = tl.exp2(b_last)[:, None]
        else:
            b_last = tl.load(gc_ptr + o_last)
            b_a = tl.exp2(b_last)
            b_gc = load_gate(gc_ptr, o_t, stride_t, n_t)  # [BT]
            b_do *= tl.exp2(b_gc)[:, None]
            # eq:cp-number   M = 2^(sum of gc_last)
            number *= b_a
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_next = dot(tl.trans(b_q), cast(b_do, b_q.dtype), b_dS * b_a)
        if k_ptr is not None:
            b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
            if CHANNEL:
                b_P = load_tile(P_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
                b_dv = dot(b_k, cast(b_dS, b_k.dtype), scale * dot(tl.trans(b_P), b_o))
                P_ptr -= BT * HV * BT
            else:
                b_dv = tl.exp2(b_last - b_gc)[:, None] * dot(b_k, cast(b_dS, b_k.dtype))
                b_dv += load_tile(dv_ptr, o_t, o_v, HV * V, n_t, V).to(tl.float32)
                dv_ptr -= BT * HV * V
            b_w = load_tile(w_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
            b_next = dot(tl.trans(b_w), cast(-b_dv, b_w.dtype), b_next)
            k_ptr -= BT * H * K
            w_ptr -= BT * HV * K
        b_dS = b_next
        q_ptr -= BT * H * K
        do_ptr -= BT * HV * V
        gc_ptr -= BT * stride_t

    store_tile(map_ptr + i_ph * K * ROW, b_dS, o_k, o_v, ROW, K, min(W, ROW))
    if number_ptr is not None:
        tl.store(number_ptr + i_ph, number, mask=i_v == 0)


MAP_CONFIGS = scan_table(
    ampere={128: [row(4, 1, BV=32)], 256: [row(4, 1, BV=16)]},
    hopper={128: THREE, 256: [row(4, 2, BV=32), row(4, 2, BV=16)]},
    ahead=3,
)
MAP_CHANNEL_CONFIGS = CHANNEL_CONFIGS


def piece_map_bwd(
    q: Tensor, k: Tensor | None, w: Tensor | None, gc: Tensor, do: Tensor, dv_new: Tensor | None,
    dht: Tensor | None = None, P: Tensor | None = None, *, scale: float, chunk_size: int, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch piece_map_bwd_kernel; arguments, result as in the reference; which: of launch_map."""
    given, sizes = (q, k, w, gc, do, dv_new, P, dht), (q.shape[2], *do.shape[2:])
    return launch_map(
        piece_map_bwd_kernel, MAP_CONFIGS if P is None else MAP_CHANNEL_CONFIGS, given, sizes,
        *gc.stride()[1:3], x=q, after=(scale,), numbers=w is None,
        constants={"BT": chunk_size, "CHANNEL": gc.ndim == 4}, **which,
    )  # fmt: skip


def cp_join_bwd(
    dS_ext: Tensor, dM: Tensor, dht: Tensor | None = None, **which
) -> tuple[Tensor, Tensor]:
    """Launch join_kernel, back in time; arguments and result as in the reference.

    which: of cp_join.
    """
    # eq:cp-merge-bwd   dS <- dM dS + dS_ext
    return cp_join(dS_ext, dM, dht, reverse=True, **which)


def cp_merge_bwd(
    dS_ext: Tensor, dM: Tensor, dht: Tensor | None = None, *, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch merge_kernel, back in time; arguments and result as in the reference.

    offsets: as in cp_merge.
    """
    # eq:cp-merge-bwd   dS <- dM dS + dS_ext
    return launch_merge(dS_ext, dM, dht, offsets, reverse=True)
