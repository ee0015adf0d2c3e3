"""Sequences packed one after the other: where they begin, for the kernels and for the reference."""

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.packing import Packing, pack, room


def packing(
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    T: int,
    chunk_size: int,
    length: int,
) -> Packing:
    """The Packing for chunks of `length` tokens; chunk_indices were made for chunk_size."""
    lengths, tokens = None, None if chunk_indices is None else T
    if cu_seqlens_cpu is not None or not cu_seqlens.is_cuda or chunk_indices is None:
        lengths = bounds(cu_seqlens, cu_seqlens_cpu, T)
    if chunk_indices is not None and length != chunk_size:
        chunk_indices = room(cu_seqlens, T, length)
    elif chunk_indices is not None and lengths is not None:
        there = chunk_indices
        if not there.is_cuda:  # without those of `room` that are left over
            there = there[there[:, 0] < len(lengths)]
        check.chunks(there, lengths, chunk_size)
    return pack(cu_seqlens, length, lengths=lengths, chunk_indices=chunk_indices, tokens=tokens)


def bounds(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None, T: int) -> list[int]:
    """The boundaries as numbers; refused where they do not fit T tokens."""
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    return check.lengths("cu_seqlens", known.tolist(), T)


def each(bounds: list[int], length: int) -> Iterator[tuple[int, slice, slice]]:
    """(number, tokens, chunks of `length` tokens) of every sequence that has tokens."""
    first = 0
    for n, (begin, end) in enumerate(pairwise(bounds)):
        if end > begin:
            yield n, slice(begin, end), slice(first, first := first - (begin - end) // length)
