"""The scans of the fused backward pass: the states again, and their gradients, side by side."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import cp_merge, launch_map, span_of, store_map
from linattn_edu.kernels.delta.cp_merge_bwd import cp_merge_bwd
from linattn_edu.kernels.delta.warm_up import way_of
from linattn_edu.kernels.fused.gdn_fwd import SCAN_CONFIGS, entering, scan_map
from linattn_edu.kernels.gluon.kernels import gdn_scans
from linattn_edu.kernels.pieces import Pieces, whole_of
from linattn_edu.kernels.routes import Load, by_load, kind_of, load_of, scan_launch
from linattn_edu.kernels.rows import row, states
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    dot_left,
    dot_right,
    first_state,
    in_halves,
    load_gate,
    load_row,
    load_tile,
    store_halves,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "N"])
def scan_states_kernel(
    k_ptr, v_ptr, beta_ptr, gc_ptr, AG_ptr, h0_ptr, h_ptr, v_new_ptr, AG_low_ptr, v_low_ptr,
    warmup_ptr, cu_ptr, offsets_ptr, T, N,
    STEP: tl.constexpr,  # one of so many programs of the grid, the last of them
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all chunks.  Grid (N * HV * V / BV).

    Arguments of scans_kernel.  Reference: linattn_edu.reference.fused.gdn_scans.scan_states.
    """
    i_v, i_nh, i_h, first, n_seq, i_c, skip, _ = way_of(
        tl.program_id(0) // STEP, warmup_ptr, cu_ptr, offsets_ptr, T, N, HV, V, BT, BV, False
    )
    k_ptr += (first * H + i_h // (HV // H)) * K
    v_ptr += (first * HV + i_h) * V
    v_new_ptr += (first * HV + i_h) * V
    AG_ptr += (first * HV + i_h) * BT
    beta_ptr += first * HV + i_h
    gc_ptr += first * HV + i_h
    h_ptr += (i_c * HV + i_h) * K * V
    FINE: tl.constexpr = AG_low_ptr is not None
    i_low = first * HV + i_h

    o_t, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, BT, BK, BV, False)

    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_h = cast(b_S, k_ptr.dtype.element_ty)
        store_tile(h_ptr, b_h, o_k, o_v, V, tl.where(i_t < skip, 0, K), V)
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_v = load_tile(v_ptr, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_AG = load_tile(AG_ptr, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr, o_t, HV, n_t)  # [BT]
        b_beta = load_row(beta_ptr, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV)

        # eq:delta-residual   W = V - diag(2^gc) K S
        b_kS = dot_right(b_k, None, b_S, None, FINE)
        b_W = b_v.to(tl.float32) - tl.exp2(b_gc)[:, None] * b_kS
        # eq:delta-v-new   v_new = (A * G) diag(beta) W
        b_low, low_ptr = None, None
        if FINE:
            b_low = load_tile(AG_low_ptr + i_low * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
            low_ptr = v_low_ptr + i_low * V
            i_low += BT * HV
        b_v = dot_right(b_AG, b_low, b_beta[:, None] * b_W, None, FINE)
        n_v = tl.where(i_t < skip, 0, n_t)
        store_halves(v_new_ptr, low_ptr, b_v, o_t, o_v, HV * V, n_v, V)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        b_v *= tl.exp2(b_last - b_gc)[:, None]
        b_S = dot_right(tl.trans(b_k), None, b_v, b_S * tl.exp2(b_last), FINE)

        k_ptr += BT * H * K
        v_ptr += BT * HV * V
        v_new_ptr += BT * HV * V
        AG_ptr += BT * HV * BT
        beta_ptr += BT * HV
        gc_ptr += BT * HV
        h_ptr += HV * K * V


@triton.jit
def scan_bwd_step(
    b_dS, q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, P_low_ptr, AG_low_ptr, do_ptr, scale, i_h,
    first, n_t, o_t, o_k, o_v, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """dS^T [BV, BK], back through the chunk of head i_h that begins with token `first`.

    Returns Z^T and dV^T [BV, BT], and the next dS^T. Transposed, what a product makes is the first
    operand of the next: it stays in registers.
    """
    i, i_qk = first * HV + i_h, (first * H + i_h // (HV // H)) * K
    b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_AG = load_tile(AG_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
    FINE: tl.constexpr = AG_low_ptr is not None
    b_P_low, b_AG_low = None, None
    if FINE:
        b_P_low = load_tile(P_low_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_AG_low = load_tile(AG_low_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    # eq:delta-dv-new   dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
    b_dv = tl.exp2(b_last - b_gc)[None, :] * dot_left(b_dS, tl.trans(b_k), None, None, FINE)
    b_do = tl.trans(b_do).to(tl.float32) * scale
    b_dv = dot_left(b_do, b_P, b_P_low, b_dv, FINE)
    # eq:delta-z   Z = (A * G)^T dv_new
    b_Z = dot_left(b_dv, b_AG, b_AG_low, None, FINE)
    # eq:delta-dv   dV = diag(beta) Z
    b_dv = b_beta[None, :] * b_Z
    # eq:fused-ds   dS <- 2^gc_last dS + (diag(2^gc) Q)^T scale dO - (diag(2^gc) K)^T dV
    b_e = tl.exp2(b_gc)[None, :]
    b_dS = dot_left(b_e * b_do, b_q, None, b_dS * tl.exp2(b_last), FINE)
    b_dS = dot_left(-b_e * b_dv, b_k, None, b_dS, FINE)
    return b_Z, b_dv, b_dS


@triton.jit(do_not_specialize=["T", "N"])
def scan_bwd_kernel(
    q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, dht_ptr, dh_ptr, Z_ptr, dv_ptr, dh0_ptr,
    P_low_ptr, AG_low_ptr, Z_low_ptr, scale, warmup_ptr, cu_ptr, offsets_ptr, T, N,
    STEP: tl.constexpr,  # one of so many programs of the grid, the first of them
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all chunks.  Grid (N * HV * V / BV).

    Arguments of scans_kernel.  Reference: linattn_edu.reference.fused.gdn_scans.scan_bwd.
    """
    pid = (tl.num_programs(0) - 1 - tl.program_id(0)) // STEP
    i_v, i_nh, i_h, first, n_seq, i_c, skip, i_end = way_of(
        pid, warmup_ptr, cu_ptr, offsets_ptr, T, N, HV, V, BT, BV, True
    )
    o_t, o_k, o_v, b_dS = first_state(dht_ptr, i_nh, i_v, K, V, BT, BK, BV, True)
    NT = tl.cdiv(n_seq, BT)
    for i_t in range(NT):
        i_b = NT - 1 - i_t  # of the chunk, back from the last
        begin, n_t = first + i_b * BT, n_seq - i_b * BT
        b_h = cast(b_dS, dh_ptr.dtype.element_ty)
        i_S, n_k = ((i_c + i_b) * HV + i_h) * K * V, tl.where(i_t < skip, 0, K)
        store_tile(dh_ptr + i_S, tl.trans(b_h), o_k, o_v, V, n_k, V)
        b_Z, b_dv, b_dS = scan_bwd_step(
            b_dS, q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, P_low_ptr, AG_low_ptr, do_ptr,
            scale, i_h, begin, n_t, o_t, o_k, o_v, H, HV, K, V, BT,
        )  # fmt: skip
        i, n_t = begin * HV + i_h, tl.where(i_t < skip, 0, n_t)
        if Z_low_ptr is not None:
            b_Z, b_low = in_halves(b_Z, Z_ptr.dtype.element_ty)
            store_tile(Z_low_ptr + i * V, tl.trans(b_low), o_t, o_v, HV * V, n_t, V)
        b_Z = tl.trans(cast(b_Z, Z_ptr.dtype.element_ty))
        store_tile(Z_ptr + i * V, b_Z, o_t, o_v, HV * V, n_t, V)
        b_dv = tl.trans(cast(b_dv, dv_ptr.dtype.element_ty))
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
    n_k = tl.where(i_end < 0, 0, K)
    store_tile(dh0_ptr + i_end * K * V, tl.trans(b_dS), o_k, o_v, V, n_k, V)


@triton.jit(do_not_specialize=["T", "N"])
def scans_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    P_ptr, AG_ptr,  # [B, T, HV, BT]
    do_ptr,  # [B, T, HV, V]
    h0_ptr,  # [N, HV, K, V] or None
    dht_ptr,  # [N, HV, K, V] or None
    h_ptr,  # [B, NT, HV, K, V] out: state entering each chunk
    v_new_ptr,  # [B, T, HV, V] out
    dh_ptr,  # [B, NT, HV, K, V] out: gradient of the state leaving each chunk
    Z_ptr, dv_ptr,  # [B, T, HV, V] out
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    forth_ptr,  # [N, HV] or None: warmup_ptr of the states
    back_ptr,  # [N, HV] or None: of their gradients
    cu_ptr, offsets_ptr, T, N,  # of columns_of and with_warm_up
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The programs of scan_bwd, which take longer, and those of scan_states.

    Grid (2 * N * HV * V / BV).  Reference: linattn_edu.reference.fused.gdn_scans.scans.
    """
    if tl.program_id(0) % 2 == 0:
        scan_bwd_kernel(
            q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, dht_ptr, dh_ptr, Z_ptr, dv_ptr,
            dh0_ptr, None, None, None, scale, back_ptr, cu_ptr, offsets_ptr, T, N, 2, H, HV, K, V,
            BT, BK, BV,
        )  # fmt: skip
    else:
        scan_states_kernel(
            k_ptr, v_ptr, beta_ptr, gc_ptr, AG_ptr, h0_ptr, h_ptr, v_new_ptr, None, None, forth_ptr,
            cu_ptr, offsets_ptr, T, N, 2, H, HV, K, V, BT, BK, BV,
        )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def scan_map_bwd_kernel(
    q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr,  # as of scans_kernel
    dht_ptr,  # [NP, HV, K, V] or None
    map_ptr,  # [NP, HV, K, ROW] out: dS_ext, and dM where W is V + K
    left_ptr,  # [NP, HV, NW] of span_of, with NEAR out; or None
    scale,
    rows_ptr,  # [NP] or None
    cu_ptr, T,  # of span_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of map_ptr
    NEAR: tl.constexpr, NW: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of [dS_ext | dM] of one head, back through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.fused.gdn_scans.scan_map_bwd.
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
        _, _, b_dS = scan_bwd_step(
            b_dS, q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, None, None, do_ptr, scale, i_h,
            begin, n_t, o_t, o_k, o_v, H, HV, K, V, BT,
        )  # fmt: skip
    store_map(map_ptr, left_ptr, tl.trans(b_dS), i_v, i_ph, o_k, o_v, made, K, V, W, ROW, NEAR, NW)


SCAN = (row(4, 2, BV=64),)  # rows of dS^T: a product of fewer would leave tensor cores idle
# with halves a program fills a multiprocessor's shared memory: wide ones where there are enough
HALVES_BACK = row(8, 2, BV=128), *SCAN
HALVES_FORTH = tuple(row(4, 2, BV=n) for n in (64, 32, 16))


class Scans(NamedTuple):
    """The tensors of both scans in the order of scans_kernel; None: of the other scan, or zero."""

    q: Tensor | None
    k: Tensor
    v: Tensor | None
    beta: Tensor
    gc: Tensor
    P: Tensor | None
    AG: Tensor
    do: Tensor | None
    h0: Tensor | None = None
    dht: Tensor | None = None
    h: Tensor | None = None
    v_new: Tensor | None = None
    dh: Tensor | None = None
    Z: Tensor | None = None
    dv: Tensor | None = None
    dh0: Tensor | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """H, HV, K, V."""
        (H, K), v = self.k.shape[2:], self.do if self.v is None else self.v
        return H, v.shape[2], K, v.shape[3]

    @property
    def forth(self) -> tuple[Tensor | None, ...]:
        """Those of scan_states, in its kernels' order."""
        return self.k, self.v, self.beta, self.gc, self.AG, self.h0, self.h, self.v_new

    @property
    def back(self) -> tuple[Tensor | None, ...]:
        """Those of scan_bwd, in its kernels' order."""
        given = self.q, self.k, self.beta, self.gc, self.P, self.AG, self.do, self.dht
        return *given, self.dh, self.Z, self.dv, self.dh0

    def written(self, pieces: Pieces, packing: Packing | None) -> "Scans":
        """With places for what the scans write, but for a v_new, a dv or a dh0 that is there."""
        _, HV, K, V = self.sizes
        x, shape = self, (*states(self.k, self.AG.shape[-1], packing), HV, K, V)
        if x.v is not None:
            v_new = torch.empty_like(x.v) if x.v_new is None else x.v_new
            x = x._replace(h=x.k.new_empty(*shape), v_new=v_new)
        if x.do is not None:
            dv = torch.empty_like(x.do) if x.dv is None else x.dv
            dh0 = x.gc.new_empty(pieces.N, HV, K, V) if x.dh0 is None else x.dh0
            x = x._replace(dh=x.k.new_empty(*shape), Z=torch.empty_like(x.do), dv=dv, dh0=dh0)
        return x


def load(q: Tensor, v: Tensor, AG: Tensor, packing: Packing | None, *others: Tensor) -> Load:
    """What is asked about a scan that reads these tensors."""
    return load_of(kind_of(q, *v.shape[2:], AG.shape[-1], packing, (q, v, AG, *others)), q, packing)


def enter(x: Scans, gluon: bool, packing: Packing | None, scale: float | None = None) -> tuple:
    """`entering` of scan_states; with scale that of scan_bwd, for chunks behind each piece."""
    options = {"chunk_size": x.AG.shape[-1], "choice": not gluon, "packing": packing}
    decays = x.k, x.beta, x.gc, x.sizes[-1]
    if scale is None:
        given = x.k, x.v, x.gc, x.AG, None, x.beta
        return entering(decays, cp_merge, scan_map, given, x.h0, **options)
    given, options = (x.q, x.k, x.beta, x.gc, x.P, x.AG, x.do), options | {"scale": scale}
    return entering(decays, cp_merge_bwd, scan_map_bwd, given, x.dht, back=True, **options)


def scan_states(
    k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, AG: Tensor, initial_state: Tensor | None = None,
    AG_low: Tensor | None = None, ways: Tensor | None = None, *, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch scan_states_kernel; arguments and result as in the reference."""
    x = Scans(None, k, v, beta, gc, None, AG, None, initial_state)
    if AG_low is not None:  # whole sequences
        x, v_low = x.written(pieces := whole_of(k, packing), packing), torch.empty_like(v)
        _launch_forth(x, False, pieces, ways, True, AG_low, v_low)
        return x.h, x.v_new, v_low
    gluon = by_load.scans(load(k, v, AG, packing)).takes == "gluon"
    pieces, warmup, h0 = enter(x, gluon, packing)
    x = x._replace(h0=h0).written(pieces, packing)
    for i, skipped in enumerate(warmup):
        _launch_forth(x, gluon, pieces, skipped, i == 0)
    return x.h, x.v_new


def _launch_forth(x: Scans, gluon: bool, pieces: Pieces, warmup: Tensor | None, wide: bool, *low):
    """Launch the kernel, in plain Triton with the tiles that suit pieces, or whole sequences."""
    if gluon and gdn_scans.scan_states_gluon(x.forth, warmup, pieces):
        return
    H, HV, K, V = x.sizes
    table = HALVES_FORTH if low else SCAN_CONFIGS
    _, config = scan_launch(table, x.k, (pieces.N if wide else pieces.batch) * HV, V)
    scan_states_kernel[(pieces.N * HV * cdiv(V, config["BV"]),)](
        *x.forth, *(low or (None, None)), warmup, *pieces.places, pieces.chained, 1, H, HV, K, V,
        BT=x.AG.shape[-1], **config,
    )  # fmt: skip


def scan_bwd(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, P: Tensor, AG: Tensor, do: Tensor,
    dht: Tensor | None = None, low: tuple[Tensor, Tensor] | None = None, ways: Tensor | None = None,
    made: tuple[Tensor, Tensor] | None = None, *, scale: float, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch scan_bwd_kernel; arguments and result as in the reference. With low the results of
    heads of which ways [N, HV] has -1 may be anything; made: where dV and dh0 are written.
    """
    x = Scans(q, k, None, beta, gc, P, AG, do, None, dht)
    if low is not None:  # whole sequences
        dv, dh0 = made or (None, None)
        x = x._replace(dv=dv, dh0=dh0).written(pieces := whole_of(k, packing), packing)
        Z_low = torch.empty_like(do)
        _launch_back(x, False, pieces, ways, scale, *low, Z_low)
        return x.dh, x.Z, x.dv, x.dh0, Z_low
    gluon = by_load.scans(load(q, do, AG, packing, k, P)).takes == "gluon"
    pieces, warmup, dht = enter(x, gluon, packing, scale)
    x = x._replace(dht=dht).written(pieces, packing)
    for skipped in warmup:
        _launch_back(x, gluon, pieces, skipped, scale)
    return x.dh, x.Z, x.dv, pieces.first(x.dh0)


def _launch_back(x: Scans, gluon: bool, pieces: Pieces, warmup: Tensor | None, scale: float, *low):
    """Launch scan_bwd_kernel, or that in Gluon."""
    if gluon and gdn_scans.scan_bwd_gluon(x.back, scale, warmup, pieces):
        return
    H, HV, K, V = x.sizes
    rows = HALVES_BACK if low and V > 64 else SCAN
    grid, config = scan_launch(rows, x.q, pieces.N * HV, V)
    scan_bwd_kernel[grid](
        *x.back, *(low or (None,) * 3), scale, warmup, *pieces.places, pieces.chained, 1, H, HV, K,
        V,
        BT=x.AG.shape[-1], **config,
    )  # fmt: skip


def scans(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, P: Tensor, AG: Tensor, do: Tensor,
    initial_state: Tensor | None = None, dht: Tensor | Callable | None = None,
    low: tuple[Tensor, Tensor] | None = None, ways: Tensor | None = None,
    made: tuple[Tensor, Tensor] | None = None, *, scale: float, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch both scans, together or one after the other: the same bits. As in the reference, but
    that dht may be a function that waits for it, while the states are made. The results of heads of
    which ways [N, HV] has -1 may be anything; made: with low, where dV and dh0 are written.
    """
    if low is not None:
        forth = k, v, beta, gc, AG, initial_state, low[1], ways
        h, v_new, *v_low = scan_states(*forth, packing=packing)
        back = q, k, beta, gc, P, AG, do, dht, low, ways, made
        back = scan_bwd(*back, scale=scale, packing=packing)
        return h, v_new, *back[:-1], *v_low, back[-1]
    x = Scans(q, k, v, beta, gc, P, AG, do, initial_state, dht)
    gluon = by_load.scans(asked := load(q, v, AG, packing, k, P, do)).takes == "gluon"
    pieces, ahead, h0 = enter(x, gluon, packing)
    x = x._replace(h0=h0).written(pieces, packing)
    H, HV, K, V = x.sizes
    (programs,), config = scan_launch(SCAN, q, pieces.N * HV, V)
    both = (one := by_load.together(asked, programs).takes) and gluon and ahead[0] is None
    if gluon and not pieces.several:
        ahead = [ways]
    apart = not both and (gluon or not one or len(ahead) > 1)
    if apart:
        _launch_forth(x, gluon, pieces, ahead.pop(0), True)
    _, behind, dht = enter(x, gluon, packing, scale)
    if gluon and not pieces.several:
        behind = [ways]
    x = x._replace(dht=dht)
    if both and gdn_scans.scans_gluon(x, scale, *ahead, *behind, pieces):
        ahead.pop()
    elif apart:
        _launch_back(x, gluon, pieces, behind.pop(0), scale)
    if ahead:
        scans_kernel[(2 * programs,)](
            *x, scale, *ahead, *behind, *pieces.places, pieces.chained, H, HV, K, V,
            BT=AG.shape[-1], **config,
        )  # fmt: skip
    return x.h, x.v_new, x.dh, x.Z, x.dv, pieces.first(x.dh0)


def scan_map_bwd(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, P: Tensor, AG: Tensor, do: Tensor,
    dht: Tensor | None = None, *, scale: float, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch scan_map_bwd_kernel; arguments, result as in the reference; which: of launch_map."""
    given, sizes = (q, k, beta, gc, P, AG, do, dht), (q.shape[2], *do.shape[2:])
    return launch_map(
        scan_map_bwd_kernel, SCAN, given, sizes, x=q, after=(scale,),
        constants={"BT": AG.shape[-1]}, **which,
    )  # fmt: skip
