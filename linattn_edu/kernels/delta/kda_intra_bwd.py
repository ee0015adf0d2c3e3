"""Stage kda_intra_bwd: gradients of q, k, beta and the gate, from those of all that is gated."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.kda_intra import halves, pairs
from linattn_edu.kernels.tiles import (
    cast,
    chunk_args,
    chunk_of,
    device_of,
    dot,
    load_gates,
    load_row,
    load_tile,
    row,
    shared_dtype,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def kda_intra_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]
    gc_ptr,  # [B, T, HV, K] log2
    dP_ptr,  # [B, T, HV, BT]
    dL_ptr,  # [B, T, HV, BT]
    dqg_ptr,  # [B, T, HV, K]
    dkb_ptr,  # [B, T, HV, K]
    dkg_ptr,  # [B, T, HV, K]
    dgl_ptr,  # [B, NT, HV, K]
    dq_ptr,  # [B, T, HV, K] out
    dk_ptr,  # [B, T, HV, K] out
    dbeta_ptr,  # [B, T, HV] added to
    dgc_ptr,  # [B, T, HV, K] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    LEVELS: tl.constexpr,  # halvings of the chunk: log2(BT)
):
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.kda_intra_bwd.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i = first * HV + i_h
    i_k = (first * H + i_h // (HV // H)) * K
    o_t = tl.arange(0, BT)
    last = tl.minimum(BT, n_t) - 1
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)
    b_dP_ii = load_row(dP_ptr + i * BT, o_t, HV * BT + 1, n_t)
    b_dbeta = load_row(dbeta_ptr + i, o_t, HV, n_t)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr + i_k, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        dtype: tl.constexpr = b_q.dtype
        b_q = b_q.to(tl.float32)
        b_k = load_tile(k_ptr + i_k, o_t, o_k, H * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_g = load_gates(gc_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_gl = tl.load(gc_ptr + (i + last * HV) * K + o_k, mask=o_k < K, other=0.0)
        b_dqg = load_tile(dqg_ptr + i * K, o_t, o_k, HV * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_dkb = load_tile(dkb_ptr + i * K, o_t, o_k, HV * K, n_t, K).to(tl.float32)  # [BT, BK]
        b_dkg = load_tile(dkg_ptr + i * K, o_t, o_k, HV * K, n_t, K).to(tl.float32)  # [BT, BK]
        # eq:kda-outer   dQ = 2^gc * dqg, Y = 2^gc * dkb, R = 2^(gc_last - gc) * dkg
        b_dq = tl.exp2(b_g) * b_dqg
        b_Y = tl.exp2(b_g) * b_dkb
        b_R = tl.exp2(b_gl[None, :] - b_g) * b_dkg
        b_dbeta += tl.sum(b_k * b_Y, 1)
        b_dk = b_beta[:, None] * b_Y + b_R
        # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
        b_R = tl.where(o_t[:, None] == last, 0.0, b_R)
        b_dgc = b_q * b_dq + b_k * (b_beta[:, None] * b_Y - b_R)
        b_dgl = tl.load(dgl_ptr + (i_c * HV + i_h) * K + o_k, mask=o_k < K, other=0.0)
        b_dgl = tl.exp2(b_gl) * b_dgl + tl.sum(b_k * b_R, 0)
        b_dgc += tl.where(o_t[:, None] == last, b_dgl[None, :], 0.0)
        for s in range(LEVELS):
            anchor, second = halves(o_t, s)
            b_E = load_gates(gc_ptr + i * K, anchor, o_k, HV * K, n_t, K)
            b_E = tl.exp2(-tl.abs(b_g - b_E))
            o_ij = i * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
            m = pairs(o_t, s) & (o_t[:, None] < n_t)
            b_dP = tl.load(dP_ptr + o_ij, mask=m, other=0.0)  # [BT, BT]
            b_dL = tl.load(dL_ptr + o_ij, mask=m, other=0.0)  # [BT, BT]
            # of a pair the first block is read by Y, the second, times beta, by R
            b_w = tl.where(second, b_beta, 1.0)[:, None]
            b_kE = cast(b_k * b_E * b_w, dtype)
            b_qE = cast(b_q * b_E, dtype)
            # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
            b_x = dot(b_dP, b_kE)
            b_dq += b_E * b_x
            # with the rounded operand, what i gains here is what j loses below, to the last bit
            b_dgc += b_qE.to(tl.float32) * b_x
            # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
            b_x = dot(b_dL, b_kE)
            # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
            b_x = dot(tl.trans(b_dL), b_kE, b_x)
            b_x = dot(tl.trans(b_dP), b_qE, b_x)
            b_dgc += b_kE.to(tl.float32) * tl.where(second[:, None], b_x, -b_x)
            b_x *= b_E
            b_dbeta += tl.sum(tl.where(second[:, None], b_k * b_x, 0.0), 1)
            b_dk += b_w * b_x
        # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
        store_tile(dgc_ptr + i * K, b_dgc, o_t, o_k, HV * K, n_t, K)
        # eq:kda-dbeta   dbeta += rowsum(K * Y)
        # eq:kda-dk   dK = diag(beta) Y + R + diag(dP) Q
        b_dk += b_dP_ii[:, None] * b_q
        store_tile(dk_ptr + i * K, b_dk, o_t, o_k, HV * K, n_t, K)
        b_dq += b_dP_ii[:, None] * b_k
        store_tile(dq_ptr + i * K, b_dq, o_t, o_k, HV * K, n_t, K)
    tl.store(dbeta_ptr + i + o_t * HV, b_dbeta, mask=o_t < n_t)


# generation -> bytes of an element -> row. Narrower heads keep these tiles: see tiles.UNPIPELINED.
CONFIGS = {
    "turing": {2: row(4, 1, BK=16), 4: row(4, 1, BK=16)},
    "ampere": {2: row(4, 1, BK=32), 4: row(4, 1, BK=32)},
    "hopper": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
}


def kda_intra_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    dP: Tensor,
    dL: Tensor,
    dqg: Tensor,
    dkb: Tensor,
    dkg: Tensor,
    dgl: Tensor,
    dbeta: Tensor,
    *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch kda_intra_bwd_kernel; arguments and result as in the reference, but dbeta is added to
    in place.
    """
    _, T, H, K = k.shape
    HV, chunk_size = dP.shape[2:]
    dq, dk = (torch.empty_like(dqg, dtype=shared_dtype(q, HV)) for _ in range(2))
    dgc = torch.empty_like(gc)
    config = CONFIGS[device_of(k)[0]][k.element_size()].launch()
    NT, *chunks = chunk_args(k, chunk_size, packing)
    kda_intra_bwd_kernel[(NT * HV,)](
        q, k, beta, gc, dP, dL, dqg, dkb, dkg, dgl, dq, dk, dbeta, dgc, *chunks, T, H, HV, K,
        BT=chunk_size, LEVELS=chunk_size.bit_length() - 1, **config,
    )  # fmt: skip
    if H < HV:
        dq, dk = (x.unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    return dq, dk, dbeta, dgc
