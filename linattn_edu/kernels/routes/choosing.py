"""What the decisions are asked about, and how one is made: told to who listens, or forced."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu import choices
from linattn_edu.choices import Choice
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.routes import limits
from linattn_edu.kernels.rows import compiled, device_of
from linattn_edu.packing import Packing

# why the kernels in Gluon are off, or "": once, at import, since torch.compile, which traces the
# choice of a set of stages, cannot ask
GLUON = "" if support.available().usable else support.available().reason


class Kind(NamedTuple):
    """A sequence, and where it is. There is no batch in it, so what is decided by it is decided
    alike whatever else is computed.
    """

    T: int  # tokens; of the longest, where sequences are packed and the host knows
    H: int  # of q and k, or groups of B and C
    HV: int
    K: int
    V: int
    C: int  # tokens of a chunk
    dtype: torch.dtype
    generation: str
    large: bool  # whether the GPU has limits.MULTIPROCESSORS or more
    compiled: bool  # False: in Triton's interpreter
    gluon: str  # why Gluon is off; or ""
    packed: bool
    aligned: bool  # whether every tensor begins at 16 bytes


class Load(NamedTuple):
    """How many such sequences there are, and multiprocessors for them."""

    kind: Kind
    sequences: int
    processors: int


def kind_of(
    q: Tensor,
    HV: int,
    V: int,
    C: int,
    packing: Packing | bool | None,
    tensors: Sequence[Tensor] = (),
) -> Kind:
    """The Kind of q [B, T, H, K] and HV heads of V values, in chunks of C tokens.

    packing: a Packing; or, where it is not made yet, whether sequences are packed. tensors: what a
    kernel wants to begin at 16 bytes.
    """
    T, (H, K) = q.shape[1], q.shape[2:] or (1, 1)
    packed = packing is not None and packing is not False
    if isinstance(packing, Packing) and packing.longest is not None:
        T = packing.longest
    generation, processors = device_of(q)
    real, large = compiled(q), processors >= limits.MULTIPROCESSORS
    aligned = not real or all(x.data_ptr() % 16 == 0 for x in tensors)
    return Kind(T, H, HV, K, V, C, q.dtype, generation, large, real, GLUON, packed, aligned)


def load_of(kind: Kind, x: Tensor, packing: Packing | None) -> Load:
    """The Load of x [B, T, ...], whose sequences are of this kind."""
    sequences = x.shape[0] if packing is None else packing.sequences
    return Load(kind, sequences, device_of(x)[1])


# -- a decision

_decisions: set[str] = set()  # their names
_forced: dict[str, Choice] = {}  # decision -> what it is to choose


def decision(f: Callable) -> Callable:
    """Make of f(record, ...) -> Choice a decision, which has the name of f."""
    name = f.__name__
    _decisions.add(name)

    @functools.wraps(f)
    def choose(record, *about) -> Choice:
        choice = _forced[name] if name in _forced else f(record, *about)
        choices.tell(name, choice, record, about)
        return choice

    return choose


@contextmanager
def forced(**what: object) -> Iterator[None]:
    """Meanwhile decisions choose as told, by their names, and limits are others, by theirs.

    For tests and benchmarks: `forced(scan="triton", LENGTH=256)`. In all threads; the programs of
    kernels.host.plan are to be cleared where calls of the same kind went before.
    """
    for n in what:
        if not (hasattr(limits, n) if n.isupper() else n in _decisions):
            raise AttributeError(f"routes have no limit and no decision {n}")
    numbers = {n: what.pop(n) for n in [*what] if n.isupper()}
    before, held = {n: getattr(limits, n) for n in numbers}, {**_forced}
    for n, x in numbers.items():
        setattr(limits, n, x)
    _forced.update({n: Choice(x, "forced") for n, x in what.items()})
    try:
        yield
    finally:
        for n, x in before.items():
            setattr(limits, n, x)
        _forced.clear()
        _forced.update(held)


def first(conditions: Sequence[tuple[str, Callable]], record: tuple) -> str | None:
    """What the first condition that does not hold says, or None: all hold."""
    for why, holds in conditions:
        if not holds(record):
            return why
    return None
