"""Stage warm_up: how far before a piece a scan begins for the state to be forgotten by then.

Then the pieces of one sequence are scanned side by side, with no map of any of them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.pieces import Pieces, by_warm_up
from linattn_edu.kernels.routes import by_load, kind_of, load_of
from linattn_edu.kernels.tiles import block, cdiv, columns_of, load_row, load_tile, sequence_of
from linattn_edu.packing import Packing

FORGOTTEN = tl.constexpr(32.0)  # log2: what is left of a state, 2^-32 of it, no sum in fp32 holds
REACH = 2048  # tokens; what takes longer to forget is carried through
ROWS = 128  # pieces and heads of a program


@triton.jit(do_not_specialize=["T", "tokens"])
def bound_kernel(
    k_ptr,  # [B, T, H, K]
    beta_ptr,  # [B, T, HV]; or R [B, T, HV, BT], on whose diagonal it is
    gc_ptr,  # [B, T, HV] log2
    bound_ptr,  # [NR, N, HV] out
    cu_ptr, T,  # of sequence_of
    tokens,  # B * T
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, NR: tl.constexpr,
    DIAGONAL: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """One program: chunk i_r before a piece, or behind it, for one head.  Grid (NR * N * HV).

    Reference: linattn_edu.reference.delta.warm_up.bound.
    """
    rows = tl.num_programs(0) // NR
    i_r, i_nh = tl.program_id(0) // rows, (tl.program_id(0) % rows).to(tl.int64)
    i_h = i_nh % HV
    first, n_t, _ = sequence_of(i_nh // HV, cu_ptr, None, T, BT)
    begin = first + n_t + i_r * BT if BACK else first - (i_r + 1) * BT
    n = tl.where((begin >= 0) & (begin + BT <= tokens), BT, 0)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    i = begin * HV + i_h
    gc_last = tl.load(gc_ptr + i + (BT - 1) * HV, mask=n > 0, other=0.0)
    if DIAGONAL:
        b_beta = load_row(beta_ptr + i * BT, o_t, HV * BT + 1, n)
    else:
        b_beta = load_row(beta_ptr + i, o_t, HV, n)
    k_ptr += (begin * H + i_h // (HV // H)) * K
    b_kk = tl.zeros([BT], dtype=tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        b_k = load_tile(k_ptr, o_t, i_k * BK + o_k, H * K, n, K).to(tl.float32)
        b_kk += tl.sum(b_k * b_k, 1)
    # eq:warm-bound   log2 |S_out| - log2 |S_in| <= gc_last + sum log2 max(1, |1 - beta k^T k|)
    b_log = tl.log2(tl.maximum(1.0, tl.abs(1.0 - b_beta * b_kk)))
    tl.store(bound_ptr + tl.program_id(0), gc_last + tl.sum(b_log, 0))


@triton.jit(do_not_specialize=["T", "each", "rows"])
def warm_up_kernel(
    bound_ptr,  # [NR, N, HV]
    warmup_ptr,  # [N, HV] int32 out; with CHOICE [2, N, HV]
    cu_ptr,  # [N + 1] or None
    sequence_ptr,  # [N] or None
    T,
    each,  # pieces of a sequence, where sequence_ptr is None
    rows,  # N * HV
    HV: tl.constexpr, BT: tl.constexpr, NR: tl.constexpr, BR: tl.constexpr,
    BACK: tl.constexpr, CHOICE: tl.constexpr,
):  # fmt: skip
    """One program: BR pieces and heads, and those that no other program takes.  Any grid; with
    CHOICE, which needs all of them, (1).

    Reference: linattn_edu.reference.delta.warm_up.warm_up.
    """
    N = rows // HV
    slow = 0
    for begin in range(tl.program_id(0) * BR, rows, tl.num_programs(0) * BR):
        i_nh = begin + tl.arange(0, BR)
        i_n = tl.minimum(i_nh, rows - 1) // HV
        other = tl.minimum(i_n + 1, N - 1) if BACK else tl.maximum(i_n - 1, 0)
        if sequence_ptr is not None:
            edge = tl.load(sequence_ptr + i_n) != tl.load(sequence_ptr + other)
        else:
            edge = i_n // each != other // each
        # whole chunks of the piece before, which is a whole one, or of the one behind
        _, n_t, _ = sequence_of(other, cu_ptr, None, T, BT)
        need, left = tl.full([BR], -1, dtype=tl.int32), tl.zeros([BR], dtype=tl.float32)
        for i_r in tl.static_range(NR):
            left += tl.load(bound_ptr + i_r * rows + i_nh, mask=i_nh < rows, other=0.0)
            found = (left <= -FORGOTTEN) & (i_r < n_t // BT) & (need < 0)
            need = tl.where(found, i_r + 1, need)
        need = tl.where(edge | (other == i_n), 0, need)
        slow = tl.maximum(slow, tl.max(tl.where((need < 0) & (i_nh < rows), 1, 0), 0))
        tl.store(warmup_ptr + i_nh, need, mask=i_nh < rows)
    if CHOICE:
        for begin in range(0, rows, BR):
            i_nh = begin + tl.arange(0, BR)
            need = tl.load(warmup_ptr + i_nh, mask=i_nh < rows)  # by the threads that stored it
            tl.store(warmup_ptr + i_nh, tl.where(slow > 0, -1, need), mask=i_nh < rows)
            need = tl.where(slow > 0, need, -1)
            tl.store(warmup_ptr + rows + i_nh, need, mask=i_nh < rows)


@triton.jit
def with_warm_up(i_nh, first, n_t, i_c, warmup_ptr, cu_ptr, T, N, HV: tl.constexpr,
                 BT: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """What a program that begins with a piece and head goes through, by the tensor of `warm_up`.

    first, n_t, i_c: of the piece, as of `columns_of`. N: pieces.
    Returns the same of the whole way, the chunks at whose end nothing is to be stored, and the
    piece and head with which it ends; -1 if the piece belongs to another program's way.
    """
    skip = tl.load(warmup_ptr + i_nh)
    i_end, n = i_nh, n_t
    if BACK:
        i_next = i_nh - HV
    else:
        i_next = i_nh + HV
    more = tl.load(warmup_ptr + i_next, mask=(i_next >= 0) & (i_next < N * HV), other=0) < 0
    while more:
        _, n_next, _ = sequence_of(i_next // HV, cu_ptr, None, T, BT)
        n += n_next
        i_end = i_next
        if BACK:
            i_next -= HV
        else:
            i_next += HV
        more = tl.load(warmup_ptr + i_next, mask=(i_next >= 0) & (i_next < N * HV), other=0) < 0
    before = n - n_t if BACK else skip * BT
    mine = skip >= 0
    n = tl.where(mine, n + skip * BT, 0)
    return first - before, n, i_c - before // BT, skip, tl.where(mine, i_end, -1)


@triton.jit
def way_of(pid, warmup_ptr, cu_ptr, offsets_ptr, T, N, HV: tl.constexpr, V: tl.constexpr,
           BT: tl.constexpr, BV: tl.constexpr, BACK: tl.constexpr):  # fmt: skip
    """As `columns_of`, of the whole way where there is a warm-up; also skip and end, as there."""
    i_v, i_nh, i_h, first, n_t, i_c = columns_of(pid, cu_ptr, offsets_ptr, T, HV, V, BT, BV)
    skip, i_end = 0, i_nh
    if warmup_ptr is not None:
        first, n_t, i_c, skip, i_end = with_warm_up(
            i_nh, first, n_t, i_c, warmup_ptr, cu_ptr, T, N, HV, BT, BACK
        )
    return i_v, i_nh, i_h, first, n_t, i_c, skip, i_end


def warm_up(
    k: Tensor, beta: Tensor, gc: Tensor, V: int, *, chunk_size: int, back: bool = False,
    choice: bool = True, always: bool = False, packing: Packing | None = None,
) -> tuple[Pieces, list[Tensor | None]]:  # fmt: skip
    """Launch bound_kernel and warm_up_kernel, where heads of V values are enough for such pieces.

    beta: [B, T, HV], or R [B, T, HV, C], whose diagonal it is.
    choice: whether the scan has tiles of several widths. always: whether there is another kernel.
    Returns the pieces and, if there are several of a sequence, the tensor of the reference. Always,
    or with choice where few whole sequences would leave a GPU half empty, it is two: if some head
    does not forget, the first sends all programs home, and else the second, for the other launch.
    """
    H, K = k.shape[2:]
    HV = gc.shape[2]
    pieces = by_warm_up(k, HV, V, chunk_size, packing)
    if not pieces.several:
        return pieces, [None]
    rows, NR = pieces.N * HV, REACH // chunk_size
    bound = gc.new_empty(NR, rows)
    bound_kernel[(NR * rows,)](
        k, beta, gc, bound, pieces.cu_seqlens, pieces.T, gc.shape[0] * gc.shape[1], H, HV, K,
        BT=chunk_size, BK=min(128, block(K)), NR=NR, DIAGONAL=beta.ndim == 4, BACK=back,
        num_warps=4, num_stages=1,
    )  # fmt: skip
    load = load_of(kind_of(k, HV, V, chunk_size, packing), k, packing)
    choice = always or (choice and by_load.both_widths(load).takes == 1)
    warmup = gc.new_empty(1 + choice, pieces.N, HV, dtype=torch.int32)
    warm_up_kernel[(1 if choice else cdiv(rows, ROWS),)](
        bound, warmup, pieces.cu_seqlens, pieces.sequence, pieces.T, pieces.N // pieces.batch, rows,
        HV, BT=chunk_size, NR=NR, BR=ROWS, BACK=back, CHOICE=choice, num_warps=4, num_stages=1,
    )  # fmt: skip
    return pieces, [*warmup]
