"""What the fused passes need of a chunk by itself: the scores and the resolvent."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.solve import kkt, merge_precision, unit_lower_inverse
from linattn_edu.kernels.gluon.kernels import gdn_intra
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.tiles import (
    chunk_of,
    decay_matrix,
    dot,
    listed,
    load_gate,
    load_row,
    load_tile,
    store_halves,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def scores_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    gc_ptr,  # [B, T, HV] log2
    P_ptr, P_low_ptr,  # [B, T, HV, BT] out, the second or None
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one q/k head, for all its value heads.  Grid (NT * H).

    Reference: linattn_edu.reference.fused.gdn_intra.intra_chunk.
    """
    pid = listed(tl.program_id(0), items_ptr, 1)
    if pid < 0:
        return
    i_h, _, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, H, BT)
    q_ptr += (first * H + i_h) * K
    k_ptr += (first * H + i_h) * K
    o_t = tl.arange(0, BT)

    b_QK = tl.zeros([BT, BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        b_q = load_tile(q_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_QK = dot(b_q, tl.trans(b_k), b_QK)
    for i_g in range(HV // H):
        i = first * HV + i_h * (HV // H) + i_g
        # eq:delta-decay-matrix   G = 2^(gc_i - gc_j), i >= j
        G = decay_matrix(load_gate(gc_ptr + i, o_t, HV, n_t), o_t)
        # eq:delta-intra   P = Q K^T * G
        low_ptr = None if P_low_ptr is None else P_low_ptr + i * BT
        store_halves(P_ptr + i * BT, low_ptr, b_QK * G, o_t, o_t, HV * BT, n_t, BT)


@triton.jit(do_not_specialize=["T"])
def resolvent_kernel(
    k_ptr,  # [B, T, H, K]
    beta_ptr, gc_ptr,  # [B, T, HV], log2
    R_ptr, A_ptr, A_low_ptr,  # [B, T, HV, BT] out, or None; with GATED A * G in the place of A
    items_ptr,  # of listed
    cu_ptr, chunks_ptr, T,  # of chunk_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.gdn_intra.intra_chunk.
    """
    pid = listed(tl.program_id(0), items_ptr, HV // H)
    if pid < 0:
        return
    i_h, _, first, n_t = chunk_of(pid, cu_ptr, chunks_ptr, T, HV, BT)
    k_ptr += (first * H + i_h // (HV // H)) * K
    o_t = tl.arange(0, BT)

    b_beta = load_row(beta_ptr + first * HV + i_h, o_t, HV, n_t)
    # eq:delta-kkt   L = diag(beta) tril(K K^T, -1)
    L = kkt(k_ptr, b_beta, H * K, n_t, K, BT, BK)
    A = unit_lower_inverse(L, BT, PRECISION)
    if A_ptr is not None and not GATED:
        store_tile(A_ptr + (first * HV + i_h) * BT, A, o_t, o_t, HV * BT, n_t, BT)
    # eq:delta-resolvent   R = (A * G) diag(beta)
    A *= decay_matrix(load_gate(gc_ptr + first * HV + i_h, o_t, HV, n_t), o_t)
    if A_ptr is not None and GATED:
        i = (first * HV + i_h) * BT
        low_ptr = None if A_low_ptr is None else A_low_ptr + i
        store_halves(A_ptr + i, low_ptr, A, o_t, o_t, HV * BT, n_t, BT)
    if R_ptr is not None:
        R = A * b_beta[None, :]
        store_tile(R_ptr + (first * HV + i_h) * BT, R, o_t, o_t, HV * BT, n_t, BT)


# generation -> bytes of an element -> row
SCORES_CONFIGS = {
    "turing": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "ampere": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "hopper": {2: row(2, 3, BK=64), 4: row(4, 1, BK=32)},
}
# one warp, as in solve
RESOLVENT_CONFIGS = {
    "turing": {2: row(4, 1, BK=64), 4: row(4, 1, BK=32)},
    "ampere": {2: row(1, 1, BK=64), 4: row(4, 1, BK=32)},
    "hopper": {2: row(1, 3, BK=64), 4: row(4, 1, BK=32)},
}


def intra_chunk(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, *, chunk_size: int,
    return_inverse: bool = False, gated: bool = False, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch the kernels that suit the GPU; arguments and result as in the reference."""
    P, R = (q.new_empty(*beta.shape, chunk_size) for _ in range(2))
    A = torch.empty_like(R) if return_inverse else None
    kind = kind_of(q, beta.shape[-1], 0, chunk_size, packing, (q, k))
    gluon = by_kind.intra_chunk(kind).takes == "gluon"
    if gluon and gdn_intra.intra_gluon((q, k, beta, gc, P, R, A), gated, packing):
        return P, R, A
    places = (P, None, None), (R, A, None, None)
    _launch_two((q, k, beta, gc), *places, merge_precision(k.dtype), gated, packing)
    return P, R, A


def _launch_two(
    given: tuple[Tensor, ...], scores: tuple, inverse: tuple, precision: str, gated: bool,
    packing: Packing | None,
) -> None:  # fmt: skip
    """Launch scores_kernel, which writes P and its low half, and resolvent_kernel: R, A and its;
    the last of scores and of inverse are the items of `listed`, or None.
    """
    q, k, beta, gc = given
    (T, H, K), (HV, C) = k.shape[1:], scores[0].shape[2:]
    NT, *chunks = chunk_args(k, C, packing)
    sizes = *chunks, T, H, HV, K, C
    scores_kernel[(NT * H,)](q, k, gc, *scores, *sizes, **entry(SCORES_CONFIGS, k).launch(K))
    resolvent_kernel[(NT * HV,)](
        k, beta, gc, *inverse, *sizes, PRECISION=precision, GATED=gated,
        **entry(RESOLVENT_CONFIGS, k).launch(K),
    )  # fmt: skip


def intra_halves(
    q: Tensor, k: Tensor, beta: Tensor, gc: Tensor, only: tuple[Tensor, Tensor] | None = None,
    made: tuple[Tensor, Tensor] | None = None, *, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch scores_kernel and resolvent_kernel; arguments and result as in the reference, but that
    P and A * G are written in their place, and the low halves of other heads are anything.
    """
    P_low, AG_low = (q.new_empty(*beta.shape, chunk_size) for _ in range(2))
    P, AG = map(torch.empty_like, (P_low, AG_low)) if made is None else made
    items = None if only is None else only[1]
    places = (P, P_low, items), (None, AG, AG_low, items)
    _launch_two((q, k, beta, gc), *places, "tf32x3", True, packing)
    return P, AG, P_low, AG_low
