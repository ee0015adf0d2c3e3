"""What the registry says of a stage."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from fused.kda_checks import SCALE


def call(names: str, given: str = "", **options) -> Callable:
    """A call on parts: parts -> (arguments, options).

    names: the parts that are its arguments, `-` where one is None. given: parts that are options
    already. options: by name, a word is that of a part.
    """

    def of(r):
        args = [None if n == "-" else attrgetter(n)(r) for n in names.split()]
        named = {n: getattr(r, x) if isinstance(x, str) else x for n, x in options.items()}
        return args, {n: x for g in given.split() for n, x in getattr(r, g).items()} | named

    return of


def options(C: int) -> dict:
    """What parts of chunks of C tokens have of the options that calls share."""
    return {"chunks": {"chunk_size": C}, "scaled": {"scale": SCALE, "chunk_size": C}}


class Table(NamedTuple):
    """A configuration table, whose every row gpu/run_rows.py runs."""

    name: str  # that of the stage, `kda_` before it with a gate for each channel
    table: str = "CONFIGS"  # its name in the stage's file
    by: str = ""  # its rows: "dim", for keys up to a width, "value", for values; else for any
    run: tuple[str, ...] = ()  # what shows them: "backward" passes, "fused" stages, in "pieces"


@dataclass(frozen=True)
class Stage:
    """A function that is in both rooms, as it is called on the parts of one family."""

    file: str  # "delta/state"
    family: str  # of kernels/blanks.py, and of FAMILIES where its grid is theirs
    call: Callable  # parts -> the call that is tested, and compiled
    function: str = ""  # where its name is not the file's
    more: Sequence[Callable] = ()  # calls that are compiled beside it
    adds: int = 0  # so many of the last arguments it adds to, or overwrites
    when: Callable = lambda r: True  # parts -> whether it is compiled on them
    pieces: bool = False  # compiled also where it cuts a sequence
    tables: tuple[Table, ...] = ()

    @property
    def name(self) -> str:
        return self.function or self.file.split("/")[1]

    @property
    def module(self):
        """The file with the kernels."""
        return importlib.import_module(f"linattn_edu.kernels.{self.file.replace('/', '.')}")

    @property
    def kernel(self) -> Callable:
        """The kernel, on copies of what it changes."""
        kernel = getattr(self.module, self.name)

        def added(*args, **options):
            kept = len(args) - self.adds
            copies = (x if x is None else x.clone() for x in args[kept:])
            return kernel(*args[:kept], *copies, **options)

        return added if self.adds else kernel

    @property
    def reference(self) -> Callable:
        at = f"linattn_edu.reference.{self.file.replace('/', '.')}"
        return getattr(importlib.import_module(at), self.name)

    def calls(self, r) -> list:
        """All that is compiled."""
        return [f(r) for f in (self.call, *self.more)]
