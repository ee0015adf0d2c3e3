"""A composition of stages, written down once: its tensors and launches as a straight program.

A short call waits for the host, not for the GPU. Most of that time goes into what is the same in
every call with tensors of the same shapes, strides and dtypes: choosing rows and grids, and what
Triton does with each argument of a launch. So the second such call is watched, and what it did
(tensors made, kernels launched, other operations of PyTorch) becomes a function of its inputs.
The calls after it run that: the same kernels on the same grids with the same numbers, hence the
same bits.

What cannot be told in that way is never replayed: a number of a tensor that the host reads, a
tensor that comes neither from the inputs nor from the call itself.
"""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, SimpleNamespace

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

from linattn_edu.kernels.host.precompile import precompile
from linattn_edu.kernels.host.watching import MAKES, Operations, launches

LIMIT = 512  # programs of an operator's pass; beyond it the oldest is forgotten
MAPS = 8192  # tensor maps; beyond it all are forgotten
SEEN, NEVER = "seen once", "cannot be told"

_aten = torch.ops.aten
DEVICES = {"cuda"}  # where calls are written down; elsewhere the host is not waited for
_MOVES = (
    _aten._to_copy.default, _aten.clone.default, _aten.copy_.default, _aten.zero_.default,
    _aten.fill_.Scalar, _aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default,
)  # fmt: skip
_all: list[dict] = []
_compiled: set[tuple] = set()  # kinds of calls, whatever their lengths, with nothing to compile


def plans() -> dict:
    """A place for the programs of one operator's pass: what kind of call -> program."""
    _all.append({})
    return _all[-1]


def clear() -> None:
    """Forget all programs: after a change of what a composition launches."""
    for programs in _all:
        programs.clear()
    _compiled.clear()
    _maps.clear()


@contextmanager
def off():
    """Every call runs its composition."""
    before = {*DEVICES}
    DEVICES.clear()
    try:
        yield
    finally:
        DEVICES.update(before)


def find(programs: dict, key: tuple, inputs: Sequence[Tensor | None]) -> Callable | None:
    """The program of earlier calls of this kind, or None; arguments as of `run`."""
    device = next(x for x in inputs if x is not None).device
    if not _repeats(device):
        return None
    program = programs.get(_kind(device, key, inputs))
    if not callable(program) or (program.computes and torch.is_autocast_enabled(device.type)):
        return None  # autocast chooses the precision of an operation itself
    return program


def run(
    programs: dict, key: tuple, inputs: Sequence[Tensor | None], compose: Callable[[], tuple]
) -> tuple[Tensor | None, ...]:
    """compose(), a composition of these inputs alone, by the program of earlier calls if there is
    one.

    Args:
        programs: From `plans`.
        key: What beside the shapes, strides, dtypes, alignment and device of the inputs tells
            calls apart. Whatever compose launches must follow from both.
        inputs: A tensor, and others or None.
    """
    device = next(x for x in inputs if x is not None).device
    if not _repeats(device):
        return compose()
    kind = _kind(device, key, inputs)
    program = programs.get(kind)
    if callable(program):
        program = find(programs, key, inputs)
        return compose() if program is None else program(*inputs)
    if program is None:
        while len(programs) >= LIMIT:
            programs.pop(next(iter(programs)), None)
        programs[kind] = SEEN
        _precompile(programs, (key, device.index), inputs, compose)
    elif program is SEEN:
        return _record(programs, kind, inputs, compose)
    return compose()


def _precompile(programs: dict, key: tuple, inputs: Sequence, compose: Callable) -> None:
    """Before the first call of a kind; but with ever new lengths and batches only until there is
    nothing left to compile, since it takes as long as the host's part of a call.
    """
    heads = (None if x is None else (x.dtype, x.shape[2:]) for x in inputs)
    family = (id(programs), *key, *heads)
    if family not in _compiled and not precompile(compose):
        if len(_compiled) >= LIMIT:
            _compiled.clear()
        _compiled.add(family)


def _repeats(device: torch.device) -> bool:
    """Whether calls on this device are written down, and nobody wants to see each launch."""
    if device.type not in DEVICES or _watched():
        return False
    return device.index is None or device.index == torch.cuda.current_device()


def _kind(device: torch.device, key: tuple, inputs: Sequence[Tensor | None]) -> tuple:
    """What tells calls apart."""
    # Triton's kernels are others where an address is not a multiple of 16
    kinds = [
        None
        if x is None
        else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.data_ptr() % 16)
        for x in inputs
    ]
    return (key, device.index, *kinds)


def _watched() -> bool:
    """Whether a profiler wants to be told of every launch, with what Triton alone has for it."""
    at = knobs.runtime
    return bool(_calls(at.launch_enter_hook) or _calls(at.launch_exit_hook))


def _calls(hook: object) -> object:
    return getattr(hook, "calls", hook)


class Untold(Exception):
    """Something that a program cannot repeat."""


def _record(programs: dict, key: tuple, inputs: Sequence, compose: Callable) -> tuple:
    """Run compose() and write down what it does."""
    tensors = [x for x in inputs if x is not None]
    storages = {x.untyped_storage().data_ptr() for x in tensors}
    if len(storages) < len(tensors) or 0 in storages:
        return compose()  # which input an address belongs to is not certain this time
    tape = _Tape(inputs)

    def launched(run: Callable, kernel, args: tuple, grid, kwargs: dict):
        with tape.away():  # the interpreter has operations of its own
            compiled = run(kernel, *args, grid=grid, warmup=False, **kwargs)
        again = compiled if compiled is not None else functools.partial(run, kernel)
        tape.launch(kernel, again, grid, args, kwargs)
        return compiled

    def computed(func: Callable, args: tuple, kwargs: dict):
        out = func(*args, **kwargs)
        tape.operation(func, args, kwargs, out)
        return out

    with launches(launched) as seen:
        if not seen:
            return compose()
        with Operations(computed):
            results = compose()
    try:
        programs[key] = tape.program(results)
    except Untold:
        programs[key] = NEVER
    return results


class _Tape:
    """What a call does, line by line; tensors are the names i0, i1, ... of its inputs and t0, ...

    A launch is given addresses, p and the tensor's name, in place of tensors.
    """

    def __init__(self, inputs: Sequence[Tensor | None]):
        self.lines: list[tuple[str, set[str]]] = []  # and the tensors that it uses
        self.constants: dict[str, object] = {}
        self.inputs = [f"i{n}" for n in range(len(inputs))]
        self.device = next(x for x in inputs if x is not None).device
        self.tensors: dict[str, tuple] = {}  # address, shape, stride, dtype and offset: no numbers
        self.at: dict[int, str] = {}  # where a storage begins -> the tensor that it is
        self.untold, self.listens, self.made = None, True, 0
        self.computes = False  # with operations of PyTorch that autocast may change
        for name, x in zip(self.inputs, inputs, strict=True):
            if x is not None:
                self._add(name, x)

    def _add(self, name: str, x: Tensor) -> None:
        self.at[x.untyped_storage().data_ptr()] = name
        place = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.storage_offset())
        self.tensors[name] = place

    def _constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _told(self, x: object) -> str:
        """An expression for what is handed to a launcher."""
        if isinstance(x, (tuple, list)) and any(isinstance(y, _Text) for y in x):
            inner = "".join(f"{self._told(y)}, " for y in x)
            return f"({inner})" if isinstance(x, tuple) else f"[{inner}]"
        if isinstance(x, _Text):
            return str(x)
        return repr(x) if x is None or type(x) in (bool, int) else self._constant(x)

    def _owner(self, x: Tensor) -> str:
        name = self.at.get(x.untyped_storage().data_ptr())
        if name is None or x.device != self.device or not x.numel():
            raise Untold(f"a tensor {tuple(x.shape)} that is not of this call")
        return name

    def _tensor(self, x: Tensor) -> tuple[str, str]:
        """An expression for a tensor, and the name of the one that it is, or is a view of."""
        name = self._owner(x)
        address, shape, stride, dtype, offset = self.tensors[name]
        if (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype) == (address, shape, stride, dtype):
            return name, name
        if x.dtype != dtype:
            raise Untold("a view in another dtype")
        moved = x.storage_offset() - offset
        return f"view({name}, {tuple(x.shape)}, {x.stride()}, {moved})", name

    def _descriptor(self, x: object, base: Tensor) -> tuple["_Text", str]:
        """An expression for a descriptor, and the name of the tensor that it describes.

        `handed` of the text: what Triton's wrapper, which makes tensor maps with `make`, is to hand
        on for it.
        """
        view, name = self._tensor(base)
        moved = base.data_ptr() - self.tensors[name][0]
        text = _Text(f"{self._constant(_based(x))}({view})")
        address = f"p{name} + {moved}" if moved else f"p{name}"

        def handed(make: Callable, *about: object) -> list:
            fill = _filled(x, make, *about)
            numbers = fill(base.data_ptr())[1:]
            if numbers != [*x.shape, *x.strides]:
                raise Untold("a descriptor that is not a tensor map, a shape and strides")
            return [_Text(f"maps[{address}, {self._constant(fill)}]"), *numbers]

        text.handed = handed
        return text, name

    # -- what is told

    @contextmanager
    def away(self):
        """Meanwhile operations are not told."""
        self.listens = False
        try:
            yield
        finally:
            self.listens = True

    def launch(self, kernel, compiled, grid, args: tuple, kwargs: dict) -> None:
        """compiled: what was launched; in the interpreter, the function that launches."""
        if self.untold is not None:
            return
        try:
            signature = inspect.signature(kernel.fn)
            named = {n: x for n, x in kwargs.items() if n in signature.parameters}
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            grid = grid(dict(bound.arguments)) if callable(grid) else tuple(grid)
            if isinstance(kernel, InterpretedFunction):
                texts, uses = self._arguments(args, kwargs)
                texts += [f"grid={grid!r}", "warmup=False"]
                self.lines.append((f"{self._constant(compiled)}({', '.join(texts)})", uses))
                return
            grid += (1,) * (3 - len(grid))
            texts, uses = [], set()
            for x in bound.arguments.values():
                if isinstance(x, Tensor):
                    name = self._owner(x)
                    moved = x.data_ptr() - self.tensors[name][0]
                    texts.append(f"p{name} + {moved}" if moved else f"p{name}")
                    uses.add(name)
                elif x is None or isinstance(x, (bool, int)):
                    texts.append(repr(x))
                elif isinstance(base := getattr(x, "base", None), Tensor):
                    text, name = self._descriptor(x, base)
                    texts.append(text)
                    uses.add(name)
                else:
                    texts.append(self._constant(x))
            texts = (x if isinstance(x, _Text) else _Text(x) for x in texts)
            head = (*(_Text(n) for n in grid), _Text("stream"))
            about = (compiled.function, compiled.packed_metadata, None, None, None)
            call, given = _handed(compiled.run, (*head, *about, *texts))
            self.lines.append(
                (f"{self._constant(call)}({', '.join(map(self._told, given))})", uses)
            )
        except (Untold, AttributeError, TypeError) as error:
            self.untold = error

    def _arguments(self, args: Sequence, kwargs: dict) -> tuple[list[str], set[str]]:
        texts, uses = [], set()
        for key, x in (*((None, x) for x in args), *kwargs.items()):
            if isinstance(x, Tensor):
                text, name = self._tensor(x)
                uses.add(name)
            elif isinstance(x, (list, tuple)) and any(isinstance(y, Tensor) for y in x):
                inner, used = self._arguments(x, {})
                text, uses = f"[{', '.join(inner)}]", uses | used
            else:
                text = repr(x) if x is None or type(x) in (bool, int) else self._constant(x)
            texts.append(text if key is None else f"{key}={text}")
        return texts, uses

    def operation(self, func, args: tuple, kwargs: dict, out) -> None:
        if self.untold is not None or not self.listens:
            return
        try:
            self._operation(func, args, kwargs, out)
        except Untold as error:
            self.untold = error

    def _operation(self, func, args, kwargs, out) -> None:
        if func in MAKES:
            return self._make(out)
        if func.is_view:
            return None  # of a storage that is known, or whoever uses it will say so
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if not all(isinstance(x, Tensor) for x in outs) or len(outs) != 1:
            raise Untold(f"{func} gives more or less than a tensor")
        texts, uses = self._arguments(args, kwargs)
        call = f"{self._constant(func)}({', '.join(texts)})"
        self.computes |= func not in _MOVES
        if func is _aten._to_copy.default and [*kwargs] == ["dtype"]:  # quicker in this form
            call = f"{texts[0]}.to({self._constant(kwargs['dtype'])})"
        if func._schema.is_mutable:
            self.lines.append((call, uses))
            return None
        if self.at.get(out.untyped_storage().data_ptr()) in uses:
            raise Untold(f"{func} gives its argument")
        name = self._new(out)
        self.lines.append((f"{name} = {call}", uses))
        return None

    def _new(self, x: Tensor) -> str:
        name = f"t{self.made}"
        self.made += 1
        self._add(name, x)
        return name

    def _make(self, x: Tensor) -> None:
        if x.device != self.device or not x.numel():
            raise Untold(f"a new tensor {tuple(x.shape)} on {x.device}")
        kind = {"dtype": self._constant(x.dtype), "device": self._constant(x.device)}
        options = ", ".join(f"{n}={c}" for n, c in kind.items())
        form = f"empty({tuple(x.shape)}, {x.stride()}, {options})"
        self.lines.append((f"{self._new(x)} = {form}", set()))

    # -- the program

    def program(self, results: Sequence[Tensor | None]) -> Callable:
        """A function of the inputs that does the same and returns new results."""
        if self.untold is not None:
            raise self.untold
        out = [("None", None) if x is None else self._tensor(x) for x in results]
        out = [(f"owned({t})" if t in self.inputs else t, n) for t, n in out]
        lines = [
            *self.lines,
            (f"return ({''.join(f'{t}, ' for t, _ in out)})", {n for _, n in out}),
        ]
        last = {name: i for i, (_, uses) in enumerate(lines) for name in uses}
        pointed = {n for n in self.tensors if any(f"p{n}" in text for text, _ in lines)}
        body = []
        if pointed:
            current = self._constant(driver.active.get_current_stream)
            body = [f"stream = {current}({self.device.index})"]
        body += [f"p{n} = {n}.data_ptr()" for n in self.inputs if n in pointed]
        for i, (text, uses) in enumerate(lines):
            body.append(text)
            made = text.split(" = ")[0]
            if made in pointed and made not in self.inputs:
                body.append(f"p{made} = {made}.data_ptr()")
            # the memory goes back when the composition would give it back, or before
            done = [n for n in sorted(uses - {None}) if last[n] == i and n not in self.inputs]
            if done and i < len(lines) - 1:
                body.append(f"del {', '.join(done)}")
        source = "\n    ".join([f"def program({', '.join(self.inputs)}):", *body])
        space = {"empty": torch.empty_strided, "view": _view, "owned": _owned, "maps": _maps}
        space |= self.constants
        exec(compile(source, "<program>", "exec"), space)
        program = space["program"]
        program.source, program.computes = source, self.computes
        return program


class _Text(str):
    """An expression of a program, in the place of what it stands for; not to be computed with."""


def _based(descriptor: object) -> Callable[[Tensor], object]:
    """Tensor -> a descriptor like this one of that tensor; this one's own is not kept."""
    kind, rest = type(descriptor), _rest(descriptor)
    return lambda base: kind(base=base, **rest)


def _rest(descriptor: object) -> dict:
    """What a descriptor holds beside its tensor."""
    names = (f.name for f in dataclasses.fields(descriptor))
    return {n: getattr(descriptor, n) for n in names if n != "base"}


class _Maps(dict):
    """(address, what fills a map for it) -> tensor map: the copy engine's form of a descriptor.

    Triton makes one for every descriptor of every launch, in Python, which may take longer than the
    kernel. What fills a map knows all numbers but the address, so with the same address it fills
    the same map, whatever tensor lies there now.
    """

    def __missing__(self, key: tuple[int, Callable]) -> object:
        address, fill = key
        made = fill(address)[0]
        if len(self) >= MAPS:
            self.clear()
        self[key] = made
        return made


_maps = _Maps()


def _filled(descriptor: object, make: Callable, *about: object) -> Callable[[int], list]:
    """Address -> what Triton's `make` makes of a descriptor like this one that begins there."""
    rest = _rest(descriptor)

    def fill(address: int) -> list:
        base = SimpleNamespace(data_ptr=lambda: address)
        return make(SimpleNamespace(base=base, **rest), *about)

    return fill


def _handed(run: Callable, arguments: tuple) -> tuple[Callable, tuple]:
    """What a launcher calls with its arguments, its function in C, and what it hands to that; or
    the launcher itself and its arguments, where it does more than to hand them on.

    A launcher of Triton is a few lines of Python, which take a quarter of the time of a launch.
    """
    told = []
    try:
        listening = copy.copy(run)
        function, listening.launch = _listener(run.launch, lambda *handed: told.append(handed))
        listening(*arguments)
    # it computes with the grid: memory that each launch needs for itself; or Triton has changed
    except Exception:
        return run, arguments
    return (function, told[0]) if len(told) == 1 else (run, arguments)


def _listener(launch: Callable, listen: Callable) -> tuple[Callable, Callable]:
    """A launcher's function in C, and what to call in place of `launch` so that `listen` hears what
    that function would be handed.

    For kernels with descriptors `launch` is a function in Python (Triton's wrap_handle_tensordesc).
    It calls make_tensordesc_arg for a descriptor and hands the result on in its place.
    """
    if inspect.isbuiltin(launch):
        return launch, listen
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__, strict=True))
    function = cells["launcher"].cell_contents
    if not inspect.isbuiltin(function):
        raise Untold("a launcher of several layers")
    make = launch.__globals__["make_tensordesc_arg"]
    known = launch.__globals__ | {
        "make_tensordesc_arg": lambda text, *about: text.handed(make, *about)
    }
    cells["launcher"] = CellType(listen)
    return function, FunctionType(launch.__code__, known, closure=tuple(cells.values()))


def _view(x: Tensor, shape: tuple, stride: tuple, moved: int) -> Tensor:
    """A view of x that begins `moved` elements behind it; autograd takes it for no view."""
    return x.as_strided(shape, stride, x.storage_offset() + moved).data


def _owned(x: Tensor) -> Tensor:
    """x, which autograd does not take for a view: else it could not be changed in place."""
    return x.data if x._is_view() else x
