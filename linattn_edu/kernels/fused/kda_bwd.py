"""What is left of Kimi Delta Attention's backward pass when states and gradients are carried.

Each chunk by itself, in one kernel for channels that are near.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate_bwd import launch_gate_bwd
from linattn_edu.kernels.delta.kda_intra_bwd import GROUP, kda_intra_bwd, launch_pairs
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
    cu_ptr, chunks_ptr, T,  # of chunk_of
    HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.kda_bwd.kda_outer_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
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
    B, T, HV, V = v.shape
    K = h.shape[3]
    new = partial(v.new_empty, dtype=torch.float32)
    dP = new(B, T, HV, chunk_size)
    dL = torch.empty_like(dP, dtype=None if fine else v.dtype)
    rows, dgl = tuple(new(B, T, HV, K) for _ in range(3)), new(*h.shape[:4])
    sums = tuple(new(B, T, HV) if write is None else None for _ in range(2))
    gates = tuple(None if write is None else torch.empty_like(x) for x in (v, write))
    NT, *chunks = chunk_args(v, chunk_size, packing)
    kda_outer_bwd_kernel[(NT * HV,)](
        v, do, write, h, dh, v_new, Z, dP, dL, *rows, dgl, *sums, *gates, scale, *chunks, T,
        HV, K, V, BT=chunk_size, BV=block(V), FINE=fine, **OUTER_OPTIONS,
    )  # fmt: skip
    return dP, dL, *rows, dgl, *(sums if write is None else (None, *gates))


def kda_fused_intra_bwd(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, h: Tensor, v_new: Tensor, do: Tensor,
    dh: Tensor, Z: Tensor, write: Tensor | None = None, *, scale: float, chunk_size: int,
    packing: Packing | None = None, fine: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the kernel in Gluon, and kda_intra_bwd_kernel for the channels that are not near, or
    else kda_outer_bwd and kda_intra_bwd; arguments and result as in the reference, but that Z may
    be overwritten; fine: v_new and Z are in halves, as of kda_fused_scans.
    """
    given = q, k, v, beta, gc, h, v_new, do, dh, Z, write
    return _launch(given, scale, chunk_size, packing, False, fine)[0]


def _launch(
    given: tuple[Tensor, ...], scale: float, chunk_size: int, packing: Packing | None,
    summed: bool, fine: bool,
) -> tuple[tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """What kda_fused_intra_bwd returns; and, where dgc of near channels is dg already, near.

    summed: whether that may be so.
    """
    q, k, v, beta, gc, h, v_new, do, dh, Z, write = given
    (B, T, HV, V), K = v.shape, k.shape[3]
    own, erase = strength(beta)
    kind = kind_of(q, HV, V, chunk_size, packing, (q, k, v, gc, h, v_new, do, dh, Z))
    gates = () if write is None else (erase.dtype, write.dtype)
    precision = "halves" if fine else "tf32x3"
    if by_kind.kda_fused_intra_bwd(kind, fine, *gates).takes == "gluon":
        dq, dk = (v.new_empty(B, T, HV, K, dtype=shared_dtype(q, HV)) for _ in range(2))
        dbeta = torch.empty_like(beta, dtype=torch.float32 if write is None else None)
        dv, dwrite = (None if write is None else torch.empty_like(x) for x in (v, write))
        dgc, dgl = torch.empty_like(gc), v.new_empty(*h.shape[:4], dtype=torch.float32)
        near = k.new_empty(dgl.shape[:3].numel(), cdiv(K, GROUP.value), dtype=torch.int8)
        tensors = q, k, v, own, erase, gc, h, v_new, do, dh, Z, write
        out = dgl, dq, dk, dbeta, dgc, dv, dwrite
        # a chunk's Z is read before dP and dL are written
        dP = Z.view(torch.float32) if fine else Z
        inner = dP, dP[..., chunk_size:]
        if kda_intra_bwd_gluon.kda_intra_bwd_gluon(tensors, out, near, inner, scale, summed, fine):
            tensors = q, k, beta, gc, *inner, dq, dk, dgc, dgl, dq, dk, dbeta, dgc
            found = launch_pairs(tensors, near, packing, chunk_size, V, True, precision)
            return found if write is None else (*found, dv, dwrite), near if summed else None
    options = {"scale": scale, "chunk_size": chunk_size, "packing": packing, "fine": fine}
    outer = kda_outer_bwd(v, h, v_new, do, dh, Z, write, **options)
    options = {"packing": packing, "precision": precision}
    dq, dk, dbeta, dgc = kda_intra_bwd(q, k, beta, gc, *outer[:7], **options)
    if fine and write is None:  # beta dbeta = rowsum(Z * v_new), without the states' rounding
        dbeta = torch.where(beta > 0.5, outer[7] / beta, dbeta)
    return (dq, dk, dbeta, dgc, *(() if write is None else outer[7:])), None


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
    given = q, k, v, beta, gc, h, v_new, do, dh, Z, write
    (dq, dk, dbeta, dgc, *more), near = _launch(given, scale, chunk_size, packing, True, fine)
    dg, dA_log, ddt_bias = launch_gate_bwd(
        dgc, g, A_log, dt_bias, near, lower_bound, chunk_size, packing
    )
    return dq, dk, dbeta, dg, dA_log, ddt_bias, *more
