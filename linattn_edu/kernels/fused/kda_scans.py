"""The backward pass of Kimi Delta Attention in fused kernels, on rows that have the gate in them.

The keys and queries are multiplied by their gates once; then the states and their gradients are
carried as in Gated DeltaNet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, launch_map, span_of, store_map
from linattn_edu.kernels.delta.cp_merge_bwd import cp_merge_bwd
from linattn_edu.kernels.delta.gate_cumsum import cumulative
from linattn_edu.kernels.delta.warm_up import way_of
from linattn_edu.kernels.fused.kda_fwd import kda_fused_scan_map
from linattn_edu.kernels.gluon.kernels import kda_scans
from linattn_edu.kernels.pieces import Pieces, by_maps
from linattn_edu.kernels.routes import by_kind, by_load, kind_of, load_of, scan_launch
from linattn_edu.kernels.rows import chunk_args, row, states, strength
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_of,
    dot_halves,
    dot_left,
    first_state,
    gated,
    listed,
    load_halves,
    load_row,
    load_tile,
    load_vector,
    parted,
    store_rows,
    store_tile,
    weighted,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_gates_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    g_ptr,  # [B, T, HV, K] natural log; with A_log or a bound, the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [HV * K] or None
    erase_ptr,  # [B, T, HV, K] or None
    gc_ptr,  # [B, T, HV, K] out: log2, cumulative within a chunk
    kd_ptr, kg_ptr, qg_ptr,  # [B, T, HV, K] out; with FINE the first two of both halves
    bound,  # lower bound of the gate, or None
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """One program: BK channels of one chunk of one head.  Grid (NT * HV * K / BK).

    Reference: linattn_edu.reference.fused.kda_scans.kda_gates.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = listed(tl.program_id(0), items_ptr, NK)
    if pid < 0:
        return
    o_k = pid % NK * BK + tl.arange(0, BK)
    i_h, _, first, n_t = chunk_of(pid // NK, cu_ptr, chunks_ptr, T, HV, BT)
    i_k, i = (first * H + i_h // (HV // H)) * K, first * HV + i_h
    o_t = tl.arange(0, BT)
    b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_q = load_tile(q_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_g = load_tile(g_ptr + i * K, o_t, o_k, HV * K, n_t, K).to(tl.float32)  # [BT, BK]
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_g = cumulative(b_g, A_log_ptr, bias_ptr, bound, i_h * K + o_k, HV * K, K)
    store_tile(gc_ptr + i * K, b_g, o_t, o_k, HV * K, n_t, K)
    b_last = tl.sum(tl.where(o_t[:, None] == tl.minimum(BT, n_t) - 1, b_g, 0.0), 0)
    b_e = tl.exp2(b_g)
    # eq:kda-kd   kd = 2^gc * K
    if erase_ptr is None:
        store_rows(kd_ptr, i, b_e * b_k.to(tl.float32), o_t, o_k, HV, n_t, K, FINE)
    else:
        b_r = gated(b_k.to(tl.float32), erase_ptr + i * K, o_t, o_k, HV * K, n_t, K)
        store_rows(kd_ptr, i, b_e * b_r, o_t, o_k, HV, n_t, K, FINE)
    # eq:kda-kg   kg = 2^(gc_last - gc) * K
    b_r = tl.exp2(b_last[None, :] - b_g) * b_k.to(tl.float32)
    store_rows(kg_ptr, i, b_r, o_t, o_k, HV, n_t, K, FINE)
    # eq:kda-qg   qg = 2^gc * Q
    store_tile(qg_ptr + i * K, b_e * b_q.to(tl.float32), o_t, o_k, HV * K, n_t, K)


@triton.jit(do_not_specialize=["T"])
def kda_scan_states(
    kg_ptr, kd_ptr, v_ptr, beta_ptr, write_ptr, gc_ptr, A_ptr, h0_ptr, h_ptr, v_new_ptr, ways_ptr,
    cu_ptr, offsets_ptr, T,
    STEP: tl.constexpr,  # one of so many programs of the grid, the last of them
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Arguments of kda_fused_scans_kernel.
    Reference: linattn_edu.reference.fused.kda_scans.kda_fused_scans.
    """
    i_v, i_nh, i_h, first, n_seq, i_c, _, _ = way_of(
        tl.program_id(0) // STEP, ways_ptr, cu_ptr, offsets_ptr, T, 0, HV, V, BT, BV, False
    )
    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, True)
    # the load of a chunk's gates runs one chunk ahead: the state waits for them
    o_last = (first + tl.minimum(BT, n_seq) - 1) * HV + i_h
    b_last = load_vector(gc_ptr + o_last * K, o_k, tl.where(n_seq > 0, K, 0))
    for i_t in range(tl.cdiv(n_seq, BT)):
        i, n_t = (first + i_t * BT) * HV + i_h, n_seq - i_t * BT
        b_kd, b_low = load_halves(kd_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
        b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        i_S = ((i_c + i_t) * HV + i_h) * K * V
        b_h = tl.trans(cast(b_S, h_ptr.dtype.element_ty))
        store_tile(h_ptr + i_S, b_h, o_k, o_v, V, K, V)
        # eq:delta-residual   W = V - kd S
        if write_ptr is not None:
            b_v = gated(b_v, write_ptr + i * V, o_t, o_v, HV * V, n_t, V)
        b_W = dot_left(b_S, tl.trans(b_kd), tl.trans(b_low), None, FINE)
        b_W = tl.trans(b_v).to(tl.float32) - b_W
        b_beta = None
        if beta_ptr is not None:
            b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
        # eq:delta-v-new   v_new = A diag(beta) W
        b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_A, b_low = parted(b_A, FINE)
        b_W = weighted(b_W, b_beta, False)
        b_new = dot_left(b_W, tl.trans(b_A), tl.trans(b_low), None, FINE)
        store_rows(v_new_ptr, i, tl.trans(b_new), o_t, o_v, HV, n_t, V, FINE)
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        b_kg, b_low = load_halves(kg_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
        b_S *= tl.exp2(b_last)[None, :]
        o_last = i + (tl.minimum(2 * BT, n_t) - 1) * HV
        b_last = load_vector(gc_ptr + o_last * K, o_k, tl.where(n_t > BT, K, 0))
        b_S = dot_left(b_new, b_kg, b_low, b_S, FINE)


@triton.jit
def kda_scan_bwd_step(
    b_dS, qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, scale, i_h,
    first, n_t, o_t, o_k, o_v, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """dS^T [BV, BK], back through the chunk of head i_h that begins with token `first`.

    Returns Z^T and dV^T [BV, BT], and the next dS^T; transposed as in gdn_bwd.
    """
    i = first * HV + i_h
    b_do = tl.trans(load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V))  # [BV, BT]
    # eq:kda-dv-out   dv_new = scale P^T dO
    b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_P, b_low = parted(b_P, FINE)
    b_dv = scale * dot_halves(b_do, None, b_P, b_low if FINE else None)
    # eq:delta-dv-new   dv_new += kg dS
    b_kg, b_low = load_halves(kg_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
    b_dv = dot_left(b_dS, tl.trans(b_kg), tl.trans(b_low), b_dv, FINE)
    # eq:kda-z   Z = A^T dv_new
    b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_A, b_low = parted(b_A, FINE)
    b_Z = dot_left(b_dv, b_A, b_low, None, FINE)
    # eq:kda-dv   dV = diag(beta) Z
    b_beta = None
    if beta_ptr is not None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    b_dv = weighted(b_Z, b_beta, False)
    # eq:fused-ds   dS <- diag(2^gc_last) dS + qg^T scale dO - kd^T dV
    b_last = load_vector(gc_ptr + (i + (tl.minimum(BT, n_t) - 1) * HV) * K, o_k, K)  # [BK]
    b_qg = load_tile(qg_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
    b_do = b_do.to(tl.float32) * scale
    b_dS = dot_left(b_do, b_qg, None, b_dS * tl.exp2(b_last)[None, :], FINE)
    b_kd, b_low = load_halves(kd_ptr, i, o_t, o_k, HV, n_t, K, FINE)  # [BT, BK]
    b_dS = dot_left(-b_dv, b_kd, b_low, b_dS, FINE)
    return b_Z, b_dv, b_dS


@triton.jit(do_not_specialize=["T"])
def kda_scan_bwd(
    qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, dht_ptr, dh_ptr, Z_ptr, dv_ptr,
    dh0_ptr, scale, ways_ptr, cu_ptr, offsets_ptr, T,
    STEP: tl.constexpr,  # one of so many programs of the grid, the first of them
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Arguments of kda_fused_scans_kernel.
    Reference: linattn_edu.reference.fused.kda_scans.kda_fused_scans.
    """
    i_v, i_nh, i_h, first, n_seq, i_c, _, i_end = way_of(
        tl.program_id(0) // STEP, ways_ptr, cu_ptr, offsets_ptr, T, 0, HV, V, BT, BV, True
    )
    o_t, o_k, o_v, b_dS = first_state(dht_ptr, i_nh, i_v, K, V, BT, BK, BV, True)
    NT = tl.cdiv(n_seq, BT)
    for i_t in range(NT):
        i_b = NT - 1 - i_t  # of the chunk, back from the last
        begin, n_t = first + i_b * BT, n_seq - i_b * BT
        b_h = cast(b_dS, dh_ptr.dtype.element_ty)
        i_S = ((i_c + i_b) * HV + i_h) * K * V
        store_tile(dh_ptr + i_S, tl.trans(b_h), o_k, o_v, V, K, V)
        b_Z, b_dv, b_dS = kda_scan_bwd_step(
            b_dS, qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, scale, i_h,
            begin, n_t, o_t, o_k, o_v, HV, K, V, BT, FINE,
        )  # fmt: skip
        i = begin * HV + i_h
        store_rows(Z_ptr, i, tl.trans(b_Z), o_t, o_v, HV, n_t, V, FINE)
        if dv_ptr is not None:
            b_dv = tl.trans(cast(b_dv, dv_ptr.dtype.element_ty))
            store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
    i_K = tl.where(i_end < 0, 0, K)
    store_tile(dh0_ptr + i_end * K * V, tl.trans(b_dS), o_k, o_v, V, i_K, V)


@triton.jit(do_not_specialize=["T"])
def kda_fused_scans_kernel(
    qg_ptr, kg_ptr, kd_ptr,  # [B, T, HV, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV], or None
    write_ptr,  # [B, T, HV, V] in the place of beta, whose erase gate kd has, or None: then no dv
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr, A_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    h0_ptr, dht_ptr, h_ptr, v_new_ptr, dh_ptr, Z_ptr, dv_ptr, dh0_ptr, scale,
    ways_ptr,  # [N, HV]: -1 where another launch goes, or None
    cu_ptr, offsets_ptr, T,  # as of gdn_scans.scans_kernel
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """The programs of kda_scan_states, and those of kda_scan_bwd, which take longer.

    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.fused.kda_scans.kda_fused_scans.
    """
    if tl.program_id(0) % 2 == 1:
        kda_scan_states(
            kg_ptr, kd_ptr, v_ptr, beta_ptr, write_ptr, gc_ptr, A_ptr, h0_ptr, h_ptr, v_new_ptr,
            ways_ptr, cu_ptr, offsets_ptr, T, 2, HV, K, V, BT, BK, BV, FINE,
        )  # fmt: skip
    else:
        kda_scan_bwd(
            qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, dht_ptr, dh_ptr, Z_ptr,
            dv_ptr, dh0_ptr, scale, ways_ptr, cu_ptr, offsets_ptr, T, 2, HV, K, V, BT, BK, BV, FINE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def kda_fused_scan_map_bwd_kernel(
    qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr,  # as of kda_fused_scans_kernel
    dht_ptr, map_ptr, left_ptr, scale, rows_ptr, cu_ptr, T,  # as of gdn_scans.scan_map_bwd_kernel
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr,
    NEAR: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FINE: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [dS_ext | dM] of one head, back through a piece.

    Grid (NP * HV * W / BV).  Reference:
    linattn_edu.reference.fused.kda_scans.kda_fused_scan_map_bwd.
    """
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    # eq:cp-transition-bwd   dM: the same with dO = 0, from I
    i_v, i_ph, i_h, first, n_seq, made, o_t, o_k, o_v, b_dS = span_of(
        dht_ptr, left_ptr, rows_ptr, cu_ptr, T, HV, K, V, W, NEAR, NW, BT, BK, BV, True
    )
    NT = tl.cdiv(n_seq, BT)
    for i_t in range(NT):
        i_b = NT - 1 - i_t
        begin, n_t = first + i_b * BT, n_seq - i_b * BT
        _, _, b_dS = kda_scan_bwd_step(
            b_dS, qg_ptr, kg_ptr, kd_ptr, beta_ptr, gc_ptr, P_ptr, A_ptr, do_ptr, scale, i_h,
            begin, n_t, o_t, o_k, o_v, HV, K, V, BT, FINE,
        )  # fmt: skip
    store_map(map_ptr, left_ptr, tl.trans(b_dS), i_v, i_ph, o_k, o_v, made, K, V, W, ROW, NEAR, NW)


def in_halves_of(x: Tensor, dtype: torch.dtype, fine: bool) -> Tensor:
    """Room for [.., D] in dtype; fine: for [.., 2 D] in bfloat16, D high halves and D low ones."""
    width, dtype = (2 * x.shape[-1], torch.bfloat16) if fine else (x.shape[-1], dtype)
    return x.new_empty(*x.shape[:-1], width, dtype=dtype)


GATES_OPTIONS = {"BK": 64, "num_warps": 4, "maxnreg": 168}
SCAN = (row(4, 2, BV=64),)  # rows of dS^T: a product of fewer would leave tensor cores idle


def kda_gates(
    q: Tensor, k: Tensor, g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    erase: Tensor | None = None, *, lower_bound: float | None = None, chunk_size: int,
    packing: Packing | None = None, fine: bool = False, items: Tensor | None = None,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch kda_gates_kernel; arguments and result as in the reference; fine: kd and kg are
    [B, T, HV, 2 K], see `in_halves_of`. items: of `listed`, or None: all. into: gc and qg, which
    have other items already.
    """
    T, H, K = k.shape[1:]
    HV = g.shape[2]
    gc, qg = into or (torch.empty_like(g, dtype=torch.float32), None)
    kd, kg = (in_halves_of(gc, k.dtype, fine) for _ in range(2))
    qg = torch.empty_like(gc, dtype=kd.dtype) if qg is None else qg
    NT, *chunks = chunk_args(k, chunk_size, packing)
    kda_gates_kernel[(NT * HV * cdiv(K, GATES_OPTIONS["BK"]),)](
        q, k, g, A_log, dt_bias, erase, gc, kd, kg, qg, lower_bound, items, *chunks, T, H, HV, K,
        BT=chunk_size, FINE=fine, **GATES_OPTIONS,
    )  # fmt: skip
    return gc, kd, kg, qg


def kda_fused_scans(
    qg: Tensor, kg: Tensor, kd: Tensor, v: Tensor, beta: Tensor, gc: Tensor, P: Tensor, A: Tensor,
    do: Tensor, initial_state: Tensor | None = None, dht: Tensor | None = None, *, scale: float,
    packing: Packing | None = None, fine: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the kernels that suit the GPU; arguments and result as in the reference; fine: kd, kg,
    v_new and Z are of both halves, see `in_halves_of`, P and A in fp32.
    """
    given = qg, kg, kd, v, beta, gc, P, A, do, initial_state, dht
    pieces, dv, dh0 = scanned(v, beta, gc, A.shape[-1], packing)
    *made, Z = launch_scans(given, (dv, dh0), scale, fine, None, pieces, packing)
    return *made, Z, dv, pieces.first(dh0)


def scanned(
    v: Tensor, beta: Tensor, gc: Tensor, C: int, packing: Packing | None
) -> tuple[Pieces, Tensor | None, Tensor]:
    """The pieces of kda_fused_scans, and room for dv and the gradient before each of them."""
    (HV, K), V = gc.shape[2:], v.shape[-1]
    pieces = by_maps(gc, HV, V, C, packing)
    return pieces, torch.empty_like(v) if beta.ndim == 3 else None, gc.new_empty(pieces.N, HV, K, V)


def launch_scans(
    given: tuple[Tensor | None, ...], out: tuple[Tensor | None, Tensor], scale: float, fine: bool,
    ways: Tensor | None, pieces: Pieces, packing: Packing | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Write dv and dh0, and make h, v_new, dh and Z, of heads of which ways [batch, HV], if there
    is one, has not -1.

    given: the tensors that kda_fused_scans is given.
    """
    qg, kg, kd, v, beta, gc, P, A, do, initial_state, dht = given
    (HV, K), V, C, options = gc.shape[2:], v.shape[-1], A.shape[-1], {"fine": fine}
    given = kg, kd, v, beta, gc, A
    initial_state = pieces.entering(cp_merge, kda_fused_scan_map, given, initial_state, **options)
    given = qg, kg, kd, beta, gc, P, A, do
    dht = pieces.entering(cp_merge_bwd, kda_fused_scan_map_bwd, given, dht, scale=scale, **options)
    h, dh = (v.new_empty(*states(kg, C, packing), HV, K, V) for _ in range(2))
    v_new, Z = (in_halves_of(v, v.dtype, fine) for _ in range(2))
    (beta, write), (dv, dh0), ways = strength(beta), out, pieces.spread(ways)
    (programs,), config = scan_launch(SCAN, gc, pieces.N * HV, V)
    kind = kind_of(kg, HV, V, C, packing, (kg, v, P, A, do))
    gates = () if write is None else (write.dtype,)
    gluon = not fine and by_kind.kda_fused_scans(kind, *gates).takes == "gluon"
    given = kg, kd, v, beta, write, gc, A, initial_state, h, v_new
    behind = qg, kg, kd, beta, gc, P, A, do, dht, dh, Z, dv, dh0
    all_of = qg, kg, kd, v, beta, write, gc, P, A, do, initial_state, dht, h, v_new, dh, Z, dv, dh0
    done = False
    if gluon and by_load.together(load_of(kind, kg, packing), programs).takes:
        done = kda_scans.kda_scans_gluon(all_of, scale, ways, pieces)
    elif gluon:
        done = kda_scans.kda_scan_states_gluon(given, ways, pieces)
        done = done and kda_scans.kda_scan_bwd_gluon(behind, scale, ways, pieces)
    if not done:
        kda_fused_scans_kernel[(2 * programs,)](
            *all_of, scale, ways, *pieces.places, HV, K, V, BT=C, FINE=fine, **config
        )
    return h, v_new, dh, Z


def kda_fused_scan_map_bwd(
    qg: Tensor, kg: Tensor, kd: Tensor, beta: Tensor, gc: Tensor, P: Tensor, A: Tensor, do: Tensor,
    dht: Tensor | None = None, *, scale: float, fine: bool = False, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch kda_fused_scan_map_bwd_kernel; arguments and result as in the reference; which: of
    launch_map.
    """
    given = qg, kg, kd, strength(beta)[0], gc, P, A, do, dht
    return launch_map(
        kda_fused_scan_map_bwd_kernel, SCAN, given, do.shape[2:], x=gc, after=(scale,),
        constants={"BT": A.shape[-1], "FINE": fine}, **which,
    )  # fmt: skip
