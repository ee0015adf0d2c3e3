"""Stage dplr_intra: what the tokens of a chunk read from each other, and their gated rows.

Blocks of 16 tokens as in kda_intra, with two readers, q and a, and two writers, k and b. a reads
before the decay of its token, as q of the token before reads after its own: a program of 16 tokens
takes their q and the a one token later, which share the gates' factors and the mask.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.kda_intra import (
    FAR,
    NEAR,
    halves,
    halving,
    kda_inverse_kernel,
    pairs,
)
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
def load_rows(x_ptr, y_ptr, o_t, o_k, stride, n_t, K):
    """The same rows of two tensors, in fp32."""
    b_x = load_tile(x_ptr, o_t, o_k, stride, n_t, K).to(tl.float32)
    return b_x, load_tile(y_ptr, o_t, o_k, stride, n_t, K).to(tl.float32)


@triton.jit
def load_readers(q_ptr, a_ptr, o_t, o_k, stride, n_t, K):
    """Rows o_t of q and o_t + 1 of a, or of what is theirs, in fp32; n_t: tokens of the chunk."""
    b_q = load_tile(q_ptr, o_t, o_k, stride, n_t, K).to(tl.float32)
    return b_q, load_tile(a_ptr + stride, o_t, o_k, stride, n_t - 1, K).to(tl.float32)


@triton.jit
def scores(b_q, b_a, b_k, b_b, qk, qb, ak, ab):
    """What two readers read of two writers, added to qk, qb, ak and ab."""
    b_k, b_b = tl.trans(b_k), tl.trans(b_b)
    return dot(b_q, b_k, qk), dot(b_q, b_b, qb), dot(b_a, b_k, ak), dot(b_a, b_b, ab)


@triton.jit
def halved(q_ptr, k_ptr, a_ptr, b_ptr, gc_ptr, n_b, n_t, stride, K: tl.constexpr,
           BK: tl.constexpr):  # fmt: skip
    """qk, qb, ak and ab of block n_b on the diagonal: right for any gate."""
    o = tl.arange(0, 16)
    o_i = n_b * 16 + o
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    zero = tl.zeros([16, 16], dtype=tl.float32)
    b_qk, b_qb, b_ak, b_ab = zero, zero, zero, zero
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q, b_a = load_readers(q_ptr, a_ptr, o_i, o_k, stride, n_t, K)
        b_k, b_b = load_rows(k_ptr, b_ptr, o_i, o_k, stride, n_t, K)
        b_g = load_gates(gc_ptr, o_i, o_k, stride, n_t, K)
        m = o[:, None] == o[None, :]
        b_qk += tl.where(m, tl.sum(b_q * b_k, 1)[:, None], 0.0)
        b_qb += tl.where(m, tl.sum(b_q * b_b, 1)[:, None], 0.0)
        b_ak += tl.where(m, tl.sum(b_a * b_k, 1)[:, None], 0.0)
        b_ab += tl.where(m, tl.sum(b_a * b_b, 1)[:, None], 0.0)
        for s in range(4):
            b_e = load_gates(gc_ptr, n_b * 16 + halves(o, s)[0], o_k, stride, n_t, K)
            b_e = tl.exp2(-tl.abs(b_g - b_e))
            x, y, z, t = scores(
                cast(b_q * b_e, dtype), cast(b_a * b_e, dtype), cast(b_k * b_e, dtype),
                cast(b_b * b_e, dtype), zero, zero, zero, zero,
            )  # fmt: skip
            m = pairs(o, s)
            b_qk, b_qb = b_qk + tl.where(m, x, 0.0), b_qb + tl.where(m, y, 0.0)
            b_ak, b_ab = b_ak + tl.where(m, z, 0.0), b_ab + tl.where(m, t, 0.0)
    return b_qk, b_qb, b_ak, b_ab


@triton.jit
def store_scores(qk_ptr, qb_ptr, ak_ptr, L_ptr, b_qk, b_qb, b_ak, b_ab, o_i, c, stride, n_t):
    """Block c of each, the rows of ak and ab one token later; of ab its negative."""
    i, o = c * 16, tl.arange(0, 16)
    store_tile(qk_ptr + i, b_qk, o_i, o, stride, n_t, 16)
    store_tile(qb_ptr + i, b_qb, o_i, o, stride, n_t, 16)
    store_tile(ak_ptr + stride + i, b_ak, o_i, o, stride, n_t - 1, 16)
    store_tile(L_ptr + stride + i, -b_ab, o_i, o, stride, n_t - 1, 16)


@triton.jit(do_not_specialize=["T"])
def dplr_scores_kernel(
    q_ptr, k_ptr, a_ptr, b_ptr,  # [B, T, H, K]
    gc_ptr,  # [B, T, H, K] log2
    L_ptr,  # [B, T, H, BT] out, fp32: -ab
    ak_ptr, qb_ptr, qk_ptr,  # [B, T, H, BT] out
    qg_ptr, kg_ptr, ag_ptr, bg_ptr,  # [B, T, H, K] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
    HALVE: tl.constexpr,  # rows of the blocks on the diagonal: those that are FAR, or ALL
):  # fmt: skip
    """One program: 16 rows of one chunk of one head.  Grid (NT * H * BT / 16).

    Reference: linattn_edu.reference.dplr.intra.
    """
    NB: tl.constexpr = BT // 16
    NK: tl.constexpr = (K + BK - 1) // BK
    n_b = tl.program_id(0) % NB
    i_h, _, first, n_t = chunk_of(tl.program_id(0) // NB, cu_ptr, chunks_ptr, T, H, BT)
    if n_b * 16 >= n_t:
        return
    n_t = tl.minimum(n_t, BT)
    i, i_s, at = (first * H + i_h) * K, (first * H + i_h) * BT, H * K
    q_ptr, k_ptr, a_ptr, b_ptr, gc_ptr = q_ptr + i, k_ptr + i, a_ptr + i, b_ptr + i, gc_ptr + i
    qk_ptr, qb_ptr, ak_ptr, L_ptr = qk_ptr + i_s, qb_ptr + i_s, ak_ptr + i_s, L_ptr + i_s
    o = tl.arange(0, 16)
    o_i = n_b * 16 + o
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    e_ptr = gc_ptr + n_b * 16 * at  # the anchor: the first of these rows

    # 2^(gc_i - gc_e) 2^(gc_e - gc_j): the readers' factors, once for all blocks
    QE = ()
    AE = ()
    b_far = tl.full([16], 0.0 if HALVE == FAR else float("-inf"), tl.float32)
    for j in tl.static_range(NK):
        o_k = j * BK + tl.arange(0, BK)
        b_q, b_a = load_readers(q_ptr, a_ptr, o_i, o_k, at, n_t, K)
        b_k, b_b = load_rows(k_ptr, b_ptr, o_i, o_k, at, n_t, K)
        b_g = load_gates(gc_ptr, o_i, o_k, at, n_t, K)
        b_e = b_g - load_vector(e_ptr, o_k, K)[None, :]
        b_far = tl.minimum(b_far, tl.min(b_e, 1))
        b_e = tl.exp2(b_e)
        QE = QE + (cast(b_q * b_e, dtype),)  # noqa: RUF005  (Triton has no starred tuples)
        AE = AE + (cast(b_a * b_e, dtype),)  # noqa: RUF005
        # eq:dplr-rows   qg = 2^gc * Q, ag = 2^gp * A, kg = 2^(gc_last - gc) * K; bg likewise
        b_e = tl.exp2(b_g)
        store_tile(qg_ptr + i, b_e * b_q, o_i, o_k, at, n_t, K)
        store_tile(ag_ptr + i + at, b_e * b_a, o_i, o_k, at, n_t - 1, K)
        b_e = tl.exp2(load_vector(gc_ptr + (n_t - 1) * at, o_k, K)[None, :] - b_g)
        store_tile(kg_ptr + i, b_e * b_k, o_i, o_k, at, n_t, K)
        store_tile(bg_ptr + i, b_e * b_b, o_i, o_k, at, n_t, K)
        if n_b == 0:
            tl.store(ag_ptr + i + o_k, load_vector(a_ptr, o_k, K), mask=o_k < K)

    # the blocks to the left, where no exponent is positive, and at last the one on the diagonal
    zero = tl.zeros([16, 16], dtype=tl.float32)
    b_qk, b_qb, b_ak, b_ab = zero, zero, zero, zero
    for c in range(n_b + 1 if HALVE == FAR else n_b):
        b_qk, b_qb, b_ak, b_ab = zero, zero, zero, zero
        for j in tl.static_range(NK):
            o_k = j * BK + tl.arange(0, BK)
            b_e = load_vector(e_ptr, o_k, K)[None, :]
            b_e -= load_gates(gc_ptr, c * 16 + o, o_k, at, n_t, K)
            b_e = tl.exp2(tl.minimum(b_e, NEAR))
            b_k, b_b = load_rows(k_ptr, b_ptr, c * 16 + o, o_k, at, n_t, K)
            # eq:dplr-qb   qb_ij = sum_d q_id b_jd 2^(gc_id - gc_jd), i >= j; qk likewise
            # eq:dplr-ab   ab_ij = sum_d a_id b_jd 2^(gp_id - gc_jd), i > j; ak likewise
            b_qk, b_qb, b_ak, b_ab = scores(
                QE[j], AE[j], cast(b_k * b_e, dtype), cast(b_b * b_e, dtype), b_qk, b_qb, b_ak, b_ab
            )
        if c < n_b:
            store_scores(qk_ptr, qb_ptr, ak_ptr, L_ptr, b_qk, b_qb, b_ak, b_ab, o_i, c, H * BT, n_t)
    near = b_far[:, None] >= -NEAR
    if tl.min(near.to(tl.int32)) == 0:
        # row by row, so that nothing depends on a later row
        x, y, z, t = halved(q_ptr, k_ptr, a_ptr, b_ptr, gc_ptr, n_b, n_t, at, K, 16)
        b_qk, b_qb = tl.where(near, b_qk, x), tl.where(near, b_qb, y)
        b_ak, b_ab = tl.where(near, b_ak, z), tl.where(near, b_ab, t)
    m = o[:, None] >= o[None, :]
    b_qk, b_qb = tl.where(m, b_qk, 0.0), tl.where(m, b_qb, 0.0)
    b_ak, b_ab = tl.where(m, b_ak, 0.0), tl.where(m, b_ab, 0.0)
    store_scores(qk_ptr, qb_ptr, ak_ptr, L_ptr, b_qk, b_qb, b_ak, b_ab, o_i, n_b, H * BT, n_t)
    for c in range(n_b + 1, NB):
        store_scores(qk_ptr, qb_ptr, ak_ptr, L_ptr, zero, zero, zero, zero, o_i, c, H * BT, n_t)
    if n_b == 0:  # a of the first token reads nothing
        b_zero = tl.zeros([BT], dtype=tl.float32)
        tl.store(ak_ptr + tl.arange(0, BT), b_zero)
        tl.store(L_ptr + tl.arange(0, BT), b_zero)


# generation -> bytes of an element -> row, or one for keys up to 64 and one for more: one warp, as
# in kda_intra, or two for rows of 128
ONE = dict.fromkeys((2, 4), row(1, 1, BK=32))
HOPPER = {64: row(1, 2, BK=64), 128: row(2, 2, BK=128)}
CONFIGS = {"turing": ONE, "ampere": ONE, "hopper": ONE | {2: HOPPER}}


def launch_of(table: dict, x: Tensor) -> dict[str, int]:
    """The row of such a table for x [.., K], as keyword arguments of a launch."""
    found, K = entry(table, x), x.shape[-1]
    return (found[64 if K <= 64 else 128] if isinstance(found, dict) else found).launch(K)


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
        q, k, a, b, gc, L, *scores, *rows, *chunks, T, H, K, BT=chunk_size, HALVE=halving(k.dtype),
        **launch_of(CONFIGS, k),
    )  # fmt: skip
    # eq:dplr-inverse   M = (I - ab)^-1
    kda_inverse_kernel[(NT * H,)](
        L, M, None, *chunks, T, H, BT=chunk_size, PRECISION=merge_precision(k.dtype), num_warps=1
    )
    return M, *scores, *rows
