"""What is chosen for a call, and the GPU that it is chosen for, which need not be there."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple


class Choice(NamedTuple):
    """What a decision takes, and why: a text in which {T} is a field of what it was asked about,
    and {0} what more it was told.
    """

    takes: str | int
    why: str


@dataclass(frozen=True)
class GPU:
    """What the choices ask of a GPU."""

    name: str
    capability: tuple[int, int]
    processors: int  # multiprocessors
    compiled: bool = True  # False: Triton's interpreter


GPUS = {
    "t4": GPU("T4", (7, 5), 40),
    "a100": GPU("A100", (8, 0), 108),
    "l4": GPU("L4", (8, 9), 58),
    "4090": GPU("GeForce RTX 4090", (8, 9), 128),
    "h100": GPU("H100", (9, 0), 132),
    "h200": GPU("H200", (9, 0), 132),
    "b200": GPU("B200", (10, 0), 148),
}
INTERPRETER = GPU("Triton's interpreter", (9, 0), 1, compiled=False)


def generation(capability: tuple[int, int]) -> str:
    """The tables' name of a GPU generation, by compute capability."""
    if capability < (8, 0):
        return "turing"
    if capability in ((10, 0), (10, 3)):
        return "blackwell"
    return "hopper" if capability == (9, 0) else "ampere"


_about: ContextVar[tuple[GPU, Callable] | None] = ContextVar("about", default=None)
_asking = [0]  # how many ask at the moment: where nobody does, a choice costs one look at this


def asked() -> GPU | None:
    """The GPU that this thread asks about, or None; tensors on the device meta are on it."""
    about = _about.get() if _asking[0] else None
    return None if about is None else about[0]


def tell(name: str, choice: Choice, record: object, more: tuple) -> None:
    """Let whoever asks know what a decision chose, asked about a record and more."""
    about = _about.get() if _asking[0] else None
    if about is not None:
        about[1](name, choice, record, more)


def gluon_is_off(why: str) -> bool:
    """False: a launcher of a kernel in Gluon has not launched it, and plain Triton takes its place,
    which whoever asks hears.
    """
    tell("gluon", Choice("triton", "{0}"), None, (why,))
    return False


@contextmanager
def ask(gpu: GPU, listen: Callable[[str, Choice, object, tuple], None]) -> Iterator[None]:
    """Meanwhile the choices of this thread are those for this GPU, and listen hears of each."""
    token = _about.set((gpu, listen))
    _asking[0] += 1
    try:
        yield
    finally:
        _asking[0] -= 1
        _about.reset(token)
