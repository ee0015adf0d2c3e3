"""Where the numbers that 16 bit round cancel, and halves are needed: found without the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, sequence_args
from linattn_edu.kernels.tiles import cast, chunk_of, dot, load_row, load_tile
from linattn_edu.packing import Packing

SCORES, INVERSE = tl.constexpr(1.15), tl.constexpr(1.1)


@triton.jit
def sequence_of_chunk(i_c, chunks_ptr, T, BT: tl.constexpr):
    """The sequence of a chunk, as chunk_of finds it."""
    if chunks_ptr is not None:
        return tl.load(chunks_ptr + 2 * i_c)
    else:
        return i_c // tl.cdiv(T, BT)


@triton.jit(do_not_specialize=["T"])
def cancels_kernel(
    P_ptr, AG_ptr,  # [B, T, HV, BT]
    beta_ptr,  # [B, T, HV], or None: 1
    cancels_ptr,  # [N, HV] int32, zeros; out: -1 where a head cancels
    cu_ptr, chunks_ptr, T,  # of chunk_of
    G: tl.constexpr, HV: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head, of which G share a q/k head.  Grid (NT * HV).

    Reference: linattn_edu.reference.fused.cancel.cancels.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, HV, BT)
    i, o_t = first * HV + i_h, tl.arange(0, BT)
    b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_R = load_tile(AG_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT).to(tl.float32)
    b_beta = tl.where(o_t < n_t, 1.0, 0.0)
    if beta_ptr is not None:
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)
        b_R *= b_beta[None, :]
    # eq:11-cancels   r = sum_j |P_j|^2 |R_j|^2 / |P R|^2
    b_PR = dot(b_P, cast(b_R, b_P.dtype))
    b_P = b_P.to(tl.float32)
    b_rows = tl.sum(b_R * b_R, 1)
    rounded = tl.sum(tl.sum(b_P * b_P, 0)[:, None] * b_rows[:, None])
    few = rounded <= SCORES * SCORES * tl.sum(b_PR * b_PR)
    own = tl.sum((b_beta * b_beta)[:, None])
    few = few & (tl.sum(b_rows[:, None]) <= INVERSE * INVERSE * own)
    i_n = sequence_of_chunk(i_c, chunks_ptr, T, BT)
    for i_g in tl.static_range(G):
        tl.atomic_min(cancels_ptr + i_n * HV + i_h // G * G + i_g, -1, mask=few == 0)


@triton.jit(do_not_specialize=["T", "items", "heads"])
def those_kernel(
    cancels_ptr,  # [N, HV] int32
    ways_ptr,  # [N, HV] int32 out
    items_ptr, others_ptr,  # [1 + NT * H] int32 out
    chunks_ptr, T,  # of chunk_of
    items,  # NT * H
    heads,  # N * HV
    H: tl.constexpr, HV: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """One program.  Grid (1).  Reference: linattn_edu.reference.fused.cancel.those."""
    o = tl.arange(0, BR)
    for i in range(0, heads, BR):
        found = tl.load(cancels_ptr + i + o, mask=i + o < heads, other=0)
        tl.store(ways_ptr + i + o, -1 - found, mask=i + o < heads)
    n, n_all = 0, 0
    for i in range(0, items, BR):
        i_n = sequence_of_chunk(tl.minimum(i + o, items - 1) // H, chunks_ptr, T, BT)
        at, some = cancels_ptr + i_n * HV + (i + o) % H * (HV // H), i + o < items
        if chunks_ptr is not None:
            some = some & (i_n * HV < heads)  # the last chunks of packing.room are of none
        found = -tl.load(at, mask=some, other=0)
        before = n + tl.cumsum(found, 0)
        tl.store(items_ptr + before, i + o, mask=found > 0)
        tl.store(others_ptr + i + o + 1 - before, i + o, mask=some & (found == 0))
        n += tl.sum(found, 0)
        n_all += tl.sum(some.to(tl.int32), 0)
    tl.store(items_ptr, n)
    tl.store(others_ptr, n_all - n)


def none_of(x: Tensor, HV: int, packing: Packing | None) -> Tensor:
    """What `cancels` returns where none of HV heads does."""
    return x.new_zeros(sequence_args(x, packing)[0], HV, dtype=torch.int32)


def cancels(
    P: Tensor, AG: Tensor, beta: Tensor | None, heads: int, *, packing: Packing | None = None
) -> Tensor:
    """Launch cancels_kernel; arguments and result as in the reference."""
    T, HV, C = P.shape[1:]
    NT, *chunks = chunk_args(P, C, packing)
    found = none_of(P, HV, packing)
    cancels_kernel[(NT * HV,)](P, AG, beta, found, *chunks, T, HV // heads, HV, C, num_warps=1)
    return found


def those(
    cancels: Tensor, k: Tensor, *, chunk_size: int, packing: Packing | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch those_kernel; arguments and result as in the reference."""
    T, H = k.shape[1:3]
    NT, _, chunks = chunk_args(k, chunk_size, packing)
    ways, (items, others) = torch.empty_like(cancels), cancels.new_empty(2, 1 + NT * H)
    those_kernel[(1,)](
        cancels, ways, items, others, chunks, T, NT * H, cancels.numel(), H, cancels.shape[1],
        chunk_size, BR=4096, num_warps=16,
    )  # fmt: skip
    return ways, items, others
