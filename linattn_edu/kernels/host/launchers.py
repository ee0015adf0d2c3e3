"""What Triton's launcher of a kernel hands to its function in C, in the Tritons from 3.6 to 3.9.

A launcher is some lines of Python that take a quarter of the time of a launch: for most kernels
they do nothing but hand on what they were given, and for each descriptor make a tensor map, the
copy engine's form of it, anew. Here it is called once with names in the place of what changes from
launch to launch, and what it would hand on is written down.
"""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from linattn_edu.kernels.host.bounded import Bounded

MAPS = 8192  # tensor maps
HEAD = 9  # what a launcher takes before the arguments of its kernel


class Untold(Exception):
    """Something that cannot be repeated."""


class Text(str):
    """An expression, in the place of what it stands for; not to be computed with."""


class Described(Text):
    """An expression for a descriptor; `place` for what `Maps` finds its map by.

    numbers: expressions for its shape and strides.
    """

    def __new__(cls, text: str, descriptor: object, place: str, numbers: Sequence[str]):
        self = super().__new__(cls, text)
        self.descriptor, self.place, self.numbers = descriptor, place, [*map(Text, numbers)]
        return self


class Fill:
    """(address, *shape, *strides) -> the map of a descriptor that is otherwise like this one; an
    address alone -> of one that has its shape and strides too.
    """

    def __init__(self, descriptor: object, make: Callable, about: tuple):
        self.rest = rest(descriptor, "base", "shape", "strides")
        self.make, self.about = make, about
        address, *self.numbers = place_of(descriptor)
        if self.all(address)[1:] != self.numbers:
            raise Untold("a descriptor that is not a tensor map, a shape and strides")

    def all(self, place: tuple | int) -> list:
        """What Triton hands on in the place of the descriptor."""
        address, *numbers = place if isinstance(place, tuple) else (place, *self.numbers)
        rank = len(numbers) // 2
        base = SimpleNamespace(data_ptr=lambda: address)
        form = {"shape": numbers[:rank], "strides": numbers[rank:], **self.rest}
        return [*self.make(SimpleNamespace(base=base, **form), *self.about)]


class Maps(Bounded):
    """(place, Fill) -> tensor map.

    Triton makes one for every descriptor of every launch, in Python, which may take longer than the
    kernel. What fills a map knows all numbers but those of its place, an address, shape and
    strides; so with the same place it fills the same map, whatever tensor lies there now.
    """

    def __missing__(self, key: tuple[tuple, Fill]) -> object:
        place, fill = key
        made = fill.all(place)[0]
        self.put(key, made)
        return made


maps = Maps(lambda: MAPS)


def place_of(descriptor: object) -> tuple:
    return (descriptor.base.data_ptr(), *descriptor.shape, *descriptor.strides)


def rest(descriptor: object, *but: str) -> dict:
    """What a descriptor holds beside that."""
    names = (f.name for f in dataclasses.fields(descriptor))
    return {n: getattr(descriptor, n) for n in names if n not in but}


def handed(
    run: Callable, arguments: tuple, constant: Callable[[object], str]
) -> tuple[Callable, tuple]:
    """What a launcher calls with its arguments, its function in C, and what it hands to that; or
    the launcher itself and its arguments, where it does more than to hand them on.

    Args:
        run: The launcher of a compiled kernel.
        arguments: Its arguments, what changes as `Text` or `Described`.
        constant: Gives a name to what does not change.
    """
    try:
        told, listening, launch = [], copy.copy(run), run.launch  # without one it would launch
        listening.launch = lambda *given: told.append(given)
        listening(*arguments)
        (given,) = told
        if inspect.isbuiltin(launch):
            return launch, given
        return _with_maps(launch, given, arguments[HEAD:], constant)
    # it computes with the grid: memory that each launch needs for itself; or Triton has changed
    except Exception:
        return run, arguments


def _with_maps(
    launch: Callable, given: tuple, arguments: tuple, constant: Callable
) -> tuple[Callable, tuple]:
    """The same for kernels with descriptors, whose `launch` is a wrapper of the function in C.

    The wrapper calls make_tensordesc_arg for a descriptor and hands the result on in its place.
    Triton 3.6 and 3.7 have it among the globals, 3.8 and 3.9 in the closure, with another argument
    that it does not read.
    """
    held = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    held = {n: cell.cell_contents for n, cell in held.items()}
    function, about = held["launcher"], iter(held["tensordesc_meta"])
    make = held.get("make_tensordesc_arg") or launch.__globals__["make_tensordesc_arg"]
    more = (None,) * (len(inspect.signature(make).parameters) - 2)
    if not inspect.isbuiltin(function):
        raise Untold("a launcher of several layers")
    texts = []
    for x in arguments:
        if isinstance(x, Described):
            fill = constant(Fill(x.descriptor, make, (next(about), *more)))
            texts += [Text(f"maps[{x.place}, {fill}]"), *x.numbers]
        else:
            texts.append(x)
    if isinstance(given[-1], tuple) and len(given[-1]) == len(arguments):
        return function, (*given[:-1], tuple(texts))
    return function, (*given[: len(given) - len(arguments)], *texts)  # Triton 3.6


def told(x: object, constant: Callable[[object], str]) -> str:
    """An expression for what is handed to a launcher."""
    if isinstance(x, (tuple, list)) and any(isinstance(y, Text) for y in x):
        inner = "".join(f"{told(y, constant)}, " for y in x)
        return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
    if isinstance(x, Text):
        return str(x)
    return repr(x) if x is None or type(x) in (bool, int) else constant(x)
