"""The forward pass in fused kernels: the scan, after all that needs no state (gdn_intra).

Against the five stages nothing of size [T, K] or [T, V] is written between kernels: w, u, v_new and
the states h stay on the chip.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta import cp_merge as maps
from linattn_edu.kernels.delta.cp_merge import cp_merge, launch_map, span_of, store_map
from linattn_edu.kernels.delta.warm_up import warm_up, way_of
from linattn_edu.kernels.fused.cancel import cancels, none_of
from linattn_edu.kernels.fused.gdn_intra import intra_chunk
from linattn_edu.kernels.gluon.kernels import gdn_fwd, gdn_intra, gdn_scan
from linattn_edu.kernels.pieces import Pieces, by_maps, here, whole_of
from linattn_edu.kernels.routes import by_kind, by_load, kind_of, load_of, scan_launch
from linattn_edu.kernels.rows import THREE, row, scan_table
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    dot,
    dot_left,
    dot_right,
    first_state,
    load_gate,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2
    P_ptr, R_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [N, HV, K, V] out, or None
    scale,
    warmup_ptr,  # [N, HV] or None
    cu_ptr, offsets_ptr, T, N,  # of columns_of and with_warm_up
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.gdn_fwd.scan.
    """
    i_v, i_nh, i_h, first, n_seq, _, skip, i_end = way_of(
        tl.program_id(0), warmup_ptr, cu_ptr, offsets_ptr, T, N, HV, V, BT, BV, False
    )
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    v_ptr += (first * HV + i_h) * V
    o_ptr += (first * HV + i_h) * V
    P_ptr += (first * HV + i_h) * BT
    R_ptr += (first * HV + i_h) * BT
    gc_ptr += first * HV + i_h

    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, False)

    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_R = load_tile(R_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_P = load_tile(P_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV)
        b_h = cast(b_S, b_k.dtype)

        # eq:delta-residual   W = V - diag(2^gc) K S
        b_kS = dot_right(b_k, None, b_S, None, False)
        b_W = b_v.to(tl.float32) - tl.exp2(b_gc)[:, None] * b_kS
        # eq:delta-v-new   v_new = R W
        b_v = dot_right(b_R, None, b_W, None, False)
        # eq:delta-inter   diag(2^gc) Q S
        b_o = tl.exp2(b_gc)[:, None] * dot(b_q, b_h)
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = scale * dot_right(b_P, None, b_v, b_o, False)
        store_tile(o_ptr, b_o, o_t, o_v, HV * V, tl.where(i_t < skip, 0, n_t), V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_v *= tl.exp2(b_last - b_gc)[:, None]
        b_S = dot_right(tl.trans(b_k), None, b_v, b_S * tl.exp2(b_last), False)

        q_ptr += BT * H * K
        k_ptr += BT * H * K
        v_ptr += BT * HV * V
        o_ptr += BT * HV * V
        P_ptr += BT * HV * BT
        R_ptr += BT * HV * BT
        gc_ptr += BT * HV

    if ht_ptr is not None:
        store_tile(ht_ptr + i_end * K * V, b_S, o_k, o_v, V, tl.where(i_end < 0, 0, K), V)


@triton.jit(do_not_specialize=["T", "N"])
def scan_transposed_kernel(
    q_ptr, k_ptr, v_ptr, gc_ptr, P_ptr, R_ptr, h0_ptr,  # as of scan_kernel
    beta_ptr,  # [B, T, HV], with low halves: R is without it; or None
    P_low_ptr, R_low_ptr,  # [B, T, HV, BT], or None
    o_ptr, ht_ptr, scale, warmup_ptr, cu_ptr, offsets_ptr, T, N,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """scan_kernel with S^T [BV, BK] in the place of S and the same sums in the same order.

    What a product makes is the first operand of the next and stays in registers: the shared memory
    of two programs fits a multiprocessor, and one works while the other waits.

    Grid (N * HV * V / BV).  Reference: linattn_edu.reference.fused.gdn_fwd.scan.
    """
    i_v, i_nh, i_h, first, n_seq, _, skip, i_end = way_of(
        tl.program_id(0), warmup_ptr, cu_ptr, offsets_ptr, T, N, HV, V, BT, BV, False
    )
    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, True)
    FINE: tl.constexpr = R_low_ptr is not None

    for i_t in range(tl.cdiv(n_seq, BT)):
        begin, n_t = first + i_t * BT, n_seq - i_t * BT
        i, i_qk = begin * HV + i_h, (begin * H + i_h // (HV // H)) * K
        b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_R = load_tile(R_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        b_h, b_e = cast(b_S, b_k.dtype), tl.exp2(b_gc)[None, :]

        # eq:delta-residual   W = V - diag(2^gc) K S
        b_W = tl.trans(b_v).to(tl.float32) - b_e * dot_left(b_S, tl.trans(b_k), None, None, FINE)
        b_RT_low, b_PT_low = None, None
        if FINE:
            b_RT_low = tl.trans(load_tile(R_low_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT))
            b_PT_low = tl.trans(load_tile(P_low_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT))
            b_W *= load_row(beta_ptr + i, o_t, HV, n_t)[None, :]
        # eq:delta-v-new   v_new = R W
        b_new = dot_left(b_W, tl.trans(b_R), b_RT_low, None, FINE)
        # eq:delta-inter   diag(2^gc) Q S
        b_o = b_e * dot(b_h, tl.trans(b_q))
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = scale * dot_left(b_new, tl.trans(b_P), b_PT_low, b_o, FINE)
        b_o = tl.trans(cast(b_o, o_ptr.dtype.element_ty))
        n_o = tl.where(i_t < skip, 0, n_t)
        store_tile(o_ptr + i * V, b_o, o_t, o_v, HV * V, n_o, V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_new *= tl.exp2(b_last - b_gc)[None, :]
        b_S = dot_left(b_new, b_k, None, b_S * tl.exp2(b_last), FINE)

    if ht_ptr is not None:
        n_k = tl.where(i_end < 0, 0, K)
        store_tile(ht_ptr + i_end * K * V, tl.trans(b_S), o_k, o_v, V, n_k, V)


@triton.jit(do_not_specialize=["T"])
def scan_map_kernel(
    k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2
    R_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [NP, HV, K, V] or None
    beta_ptr,  # [B, T, HV], where R is without it; or None
    map_ptr,  # [NP, HV, K, ROW] out: S_ext, and M where W is V + K
    left_ptr,  # [NP, HV, NW] of span_of, with NEAR out; or None
    rows_ptr,  # [NP] or None
    cu_ptr, T,  # of span_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of map_ptr
    NEAR: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [S_ext | M] of one head, through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.fused.gdn_fwd.scan_map.
    """
    # eq:cp-ext   S_ext: the state after the piece, from zero
    # eq:cp-transition   M: the same without values, from I
    i_v, i_ph, i_h, first, n_seq, made, o_t, o_k, o_v, b_S = span_of(
        h0_ptr, left_ptr, rows_ptr, cu_ptr, T, HV, K, V, W, NEAR, NW, BT, BK, BV, False
    )
    k_ptr += (first * H + i_h // (HV // H)) * K
    v_ptr += (first * HV + i_h) * V
    R_ptr += (first * HV + i_h) * BT
    gc_ptr += first * HV + i_h
    if beta_ptr is not None:
        beta_ptr += first * HV + i_h
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_R = load_tile(R_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV)
        b_W = b_v.to(tl.float32) - tl.exp2(b_gc)[:, None] * dot(b_k, cast(b_S, b_k.dtype))
        if beta_ptr is not None:
            b_W *= load_row(beta_ptr, o_t, HV, n_t)[:, None]
            beta_ptr += BT * HV
        b_v = dot(b_R, cast(b_W, b_R.dtype)) * tl.exp2(b_last - b_gc)[:, None]
        b_S = dot(tl.trans(b_k), cast(b_v, b_k.dtype), b_S * tl.exp2(b_last))
        k_ptr += BT * H * K
        v_ptr += BT * HV * V
        R_ptr += BT * HV * BT
        gc_ptr += BT * HV
    store_map(map_ptr, left_ptr, b_S, i_v, i_ph, o_k, o_v, made, K, V, W, ROW, NEAR, NW)


SCAN_CONFIGS = scan_table(
    ampere={128: [row(4, 1, BV=32)], 256: [row(4, 1, BV=16)]},
    # never 1 stage in 16 bit with BV < 64: miscompiled by ptxas 12.8, see rows.UNPIPELINED
    hopper={128: THREE, 256: [row(4, 2, BV=64), row(4, 2, BV=32), row(4, 2, BV=16)]},
)


# of 64 values; with more chunks in flight there would be no room for a second program
TRANSPOSED = {"num_warps": 4, "num_stages": 2}
# with low halves, which take room: of 128 values where that leaves programs enough, else of 64
HALVES = row(8, 2, BV=128), row(4, 1, BV=64)


def entering(
    decays: tuple, merge: Callable, make: Callable, given: tuple, state: Tensor | Callable | None,
    *, chunk_size: int, choice: bool, back: bool = False, packing: Packing | None = None, **options,
) -> tuple[Pieces, list[Tensor | None], Tensor | None]:  # fmt: skip
    """The pieces of a scan, with how many chunks before each it begins, and the states that enter.

    decays, choice, back: k, beta, gc, V and options of warm_up, where pieces are entered by a
    warm-up. merge, make, given, state, options: of Pieces.entering, where they are by maps. A state
    that is on its way is waited for when all else is done.
    """
    k, _, gc, V = decays
    pieces = by_maps(k, gc.shape[2], V, chunk_size, packing)
    if pieces.several:
        return pieces, [None], pieces.entering(merge, make, given, state, **options)
    pieces, warmup = warm_up(
        *decays, chunk_size=chunk_size, back=back, choice=choice, packing=packing
    )
    return pieces, warmup, pieces.placed(here(state), last=back)


def scan(
    q: Tensor, k: Tensor, v: Tensor, gc: Tensor, P: Tensor, R: Tensor,
    initial_state: Tensor | Callable | None = None, beta: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None, ways: Tensor | None = None,
    made: tuple[Tensor, Tensor | None] | None = None, *, scale: float,
    output_final_state: bool = False, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch the scan that suits the GPU; arguments and result as in the reference, but that
    initial_state may be a function that waits for it, and o and the state are written in the place
    of what is made.
    """
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    C = P.shape[-1]
    load = load_of(kind_of(q, HV, V, C, packing, (q, k, v, P, R)), q, packing)
    in_gluon = low is None and by_load.scan(load).takes == "gluon"
    if low is None:
        pieces, warmup, initial_state = entering(
            (k, R, gc, V), cp_merge, scan_map, (k, v, gc, R), initial_state, chunk_size=C,
            choice=not in_gluon, packing=packing,
        )  # fmt: skip
        warmup = warmup if pieces.several else [ways]
    else:
        pieces, warmup = whole_of(q, packing), [ways]
    o, last = made or (torch.empty_like(v), None)
    if output_final_state and made is None:
        last = q.new_empty(pieces.N, HV, K, V, dtype=torch.float32)
    given = q, k, v, gc, P, R, initial_state
    if in_gluon and gdn_scan.scan_gluon((*given, o, last), scale, *warmup, pieces):
        return o, pieces.last(last)
    for i, skipped in enumerate(warmup):
        heads = (pieces.batch if i else pieces.N) * HV
        _, config = scan_launch(SCAN_CONFIGS if low is None else HALVES[V <= 64 :], k, heads, V)
        programs, halves = pieces.N * HV * cdiv(V, config["BV"]), (beta, *(low or (None, None)))
        if low is None:
            choice = by_load.transposed(load, programs, config["BK"], config["BV"])
            halves = (None,) * 3 if choice.takes == "transposed" else ()
            config |= TRANSPOSED if halves else {}
        elif K <= 64 or C < 64:  # never 1 stage: see above
            config["num_stages"] = 2
        kernel = scan_transposed_kernel if halves else scan_kernel
        kernel[(programs,)](
            *given, *halves, o, last, scale, skipped, *pieces.places, pieces.chained, H, HV, K, V,
            BT=C, **config,
        )  # fmt: skip
    return o, pieces.last(last)


def scan_map(
    k: Tensor, v: Tensor, gc: Tensor, R: Tensor, initial_state: Tensor | None = None,
    beta: Tensor | None = None, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch scan_map_kernel; arguments and result as in the reference; which: of launch_map."""
    given, sizes = (k, v, gc, R, initial_state, beta), (k.shape[2], *v.shape[2:])
    return launch_map(
        scan_map_kernel, SCAN_CONFIGS, given, sizes, x=k, constants={"BT": R.shape[-1]}, **which
    )


def near_map(
    inner: tuple, v: Tensor, far: list, initial_state: Tensor | None = None, *, rows: Tensor,
    **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """scan_map over ranks, of whole chunks: R is made of the near ones of sequences `rows`; of all,
    with P and A * G, if some head does not forget in these.

    inner: the tensors of intra_gluon.  far: a list that gets a number, negative if they are not.
    """
    q, k, beta, gc, P, R, _ = inner
    near = min(maps.NEAR, k.shape[1] // R.shape[-1])
    gdn_intra.intra_gluon((q, k, beta, gc, P, R, None), False, None, (None, None), rows, near)

    def others(left: Tensor) -> None:
        far.append(left.amax() - maps.FORGOTTEN.value / k.shape[-1])
        gdn_intra.intra_gluon(inner, True, None, (far[0], None))

    return scan_map(k, v, gc, R, initial_state, rows=rows, between=others, **which)


def chunk_fwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, initial_state: Tensor | None = None,
    enter: Callable | None = None, *, scale: float, chunk_size: int,
    output_final_state: bool = False, keep: bool = False, cancelling: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch intra_chunk, cancels and scan, or one kernel for all; arguments and result as in the
    reference.
    """
    K, (HV, V) = q.shape[3], v.shape[2:]
    load = load_of(kind_of(q, HV, V, chunk_size, packing, (q, k, v)), q, packing)
    if by_load.chunk_fwd(load, cancelling).takes == "one":
        kept = [q.new_empty(*gc.shape, chunk_size) if keep else None for _ in range(2)]
        found = none_of(q, HV, packing) if cancelling else None
        cut, far = by_kind.pieces_by_warm_up(load.kind).takes, []
        if cut or enter is not None:  # for heads that do not forget
            R = q.new_empty(*gc.shape, chunk_size)
            P = kept[0] if keep else torch.empty_like(R)
            inner = q, k, beta, gc, P, R, kept[1]
        if enter is not None:
            initial_state = enter(near_map, (inner, v, far))
        # R, by which scan is warmed up, has beta in k's dtype
        written = beta.to(k.dtype) if cut else beta
        pieces, (warmup, *other) = warm_up(
            k, written, gc, V, chunk_size=chunk_size, always=True, packing=packing
        )
        o, h0 = torch.empty_like(v), pieces.placed(here(initial_state))
        last = gc.new_empty(pieces.N, HV, K, V) if output_final_state else None
        given, out = (q, k, v, beta, gc, h0), (o, last, *kept, found)
        if gdn_fwd.chunk_fwd_gluon(given, out, scale, warmup, pieces):
            for slow in other:  # if a head does not forget, its scan goes on alone behind what is
                # of chunks, which over ranks may be there
                gdn_intra.intra_gluon(inner, True, None, (slow, far[0] if far else None))
                gdn_scan.scan_gluon((q, k, v, gc, P, R, h0, o, last), scale, slow, pieces)
            return o, pieces.last(last), *kept, found
    keeps, found = keep or cancelling, None
    P, R, AG = intra_chunk(
        q, k, beta, gc, chunk_size=chunk_size, return_inverse=keeps, gated=keeps, packing=packing
    )
    if cancelling:
        found = cancels(P, AG, beta, q.shape[2], packing=packing)
    if enter is not None:
        initial_state = enter(scan_map, (k, v, gc, R))
    o, last = scan(
        q, k, v, gc, P, R, initial_state, ways=found, scale=scale,
        output_final_state=output_final_state, packing=packing,
    )  # fmt: skip
    return o, last, *((P, AG) if keep else (None, None)), found
