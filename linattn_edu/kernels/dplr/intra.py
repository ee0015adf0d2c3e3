"""Stage dplr_intra: what the tokens of a chunk read from each other, and their gated rows.

Blocks of 16 tokens as in kda_intra, with two readers, q and a, and two writers, k and b.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.kda_intra import halves, kda_inverse_kernel, pairs
from linattn_edu.kernels.delta.solve import merge_precision
from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.tiles import (
    cast,
    chunk_of,
    dot,
    load_gates,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit
def load_before(gc_ptr, o_t, o_k, stride, n_t, K):
    """gc[o_t - 1, o_k] of one chunk, 0 for its first token; a missing token as in `load_gates`."""
    o_t = tl.minimum(o_t, n_t - 1)[:, None]
    mask = (o_t > 0) & (o_k[None, :] < K)
    return tl.load(gc_ptr + (o_t - 1) * stride + o_k[None, :], mask=mask, other=0.0)


@triton.jit
def anchor(gc_ptr, c, o_k, stride, K):
    """[1, BK]: the gate before block c, of which neither its readers nor the writers to its left
    have an exponent above 0.
    """
    return load_vector(gc_ptr + (c * 16 - 1) * stride, o_k, tl.where(c > 0, K, 0))[None, :]


@triton.jit
def load_rows(x_ptr, y_ptr, o_t, o_k, stride, n_t, K):
    """The same rows of two tensors, in fp32."""
    b_x = load_tile(x_ptr, o_t, o_k, stride, n_t, K).to(tl.float32)
    return b_x, load_tile(y_ptr, o_t, o_k, stride, n_t, K).to(tl.float32)


@triton.jit
def scores(b_q, b_a, b_k, b_b, qk, qb, ak, ab):
    """What two readers read of two writers, added to qk, qb, ak and ab."""
    b_k, b_b = tl.trans(b_k), tl.trans(b_b)
    return dot(b_q, b_k, qk), dot(b_q, b_b, qb), dot(b_a, b_k, ak), dot(b_a, b_b, ab)


@triton.jit
def left_block(q_ptr, k_ptr, a_ptr, b_ptr, gc_ptr, n_b, c, n_t, stride,
               K: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """qk, qb, ak and ab of the rows of block n_b and the columns of block c, to its left."""
    zero = tl.zeros([16, 16], dtype=tl.float32)
    b_qk, b_qb, b_ak, b_ab = zero, zero, zero, zero
    o_i, o_j = n_b * 16 + tl.arange(0, 16), c * 16 + tl.arange(0, 16)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    for j in tl.static_range((K + BK - 1) // BK):
        o_k = j * BK + tl.arange(0, BK)
        b_e = anchor(gc_ptr, n_b, o_k, stride, K)
        b_q, b_a = load_rows(q_ptr, a_ptr, o_i, o_k, stride, n_t, K)
        b_q *= tl.exp2(load_gates(gc_ptr, o_i, o_k, stride, n_t, K) - b_e)
        b_a *= tl.exp2(load_before(gc_ptr, o_i, o_k, stride, n_t, K) - b_e)
        b_k, b_b = load_rows(k_ptr, b_ptr, o_j, o_k, stride, n_t, K)
        b_e = tl.exp2(b_e - load_gates(gc_ptr, o_j, o_k, stride, n_t, K))
        # eq:dplr-qb   qb_ij = sum_d q_id b_jd 2^(gc_id - gc_jd), i >= j; qk likewise
        # eq:dplr-ab   ab_ij = sum_d a_id b_jd 2^(gp_id - gc_jd), i > j; ak likewise
        b_qk, b_qb, b_ak, b_ab = scores(
            cast(b_q, dtype), cast(b_a, dtype), cast(b_k * b_e, dtype), cast(b_b * b_e, dtype),
            b_qk, b_qb, b_ak, b_ab,
        )  # fmt: skip
    return b_qk, b_qb, b_ak, b_ab


@triton.jit
def store_scores(qk_ptr, qb_ptr, ak_ptr, L_ptr, b_qk, b_qb, b_ak, b_ab, o_i, o, stride, n_t):
    """A block of each; of ab its negative."""
    store_tile(qk_ptr, b_qk, o_i, o, stride, n_t, 16)
    store_tile(qb_ptr, b_qb, o_i, o, stride, n_t, 16)
    store_tile(ak_ptr, b_ak, o_i, o, stride, n_t, 16)
    store_tile(L_ptr, -b_ab, o_i, o, stride, n_t, 16)


@triton.jit(do_not_specialize=["T"])
def dplr_scores_kernel(
    q_ptr,  # [B, T, H, K]
    k_ptr,  # [B, T, H, K]
    a_ptr,  # [B, T, H, K]
    b_ptr,  # [B, T, H, K]
    gc_ptr,  # [B, T, H, K] log2
    L_ptr,  # [B, T, H, BT] out, fp32: -ab
    ak_ptr,  # [B, T, H, BT] out
    qb_ptr,  # [B, T, H, BT] out
    qk_ptr,  # [B, T, H, BT] out
    qg_ptr,  # [B, T, H, K] out
    kg_ptr,  # [B, T, H, K] out
    ag_ptr,  # [B, T, H, K] out
    bg_ptr,  # [B, T, H, K] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    H: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: 16 rows of one chunk of one head.  Grid (NT * H * BT / 16).

    Reference: linattn_edu.reference.dplr.intra.
    """
    NB: tl.constexpr = BT // 16
    n_b = tl.program_id(0) % NB
    i_h, _, first, n_t = chunk_of(tl.program_id(0) // NB, cu_ptr, chunks_ptr, T, H, BT)
    if n_b * 16 >= n_t:
        return
    i, i_s = (first * H + i_h) * K, (first * H + i_h) * BT
    gc_ptr += i
    o = tl.arange(0, 16)
    o_i = n_b * 16 + o
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    zero = tl.zeros([16, 16], dtype=tl.float32)
    at = H * BT

    for c in range(n_b):
        b_qk, b_qb, b_ak, b_ab = left_block(
            q_ptr + i, k_ptr + i, a_ptr + i, b_ptr + i, gc_ptr, n_b, c, n_t, H * K, K, BK
        )
        p = i_s + c * 16
        store_scores(qk_ptr + p, qb_ptr + p, ak_ptr + p, L_ptr + p, b_qk, b_qb, b_ak, b_ab, o_i, o,
                     at, n_t)  # fmt: skip

    # the block on the diagonal, in halves: the second reads, the first wrote
    b_qk, b_qb, b_ak, b_ab = zero, zero, zero, zero
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q, b_a = load_rows(q_ptr + i, a_ptr + i, o_i, o_k, H * K, n_t, K)
        b_k, b_b = load_rows(k_ptr + i, b_ptr + i, o_i, o_k, H * K, n_t, K)
        b_g = load_gates(gc_ptr, o_i, o_k, H * K, n_t, K)
        b_p = load_before(gc_ptr, o_i, o_k, H * K, n_t, K)
        own = o[:, None] == o[None, :]
        b_qk += tl.where(own, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        b_qb += tl.where(own, tl.sum(b_q * b_b, 1)[:, None], 0.0)
        for s in range(4):
            b_e = load_before(gc_ptr, n_b * 16 + halves(o, s)[0], o_k, H * K, n_t, K)
            b_f = tl.exp2(-tl.abs(b_p - b_e))
            b_e = tl.exp2(-tl.abs(b_g - b_e))
            x, y, z, t = scores(
                cast(b_q * b_e, dtype), cast(b_a * b_f, dtype), cast(b_k * b_e, dtype),
                cast(b_b * b_e, dtype), zero, zero, zero, zero,
            )  # fmt: skip
            m = pairs(o, s)
            b_qk, b_qb = b_qk + tl.where(m, x, 0.0), b_qb + tl.where(m, y, 0.0)
            b_ak, b_ab = b_ak + tl.where(m, z, 0.0), b_ab + tl.where(m, t, 0.0)
        # eq:dplr-rows   qg = 2^gc * Q, ag = 2^gp * A, kg = 2^(gc_last - gc) * K; bg likewise
        store_tile(qg_ptr + i, tl.exp2(b_g) * b_q, o_i, o_k, H * K, n_t, K)
        store_tile(ag_ptr + i, tl.exp2(b_p) * b_a, o_i, o_k, H * K, n_t, K)
        b_e = load_vector(gc_ptr + (tl.minimum(BT, n_t) - 1) * H * K, o_k, K)[None, :]
        b_e = tl.exp2(b_e - b_g)
        store_tile(kg_ptr + i, b_e * b_k, o_i, o_k, H * K, n_t, K)
        store_tile(bg_ptr + i, b_e * b_b, o_i, o_k, H * K, n_t, K)
    p = i_s + n_b * 16
    store_scores(qk_ptr + p, qb_ptr + p, ak_ptr + p, L_ptr + p, b_qk, b_qb, b_ak, b_ab, o_i, o, at,
                 n_t)  # fmt: skip
    for c in range(n_b + 1, NB):
        p = i_s + c * 16
        store_scores(qk_ptr + p, qb_ptr + p, ak_ptr + p, L_ptr + p, zero, zero, zero, zero, o_i, o,
                     at, n_t)  # fmt: skip


# generation -> bytes of an element -> row: one warp, as in kda_intra
CONFIGS = dict.fromkeys(("turing", "ampere", "hopper"), dict.fromkeys((2, 4), row(1, 1, BK=32)))


def dplr_intra(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, gc: Tensor,
    *, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch both kernels; arguments and result as in the reference."""
    B, T, H, K = k.shape
    M, *scores = (k.new_empty(B, T, H, chunk_size) for _ in range(4))
    L, rows = torch.empty_like(M, dtype=torch.float32), [torch.empty_like(k) for _ in range(4)]
    NT, *chunks = chunk_args(k, chunk_size, packing)
    dplr_scores_kernel[(NT * H * (chunk_size // 16),)](
        q, k, a, b, gc, L, *scores, *rows, *chunks, T, H, K, BT=chunk_size,
        **entry(CONFIGS, k).launch(K),
    )  # fmt: skip
    # eq:dplr-inverse   M = (I - ab)^-1
    kda_inverse_kernel[(NT * H,)](
        L, M, *chunks, T, H, BT=chunk_size, PRECISION=merge_precision(k.dtype), num_warps=1
    )
    return M, *scores, *rows
