"""What is left of Kimi Delta Attention's backward pass when states and gradients are carried.

Each chunk by itself, in one kernel for channels that are near.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate_bwd import launch_gate_bwd
from linattn_edu.kernels.delta.kda_intra_bwd import GROUP, are_near, launch_pairs, middle, near_sums
from linattn_edu.kernels.gluon.kernels import kda_intra_bwd as kda_intra_bwd_gluon
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.rows import chunk_args, shared_dtype, strength
from linattn_edu.kernels.tiles import (
    block,
    cast,
    cdiv,
    chunk_of,
    dot,
    gated,
    in_halves,
    load_gates,
    load_row,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_fused_intra_bwd_kernel(
    q_ptr, k_ptr, v_ptr,
    beta_ptr,  # [B, T, HV], or None
    erase_ptr,  # [B, T, HV, K] in the place of beta, or None
    gc_ptr,  # [B, T, HV, K] log2
    h_ptr, v_new_ptr, do_ptr, dh_ptr, Z_ptr,  # these as of gdn_bwd.intra_chunk_bwd_kernel
    write_ptr,  # [B, T, HV, V] with erase, or None
    dP_ptr,  # [B, T, HV, PW] out: of chunks with channels that are not near; Z may be here
    dL_ptr,  # [B, T, HV, PW] out: as dP
    dgl_ptr,  # [B, NT, HV, K] out: all that dgc_last gets
    dq_ptr,  # [B, T, HV, K] out; dqg of channels that are not near
    dk_ptr,  # [B, T, HV, K] out; dkb of channels that are not near
    dbeta_ptr,  # [B, T, HV] out, without the channels that are not near; or [B, T, HV, K]
    dgc_ptr,  # [B, T, HV, K] out; dkg of channels that are not near
    dv_ptr,  # [B, T, HV, V] out, with write
    dwrite_ptr,  # [B, T, HV, V] out, with write
    near_ptr,  # [B, NT, HV, NG] out: whether the channels of a group are near
    scale,
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BN: tl.constexpr,  # all channels, in whole groups
    PW: tl.constexpr,  # from head to head of dP and dL
):  # fmt: skip
    """One program: one chunk of one head, its channels that are near.  Grid (NT * HV).

    What kda_intra_bwd reads of the others is stored in the place of what it writes.

    Reference: linattn_edu.reference.fused.kda_bwd.kda_fused_intra_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i = first * HV + i_h
    i_S = (i_c * HV + i_h) * K * V
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    gc_ptr += i * K
    dgl_ptr += (i_c * HV + i_h) * K
    o_t, o_v = tl.arange(0, BT), tl.arange(0, BV)
    last = tl.minimum(BT, n_t) - 1
    b_Z = load_tile(Z_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_v_new = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    if erase_ptr is None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)[:, None]
    NG: tl.constexpr = (K + GROUP - 1) // GROUP
    o_n = tl.arange(0, BN // GROUP)
    b_near = are_near(gc_ptr, HV * K, n_t, K, BT, BN)
    tl.store(near_ptr + (i_c * HV + i_h) * NG + o_n, b_near, mask=o_n < NG)
    near = tl.sum(b_near.to(tl.int32) << o_n, 0)  # a bit for each group
    far = tl.sum((o_n < NG).to(tl.int32) << o_n, 0) & ~near
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    if erase_ptr is None:
        b_dbeta = tl.sum(b_Z.to(tl.float32) * b_v.to(tl.float32), 1)
    else:
        # dw = Z * V, dV = w * Z
        b_dw = b_Z.to(tl.float32) * b_v.to(tl.float32)
        store_tile(dwrite_ptr + i * V, b_dw, o_t, o_v, HV * V, n_t, V)
        b_dv = gated(b_Z.to(tl.float32), write_ptr + i * V, o_t, o_v, HV * V, n_t, V)
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
    # eq:kda-dp   dP = scale tril(dO v_new^T)
    b_dP = scale * dot(b_do, tl.trans(b_v_new))
    b_dP_ii = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dP, 0.0), 1)[:, None]
    # eq:kda-dl   dL = -tril(Z v_new^T, -1)
    b_dL = -dot(b_Z, tl.trans(b_v_new))
    below = o_t[:, None] > o_t[None, :]
    if far != 0:
        b_x = tl.where(o_t[:, None] >= o_t[None, :], b_dP, 0.0)
        store_tile(dP_ptr + i * PW, b_x, o_t, o_t, HV * PW, n_t, BT)
        store_tile(dL_ptr + i * PW, tl.where(below, b_dL, 0.0), o_t, o_t, HV * PW, n_t, BT)
    b_dP = tl.where(below, b_dP, 0.0)
    b_dP, b_low = in_halves(b_dP, dtype)
    b_dL = cast(tl.where(below, b_dL, 0.0), dtype)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        is_near = (near >> (j * BK // GROUP)) & 1 != 0
        b_h = load_tile(h_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_dh = load_tile(dh_ptr + i_S, o_k, o_v, V, K, V)  # [BK, BV]
        b_ga = load_vector(gc_ptr + middle(n_t, BT) * HV * K, o_k, K)
        b_gl = load_vector(gc_ptr + last * HV * K, o_k, K)
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_g = load_gates(gc_ptr, o_t, o_k, HV * K, n_t, K) - b_ga[None, :]  # [BT, BK]
        if erase_ptr is not None:
            b_beta = load_tile(erase_ptr + i * K, o_t, o_k, HV * K, n_t, K).to(tl.float32)
        # eq:kda-dqg   dqg = scale dO h^T
        b_dqg = scale * dot(b_do, tl.trans(b_h))
        # eq:kda-dkb   dkb = -Z S^T
        b_dkb = -dot(b_Z, tl.trans(b_h))
        # eq:kda-dkg   dkg = v_new dS^T
        b_dkg = dot(b_v_new, tl.trans(b_dh))
        # eq:kda-dgl   dgl = rowsum(dS * S)
        b_dgl = tl.sum(b_dh.to(tl.float32) * b_h.to(tl.float32), 1)
        # not by 2^-b_g, so that it is right of channels that are not near, too
        b_left = tl.exp2((b_gl - b_ga)[None, :] - b_g)
        b_dq, b_Y, b_R, b_dgc, b_dgl = near_sums(
            b_q, b_k, b_g, b_beta, b_dP, b_low, b_dL, None, b_dqg, b_dkb, b_dkg, b_dgl, b_ga, b_gl,
            b_left, o_t, last, dtype,
        )  # fmt: skip
        tl.store(dgl_ptr + o_k, b_dgl, mask=o_k < K)
        # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
        b_dgc = tl.where(is_near, b_dgc, b_dkg)
        store_tile(dgc_ptr + i * K, b_dgc, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dbeta   dbeta += rowsum(K * Y)
        if erase_ptr is None:
            b_dbeta += tl.where(is_near, tl.sum(b_k * b_Y, 1), 0.0)
        else:
            store_tile(dbeta_ptr + i * K, b_k * b_Y, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dk   dk = diag(beta) Y + R + diag(dP) Q
        b_R = tl.where(is_near, b_R + b_beta * b_Y + b_dP_ii * b_q, b_dkb)
        store_tile(dk_ptr + i * K, b_R, o_t, o_k, HV * K, n_t, K)
        b_dq = tl.where(is_near, b_dq + b_dP_ii * b_k, b_dqg)
        store_tile(dq_ptr + i * K, b_dq, o_t, o_k, HV * K, n_t, K)
    if erase_ptr is None:
        tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)


INTRA_OPTIONS = {"BK": 16, "num_warps": 4, "num_stages": 2}


def kda_fused_intra_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    write: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, ...]:
    """Launch kda_fused_intra_bwd_kernel or that in Gluon, and kda_intra_bwd_kernel for the channels
    that are not near; arguments and result as in the reference, but Z is overwritten.

    Of bfloat16, which holds a factor of 2^NEAR, and rows of whole words, without which a loop over
    columns of 16 could not be pipelined.
    """
    given = q, k, v, beta, gc, h, v_new, do, dh, Z, write
    return _launch(given, scale, chunk_size, packing, False)[0]


def _launch(
    given: tuple[Tensor, ...], scale: float, chunk_size: int, packing: Packing | None, summed: bool
) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """What kda_fused_intra_bwd returns; and, where dgc of near channels is dg already, near.

    summed: whether that may be so.
    """
    q, k, v, beta, gc, h, v_new, do, dh, Z, write = given
    assert k.dtype == torch.bfloat16 and k.shape[-1] % 2 == v.shape[-1] % 2 == 0
    B, T, H, K = k.shape
    HV, V = v.shape[2:]
    dq, dk = (v.new_empty(B, T, HV, K, dtype=shared_dtype(q, HV)) for _ in range(2))
    dbeta = torch.empty_like(beta, dtype=torch.float32 if write is None else None)
    dgc = torch.empty_like(gc)
    dv, dwrite = (None if write is None else torch.empty_like(x) for x in (v, write))
    dgl = v.new_empty(*h.shape[:4], dtype=torch.float32)
    if 2 * chunk_size <= V:  # a chunk's Z is read before dP and dL are written
        dP, dL, width = Z, Z[..., chunk_size:], V
    else:
        (dP, dL), width = (v.new_empty(B, T, HV, chunk_size) for _ in range(2)), chunk_size
    NT, *chunks = chunk_args(v, chunk_size, packing)
    near = k.new_empty(NT * HV, cdiv(K, GROUP.value), dtype=torch.int8)
    own, erase = strength(beta)
    tensors = q, k, v, own, erase, gc, h, v_new, do, dh, Z, write
    copied = q, k, v, gc, h, v_new, do, dh, Z
    kind = kind_of(q, HV, V, chunk_size, packing, copied)
    gates = () if write is None else (erase.dtype, write.dtype)
    gluon = by_kind.kda_fused_intra_bwd(kind, *gates).takes == "gluon"
    out = dgl, dq, dk, dbeta, dgc, dv, dwrite
    launched = gluon and kda_intra_bwd_gluon.kda_intra_bwd_gluon(tensors, out, near, scale, summed)
    if not launched:
        kda_fused_intra_bwd_kernel[(NT * HV,)](
            *tensors, dP, dL, *out, near, scale, *chunks, T, H, HV, K, V,
            BT=chunk_size, BV=block(V), BN=max(block(K), GROUP.value), PW=width, **INTRA_OPTIONS,
        )  # fmt: skip
    tensors = q, k, beta, gc, dP, dL, dq, dk, dgc, dgl, dq, dk, dbeta, dgc
    found = launch_pairs(tensors, near, packing, chunk_size, width, summed=True)
    found = found if write is None else (*found, dv, dwrite)
    return found, near if launched and summed else None


def kda_intra_gate_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Tensor | None = None,
    *,
    scale: float,
    lower_bound: float | None = None,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:
    """Launch kda_fused_intra_bwd's kernels, the one in Gluon so that it sums dgc of near channels
    itself, and gate_bwd_kernel; arguments and result as in the reference, but Z is overwritten.
    """
    given = q, k, v, beta, gc, h, v_new, do, dh, Z, write
    (dq, dk, dbeta, dgc, *more), near = _launch(given, scale, chunk_size, packing, True)
    dg, dA_log, ddt_bias = launch_gate_bwd(
        dgc, g, A_log, dt_bias, near, lower_bound, chunk_size, packing
    )
    return dq, dk, dbeta, dg, dA_log, ddt_bias, *more
