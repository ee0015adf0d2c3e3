"""Shared memory, and who may touch it when.

Each allocation remembers its accesses: who, where, and when by the clock of who did it. The parts
of a program and each copy and product are actors with clocks; a barrier hands on what the one who
arrives knows of all clocks to the one who waits (vector clocks). Two accesses to the same bytes, of
which one writes, must be in an order that barriers force: one actor must know of the other. So a
race is found in whatever order the parts happened to run.
"""

import functools

import torch

from linattn_edu.gluon_interpreter.errors import Race
from linattn_edu.gluon_interpreter.values import Block, torch_dtype


class Access:
    """One read or write of a region of an allocation."""

    def __init__(self, region, writes, actor, time, what):
        self.region, self.writes, self.actor, self.time = region, writes, actor, time
        self.what = what
        self.fenced = None  # of a write through registers: the actor's time at its next fence


@functools.lru_cache(maxsize=4096)
def _bytes_of(region: tuple) -> frozenset:
    """In units of two bytes, so that tiles of 16-bit numbers have one for each of them."""
    first, shape, strides, size = region
    places = torch.tensor([first * size])
    for n, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + torch.arange(n) * (stride * size)).flatten()
    return frozenset(y for x in places.tolist() for y in range(x // 2, -(-(x + size) // 2)))


@functools.lru_cache(maxsize=65536)
def overlap(a: tuple, b: tuple) -> bool:
    """Whether two regions have a byte in common."""
    return a == b or not _bytes_of(a).isdisjoint(_bytes_of(b))


@functools.lru_cache(maxsize=65536)
def covers(a: tuple, b: tuple) -> bool:
    """Whether region a has all of b."""
    return a == b or _bytes_of(a) >= _bytes_of(b)


class Allocation:
    """Memory that a kernel allocates: numbers, NaN until written, or mbarriers."""

    def __init__(self, dtype, shape):
        self.name, self.barriers = None, {}
        self.described = f"memory {dtype.name}{[*map(int, shape)]}"
        self.accesses: list[Access] = []

    def conflicts(self, region, writes):
        """The accesses with which another one may be in a race."""
        return [x for x in self.accesses if (writes or x.writes) and overlap(x.region, region)]

    def add(self, access: Access) -> None:
        """Keep an access that is in order. What a later one must not race with is the last write
        of each place and the reads since: who knows of a write knows of what it knew of.
        """
        region = access.region
        if access.writes:
            self.accesses = [x for x in self.accesses if not covers(region, x.region)]
        else:
            self.accesses = [
                x for x in self.accesses
                if x.writes or x.actor is not access.actor or not covers(region, x.region)
            ]  # fmt: skip
        self.accesses.append(access)


class Shared:
    """A view of an allocation, as kernels handle it."""

    def __init__(self, machine, allocation, tensor, dtype, layout, place=""):
        self._machine, self.allocation, self.tensor = machine, allocation, tensor
        self.dtype, self.layout, self._place = dtype, layout, place

    @property
    def shape(self) -> list[int]:
        return [*self.tensor.shape]

    @property
    def name(self) -> str:
        return (self.allocation.name or self.allocation.described) + self._place

    @property
    def region(self) -> tuple:
        x = self.tensor
        return x.storage_offset(), tuple(x.shape), x.stride(), x.element_size()

    def _view(self, tensor, place="") -> "Shared":
        return Shared(
            self._machine, self.allocation, tensor, self.dtype, self.layout, self._place + place
        )

    def index(self, i: int) -> "Shared":
        """Place i of a ring."""
        if not 0 <= i < len(self.tensor):
            raise IndexError(f"place {int(i)} of {self.name}, which has {len(self.tensor)}")
        return self._view(self.tensor[int(i)], f"[{int(i)}]")

    def slice(self, start: int, length: int, dim: int = 0) -> "Shared":
        """`length` rows from `start` on, or columns."""
        return self._view(self.tensor.narrow(dim, int(start), int(length)))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return self._view(self.tensor.permute(*order))

    def reshape(self, shape: list[int]) -> "Shared":
        return self._view(self.tensor.view(*map(int, shape)))

    def reinterpret(self, dtype, shape: list[int], layout: object) -> "Shared":
        """The same bytes as numbers of another dtype and shape."""
        tensor = self.tensor.view(-1).view(torch_dtype(dtype)).view(*map(int, shape))
        return Shared(self._machine, self.allocation, tensor, dtype, layout, self._place)

    _reinterpret = reinterpret  # its name up to Triton 3.8

    def load(self, layout: object = None) -> Block:
        """Into registers."""
        self._machine.part.touch(self, writes=False)
        return Block(self.tensor.clone())

    def store(self, value: Block) -> None:
        """From registers."""
        if value.shape != self.shape or value.dtype != self.dtype:
            raise TypeError(
                f"{value.dtype}{value.shape} is stored to {self.name}, {self.dtype}{self.shape}"
            )
        data = value.data
        self._machine.part.touch(self, writes=True)
        self.tensor.copy_(data)


def allocate(machine, dtype, shape: list[int], layout: object) -> Shared:
    """New shared memory. Of numbers each is NaN until it is written."""
    shape = [int(x) for x in shape]
    kind = torch_dtype(dtype)
    tensor = torch.zeros(shape, dtype=kind)
    if kind.is_floating_point:
        tensor.fill_(float("nan"))
    return Shared(machine, Allocation(dtype, shape), tensor, dtype, layout)


def race(first: Access, then: str, who: str, name: str) -> Race:
    """The error of an access that no barrier puts after `first`."""
    return Race(f"{name} {then} by {who}, and no barrier says that before it {first.what}")
