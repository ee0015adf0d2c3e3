"""Stage output_bwd: the adjoint of output."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import (
    by_key,
    cast,
    chunk_args,
    chunk_of,
    decay_matrix,
    decay_matrix_transposed,
    dot,
    load_gate,
    load_tile,
    row,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def output_bwd_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    v_new_ptr,  # [B, T, HV, V]
    h_ptr,  # [B, NT, HV, K, V]
    gc_ptr,  # [B, T, HV] log2
    do_ptr,  # [B, T, HV, V]
    dq_ptr,  # [B, T, H, K] out
    dk_ptr,  # [B, T, H, K] out
    dv_ptr,  # [B, T, HV, V] out
    dgc_ptr,  # [NK, B, T, HV] out
    scale,
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    total,  # B * T
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program: one chunk of one q/k head, BK key columns.  Grid (NT * H, K / BK).

    It adds up the value heads of the q/k head. The first of the K / BK programs writes dv_new and
    the part of dgc that needs all of K. Matrices that a product needs transposed are computed so:
    see chapter 08.
    Reference: linattn_edu.reference.delta.output_bwd.
    """
    i_k = tl.program_id(1)
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    q_ptr += (first * H + i_h) * K
    k_ptr += (first * H + i_h) * K
    o_t = tl.arange(0, BT)
    o_k = i_k * BK + tl.arange(0, BK)
    b_MT = tl.zeros([BT, BT], dtype=tl.float32)  # K Q^T
    for j in range(tl.cdiv(K, BK)):
        o_j = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr, o_t, o_j, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr, o_t, o_j, H * K, n_t, K)  # [BT, BK]
        b_MT = dot(b_k, tl.trans(b_q), b_MT)
    b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_dq = tl.zeros([BT, BK], dtype=tl.float32)
    b_dk = tl.zeros([BT, BK], dtype=tl.float32)

    for i_hv in range(i_h * (HV // H), (i_h + 1) * (HV // H)):
        i_v = first * HV + i_hv
        b_gc = load_gate(gc_ptr + i_v, o_t, HV, n_t)
        GT = decay_matrix_transposed(b_gc, o_t) * scale
        b_PT = cast(b_MT * GT, do_ptr.dtype.element_ty)
        b_dM = tl.zeros([BT, BT], dtype=tl.float32)
        b_dMT = tl.zeros([BT, BT], dtype=tl.float32)
        b_inter = tl.zeros([BT, BK], dtype=tl.float32)
        for j in range(tl.cdiv(V, BV)):
            o_v = j * BV + tl.arange(0, BV)
            b_do = load_tile(do_ptr + i_v * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_v = load_tile(v_new_ptr + i_v * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
            b_h = load_tile(h_ptr + (i_c * HV + i_hv) * K * V, o_k, o_v, V, K, V)  # [BK, BV]
            b_dM = dot(b_do, tl.trans(b_v), b_dM)
            b_dMT = dot(b_v, tl.trans(b_do), b_dMT)
            b_inter = dot(b_do, tl.trans(b_h), b_inter)
            # eq:delta-dv-out   dv_new = scale P^T dO
            if i_k == 0:
                store_tile(dv_ptr + i_v * V, dot(b_PT, b_do), o_t, o_v, HV * V, n_t, V)

        # eq:delta-dm   dM = scale (dO v_new^T) * G
        b_dM *= decay_matrix(b_gc, o_t) * scale
        b_dMT *= GT
        # eq:delta-dq-inter   scale diag(2^gc) dO h^T
        b_inter *= tl.exp2(b_gc)[:, None] * scale
        # eq:delta-dgc-out   dgc = rowsum(Q * inter) + rowsum(dM * M) - colsum(dM * M)
        b_dgc = tl.sum(b_q.to(tl.float32) * b_inter, 1)
        if i_k == 0:
            # transposed; without the diagonal, which is in both sums and would only be rounded
            X = tl.where(o_t[:, None] != o_t[None, :], b_dMT * b_MT, 0.0)
            b_dgc += tl.sum(X, 0) - tl.sum(X, 1)
        tl.store(dgc_ptr + i_k.to(tl.int64) * total * HV + i_v + o_t * HV, b_dgc, mask=o_t < n_t)
        # eq:delta-dq   dQ = inter + dM K
        b_dq = dot(cast(b_dM, b_k.dtype), b_k, b_dq + b_inter)
        # eq:delta-dk-out   dK = dM^T Q
        b_dk = dot(cast(b_dMT, b_q.dtype), b_q, b_dk)

    store_tile(dq_ptr + (first * H + i_h) * K, b_dq, o_t, o_k, H * K, n_t, K)
    store_tile(dk_ptr + (first * H + i_h) * K, b_dk, o_t, o_k, H * K, n_t, K)


# generation -> bytes of an element -> keys up to -> row. Narrower heads keep these tiles: see
# tiles.UNPIPELINED.
CONFIGS = {
    "turing": {
        2: {64: row(4, 1, BK=64, BV=32), 256: row(4, 1, BK=64, BV=32)},
        4: {64: row(4, 1, BK=32, BV=32), 256: row(4, 1, BK=32, BV=32)},
    },
    "ampere": {
        2: {64: row(4, 1, BK=64, BV=32), 256: row(4, 1, BK=64, BV=32)},
        4: {64: row(4, 1, BK=32, BV=32), 256: row(4, 1, BK=32, BV=32)},
    },
    "hopper": {
        2: {64: row(4, 2, BK=64, BV=64), 256: row(8, 2, BK=128, BV=64)},
        4: {64: row(4, 1, BK=64, BV=32), 256: row(4, 1, BK=64, BV=32)},
    },
}


def output_bwd(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    gc: Tensor,
    do: Tensor,
    *,
    scale: float,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch output_bwd_kernel; arguments and result as in the reference."""
    B, T, H, K = q.shape
    HV, V = v_new.shape[2:]
    _, config = by_key(CONFIGS, q)
    NK = triton.cdiv(K, config["BK"])
    dq, dk, dv_new = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v_new)
    dgc = gc.new_empty(NK, B, T, HV)
    NT, *chunks = chunk_args(q, chunk_size, packing)
    output_bwd_kernel[(NT * H, NK)](
        q, k, v_new, h, gc, do, dq, dk, dv_new, dgc,
        scale, *chunks, T, B * T, H, HV, K, V, BT=chunk_size, **config,
    )  # fmt: skip
    dgc = dgc[0] if NK == 1 else dgc.sum(0)
    return dq, dk, dv_new, dgc
