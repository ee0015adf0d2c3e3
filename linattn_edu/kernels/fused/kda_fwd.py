"""The forward pass of Kimi Delta Attention in fused kernels: the gate goes into the rows once.

With keys and queries that have the gate in them, the scan is that of Gated DeltaNet, with a decay
for each row of the state; w, u, v_new and the states stay on the chip.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, launch_map, span_of, store_map
from linattn_edu.kernels.delta.gate import gate
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum
from linattn_edu.kernels.delta.kda_intra import launch_intra
from linattn_edu.kernels.delta.warm_up import way_of
from linattn_edu.kernels.fused.cancel import cancels, none_of
from linattn_edu.kernels.fused.gdn_fwd import TRANSPOSED
from linattn_edu.kernels.gluon.kernels import kda_intra, kda_scan
from linattn_edu.kernels.pieces import Pieces, by_maps
from linattn_edu.kernels.routes import by_kind, by_load, kind_of, load_of, scan_launch
from linattn_edu.kernels.rows import row, strength
from linattn_edu.kernels.tiles import (
    cast,
    dot,
    dot_left,
    dot_right,
    first_state,
    gated,
    load_halves,
    load_row,
    load_tile,
    load_vector,
    parted,
    store_tile,
    weighted,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_fused_scan_kernel(
    qg_ptr, kg_ptr, kd_ptr,  # [B, T, HV, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV], or None
    write_ptr,  # [B, T, HV, V] in the place of beta, whose erase gate kd has, or None
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr, A_ptr,  # [B, T, HV, BT]
    h0_ptr,  # [N, HV, K, V] or None
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [N, HV, K, V] out, or None
    scale,
    ways_ptr,  # [N, HV]: -1 where another launch goes, or None
    cu_ptr, offsets_ptr, T,  # of columns_of
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.fused.kda_fwd.kda_fused_scan.
    """
    i_v, i_nh, i_h, first, n_seq, _, _, i_end = way_of(
        tl.program_id(0), ways_ptr, cu_ptr, offsets_ptr, T, 0, HV, V, BT, BV, False
    )
    i = first * HV + i_h
    qg_ptr += i * K
    kg_ptr += i * K
    kd_ptr += i * K
    gc_ptr += i * K
    v_ptr += i * V
    o_ptr += i * V
    P_ptr += i * BT
    A_ptr += i * BT
    if beta_ptr is not None:
        beta_ptr += i
    else:
        write_ptr += i * V

    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, False)
    # what feeds no product is loaded one chunk ahead, or the loop would wait for it
    o_last = (tl.minimum(BT, n_seq) - 1) * HV * K
    b_last = load_vector(gc_ptr + o_last, o_k, tl.where(n_seq > 0, K, 0))
    b_beta = None
    if beta_ptr is not None:
        b_beta = load_row(beta_ptr, o_t, HV, n_seq)
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_kd = load_tile(kd_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_qg = load_tile(qg_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_A = load_tile(A_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_P = load_tile(P_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_kg = load_tile(kg_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_h = cast(b_S, b_kd.dtype)

        # eq:delta-residual   W = V - kd S
        b_v = gated(b_v, write_ptr, o_t, o_v, HV * V, n_t, V)
        b_W = b_v.to(tl.float32) - dot(b_kd, b_h)
        # eq:delta-v-new   v_new = A diag(beta) W
        b_v = cast(dot(b_A, cast(weighted(b_W, b_beta), b_A.dtype)), b_kg.dtype)
        # eq:delta-inter   qg S
        b_o = dot(b_qg, b_h)
        # eq:delta-output   o = scale (inter + P v_new)
        b_o = scale * dot(b_P, b_v, b_o)
        store_tile(o_ptr, b_o, o_t, o_v, HV * V, n_t, V)
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        b_S *= tl.exp2(b_last)[:, None]
        o_last = (tl.minimum(2 * BT, n_t) - 1) * HV * K
        b_last = load_vector(gc_ptr + o_last, o_k, tl.where(n_t > BT, K, 0))
        if beta_ptr is not None:
            b_beta = load_row(beta_ptr + BT * HV, o_t, HV, n_t - BT)
        b_S = dot(tl.trans(b_kg), b_v, b_S)

        qg_ptr += BT * HV * K
        kg_ptr += BT * HV * K
        kd_ptr += BT * HV * K
        gc_ptr += BT * HV * K
        v_ptr += BT * HV * V
        o_ptr += BT * HV * V
        P_ptr += BT * HV * BT
        A_ptr += BT * HV * BT
        if beta_ptr is not None:
            beta_ptr += BT * HV
        else:
            write_ptr += BT * HV * V

    if ht_ptr is not None:
        store_tile(ht_ptr + i_end * K * V, b_S, o_k, o_v, V, tl.where(i_end < 0, 0, K), V)


@triton.jit(do_not_specialize=["T"])
def kda_fused_scan_transposed_kernel(
    qg_ptr, kg_ptr, kd_ptr, v_ptr, beta_ptr, write_ptr, gc_ptr, P_ptr, A_ptr, h0_ptr, o_ptr, ht_ptr,
    scale, ways_ptr, cu_ptr, offsets_ptr, T,
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """kda_fused_scan_kernel, whose arguments it has, with S^T [BV, BK] in the place of S: the same
    sums in the same order; why, says gdn_fwd.scan_transposed_kernel.  FINE: kd and kg have both
    halves, as in load_halves; S and all that A and P multiply are parted into theirs.

    Grid (N * HV * V / BV).  Reference: linattn_edu.reference.fused.kda_fwd.kda_fused_scan.
    """
    i_v, i_nh, i_h, first, n_seq, _, _, i_end = way_of(
        tl.program_id(0), ways_ptr, cu_ptr, offsets_ptr, T, 0, HV, V, BT, BV, False
    )
    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, True)
    i = first * HV + i_h
    o_last = (tl.minimum(BT, n_seq) - 1) * HV * K
    b_last = load_vector(gc_ptr + i * K + o_last, o_k, tl.where(n_seq > 0, K, 0))
    b_beta = None
    if beta_ptr is not None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_seq)
    for i_t in range(tl.cdiv(n_seq, BT)):
        i, n_t = (first + i_t * BT) * HV + i_h, n_seq - i_t * BT
        b_kd, b_low = load_halves(kd_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]

        # eq:delta-residual   W = V - kd S
        if write_ptr is not None:
            b_v = gated(b_v, write_ptr + i * V, o_t, o_v, HV * V, n_t, V)
        b_W = dot_left(b_S, tl.trans(b_kd), tl.trans(b_low), None, FINE)
        b_W = tl.trans(b_v).to(tl.float32) - b_W
        b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        # eq:delta-v-new   v_new = A diag(beta) W
        b_A, b_low = parted(b_A, FINE)
        b_W = weighted(b_W, b_beta, False)
        b_new = dot_left(b_W, tl.trans(b_A), tl.trans(b_low), None, FINE)
        # eq:delta-inter   qg S
        b_qg = load_tile(qg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_o = dot(cast(b_S, b_qg.dtype), tl.trans(b_qg))
        b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        # eq:delta-output   o = scale (inter + P v_new)
        b_P, b_low = parted(b_P, FINE)
        b_o = scale * dot_left(b_new, tl.trans(b_P), tl.trans(b_low), b_o, FINE)
        b_o = tl.trans(cast(b_o, o_ptr.dtype.element_ty))
        store_tile(o_ptr + i * V, b_o, o_t, o_v, HV * V, n_t, V)
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        b_kg, b_low = load_halves(kg_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
        b_S *= tl.exp2(b_last)[None, :]
        o_last = (tl.minimum(2 * BT, n_t) - 1) * HV * K
        b_last = load_vector(gc_ptr + i * K + o_last, o_k, tl.where(n_t > BT, K, 0))
        if beta_ptr is not None:
            b_beta = load_row(beta_ptr + i + BT * HV, o_t, HV, n_t - BT)
        b_S = dot_left(b_new, b_kg, b_low, b_S, FINE)

    if ht_ptr is not None:
        i_K = tl.where(i_end < 0, 0, K)
        store_tile(ht_ptr + i_end * K * V, tl.trans(b_S), o_k, o_v, V, i_K, V)


@triton.jit(do_not_specialize=["T"])
def kda_fused_scan_map_kernel(
    kg_ptr, kd_ptr, v_ptr, beta_ptr, write_ptr, gc_ptr, A_ptr,  # as of kda_fused_scan_kernel
    h0_ptr, map_ptr, left_ptr, rows_ptr, cu_ptr, T,  # as of gdn_fwd.scan_map_kernel
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr,
    NEAR: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [S_ext | M] of one head, through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.fused.kda_fwd.kda_fused_scan_map.
    """
    # eq:cp-ext   S_ext: the state after the piece, from zero
    # eq:cp-transition   M: the same without values, from I
    i_v, i_ph, i_h, first, n_seq, made, o_t, o_k, o_v, b_S = span_of(
        h0_ptr, left_ptr, rows_ptr, cu_ptr, T, HV, K, V, W, NEAR, NW, BT, BK, BV, False
    )
    i = first * HV + i_h
    o_last = (tl.minimum(BT, n_seq) - 1) * HV * K
    b_last = load_vector(gc_ptr + i * K + o_last, o_k, tl.where(n_seq > 0, K, 0))
    b_beta = None
    if beta_ptr is not None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_seq)
    for i_t in range(tl.cdiv(n_seq, BT)):
        i, n_t = (first + i_t * BT) * HV + i_h, n_seq - i_t * BT
        b_kd, b_kd_low = load_halves(kd_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_kg, b_kg_low = load_halves(kg_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
        if write_ptr is not None:
            b_v = gated(b_v, write_ptr + i * V, o_t, o_v, HV * V, n_t, V)
        b_W = b_v.to(tl.float32) - dot_right(b_kd, b_kd_low, b_S, None, FINE)
        b_A, b_low = parted(b_A, FINE)
        b_v = dot_right(b_A, b_low, weighted(b_W, b_beta), None, FINE)
        b_S *= tl.exp2(b_last)[:, None]
        o_last = (tl.minimum(2 * BT, n_t) - 1) * HV * K
        b_last = load_vector(gc_ptr + i * K + o_last, o_k, tl.where(n_t > BT, K, 0))
        if beta_ptr is not None:
            b_beta = load_row(beta_ptr + i + BT * HV, o_t, HV, n_t - BT)
        b_S = dot_right(tl.trans(b_kg), tl.trans(b_kg_low), b_v, b_S, FINE)
    store_map(map_ptr, left_ptr, b_S, i_v, i_ph, o_k, o_v, made, K, V, W, ROW, NEAR, NW)


CONFIGS = row(4, 2, BV=64), row(4, 3, BV=32), row(4, 3, BV=16)
MAP_CONFIGS = tuple(row(4, 2, BV=n) for n in (64, 32, 16))
HALVES_CONFIGS = (row(4, 2, BV=64),)  # of 128 keys in 1 stage: two programs a multiprocessor


def kda_prepare(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, *, chunk_size: int,
    lower_bound: float | None = None, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the kernels of kda_intra, the first of which writes the gated rows on its way;
    arguments and result as in the reference.
    """
    gated = tuple(torch.empty_like(gc, dtype=k.dtype) for _ in range(3))
    P, A = launch_intra((q, k, beta, gc), gated, chunk_size, lower_bound, packing)
    return P, A, *gated


def kda_gate_prepare(
    q: Tensor, k: Tensor, beta: Tensor, g: Tensor, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, *, lower_bound: float | None = None,
    safe_bound: float | None = None, chunk_size: int, cancelling: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch gate_cumsum, kda_prepare and cancels, or one kernel for all, after `gate` where g is
    raw; arguments and result as in the reference.
    """
    own, erase = strength(beta)
    kind = kind_of(q, g.shape[2], 0, chunk_size, packing, (q, k, g))
    gates = () if erase is None else (erase.dtype,)
    if by_kind.kda_gate_prepare(kind, *gates).takes == "gluon":
        raw = A_log is not None or lower_bound is not None
        given = gate(g, A_log, dt_bias, lower_bound=lower_bound) if raw else g
        P, A = (k.new_empty(*g.shape[:3], chunk_size) for _ in range(2))
        rows = (torch.empty_like(g, dtype=k.dtype) for _ in range(3))
        found = none_of(k, g.shape[2], packing) if cancelling else None
        out = torch.empty_like(g, dtype=torch.float32), P, A, *rows, found
        near = by_kind.kda_halved(k.dtype, safe_bound).takes == "none"
        if kda_intra.kda_prepare_gluon((q, k, given, own, erase), out, near, packing):
            return out if cancelling else out[:-1]
    options = {"chunk_size": chunk_size, "packing": packing}
    gc = gate_cumsum(g, A_log, dt_bias, lower_bound=lower_bound, **options)
    P, A, *rows = kda_prepare(q, k, beta, gc, lower_bound=safe_bound, **options)
    found = (cancels(P, A, own, q.shape[2], packing=packing),) if cancelling else ()
    return gc, P, A, *rows, *found


def kda_fused_scan(
    qg: Tensor, kg: Tensor, kd: Tensor, v: Tensor, beta: Tensor, gc: Tensor, P: Tensor, A: Tensor,
    initial_state: Tensor | None = None, *, scale: float, output_final_state: bool = False,
    packing: Packing | None = None, fine: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch the scan that suits the GPU; arguments and result as in the reference; fine: kd and kg
    as `kda_gates` makes them, P and A in fp32.
    """
    given = qg, kg, kd, v, beta, gc, P, A, initial_state
    pieces, o, last = scanned(qg, v, A.shape[-1], output_final_state, packing)
    launch_scan(given, (o, last), scale, fine, None, pieces, packing)
    return o, pieces.last(last)


def scanned(
    qg: Tensor, v: Tensor, C: int, output_final_state: bool, packing: Packing | None
) -> tuple[Pieces, Tensor, Tensor | None]:
    """The pieces of kda_fused_scan, and room for o and the state at the end of each."""
    (HV, K), V, last = qg.shape[2:], v.shape[-1], None
    pieces = by_maps(qg, HV, V, C, packing)
    if output_final_state:
        last = qg.new_empty(pieces.N, HV, K, V, dtype=torch.float32)
    return pieces, torch.empty_like(v), last


def launch_scan(
    given: tuple[Tensor | None, ...], out: tuple[Tensor, Tensor | None], scale: float, fine: bool,
    ways: Tensor | None, pieces: Pieces, packing: Packing | None,
) -> None:  # fmt: skip
    """Write o and the last states of heads of which ways [batch, HV], if there is one, has not -1.

    given: the tensors that kda_fused_scan is given.
    """
    qg, kg, kd, v, beta, gc, P, A, initial_state = given
    (HV, K), V, C = gc.shape[2:], v.shape[-1], A.shape[-1]
    given = kg, kd, v, beta, gc, A
    initial_state = pieces.entering(cp_merge, kda_fused_scan_map, given, initial_state, fine=fine)
    beta, write = strength(beta)
    given, ways = (qg, kg, kd, v, beta, write, gc, P, A, initial_state, *out), pieces.spread(ways)
    load = load_of(kind_of(qg, HV, V, C, packing, (kg, v, P, A)), qg, packing)
    gates = () if write is None else (write.dtype,)
    gluon = not fine and by_load.kda_scan(load, *gates).takes == "gluon"
    if gluon and kda_scan.kda_scan_gluon(given, scale, ways, pieces):
        return
    grid, config = scan_launch(HALVES_CONFIGS if fine else CONFIGS, qg, pieces.N * HV, V)
    full = fine or by_load.transposed(load, *grid, config["BK"], config["BV"]).takes == "transposed"
    kernel = kda_fused_scan_transposed_kernel if full else kda_fused_scan_kernel
    if full:
        stages = 1 if K > 64 and C == 64 else 2  # never 1 of fewer columns: see rows.UNPIPELINED
        config |= {"FINE": fine} | ({"num_stages": stages} if fine else TRANSPOSED)
    kernel[grid](*given, scale, ways, *pieces.places, HV, K, V, BT=C, **config)


def kda_fused_scan_map(
    kg: Tensor, kd: Tensor, v: Tensor, beta: Tensor, gc: Tensor, A: Tensor,
    initial_state: Tensor | None = None, *, fine: bool = False, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch kda_fused_scan_map_kernel; arguments and result as in the reference; which: of
    launch_map.
    """
    given = kg, kd, v, *strength(beta), gc, A, initial_state
    return launch_map(
        kda_fused_scan_map_kernel, MAP_CONFIGS, given, v.shape[2:], x=gc,
        constants={"BT": A.shape[-1], "FINE": fine}, **which,
    )  # fmt: skip
