"""Stage kda_intra: what the tokens of a chunk read from each other, with a gate a channel.

A chunk is cut into blocks of 16 tokens. One warp takes the 16 rows of a block: the blocks to their
left are anchored at its first row; the block on the diagonal is halved again and again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.solve import merge, merge_precision, substitute
from linattn_edu.kernels.routes import by_kind
from linattn_edu.kernels.rows import chunk_args, device_of, entry, of_generation, row, strength
from linattn_edu.kernels.tiles import (
    cast,
    chunk_of,
    dot_as,
    gated,
    listed,
    load_gates,
    load_row,
    load_tile,
    load_vector,
    store_tile,
    weighted,
)
from linattn_edu.packing import Packing

# which rows of a diagonal block are halved
NONE, FAR, ALL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# a row is near its block's first if no channel has faded by more than 2^80 between the two: in
# bf16 and fp32 the factors of such rows leave 2^46 for the queries and keys that they multiply
NEAR = tl.constexpr(80.0)


@triton.jit
def halves(o, s):
    """(first row of the second block, whether in the second) in pairs of blocks of 2^s tokens."""
    return ((o >> s) | 1) << s, ((o >> s) & 1) == 1


@triton.jit
def pairs(o, s):
    """[16, 16]: i in the second and j in the first block of the same pair."""
    anchor, second = halves(o, s)
    return (anchor[:, None] == anchor[None, :]) & second[:, None] & ~second[None, :]


@triton.jit
def halved(
    q_ptr, k_ptr, erase_ptr, gc_ptr, b, n_t,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P, and L without beta, of block b on the diagonal: right for any gate."""
    o = tl.arange(0, 16)
    o_i = b * 16 + o
    dtype: tl.constexpr = tl.float32 if PRECISION == "halves" else k_ptr.dtype.element_ty
    b_P = tl.zeros([16, 16], dtype=tl.float32)
    b_L = tl.zeros([16, 16], dtype=tl.float32)
    for j in range(tl.cdiv(K, BK)):
        o_k = j * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr, o_i, o_k, H * K, n_t, K).to(tl.float32)  # [16, BK]
        b_k = load_tile(k_ptr, o_i, o_k, H * K, n_t, K).to(tl.float32)  # [16, BK]
        b_g = load_gates(gc_ptr, o_i, o_k, HV * K, n_t, K)  # [16, BK]
        b_r = gated(b_k, erase_ptr, o_i, o_k, HV * K, n_t, K)
        b_P += tl.where(o[:, None] == o[None, :], tl.sum(b_q * b_k, 1)[:, None], 0.0)
        for s in range(4):
            b_E = load_gates(gc_ptr, b * 16 + halves(o, s)[0], o_k, HV * K, n_t, K)
            b_E = tl.exp2(-tl.abs(b_g - b_E))
            # the second block reads, the first wrote
            b_kE = b_k if erase_ptr is None else tl.where(halves(o, s)[1][:, None], b_r, b_k)
            b_kE = cast(b_kE * b_E, dtype)
            m = pairs(o, s)
            b_qE = cast(b_q * b_E, dtype)
            b_P += tl.where(m, dot_as(b_qE, tl.trans(b_kE), None, PRECISION), 0.0)
            b_L += tl.where(m, dot_as(b_kE, tl.trans(b_kE), None, PRECISION), 0.0)
    return b_P, b_L


@triton.jit(do_not_specialize=["T"])
def kda_scores_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV], or None
    erase_ptr,  # [B, T, HV, K] in the place of beta, or None
    gc_ptr,  # [B, T, HV, K] log2
    P_ptr,  # [B, T, HV, BT] out
    L_ptr,  # [B, T, HV, BT] out, fp32: L up to its diagonal's blocks
    kd_ptr,  # [B, T, HV, K] out, or None
    kg_ptr,  # [B, T, HV, K] out, with kd
    qg_ptr,  # [B, T, HV, K] out, with kd
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
    HALVE: tl.constexpr,  # rows of the blocks on the diagonal: NONE, those that are FAR, or ALL
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: 16 rows of one chunk of one head.  Grid (NT * HV * BT / 16).

    Reference: linattn_edu.reference.delta.kda_intra.
    """
    NB: tl.constexpr = BT // 16
    NK: tl.constexpr = (K + BK - 1) // BK
    pid = listed(tl.program_id(0), items_ptr, NB)
    b = pid % NB
    i_h, _, first, n_t = chunk_of(tl.maximum(pid, 0) // NB, cu_ptr, chunks_ptr, T, HV, BT)
    if (pid < 0) | (b * 16 >= n_t):
        return
    q_ptr += (first * H + i_h // (HV // H)) * K
    k_ptr += (first * H + i_h // (HV // H)) * K
    gc_ptr += (first * HV + i_h) * K
    P_ptr += (first * HV + i_h) * BT
    L_ptr += (first * HV + i_h) * BT
    o = tl.arange(0, 16)
    o_i = b * 16 + o
    if erase_ptr is None:
        b_beta = load_row(beta_ptr + first * HV + i_h, o_i, HV, n_t)
    else:
        b_beta = None
        erase_ptr += (first * HV + i_h) * K
    dtype: tl.constexpr = tl.float32 if PRECISION == "halves" else k_ptr.dtype.element_ty
    a_ptr = gc_ptr + b * 16 * HV * K  # the anchor: the first of these rows

    # 2^(gc_i - gc_a) 2^(gc_a - gc_j): the readers' factors, once for all blocks
    QE = ()
    KE = ()
    b_far = tl.zeros([16], dtype=tl.float32)
    for j in tl.static_range(NK):
        o_k = j * BK + tl.arange(0, BK)
        b_g = load_gates(gc_ptr, o_i, o_k, HV * K, n_t, K)  # [16, BK]
        b_E = b_g - load_vector(a_ptr, o_k, K)[None, :]
        b_far = tl.minimum(b_far, tl.min(b_E, 1))
        b_E = tl.exp2(b_E)
        b_q = load_tile(q_ptr, o_i, o_k, H * K, n_t, K).to(tl.float32)  # [16, BK]
        b_k = load_tile(k_ptr, o_i, o_k, H * K, n_t, K).to(tl.float32)  # [16, BK]
        QE = QE + (cast(b_q * b_E, dtype),)  # noqa: RUF005  (Triton has no starred tuples)
        b_r = gated(b_k, erase_ptr, o_i, o_k, HV * K, n_t, K)
        KE = KE + (cast(b_r * b_E, dtype),)  # noqa: RUF005  (Triton has no starred tuples)
        if kd_ptr is not None:  # the rows of kda_gates, whose numbers are all here
            i = (first * HV + i_h) * K
            b_last = load_vector(gc_ptr + (tl.minimum(BT, n_t) - 1) * HV * K, o_k, K)[None, :]
            b_E = tl.exp2(b_g)
            store_tile(kd_ptr + i, b_E * b_r, o_i, o_k, HV * K, n_t, K)
            store_tile(kg_ptr + i, tl.exp2(b_last - b_g) * b_k, o_i, o_k, HV * K, n_t, K)
            store_tile(qg_ptr + i, b_E * b_q, o_i, o_k, HV * K, n_t, K)

    # the blocks to the left, where no exponent is positive, and at last the one on the diagonal
    b_P, b_L = tl.zeros([16, 16], dtype=tl.float32), tl.zeros([16, 16], dtype=tl.float32)
    for c in range(b if HALVE == ALL else b + 1):
        o_j = c * 16 + o
        b_P, b_L = tl.zeros([16, 16], dtype=tl.float32), tl.zeros([16, 16], dtype=tl.float32)
        for j in tl.static_range(NK):
            o_k = j * BK + tl.arange(0, BK)
            b_E = load_vector(a_ptr, o_k, K)[None, :]
            b_E -= load_gates(gc_ptr, o_j, o_k, HV * K, n_t, K)
            b_E = tl.exp2(tl.minimum(b_E, NEAR) if HALVE == FAR else b_E)
            b_kj = load_tile(k_ptr, o_j, o_k, H * K, n_t, K).to(tl.float32) * b_E  # [16, BK]
            b_kj = tl.trans(cast(b_kj, dtype))
            # eq:kda-scores   P_ij = sum_d q_id k_jd 2^(gc_id - gc_jd), i >= j
            b_P = dot_as(QE[j], b_kj, b_P, PRECISION)
            # eq:kda-kk   L_ij = beta_i sum_d k_id k_jd 2^(gc_id - gc_jd), i > j
            b_L = dot_as(KE[j], b_kj, b_L, PRECISION)
        if c < b:
            store_tile(P_ptr + c * 16, b_P, o_i, o, HV * BT, n_t, 16)
            store_tile(L_ptr + c * 16, weighted(b_L, b_beta), o_i, o, HV * BT, n_t, 16)

    if HALVE == ALL or (HALVE == FAR and tl.min(b_far) < -NEAR):
        b_Ph, b_Lh = halved(q_ptr, k_ptr, erase_ptr, gc_ptr, b, n_t, H, HV, K, 16, PRECISION)
        if HALVE == ALL:
            b_P, b_L = b_Ph, b_Lh
        else:
            # row by row, so that nothing depends on a later row
            b_P = tl.where(b_far[:, None] < -NEAR, b_Ph, b_P)
            b_L = tl.where(b_far[:, None] < -NEAR, b_Lh, b_L)
    b_P = tl.where(o[:, None] >= o[None, :], b_P, 0.0)
    b_L = tl.where(o[:, None] > o[None, :], b_L, 0.0)
    store_tile(P_ptr + b * 16, b_P, o_i, o, HV * BT, n_t, 16)
    store_tile(L_ptr + b * 16, weighted(b_L, b_beta), o_i, o, HV * BT, n_t, 16)
    for c in range(b + 1, NB):
        store_tile(P_ptr + c * 16, tl.zeros_like(b_P), o_i, o, HV * BT, n_t, 16)


@triton.jit
def load_blocks(L_ptr, S: tl.constexpr, N: tl.constexpr, BELOW: tl.constexpr, stride, n_t):
    """[N, S, S]: the blocks on the diagonal of a matrix of n_t rows; or, with BELOW, the lower left
    quarters of those of twice the size.
    """
    o = tl.arange(0, S)
    corner = tl.arange(0, N)[:, None, None] * (2 * S if BELOW else S)
    o_i = corner + (S if BELOW else 0) + o[None, :, None]
    o_j = corner + o[None, None, :]
    return tl.load(L_ptr + o_i * stride + o_j, mask=o_i < n_t, other=0.0)


@triton.jit(do_not_specialize=["T"])
def kda_inverse_kernel(
    L_ptr,  # [B, T, HV, BT] fp32, as kda_scores_kernel leaves it
    A_ptr,  # [B, T, HV, BT] out
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    HV: tl.constexpr,
    BT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.delta.kda_intra.
    """
    pid = listed(tl.program_id(0), items_ptr, 1)
    if pid < 0:
        return
    i_h, _, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, HV, BT)
    L_ptr += (first * HV + i_h) * BT
    A_ptr += (first * HV + i_h) * BT
    # eq:kda-inverse   A = (I + L)^-1
    X = substitute(load_blocks(L_ptr, 8, BT // 8, False, HV * BT, n_t))
    X = merge(X, load_blocks(L_ptr, 8, BT // 16, True, HV * BT, n_t), 8, BT, PRECISION)
    if BT > 16:
        X = merge(X, load_blocks(L_ptr, 16, BT // 32, True, HV * BT, n_t), 16, BT, PRECISION)
    if BT > 32:
        X = merge(X, load_blocks(L_ptr, 32, BT // 64, True, HV * BT, n_t), 32, BT, PRECISION)
    o_t = tl.arange(0, BT)
    store_tile(A_ptr, tl.reshape(X, (BT, BT)), o_t, o_t, HV * BT, n_t, BT)


# generation -> bytes of an element -> row of kda_scores: one warp, so that nothing waits at a
# barrier, and its products are mma.sync
CONFIGS = {
    "turing": {2: row(1, 1, BK=32), 4: row(1, 1, BK=32)},
    "ampere": {2: row(1, 1, BK=64, maxnreg=128), 4: row(1, 1, BK=32)},
    "hopper": {2: row(1, 2, BK=64, maxnreg=168), 4: row(1, 1, BK=32)},
}
FINE = row(1, 2, BK=32)  # in halves, on Hopper
# with the gated rows, where it differs: the compiler takes 252 registers, and with fewer it spills
GATED_CONFIGS = {"hopper": {2: row(1, 2, BK=64)}}


def halving(dtype: torch.dtype, lower_bound: float | None = None) -> int:
    """The rows of a block on the diagonal that are halved: NONE, FAR or ALL."""
    takes = by_kind.kda_halved(dtype, lower_bound).takes
    return {"none": NONE, "far": FAR, "all": ALL}[takes].value


def kda_intra(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, *, chunk_size: int,
    lower_bound: float | None = None, packing: Packing | None = None, precision: str = "tf32x3",
    items: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch both kernels; arguments and result as in the reference; items: of `listed`, or None:
    all.
    """
    return launch_intra((q, k, beta, gc), None, chunk_size, lower_bound, packing, precision, items)


def launch_intra(
    given: tuple[Tensor, ...], rows: tuple[Tensor, ...] | None, chunk_size: int,
    lower_bound: float | None, packing: Packing | None, precision: str = "tf32x3",
    items: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch both kernels on q, k, beta and gc; return P and A.

    rows: kd, kg and qg [B, T, HV, K], which the first kernel writes, or None.
    """
    q, k, beta, gc = given
    B, T, H, K = k.shape
    HV = gc.shape[2]
    fine = precision == "halves"
    dtype = torch.float32 if fine else k.dtype
    P, A = (k.new_empty(B, T, HV, chunk_size, dtype=dtype) for _ in range(2))
    L = torch.empty_like(P, dtype=torch.float32)
    config = FINE if fine else entry(CONFIGS, k)
    if rows is not None:
        config = of_generation(GATED_CONFIGS, device_of(k)[0]).get(k.element_size(), config)
    NT, *chunks = chunk_args(k, chunk_size, packing)
    kda_scores_kernel[(NT * HV * (chunk_size // 16),)](
        q, k, *strength(beta), gc, P, L, *(rows or (None,) * 3), items, *chunks, T, H, HV, K,
        BT=chunk_size, HALVE=halving(k.dtype, lower_bound), PRECISION=precision, **config.launch(K),
    )  # fmt: skip
    precision = merge_precision(A.dtype)
    kda_inverse_kernel[(NT * HV,)](
        L, A, items, *chunks, T, HV, BT=chunk_size, PRECISION=precision, num_warps=1
    )
    return P, A
