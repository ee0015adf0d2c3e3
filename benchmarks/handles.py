"""Launches without Triton's front, for the same kernel with arguments of the same kind.

For every launch Triton binds the arguments to the signature, asks of each what the compiled kernel
depends on, looks for that kernel, and hands the arguments on. In a composition that runs under
`fast` what was found for a kind of launch is kept: its kinds of arguments (the dtype of a tensor
and whether its address is a multiple of 16, the value of a number, None, constants and options) are
told apart here, never more coarsely than by Triton, and the compiled kernel's function in C is
called with addresses.

It is no part of the library, whose calls are written down (`linattn_edu.kernels.host.plan`), but
what that is measured against.

Triton launches itself: outside of `fast`; for a grid that is a function; for arguments of kinds
that are not told here; for kernels with hooks of their own.
"""

import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from linattn_edu.kernels.host import plan
from linattn_edu.kernels.host.bounded import Bounded
from linattn_edu.kernels.host.launchers import (
    Described,
    Text,
    Untold,
    handed,
    maps,
    place_of,
    rest,
    told,
)

LIMIT = 8192  # kinds of launches
TENSORS = (Tensor, Parameter)
PLACE = ("base", "shape", "strides")

_triton_run = JITFunction.run
_kinds = Bounded(lambda: LIMIT)  # kernel, device and types of arguments -> _Kind


class _Here(threading.local):
    device = None  # where this thread's launches are made fast


_here = _Here()


def clear() -> None:
    """Forget all kinds of launches: after a change of Triton's knobs."""
    _kinds.clear()


def fast(device: torch.device, compose: Callable[[], tuple]) -> tuple:
    """compose(), which launches on this device, the current one, alone."""
    before, _here.device = _here.device, device.index or 0
    try:
        return compose()
    finally:
        _here.device = before


def _composed(programs, key: tuple, inputs, compose: Callable[[], tuple], writes=None) -> tuple:
    """In the place of plan.run."""
    return fast(next(x for x in inputs if x is not None).device, compose)


@contextmanager
def instead():
    """Passes are composed anew and launched so, where else they would be written down."""
    with patch.multiple(plan, find=lambda *_: None, run=_composed):
        yield


def _run(self, *args, grid, warmup, **kwargs):
    """In the place of JITFunction.run."""
    device = _here.device
    if device is None or warmup or self.pre_run_hooks or callable(grid):
        return _triton_run(self, *args, grid=grid, warmup=warmup, **kwargs)
    types = id(self), device, len(grid), *map(type, args), *kwargs, *map(type, kwargs.values())
    kind = _kinds.get(types)
    if kind is None:
        kind = _Kind(self, device, len(grid), args, kwargs)
        _kinds.put(types, kind)
    if (launch := kind.launch) is None:
        return _triton_run(self, *args, grid=grid, warmup=warmup, **kwargs)
    try:
        if (compiled := launch(grid, *args, **kwargs)) is not None:
            return compiled
    except TypeError:  # a constant that cannot be a key
        kind.launch = None
    compiled = _triton_run(self, *args, grid=grid, warmup=warmup, **kwargs)
    if kind.launch is not None:
        kind.keep(compiled, args, kwargs)
    return compiled


JITFunction.run = _run


class _Kind:
    """Launches of a kernel whose arguments have these types, given in this way.

    launch(grid, *args, **kwargs) does it and returns the compiled kernel; None if it is not known
    what to launch. It is None where types are not told.
    """

    def __init__(self, kernel: JITFunction, device: int, rank: int, args: tuple, kwargs: dict):
        self.kernel = kernel  # which is not to go: its id is a key
        self.known = Bounded(lambda: LIMIT)
        self.rank = rank
        self.stream = driver.active.get_current_stream
        self.device = device
        try:
            if driver.active.get_current_target().backend != "cuda":
                raise Untold("a launcher that is not known here")
            self.launch = self._written(args, kwargs)
        except Untold:
            self.launch = None

    def _written(self, args: tuple, kwargs: dict) -> Callable:
        """The function that launches."""
        params = self.kernel.params
        names = {p.name for p in params}
        given = dict(zip((p.name for p in params), args, strict=False))
        given |= {n: x for n, x in kwargs.items() if n in names}
        self.names = [p.name for p in params]
        self.values, lines, key, pointers = [], [], [], []
        for p in params:
            n = p.name
            if n not in given:
                if not p.has_default or type(p.default) in TENSORS:
                    raise Untold(n)
                self.values.append(None)
                continue
            x, value = given[n], n
            if p.is_constexpr:
                key.append(n)
                value = None
            elif type(x) in TENSORS:
                lines.append(f"_{n} = {n}.data_ptr()")
                key.append(f"{n}.dtype")
                pointers.append(value := f"_{n}")
            elif x is None:
                value = None
            elif type(x) is bool:
                key.append(n)
            elif type(x) is int:  # else its size chooses the type, and Triton looks for 1 and 16
                small = f"-0x80000000 <= {n} < 0x80000000 or {n}"
                key.append(small if p.do_not_specialize else n)
            elif is_dataclass(x) and isinstance(getattr(x, "base", None), Tensor):
                lines.append(f"_{n} = ({n}.base.data_ptr(), *{n}.shape, *{n}.strides)")
                key += [f"{n}.base.dtype", *self._rest(n, x)]
                value = f"_{n}"
            elif type(x) is not float:
                raise Untold(f"{n}: {type(x)}")
            self.values.append(value)
        options = [n for n in kwargs if n not in names]
        key += options
        if pointers:
            every = "".join(f"{p} & 15 == 0, " for p in pointers)
            key.append(f"({' | '.join(pointers)}) & 15 and ({every})")
        passed = [v for v in self.values if v is not None]
        grid = [f"_g{i}" for i in range(self.rank)]
        head = ["_grid", *self.names[: len(args)], "/", *(["*", *kwargs] if kwargs else [])]
        key = f"({''.join(f'{k}, ' for k in key)})"
        body = [
            *lines,
            f"_call = _known.get({key})",
            "if _call is None: return None",
            f"{''.join(f'{g}, ' for g in grid)}= _grid",
            f"_call[0]({', '.join([*grid, f'_stream({self.device})', *passed])})",
            "return _call[1]",
        ]
        space = {"_known": self.known, "_stream": self.stream}
        source = "\n    ".join([f"def launch({', '.join(head)}):", *body])
        by_key = "\n    ".join([f"def key({', '.join(head)}):", *lines, f"return {key}"])
        exec(compile(f"{source}\n{by_key}", "<launch>", "exec"), space)
        self.key = space["key"]
        return space["launch"]

    def _rest(self, name: str, descriptor: object) -> list[str]:
        """Expressions for what a descriptor has beside its place; what is unhashable by its id."""
        out = []
        for f in fields(descriptor):
            if f.name in PLACE:
                continue
            x = getattr(descriptor, f.name)
            at = f"{name}.{f.name}"
            if isinstance(x, list):
                at = f"(*{at},)"
            elif not isinstance(x, (str, int, type(None))):
                at = f"id({at})"
            out.append(at)
        return out

    def keep(self, compiled: object, args: tuple, kwargs: dict) -> None:
        """What was launched with these arguments."""
        constants: dict[str, object] = {}

        def constant(x: object) -> str:
            constants[name := f"c{len(constants)}"] = x
            return name

        params = self.kernel.params
        bound = dict(zip(self.names, args, strict=False)) | kwargs
        texts, passed = [], []
        for p, value in zip(params, self.values, strict=True):
            x = bound.get(p.name, p.default)
            if value is None:
                texts.append(x)
            elif is_dataclass(x):
                numbers = [f"{value}[{i}]" for i in range(1, len(place_of(x)))]
                texts.append(Described(p.name, x, value, numbers))
                passed.append(value)
            else:
                texts.append(Text(value))
                passed.append(value)
        grid = [f"_g{i}" for i in range(self.rank)]
        whole = map(Text, [*grid, *["1"] * (3 - self.rank), "_s"])
        try:
            about = (compiled.function, compiled.packed_metadata, None, None, None)
            call, given = handed(compiled.run, (*whole, *about, *texts), constant)
            if call is compiled.run:
                raise Untold("a launcher that does more")
            call = constant(call)
            line = f"{call}({', '.join(told(x, constant) for x in given)})"
            head = ", ".join([*grid, "_s", *passed])
            space = {"maps": maps, **constants}
            exec(compile(f"def call({head}): {line}", "<handle>", "exec"), space)
            held = [rest(x, *PLACE) for x in bound.values() if is_dataclass(x)]  # ids are keys
            self.known.put(self.key(None, *args, **kwargs), (space["call"], compiled, held))
        except (Untold, AttributeError, TypeError):
            self.launch = None
