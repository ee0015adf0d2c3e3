"""How packed sequences are cut over the ranks of a group: what a rank holds, where it goes on."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linattn_edu.cp.place import Place
from linattn_edu.ops import check
from linattn_edu.ops.tensors import known

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LAYOUTS = ("contiguous", "zigzag")
PLACES = 16  # of batches of other sizes, of either form, that a context keeps


@dataclass(frozen=True)
class Part:
    """A run of tokens of the global stream, whole on one rank.

    Args:
        number: Of the part, in the order of the tokens.
        tokens: First token and end in the global stream.
        head: The local sequence that goes on from an earlier part, or None.
        begin: The part in which that sequence begins.
        before: Tokens of that sequence before this part.
        tail: The local sequence that goes on in a later part, or None.
        end: The part in which that sequence ends.
    """

    number: int
    tokens: tuple[int, int]
    head: int | None
    begin: int
    before: int
    tail: int | None
    end: int


@dataclass(frozen=True)
class CPContext:
    """What one rank holds of sequences that are cut over a group; see build_cp_context.

    ``copy_for_backward()`` gives a copy that shares no tensor, for pipelines that hold several
    microbatches.

    Args:
        group: The process group, or None: one rank.
        layout: "contiguous" or "zigzag".
        rank, world: Number of this rank, and of all.
        parts: The parts of this rank, in the order of their tokens: one, or with zigzag two.
        documents: The number in the global cu_seqlens of each local sequence.
        first: The local sequences whose first token (or, if empty, whose place) is on this rank:
            the rows of an initial_state.
        last: The local sequences whose last token is on this rank: the rows of a final_state.
        tokens: How many tokens this rank has.
        cu_seqlens_cpu: ``[N + 1]`` int64, boundaries of the local sequences.
        cu_seqlens: The same numbers on the device of the global ones.
        through: Whether a part of any rank lies within a sequence, begun before and going on after
            it.
        even: Whether all local sequences are equally long, and not empty.
        conv1d_kernel_size: Taps of the short convolution, or None.
    """

    group: ProcessGroup | None
    layout: str
    rank: int
    world: int
    parts: tuple[Part, ...]
    documents: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]
    tokens: int
    cu_seqlens_cpu: Tensor
    cu_seqlens: Tensor
    through: bool = False
    even: bool = False
    conv1d_kernel_size: int | None = None
    _kept: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_seqs(self) -> int:
        """Local sequences of this rank."""
        return len(self.documents)

    @property
    def is_cp_enabled(self) -> bool:
        """Whether there is more than one rank."""
        return self.world > 1

    @property
    def pre_num_ranks(self) -> int:
        """Parts before this rank's first that hold tokens of its first local sequence."""
        part = self.parts[0]
        return part.number - part.begin

    @property
    def post_num_ranks(self) -> int:
        """Parts after this rank's last that hold tokens of its last local sequence."""
        part = self.parts[-1]
        return part.end - part.number

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank's first local sequence begins on it."""
        return self.parts[0].head is None

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank's last local sequence ends on it."""
        return self.parts[-1].tail is None

    @property
    def pre_num_conv_tokens(self) -> int:
        """Tokens of its first local sequence that the convolution reads from ranks before."""
        return min((self.conv1d_kernel_size or 1) - 1, self.parts[0].before)

    def copy_for_backward(self) -> CPContext:
        """A copy that shares no tensor, for pipelines that hold several microbatches."""
        copies = self.cu_seqlens_cpu.clone(), self.cu_seqlens.clone()
        return replace(self, cu_seqlens_cpu=copies[0], cu_seqlens=copies[1], _kept={})

    def check_group(self) -> None:
        """Refuse a group that is gone, or has another size than the context was built for."""
        if self.world > 1 and self.group is None:
            raise ValueError(
                f"cp_context of rank {self.rank} of {self.world} must have a group for an operator "
                "to run with it, got None"
            )
        if self.world > 1 and (self.group.size(), self.group.rank()) != (self.world, self.rank):
            raise ValueError(
                f"cp_context was built for rank {self.rank} of {self.world}, and its group now has "
                f"rank {self.group.rank()} of {self.group.size()}"
            )

    def place(self, B: int, device: torch.device, even: bool = False) -> Place:
        """The place of B sequences that are cut alike, one after the other; with even and local
        sequences that are equally long, a batch of these.

        Its plan has the rank, the world, B, the local sequences of all entries, and whether a part
        of any rank lies within a sequence; then of each part its number, those where its head
        begins and its tail ends, and its head and tail, or -1. Its rows are the numbers of all
        tails and then of all heads.
        """
        key = B, device, even
        if key not in self._kept:
            while len(self._kept) >= PLACES:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = self._place(*key)
        return self._kept[key]

    def _place(self, B: int, device: torch.device, even: bool) -> Place:
        N, cpu = self.num_seqs, self.cu_seqlens_cpu
        even = even and self.even

        def rows(local) -> list[int]:
            return [row + b * N for row in local if row is not None for b in range(B)]

        def ends(local: tuple[int, ...]) -> Tensor | None:
            if len(local) == N:
                return None
            each = [row + b * N for b in range(B) for row in local]
            return torch.tensor(each, dtype=torch.int64).to(device)

        starts = torch.arange(B)[:, None] * self.tokens + cpu[:-1]
        cpu = torch.cat([starts.flatten(), cpu[-1:] * B])
        plan = [self.rank, self.world, B, B * N, int(self.through)]
        for p in self.parts:
            plan += [p.number, p.begin, p.end, *(-1 if x is None else x for x in (p.head, p.tail))]
        both = rows(p.tail for p in self.parts) + rows(p.head for p in self.parts)
        both = torch.tensor(both, dtype=torch.int64).to(device)
        exchange = (torch.tensor(plan), both) if self.world > 1 else (None, None)
        bounds = (None, None) if even else (cpu.to(device), cpu)
        return Place(
            (*bounds, None, *exchange),
            self.group.group_name if self.world > 1 and self.group is not None else "",
            B, self.tokens, B * N, ends(self.first), ends(self.last), even,
        )  # fmt: skip


def build_cp_context(
    cu_seqlens: Tensor,
    group: ProcessGroup | None = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> CPContext:
    """Cut packed sequences over the ranks of a group.

    The T tokens of all sequences, one after the other, are cut into as many parts as there are
    ranks, R, or with zigzag 2 R: part i holds the tokens from ``i T // parts`` on. Rank r holds
    part r; with zigzag the parts r and 2 R - 1 - r, one after the other, so that causal attention
    in other layers has the same work on every rank. Sequences may begin and end anywhere.

    The operators refuse their arguments before anything is sent. A rank that raises leaves the
    others waiting for its message until its process ends or the group's timeout has passed. Then
    they raise too, or with NCCL, where a host does not wait for its GPU, its watchdog ends their
    processes: give ``torch.distributed.init_process_group`` a ``timeout`` of what a step may take,
    as its own is 10 minutes or, without NCCL, 30.

    Args:
        cu_seqlens: Boundaries ``[N + 1]``, int32 or int64, of all sequences before they are cut;
            on the device where the operators run, or on the CPU.
        group: The process group, of any backend that gathers tensors of that device, or a rank of
            :func:`simulate`. None: one rank, which needs no torch.distributed.
        conv1d_kernel_size: Taps of the short convolution, for
            :attr:`CPContext.pre_num_conv_tokens`.
        cu_seqlens_cpu: The same numbers on the CPU. Without them a cu_seqlens on a GPU is read
            once, and the call waits for the device.
        use_tf32x3_affine_chain: True, as in fla-core 0.6: what goes from rank to rank is never
            rounded to tf32.
        layout: "contiguous" or "zigzag".

    Returns:
        CPContext: for the argument cp_context of the operators, which then take the tokens of this
        rank, ``[B, context.tokens, ...]``.

    Raises:
        TypeError: an argument is not of a type listed above.
        ValueError: boundaries that do not fit; fewer tokens than parts; a group whose
            torch.distributed is not initialised, or that this process is not in;
            use_tf32x3_affine_chain=False.

    Source: chapters 21 and 23; the arguments are those of fla-core.
    """
    check.absent("use_tf32x3_affine_chain", use_tf32x3_affine_chain, True)
    return _context(cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu, layout, None)


def get_cp_cu_seqlens(
    cu_seqlens: Tensor,
    cu_seqlens_cpu: Tensor | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    group: ProcessGroup | None = None,
    conv1d_kernel_size: int | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> CPContext:
    """:func:`build_cp_context` under fla-core's other name, or what any rank of a world would hold.

    The arguments that are not named here are those of :func:`build_cp_context`.

    Args:
        world_size, rank: Number of all ranks, and of the one to look at; None: those of the group.
            The operators refuse such a context of another rank than the group's.

    Raises:
        ValueError: one of world_size and rank without the other, or a rank that is not in the
            world; otherwise as :func:`build_cp_context`.
    """
    if (world_size is None) != (rank is None):
        raise ValueError(f"world_size and rank must come together, got {world_size} and {rank}")
    place = None
    if world_size is not None:
        check.positive(world_size=world_size)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise ValueError(f"rank must be an integer from 0 to {world_size - 1}, got {rank!r}")
        place = rank, world_size
    check.absent("use_tf32x3_affine_chain", use_tf32x3_affine_chain, True)
    return _context(cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu, layout, place)


def _context(
    cu_seqlens: Tensor,
    group: ProcessGroup | None,
    conv1d_kernel_size: int | None,
    cu_seqlens_cpu: Tensor | None,
    layout: str,
    place: tuple[int, int] | None,
) -> CPContext:
    """The context of a rank of a world, or of this one."""
    check.choice("layout", layout, LAYOUTS)
    N = check.boundaries("cu_seqlens", cu_seqlens)
    if cu_seqlens_cpu is not None and check.boundaries("cu_seqlens_cpu", cu_seqlens_cpu) != N:
        raise ValueError(
            f"cu_seqlens_cpu must have the shape of cu_seqlens, {tuple(cu_seqlens.shape)}, got "
            f"{tuple(cu_seqlens_cpu.shape)}"
        )
    if conv1d_kernel_size is not None and (
        not isinstance(conv1d_kernel_size, int) or conv1d_kernel_size < 1
    ):
        raise ValueError(f"conv1d_kernel_size must be an integer >= 1, got {conv1d_kernel_size!r}")
    bounds = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
    check.lengths("cu_seqlens", bounds, bounds[-1])
    if known(cu_seqlens) and cu_seqlens.tolist() != bounds:
        raise ValueError(f"cu_seqlens_cpu must be cu_seqlens, {cu_seqlens}, got {bounds}")
    rank, world = _place(group) if place is None else place
    zigzag = layout == "zigzag" and world > 1
    count = 2 * world if zigzag else world
    if bounds[-1] < count:
        raise ValueError(
            f"cu_seqlens must have a token for each of the {count} parts of {world} ranks, got "
            f"T={bounds[-1]}"
        )
    numbers = (rank, count - 1 - rank) if zigzag else (rank,)
    return _local(
        bounds, count, numbers, cu_seqlens.device, group=group, layout=layout, rank=rank,
        world=world, conv1d_kernel_size=conv1d_kernel_size,
    )  # fmt: skip


def _place(group) -> tuple[int, int]:
    """Rank and world of a group."""
    if group is None:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not torch.distributed.is_initialized():
            raise ValueError(
                "group is None, as torch.distributed.group.WORLD is before it is initialised, but "
                f"there are {os.environ['WORLD_SIZE']} processes (WORLD_SIZE): call "
                "torch.distributed.init_process_group first"
            )
        return 0, 1
    for name in ("rank", "size", "group_name"):
        if not hasattr(group, name):
            raise TypeError(f"group must be a ProcessGroup or None, got {type(group).__name__}")
    return group.rank(), group.size()


def _local(bounds: list[int], count: int, numbers: tuple[int, ...], device, **of_context):
    """The context of the rank that holds the parts of these numbers."""
    T = bounds[-1]
    cuts = [i * T // count for i in range(count + 1)]

    def part_of(token: int) -> int:
        return bisect_right(cuts, token) - 1

    local, documents, first, last, parts = [0], [], [], [], []
    for number in numbers:
        begin, end = cuts[number], cuts[number + 1]
        rows = []  # sequence, its tokens here
        for n, (a, b) in enumerate(pairwise(bounds)):
            here = begin <= a < end or (a == T and number == count - 1)
            if (a == b and here) or max(a, begin) < min(b, end):
                rows.append((n, max(a, begin), min(b, end)))
        for n, a, b in rows:
            row = len(documents)
            documents.append(n)
            local.append(local[-1] + b - a)
            if a == bounds[n]:
                first.append(row)
            if b == bounds[n + 1]:
                last.append(row)
        row = len(documents)
        head, tail = row - len(rows), row - 1
        (before, *_), (*_, after) = (x[0] for x in rows), (x[0] for x in rows)
        parts.append(
            Part(
                number,
                (begin, end),
                head=head if bounds[before] < begin else None,
                begin=part_of(bounds[before]) if bounds[before] < begin else number,
                before=begin - bounds[before] if bounds[before] < begin else 0,
                tail=tail if bounds[after + 1] > end else None,
                end=part_of(bounds[after + 1] - 1) if bounds[after + 1] > end else number,
            )
        )
    through = any(
        a < begin and end < b for a, b in pairwise(bounds) for begin, end in pairwise(cuts)
    )
    even = len({b - a for a, b in pairwise(local)}) == 1 and local[-1] > 0
    cpu = torch.tensor(local)
    context = CPContext(
        parts=tuple(parts), documents=tuple(documents), first=tuple(first), last=tuple(last),
        tokens=local[-1], cu_seqlens_cpu=cpu, cu_seqlens=cpu.to(device), through=through,
        even=even, **of_context,
    )  # fmt: skip
    for even in (False, True):
        context.place(1, device, even)  # made here, where nothing is traced
    return context
