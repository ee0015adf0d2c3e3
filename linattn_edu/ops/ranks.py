"""Sequences that go on from rank to rank: what the compositions and the public functions need."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from linattn_edu.cp.groups import Gathering


class Reached(Exception):
    """Ends a composition at the map of its piece, which is all that was wanted of it."""

    def __init__(self, S_ext: Tensor, M: Tensor | None):
        super().__init__("a composition was asked for the map of its piece alone")
        self.map = S_ext, M


@dataclass(frozen=True)
class Probe:
    """In the place of Ranks: a composition runs one piece, up to its map."""

    transition: bool

    def send(self, f: Callable, tensors: tuple, state: Tensor | None, **options) -> None:
        raise Reached(*f(*tensors, state, transition=self.transition, **options))

    send_all = send

    def entering(self, crossing: Tensor | None, state: Tensor | None) -> Tensor | None:
        return state  # of this piece, already in its place


@dataclass(frozen=True)
class _Part:
    """A part of this rank: its number; the parts where its head begins and its tail ends; the local
    sequences that are its head and its tail, or -1.
    """

    number: int
    begin: int
    end: int
    head: int
    tail: int


def crossings(plan: Tensor) -> int:
    """How many states come from other ranks."""
    _, _, B, _, _, *parts = plan.tolist()
    return B * sum(head >= 0 for head in parts[3::5])


class Ranks:
    """One exchange of the maps of pieces, forward in time or back, and the states that follow.

    Forward the maps are those of the tails, which go on in later parts, and the states enter the
    heads, which were begun in earlier ones; back in time the other way round.

    Args:
        plan, rows: Of CPContext.place.
        group: Name of the process group.
        axes: Sizes of a state: heads, then one or two more.
        matrices: Whether a transition is a matrix for each head, or a number.
        dtype: Of the maps on the wire, the same on all ranks.
        kernels: Whether kernels make them, which are told which sequences are wanted and where the
            maps go.
        back: Whether time runs back.
    """

    def __init__(
        self,
        plan: Tensor,
        rows: Tensor,
        group: str,
        axes: tuple[int, ...],
        *,
        matrices: bool,
        dtype: torch.dtype,
        kernels: bool,
        back: bool = False,
    ):
        self.rank, self.world, self.B, self.N, through, *parts = plan.tolist()
        self.parts = [_Part(*p) for p in zip(*[iter(parts)] * 5, strict=True)]
        self.group, self.axes, self.matrices = group, axes, matrices
        self.dtype, self.kernels, self.back = dtype, kernels, back
        tails = self.B * sum(p.tail >= 0 for p in self.parts)
        self.tails, self.heads = rows[:tails], rows[tails:]
        self.sources = self.heads if back else self.tails
        self.alone = matrices and not through  # a state is what one piece makes of nothing
        self.crossing: Tensor | None = None

    @property
    def transition(self) -> bool:
        """Whether a piece goes on at both its ends, so that its transition is needed."""
        return any(p.head == p.tail >= 0 for p in self.parts)

    def send(self, f: Callable, tensors: tuple, state: Tensor | None, **options) -> None:
        """Send f of the tensors and the sources' states, their maps; nothing waits for others."""
        if not len(self.sources):
            return self.gather(None)
        state = None if state is None else state[self.sources]
        options |= {"transition": self.transition}
        if self.kernels and self.matrices:
            message, slots = self._message()
            out = message[slots[0] : slots[-1] + 1].flatten(0, 1)
            f(*tensors, state, rows=self.sources, out=out, **options)
            return self._gather(message)
        if self.kernels:
            options |= {"rows": self.sources}
        else:  # tensors of a batch

            def own(x):
                return x[self.sources] if isinstance(x, Tensor) else x

            tensors = map(own, tensors)
            options = {n: own(x) for n, x in options.items()}
        return self.gather(f(*tensors, state, **options))

    def send_pieces(self, join: Callable, maps: tuple, state: Tensor | None, **options) -> None:
        """As send, where the maps of the pieces of all local sequences are there, numbers: join
        writes those of the sources into the message. Kernels alone do.
        """
        message, slots = self._message(torch.zeros)
        if slots:
            state = None if state is None else state[self.sources]
            own = message[slots[0] : slots[-1] + 1].flatten(0, 1)
            join(*maps, state, rows=self.sources, out=self._split(own), **options)
        self._gather(message)

    def send_all(self, f: Callable, tensors: tuple, state: Tensor | None, **options) -> None:
        """As send, where f gives the maps of all local sequences."""
        maps = None
        if len(self.sources):
            S_ext, M = f(*tensors, state, transition=self.transition, **options)
            maps = S_ext[self.sources], None if M is None else M[self.sources]
        self.gather(maps)

    def gather(self, maps: tuple[Tensor, Tensor | None] | None) -> None:
        """Begin to gather the maps of all ranks; of a part without one it is zero, and of one whose
        transition nobody needs that.
        """
        message, slots = self._message(torch.zeros)
        S_ext, M = (None, None) if maps is None else maps
        for i, slot in enumerate(slots):
            own = slice(i * self.B, (i + 1) * self.B)
            to_ext, to_M = self._split(message[slot])
            to_ext.copy_(S_ext[own].reshape(to_ext.shape))
            if M is not None and to_M.numel():
                to_M.copy_(M[own])
        self._gather(message)

    def _message(self, new: Callable = torch.empty) -> tuple[Tensor, list[int]]:
        """A place for the maps of all parts, and which parts have one: those beside each other. It
        is zero where one has none, or with torch.zeros all of it.

        A number is in a column of its own, or four, so that rows begin at 16 bytes.
        """
        H, K, V = self._matrix
        more = K * (not self.alone) if self.matrices else 1 if K == 1 else 4
        sizes = len(self.parts), self.B, H, K, V + more
        slots = [i for i, p in enumerate(self.parts) if self._source(p) >= 0]
        new = new if len(slots) == len(self.parts) else torch.zeros
        return new(sizes, dtype=self.dtype, device=self.sources.device), slots

    def _gather(self, message: Tensor) -> None:
        self._arriving = Gathering(message, self.group, self.rank, self.world)

    def receive(self, merge: Callable, state: Tensor | None) -> Tensor | None:
        """state [N, ...] of all local sequences, with those that come from other parts."""
        gathered, found = self._arriving.wait(), []
        for p in self.parts:
            if self._target(p) >= 0:
                numbers = range(p.number + 1, p.end + 1) if self.back else range(p.begin, p.number)
                S_ext, M = self._split(self._of(gathered, numbers))
                # of one piece nothing is merged; a copy: it is kept for the backward pass, without
                # the other messages
                found.append(S_ext[:, 0].clone() if len(numbers) == 1 else merge(S_ext, M)[1])
        if not found:
            return state
        self.crossing = (torch.cat(found) if found[1:] else found[0]).reshape(-1, *self.axes)
        return self._placed(self.tails if self.back else self.heads, self.crossing, state)

    def promised(self, merge: Callable, state: Tensor | None) -> Tensor | Callable | None:
        """What `receive` gives; to kernels, which have other work before they need it, a function
        that gives it.
        """
        f = partial(self.receive, merge, state)
        return f if self.kernels else f()

    def _of(self, gathered: Tensor, numbers: range) -> Tensor:
        """[B, pieces, ...]: the maps of the parts of these numbers."""
        if numbers.stop <= self.world:  # the first of each rank, in the order of ranks
            return gathered[numbers.start : numbers.stop, 0].transpose(0, 1)
        return torch.stack([gathered[self._place(i)] for i in numbers], 1)

    def entering(self, crossing: Tensor | None, state: Tensor | None) -> Tensor | None:
        """state [N, ...], with the states that entered the heads in the forward pass."""
        return state if crossing is None else self._placed(self.heads, crossing, state)

    def _placed(self, rows: Tensor, values: Tensor, state: Tensor | None) -> Tensor:
        if len(rows) == self.N and 1 in (self.B, len(self.parts)):  # all of them, in their order
            return values
        if state is None:
            state = values.new_zeros(self.N, *self.axes)
        dtype = max(state.dtype, values.dtype, key=lambda dtype: dtype.itemsize)
        return state.to(dtype).index_copy(0, rows, values.to(dtype))

    @property
    def _matrix(self) -> tuple[int, int, int]:
        """Sizes of a state: heads, rows, columns."""
        return self.axes if len(self.axes) == 3 else (self.axes[0], 1, self.axes[1])

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """S_ext [..., H, K, V] and M, [..., H, K, K] or [..., H], of messages; M without columns
        where none is sent.
        """
        V = self._matrix[2]
        return message[..., :V], message[..., V:] if self.matrices else message[..., 0, V]

    def _source(self, p: _Part) -> int:
        return p.head if self.back else p.tail

    def _target(self, p: _Part) -> int:
        return p.tail if self.back else p.head

    def _place(self, number: int) -> tuple[int, int]:
        """Rank of a part, and the place among its parts."""
        return (number, 0) if number < self.world else (2 * self.world - 1 - number, 1)
