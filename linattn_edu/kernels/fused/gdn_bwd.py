"""The backward pass in fused kernels: the scans, then all that is left of a chunk in one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.fused.cancel import those
from linattn_edu.kernels.fused.gdn_scans import Scans, enter, load, scans
from linattn_edu.kernels.gluon.kernels import gdn_bwd, gdn_intra_bwd, gdn_scans
from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.routes import by_kind, by_load, kind_of
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import (
    block,
    cast,
    chunk_of,
    decay_matrix,
    dot,
    dot_halves,
    in_halves,
    listed,
    load_gate,
    load_row,
    load_tile,
    significand,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "i_g"])
def intra_chunk_bwd_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV] log2
    h_ptr,  # [B, NT, HV, K, V]
    v_new_ptr, do_ptr,  # [B, T, HV, V]
    dh_ptr,  # [B, NT, HV, K, V]
    Z_ptr,  # [B, T, HV, V]
    v_low_ptr,  # [B, T, HV, V] or None
    Z_low_ptr,  # [B, T, HV, V] or None
    dq_ptr, dk_ptr,  # [B, T, H, K] out
    dq_sum_ptr,  # [B, T, H, K] fp32: of the value heads before; or None: there is one
    dk_sum_ptr,  # [B, T, H, K] fp32, or None
    dbeta_ptr, dgc_ptr,  # [B, T, HV] out
    scale,
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    i_g,  # which value head of a q/k head
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,  # whether i_g is
):  # fmt: skip
    """One program: one chunk of value head i_g of a q/k head.  Grid (NT * H).

    Reference: linattn_edu.reference.fused.gdn_bwd.intra_chunk_bwd.
    """
    pid = listed(tl.program_id(0), items_ptr, 1)
    if pid < 0:
        return
    i_h, i_c, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, H, BT)
    i_qk = (first * H + i_h) * K
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    last = tl.minimum(BT, n_t) - 1
    i = first * HV + i_h * (HV // H) + i_g
    i_S = (i_c * HV + i_h * (HV // H) + i_g) * K * V
    b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)
    b_last = tl.load(gc_ptr + i + last * HV)
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)
    # 2^gc_last <dS, S> of whole tiles, while no other holds registers; below they come from L2
    o_S = tl.arange(0, BS)
    b_S = load_tile(h_ptr + i_S, o_S, o_v, V, K, V).to(tl.float32)
    b_dS = load_tile(dh_ptr + i_S, o_S, o_v, V, K, V).to(tl.float32)
    through = tl.exp2(b_last) * tl.sum(tl.sum(b_S * b_dS, 1), 0)
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_Z = load_tile(Z_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    FINE: tl.constexpr = Z_low_ptr is not None
    b_dbeta = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
    b_v_low, b_Z_low, b_vT_low = None, None, None
    b_vT = tl.trans(b_v_new)
    if FINE:
        b_v_low = load_tile(v_low_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_Z_low = load_tile(Z_low_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_vT_low = tl.trans(b_v_low)
        b_dbeta += tl.sum(b_Z_low.to(tl.float32) * b_v.to(tl.float32), 1)
        b_written = (b_Z.to(tl.float32) + b_Z_low) * (b_v_new.to(tl.float32) + b_v_low)
        b_written = tl.sum(b_written, 1)  # beta rowsum(Z * (V - K S))
    G = decay_matrix(b_gc, o_t)
    # eq:delta-dm   dM = scale (dO v_new^T) * G
    below = o_t[:, None] > o_t[None, :]
    b_dM = dot_halves(b_do, None, b_vT, b_vT_low) * G * scale
    # no decay acts on the diagonal: it must not be in the sums of dgc, where it would cancel
    b_own = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dM, 0.0), 1)
    b_dM = tl.where(below, b_dM, 0.0)
    # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
    b_dL = tl.where(below, -dot_halves(b_Z, b_Z_low, b_vT, b_vT_low) * G, 0.0)
    # beta = one two: F and D both have one dL, rounded once, so that it cancels in dgc to the bit
    b_one, b_two = significand(b_beta)
    b_dL *= b_one[:, None]
    b_NT = tl.trans(b_two[:, None] * b_dL)
    b_dM_low, b_MT_low, b_dL_low, b_NT_low = None, None, None, None
    if FINE:
        b_dM, b_dM_low = in_halves(b_dM, b_do.dtype)
        b_dL, b_dL_low = in_halves(b_dL, b_do.dtype)
        b_NT, b_NT_low = in_halves(b_NT, b_do.dtype)
        b_MT_low = tl.trans(b_dM_low)
    else:
        b_dM, b_NT, b_dL = cast(b_dM, b_do.dtype), cast(b_NT, b_do.dtype), cast(b_dL, b_do.dtype)
    b_dgc = tl.zeros([BT], dtype=tl.float32)
    b_KF = tl.zeros([BT], dtype=tl.float32)
    b_t = tl.zeros([BT], dtype=tl.float32)
    if not FIRST:  # an iteration ahead: at their place the loop would wait for them
        o_k = tl.arange(0, BK)
        b_dq_sum = load_tile(dq_sum_ptr + i_qk, o_t, o_k, H * K, n_t, K)
        b_dk_sum = load_tile(dk_sum_ptr + i_qk, o_t, o_k, H * K, n_t, K)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr + i_qk, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        # eq:delta-dq   dQ = scale diag(2^gc) dO S^T + dM K
        b_dq = dot(b_do, tl.trans(b_h)) * (tl.exp2(b_gc) * scale)[:, None]
        b_dq = dot_halves(b_dM, b_dM_low, b_k, None, b_dq)
        b_dgc += tl.sum(b_q.to(tl.float32) * b_dq, 1)
        b_dq += b_own[:, None] * b_k.to(tl.float32)
        if not FIRST:
            b_dq += b_dq_sum
            b_dq_sum = load_tile(dq_sum_ptr + i_qk, o_t, o_k + BK, H * K, n_t, K)
        if LAST:
            store_tile(dq_ptr + i_qk, b_dq, o_t, o_k, H * K, n_t, K)
        else:
            store_tile(dq_sum_ptr + i_qk, b_dq, o_t, o_k, H * K, n_t, K)
        # eq:fused-read   F = dL K - diag(2^gc) Z S^T, here times one
        b_F = dot_halves(b_Z, b_Z_low, tl.trans(b_h), None) * -(b_one * tl.exp2(b_gc))[:, None]
        b_F = dot_halves(b_dL, b_dL_low, b_k, None, b_F)
        # eq:fused-dbeta   dbeta = rowsum(Z * V) + rowsum(K * F)
        b_KF += tl.sum(b_k.to(tl.float32) * b_F, 1)
        # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
        b_dk = dot_halves(b_v_new, b_v_low, tl.trans(b_dh), None)
        b_dk *= tl.exp2(b_last - b_gc)[:, None]
        b_t += tl.sum(b_k.to(tl.float32) * b_dk, 1)
        b_dk += b_own[:, None] * b_q.to(tl.float32) + b_two[:, None] * b_F
        # eq:fused-write   D = dK_state + dM^T Q + (diag(beta) dL)^T K
        b_D = dot_halves(tl.trans(b_dM), b_MT_low, b_q, None)
        b_D = dot_halves(b_NT, b_NT_low, b_k, None, b_D)
        b_dgc -= tl.sum(b_k.to(tl.float32) * b_D, 1)
        # eq:fused-dk   dK = diag(beta) F + D
        b_dk += b_D
        if not FIRST:
            b_dk += b_dk_sum
            b_dk_sum = load_tile(dk_sum_ptr + i_qk, o_t, o_k + BK, H * K, n_t, K)
        if LAST:
            store_tile(dk_ptr + i_qk, b_dk, o_t, o_k, H * K, n_t, K)
        else:
            store_tile(dk_sum_ptr + i_qk, b_dk, o_t, o_k, H * K, n_t, K)
    b_KF /= b_one
    if FINE:  # dbeta, without the rounding of the states that K F has
        large = b_beta > 0.5
        b_KF = tl.where(large, b_written / tl.where(large, b_beta, 1.0) - b_dbeta, b_KF)
    # eq:fused-dgc   dgc = q dq + beta k f - k d; dgc_last += sum k dk + 2^gc_last <dS, S>
    b_t = tl.where(o_t == last, 0.0, b_t)
    # [:, None]: as in wy_bwd
    through += tl.sum(b_t[:, None], 0)
    b_dgc += b_beta * b_KF - b_t + tl.where(o_t == last, through, 0.0)
    b_dbeta = cast(b_dbeta + b_KF, dbeta_ptr.dtype.element_ty)
    tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)
    tl.store(dgc_ptr + i + o_t * HV, b_dgc, mask=o_t < n_t)


# 32: with 64 columns of K one program alone would fill a multiprocessor's shared memory. Two such
# programs leave no room for L1: a register that spills is read back from L2
INTRA_OPTIONS = {"BK": 32, "num_warps": 4}
INTRA_STAGES = (2, 3), (3, 1)  # of K > 64, and of narrower heads; the same with low halves


def intra_chunk_bwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, h: Tensor, v_new: Tensor, do: Tensor,
    dh: Tensor, Z: Tensor, low: tuple[Tensor, Tensor] | None = None, *, scale: float,
    chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch the kernel that suits the GPU; arguments and result as in the reference."""
    out = tuple(map(torch.empty_like, (q, k, beta, gc)))
    given = q, k, v, beta, gc, h, v_new, do, dh, Z
    _launch_intra(given, low, None, out, scale, chunk_size, packing)
    return out


def _launch_intra(
    given: tuple[Tensor, ...], low: tuple[Tensor, Tensor] | None, items: Tensor | None,
    out: tuple[Tensor, ...], scale: float, chunk_size: int, packing: Packing | None,
) -> None:  # fmt: skip
    """Launch what writes dq, dk, dbeta and dgc. A program reads v_new and Z of its chunk whole
    before it writes dq and dk, which may lie in their place.
    """
    (_, T, H, K), (HV, V) = given[0].shape, given[2].shape[2:]
    kind = kind_of(given[0], HV, V, chunk_size, packing, (*given[:3], *given[5:]))
    gluon = by_kind.intra_chunk_bwd(kind, low is not None).takes == "gluon"
    if gluon and gdn_intra_bwd.intra_bwd_gluon(given, out, scale, low, items):
        return
    dq, dk, dbeta, dgc = out
    sums = (None, None)
    if HV > H:
        sums = tuple(torch.empty_like(given[0], dtype=torch.float32) for _ in range(2))
    NT, *chunks = chunk_args(given[0], chunk_size, packing)
    for i_g in range(HV // H):
        intra_chunk_bwd_kernel[(NT * H,)](
            *given, *(low or (None, None)), dq, dk, *sums, dbeta, dgc, scale, items, *chunks, T,
            i_g, H, HV, K, V, BT=chunk_size, BS=block(K), BV=block(V), FIRST=i_g == 0,
            LAST=i_g == HV // H - 1, num_stages=INTRA_STAGES[low is not None][K <= 64],
            **INTRA_OPTIONS,
        )  # fmt: skip


def chunk_bwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, P: Tensor, AG: Tensor, do: Tensor,
    initial_state: Tensor | None = None, dht: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None, cancels: Tensor | None = None, *, scale: float,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch scans and intra_chunk_bwd, on some heads after the others where that takes no longer,
    or both with scan_bwd in one kernel, but where dht is waited for, as in `scans`, while the
    states are made; arguments and result as in the reference.
    """
    C, given = AG.shape[-1], (q, k, v, beta, gc, P, AG, do, initial_state, dht)
    only = None if cancels is None else those(cancels, k, chunk_size=C, packing=packing)
    asked = load(q, v, AG, packing, k, P, do)
    all_in_halves = low is not None and cancels is None
    one = not all_in_halves and by_load.scan_intra_bwd(asked, callable(dht)).takes == "one"
    groups = 1 if all_in_halves else by_load.head_groups(asked, one).takes
    if one or groups > 1:
        made = _in_head_groups(groups, Scans(*given), scale, one, cancels)
    else:
        halves = low if all_in_halves else None
        h, v_new, dh, Z, dv, dh0, *rest = scans(
            *given, halves, cancels, scale=scale, packing=packing
        )
        dq, dk = (v_new, Z) if q.shape == v.shape else map(torch.empty_like, (q, k))
        out = dq, dk, torch.empty_like(beta), torch.empty_like(gc)
        read = q, k, v, beta, gc, h, v_new, do, dh, Z
        _launch_intra(read, rest or None, only and only[2], out, scale, C, packing)
        made = dq, dk, dv, *out[2:], dh0
        del h, v_new, dh, Z, rest, read
    if cancels is None:
        return made
    into = made[2], made[5]
    h, v_new, dh, Z, *_, v_low, Z_low = scans(
        *given, low, only[0], into, scale=scale, packing=packing
    )
    read = q, k, v, beta, gc, h, v_new, do, dh, Z
    _launch_intra(read, (v_low, Z_low), only[1], (*made[:2], *made[3:5]), scale, C, packing)
    return made


def _in_head_groups(
    groups: int, x: Scans, scale: float, one: bool, skip: Tensor | None
) -> tuple[Tensor, ...]:
    """chunk_bwd in Gluon, on as many groups of heads: the same bits. one: scan_bwd and
    intra_chunk_bwd in one kernel. skip: -1 for heads whose gradients may be anything, or None.
    """
    (pieces, ahead, h0), (_, behind, dht) = enter(x, True, None), enter(x, True, None, scale)
    assert ahead[0] is behind[0] is None  # by_load.head_groups: no piece has a warm-up here
    skip = None if pieces.several else skip
    out, dh0 = tuple(map(torch.empty_like, (x.q, x.k, x.v, x.beta, x.gc))), []
    for i in range(groups):
        given, (dq, dk, dv, *rest) = (
            [t.chunk(groups, 2)[i] for t in tensors] for tensors in (x[:8], out)
        )
        own = (t if t is None else t.chunk(groups, 1)[i].contiguous() for t in (h0, dht, skip))
        *ends, ways = own
        group = Scans(*given, *ends, dv=dv), (dq, dk, *rest), scale, pieces, ways
        dh0.append((_head_group_in_one if one else _head_group)(*group))
    return *out, pieces.first(torch.cat(dh0, 1) if groups > 1 else dh0[0])


def _head_group(
    own: Scans, out: tuple[Tensor, ...], scale: float, pieces: Pieces, ways: Tensor | None
) -> Tensor:
    """One of the groups, views of its heads: writes dq, dk, dv, dbeta and dgc, returns dh0. A
    function, so that its states go before those of the next are made.
    """
    own = own.written(pieces, None)
    gdn_scans.scan_states_gluon(own.forth, ways, pieces)
    gdn_scans.scan_bwd_gluon(own.back, scale, ways, pieces)
    read = *own[:5], own.h, own.v_new, own.do, own.dh, own.Z
    gdn_intra_bwd.intra_bwd_gluon(read, out, scale)
    return own.dh0


def _head_group_in_one(
    own: Scans, out: tuple[Tensor, ...], scale: float, pieces: Pieces, ways: Tensor | None
) -> Tensor:
    """The same with scan_bwd and intra_chunk_bwd in one kernel: neither dS nor Z is in memory. A
    program has read v_new of a chunk before it writes dq, which lies in its place.
    """
    dq, dk, *rest = out
    x = own._replace(do=None, v_new=dq).written(pieces, None)
    gdn_scans.scan_states_gluon(x.forth, ways, pieces)
    given, dh0 = (*x[:7], x.h, dq, own.do, own.dht), x.gc.new_empty(pieces.N, *x.h.shape[2:])
    gdn_bwd.scan_intra_bwd_gluon(given, (dq, dk, own.dv, *rest, dh0), scale, ways, pieces)
    return dh0
