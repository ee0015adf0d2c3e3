"""What is left of Kimi Delta Attention's backward pass when states and gradients are carried.

Each chunk by itself, in one kernel for channels that are near.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate_bwd import launch_gate_bwd
from linattn_edu.kernels.delta.kda_intra_bwd import (
    GROUP,
    launch_intra_bwd,
    launch_pairs,
    of_key_heads,
)
from linattn_edu.kernels.gluon.kernels import kda_intra_bwd as kda_intra_bwd_gluon
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.rows import chunk_args, shared_dtype, strength
from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    chunk_of,
    dot,
    dot_halves,
    gated,
    joined,
    listed,
    load_halves,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_outer_bwd_kernel(
    v_ptr, do_ptr,  # [B, T, HV, V]
    write_ptr,  # [B, T, HV, V] or None
    h_ptr, dh_ptr,  # [B, NT, HV, K, V]
    v_new_ptr, Z_ptr,  # [B, T, HV, V]; or with both halves [B, T, HV, 2 V]
    dP_ptr, dL_ptr,  # [B, T, HV, BT] out
    dqg_ptr, dkb_ptr, dkg_ptr,  # [B, T, HV, K] out
    dgl_ptr,  # [B, NT, HV, K] out
    dbeta_ptr, written_ptr,  # [B, T, HV] out, without write
    dv_ptr, dwrite_ptr,  # [B, T, HV, V] out, with write
    scale,
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.kda_bwd.kda_outer_bwd.
    """
    pid = listed(tl.program_id(0), items_ptr, 1)
    if pid < 0:
        return
    i_h, i_c, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, HV, BT)
    i, i_S = first * HV + i_h, (i_c * HV + i_h) * K * V
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V).to(tl.float32)  # [BT, BV]
    b_Z, b_Z_low = load_halves(Z_ptr, i, o_t, o_v, HV, n_t, V, FINE)  # [BT, BV]
    b_new, b_low = load_halves(v_new_ptr, i, o_t, o_v, HV, n_t, V, FINE)  # [BT, BV]
    if not FINE:
        b_Z_low, b_low = None, None
    b_low_T = tl.trans(b_low) if FINE else None
    b_x = joined(b_Z, b_Z_low)
    if write_ptr is None:
        tl.store(dbeta_ptr + i + o_t * HV, tl.sum(b_x * b_v, 1), mask=o_t < n_t)
        b_x *= joined(b_new, b_low)
        tl.store(written_ptr + i + o_t * HV, tl.sum(b_x, 1), mask=o_t < n_t)
    else:
        # dw = Z * V, dV = w * Z
        store_tile(dwrite_ptr + i * V, b_x * b_v, o_t, o_v, HV * V, n_t, V)
        b_x = gated(b_x, write_ptr + i * V, o_t, o_v, HV * V, n_t, V)
        store_tile(dv_ptr + i * V, b_x, o_t, o_v, HV * V, n_t, V)
    # eq:kda-dp   dP = scale tril(dO v_new^T)
    b_dP = scale * dot_halves(b_do, None, tl.trans(b_new), b_low_T)
    b_dP = tl.where(o_t[:, None] >= o_t[None, :], b_dP, 0.0)
    store_tile(dP_ptr + i * BT, b_dP, o_t, o_t, HV * BT, n_t, BT)
    # eq:kda-dl   dL = -tril(Z v_new^T, -1)
    b_dL = dot_halves(b_Z, b_Z_low, tl.trans(b_new), b_low_T)
    b_dL = tl.where(o_t[:, None] > o_t[None, :], -b_dL, 0.0)
    store_tile(dL_ptr + i * BT, b_dL, o_t, o_t, HV * BT, n_t, BT)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        # eq:kda-dqg   dqg = scale dO h^T
        b_dqg = scale * dot(b_do, tl.trans(b_h))
        # eq:kda-dkb   dkb = -Z S^T
        b_dkb = -dot_halves(b_Z, b_Z_low, tl.trans(b_h), None)
        # eq:kda-dkg   dkg = v_new dS^T
        b_dkg = dot_halves(b_new, b_low, tl.trans(b_dh), None)
        # eq:kda-dgl   dgl = rowsum(dS * S)
        b_dgl = tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
        # at last, when S and dS have left their shared memory to what these pass through
        store_tile(dqg_ptr + i * K, b_dqg, o_t, o_k, HV * K, n_t, K)
        store_tile(dkb_ptr + i * K, b_dkb, o_t, o_k, HV * K, n_t, K)
        store_tile(dkg_ptr + i * K, b_dkg, o_t, o_k, HV * K, n_t, K)
        tl.store(dgl_ptr + (i_c * HV + i_h) * K + o_k, b_dgl, mask=o_k < K)


# two programs of 128 values fill a multiprocessor's shared memory
OUTER_OPTIONS = {"BK": 64, "num_warps": 4, "num_stages": 1}


def kda_outer_bwd(
    v: Tensor, h: Tensor, v_new: Tensor, do: Tensor, dh: Tensor, Z: Tensor,
    write: Tensor | None = None, *, scale: float, chunk_size: int, packing: Packing | None = None,
    fine: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch kda_outer_bwd_kernel; arguments and result as in the reference; fine: v_new and Z are
    in halves, as of kda_fused_scans, and dL is in fp32.
    """
    sums = tuple(
        v.new_empty(v.shape[:3], dtype=torch.float32) if write is None else None for _ in range(2)
    )
    gates = tuple(None if write is None else torch.empty_like(x) for x in (v, write))
    given = v, h, v_new, do, dh, Z, write
    made = _launch_outer(given, (*sums, *gates), scale, chunk_size, packing, fine, None)
    return *made, *(sums if write is None else (None, *gates))


def _launch_outer(
    given: tuple[Tensor | None, ...], out: tuple[Tensor | None, ...], scale: float,
    chunk_size: int, packing: Packing | None, fine: bool, items: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Write rowsum(Z * V) and rowsum(Z * v_new), or dv and the gradient of write; return the rest
    of what kda_outer_bwd makes. items: of `listed`, or None: all.
    """
    v, h, v_new, do, dh, Z, write = given
    (B, T, HV, V), K = v.shape, h.shape[3]
    new = partial(v.new_empty, dtype=torch.float32)
    dP = new(B, T, HV, chunk_size)
    dL = torch.empty_like(dP, dtype=None if fine else v.dtype)
    rows, dgl = tuple(new(B, T, HV, K) for _ in range(3)), new(*h.shape[:4])
    NT, *chunks = chunk_args(v, chunk_size, packing)
    kda_outer_bwd_kernel[(NT * HV,)](
        v, do, write, h, dh, v_new, Z, dP, dL, *rows, dgl, *out, scale, items, *chunks, T,
        HV, K, V, BT=chunk_size, BV=block(V), FINE=fine, **OUTER_OPTIONS,
    )  # fmt: skip
    return dP, dL, *rows, dgl


def kda_fused_intra_bwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, h: Tensor, v_new: Tensor, do: Tensor,
    dh: Tensor, Z: Tensor, write: Tensor | None = None, *, scale: float, chunk_size: int,
    packing: Packing | None = None, fine: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the kernel in Gluon, and kda_intra_bwd_kernel for the channels that are not near, or
    else kda_outer_bwd and kda_intra_bwd; arguments and result as in the reference, but that Z may
    be overwritten; fine: v_new and Z are in halves, as of kda_fused_scans.
    """
    given, out = (q, k, v, beta, gc, h, v_new, do, dh, Z, write), gradients(q, v, beta, gc, write)
    launch_left(given, out, None, scale, chunk_size, packing, fine, None)
    return of_chunks(out, q)


def gradients(
    q: Tensor, v: Tensor, beta: Tensor, gc: Tensor, write: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Room for dq and dk of each value head, dbeta, dgc, and with write dv and its gradient."""
    dq, dk = (torch.empty_like(gc, dtype=shared_dtype(q, gc.shape[2])) for _ in range(2))
    dbeta = torch.empty_like(beta, dtype=torch.float32 if write is None else None)
    gates = (None if write is None else torch.empty_like(x) for x in (v, write))
    return dq, dk, dbeta, torch.empty_like(gc), *gates


def of_chunks(out: tuple[Tensor | None, ...], q: Tensor) -> tuple[Tensor, ...]:
    """What kda_fused_intra_bwd returns, from `gradients`."""
    dq, dk, dbeta, dgc, *gates = out
    return *of_key_heads(dq, dk, q), dbeta, dgc, *(x for x in gates if x is not None)


def launch_left(
    given: tuple[Tensor | None, ...], out: tuple[Tensor | None, ...], near: Tensor | None,
    scale: float, chunk_size: int, packing: Packing | None, fine: bool, items: Tensor | None,
) -> bool:  # fmt: skip
    """Write `gradients` from the tensors that kda_fused_intra_bwd is given; say whether in Gluon.

    near: where it says then of which channels dgc is dg already, or None: it never is. items: of
    `listed`, or None: all.
    """
    q, k, v, beta, gc, h, v_new, do, dh, Z, write = given
    dq, dk, dbeta, dgc, dv, dwrite = out
    (_, _, HV, V), own, erase = v.shape, *strength(beta)
    kind = kind_of(q, HV, V, chunk_size, packing, (q, k, v, gc, h, v_new, do, dh, Z))
    gates = () if write is None else (erase.dtype, write.dtype)
    precision = "halves" if fine else "tf32x3"
    if by_kind.kda_fused_intra_bwd(kind, fine, *gates).takes == "gluon":
        said, summed = near_of(k, h) if near is None else near, near is not None
        dgl = v.new_empty(*h.shape[:4], dtype=torch.float32)
        tensors = q, k, v, own, erase, gc, h, v_new, do, dh, Z, write
        made = dgl, dq, dk, dbeta, dgc, dv, dwrite
        # a chunk's Z is read before dP and dL are written
        dP = Z.view(torch.float32) if fine else Z
        inner = dP, dP[..., chunk_size:]
        options = scale, summed, fine, items
        if kda_intra_bwd_gluon.kda_intra_bwd_gluon(tensors, made, said, inner, *options):
            tensors = q, k, beta, gc, *inner, dq, dk, dgc, dgl, dq, dk, dbeta, dgc
            launch_pairs(tensors, said, packing, chunk_size, V, True, precision, items)
            return True
    sums = None, None
    if write is None:
        sums = dbeta, (torch.zeros_like if fine else torch.empty_like)(dbeta)
    rows = v, h, v_new, do, dh, Z, write
    outer = _launch_outer(rows, (*sums, dv, dwrite), scale, chunk_size, packing, fine, items)
    launch_intra_bwd((q, k, beta, gc, *outer, *out[:4]), packing, precision, items)
    if fine and write is None:  # beta dbeta = rowsum(Z * v_new), without the states' rounding
        some = (beta > 0.5) & (sums[1] != 0)  # 0 of what is not listed
        dbeta.copy_(torch.where(some, sums[1] / beta, dbeta))
    return False


def near_of(k: Tensor, h: Tensor) -> Tensor:
    """Room for what is near: [B * NT * HV, groups of channels], where h is [B, NT, HV, K, V]."""
    return k.new_empty(h.shape[:3].numel(), cdiv(k.shape[-1], GROUP.value), dtype=torch.int8)


def kda_intra_gate_bwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, h: Tensor, v_new: Tensor, do: Tensor,
    dh: Tensor, Z: Tensor, g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None,
    write: Tensor | None = None, *, scale: float, lower_bound: float | None = None, chunk_size: int,
    packing: Packing | None = None, fine: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch kda_fused_intra_bwd's kernels, the one in Gluon so that it sums dgc of near channels
    itself, and gate_bwd_kernel; arguments and result as in the reference and kda_fused_intra_bwd,
    but Z is overwritten.
    """
    given, out = (q, k, v, beta, gc, h, v_new, do, dh, Z, write), gradients(q, v, beta, gc, write)
    near = near_of(k, h)
    summed = launch_left(given, out, near, scale, chunk_size, packing, fine, None)
    dq, dk, dbeta, dgc, *more = of_chunks(out, q)
    dg, dA_log, ddt_bias = launch_gate_bwd(
        dgc, g, A_log, dt_bias, near if summed else None, lower_bound, chunk_size, packing
    )
    return dq, dk, dbeta, dg, dA_log, ddt_bias, *more
