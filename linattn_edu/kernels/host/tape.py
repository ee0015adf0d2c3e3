"""A composition of stages, written down once: its tensors and launches as a straight program.

A call is watched, and what it did (tensors made, kernels launched, other operations of PyTorch)
becomes a function of its inputs. The calls after it run that: the same kernels on the same grids
with the same numbers, hence the same bits.

What cannot be told in that way is never replayed: a number of a tensor that the host reads, a
tensor that comes neither from the inputs nor from the call itself, an argument of a launch that is
neither a tensor nor a descriptor nor a plain value.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction

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
from linattn_edu.kernels.host.watching import MAKES, Operations, launches

NEVER = "cannot be told"
# what is the same in every call: beside these of a kernel, what PyTorch's operations take
PLAIN = (int, float, str, torch.dtype, tl.dtype, torch.device, torch.layout, torch.memory_format)

_aten = torch.ops.aten
# what autocast leaves as it is; others are taken for what it may change
_MOVES = (
    _aten._to_copy.default, _aten.clone.default, _aten.copy_.default, _aten.zero_.default,
    _aten.fill_.Scalar, _aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default,
    _aten.index.Tensor, _aten.index_copy.default, _aten.index_copy_.default,
)  # fmt: skip
_NOTHING = (_aten._unsafe_view.default, _aten.promote_types.default)  # a view; a dtype
_SENDS = "_c10d_functional"  # the namespace of what goes to other processes, as it is


def record(
    inputs: Sequence[Tensor | None], compose: Callable, writes: Sequence[bool] | None = None
) -> tuple[object, object]:
    """Run compose(), and write down what it does; arguments as of `plan.run`.

    Returns:
        Its results; and the program, or NEVER, or None: this time it was not watched.
    """
    tensors = [x for x in inputs if x is not None]
    places = {x.data_ptr() for x in tensors}
    if len(places) < len(tensors) or 0 in places:
        return compose(), None  # which input an address belongs to is not certain this time
    tape = _Tape(inputs)
    before = [_version(x) if w else 0 for x, w in zip(inputs, writes or (), strict=False)]

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
            return compose(), None
        with Operations(computed):
            results = compose()
    for i, version in enumerate(before):
        if writes[i] and (version is None or version < _version(inputs[i])):
            tape.lines.append((f"written(i{i})", {f"i{i}"}))
    try:
        return results, tape.program(results, writes)
    except Untold:
        return results, NEVER


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
        self.at: dict[int, list[str]] = {}  # where a storage begins -> the tensors that it is
        self.untold, self.listens, self.made = None, True, 0
        self.launched: list[str] = []  # the lines of launches
        self.computes = False  # with operations of PyTorch that autocast may change
        for name, x in zip(self.inputs, inputs, strict=True):
            if x is not None:
                self.at.setdefault(x.untyped_storage().data_ptr(), []).append(name)
                self._add(name, x)

    def _add(self, name: str, x: Tensor) -> None:
        place = (x.data_ptr(), tuple(x.shape), x.stride(), x.dtype, x.storage_offset())
        self.tensors[name] = place

    def _constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _plain(self, x: object) -> str:
        """An expression for an argument that is no tensor, the same in every call."""
        if x is None or type(x) in (bool, int):
            return repr(x)
        if isinstance(x, (list, tuple)):
            inner = "".join(f"{self._plain(y)}, " for y in x)
            return f"[{inner}]" if isinstance(x, list) else f"({inner})"
        if not isinstance(x, PLAIN):
            raise Untold(f"an argument {type(x)}")
        return self._constant(x)

    def _owner(self, x: Tensor) -> str:
        names = self.at.get(x.untyped_storage().data_ptr(), ())
        if len(names) > 1:  # inputs that are slices of one tensor
            names = [n for n in names if _holds(self.tensors[n], x)]
        if len(names) != 1 or x.device != self.device or not x.numel():
            raise Untold(f"a tensor {tuple(x.shape)} that is not of this call")
        return names[0]

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

    def _descriptor(self, x: object) -> tuple[Described, str]:
        """An expression for a descriptor, and the name of the tensor that it describes."""
        view, name = self._tensor(x.base)
        moved = x.base.data_ptr() - self.tensors[name][0]
        numbers = [*map(repr, place_of(x)[1:])]
        address = f"p{name} + {moved}" if moved else f"p{name}"
        text = f"{self._constant(_based(x))}({view})"
        return Described(text, x, address, numbers), name

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
                self._launch(f"{self._constant(compiled)}({', '.join(texts)})", uses)
                return
            grid += (1,) * (3 - len(grid))
            texts, uses = [], set()
            for x in bound.arguments.values():
                if isinstance(x, Tensor):
                    name = self._owner(x)
                    moved = x.data_ptr() - self.tensors[name][0]
                    texts.append(f"p{name} + {moved}" if moved else f"p{name}")
                    uses.add(name)
                elif isinstance(getattr(x, "base", None), Tensor):
                    text, name = self._descriptor(x)
                    texts.append(text)
                    uses.add(name)
                else:
                    texts.append(self._plain(x))
            texts = (x if isinstance(x, Text) else Text(x) for x in texts)
            head = (*(Text(n) for n in grid), Text("stream"))
            about = (compiled.function, compiled.packed_metadata, None, None, None)
            call, given = handed(compiled.run, (*head, *about, *texts), self._constant)
            given = ", ".join(told(x, self._constant) for x in given)
            self._launch(f"{self._constant(call)}({given})", uses)
        except (Untold, AttributeError, TypeError) as error:
            self.untold = error

    def _launch(self, line: str, uses: set[str]) -> None:
        self.launched.append(line)
        self.lines.append((line, uses))

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
                text = self._plain(x)
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
        if func.is_view or func in _NOTHING:
            return None  # of a storage that is known, or whoever uses it will say so
        outs = out if isinstance(out, (tuple, list)) else (out,)
        if not all(isinstance(x, Tensor) for x in outs) or len(outs) != 1:
            raise Untold(f"{func} gives more or less than a tensor")
        (out,) = outs
        if out.device != self.device:
            raise Untold(f"{func} gives the host what it may read")
        texts, uses = self._arguments(args, kwargs)
        run = _below_autograd(func) if func.namespace == _SENDS else func
        call = f"{self._constant(run)}({', '.join(texts)})"
        self.computes |= func not in _MOVES and func.namespace != _SENDS
        if func is _aten._to_copy.default and [*kwargs] == ["dtype"]:  # quicker in this form
            call = f"{texts[0]}.to({self._constant(kwargs['dtype'])})"
        if func._schema.is_mutable or (func.namespace == _SENDS and out is args[0]):
            self.lines.append((call, uses))
            return None
        if uses & {*self.at.get(out.untyped_storage().data_ptr(), ())}:
            raise Untold(f"{func} gives its argument")
        name = self._new(out)
        self.lines.append((f"{name} = {call}", uses))
        return None

    def _new(self, x: Tensor) -> str:
        name = f"t{self.made}"
        self.made += 1
        self.at[x.untyped_storage().data_ptr()] = [name]
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

    def program(self, results: object, writes: Sequence[bool] | None = None) -> Callable:
        """A function of the inputs that does the same and returns new results."""
        if self.untold is not None:
            raise self.untold
        if writes is not None and not self.launched:
            raise Untold("operations of PyTorch alone, as many as there are tokens")
        for name in self.inputs if writes is not None else ():
            self._into(name)
        one = isinstance(results, Tensor)
        out = [self._result(x, writes) for x in ([results] if one else results)]
        back = out[0][0] if one else f"({''.join(f'{t}, ' for t, _ in out)})"
        lines = [*self.lines, (f"return {back}", {n for _, n in out})]
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
        space = {"empty": torch.empty_strided, "view": _view, "owned": _owned, "maps": maps}
        space |= {"written": _written, **self.constants}
        exec(compile(source, "<program>", "exec"), space)
        program = space["program"]
        program.source, program.computes = source, self.computes
        program.writes, program.sizes = writes if any(writes or ()) else None, None
        return program

    def _into(self, name: str) -> None:
        """What is made only to be copied to an input is made there; that lies apart from all."""
        for i, (line, _) in enumerate(self.lines):
            found = re.fullmatch(rf"(c\d+)\({name}, (t\d+)\)", line)
            if found is None or self.constants[found[1]] is not _aten.copy_.default:
                continue
            made, (address, *kind, _) = found[2], self.tensors[name]
            begin, *named = [j for j, x in enumerate(self.lines) if _names(f"p?{made}", x)]
            others = {x[0] for x in self.lines if _names(f"p?{name}", x)}
            fresh = self.lines[begin][0].startswith(f"{made} = empty(") and named[-1] == i
            fresh &= all(self.lines[j][0] in self.launched for j in named[:-1])
            apart = others <= {line, f"written({name})"} and address % 16 == 0
            if fresh and apart and kind == [*self.tensors[made][1:4]]:
                there = lambda x: re.sub(rf"\b(p?){made}\b", rf"\1{name}", x)  # noqa: B023
                self.lines = [
                    (there(x), {*uses, name} - {made} if made in uses else uses)
                    for j, (x, uses) in enumerate(self.lines)
                    if j not in (begin, i)
                ]
                self.launched = [*map(there, self.launched)]
                return

    def _result(self, x: Tensor | None, writes: Sequence[bool] | None) -> tuple[str, str | None]:
        """An expression for a result, and the name of the tensor that it is, or is a view of."""
        if x is None:
            return "None", None
        text, name = self._tensor(x)
        if text in self.inputs:
            return (f"owned({text})" if writes is None else text), name
        form = f"{name} = empty({self.tensors[name][1]}, {self.tensors[name][2]}, "
        made = [i for i, line in enumerate(self.lines) if _names(name, line)]
        whole = x.is_contiguous() and x.nbytes == x.untyped_storage().nbytes()
        if text != name and whole and [self.lines[i][0][: len(form)] for i in made] == [form]:
            # made in the form that is returned: all others know it by its address
            again = f"{name} = empty({tuple(x.shape)}, {x.stride()}, "
            self.lines[made[0]] = again + self.lines[made[0]][0][len(form) :], set()
            self._add(name, x)
            return name, name
        return text, name


def _based(descriptor: object) -> Callable[[Tensor], object]:
    """Tensor -> a descriptor like this one of that tensor; this one's own is not kept."""
    kind, others = type(descriptor), rest(descriptor, "base")
    return lambda base: kind(base=base, **others)


def _version(x: Tensor) -> int | None:
    """How often x was written; None: nobody counts."""
    return None if x.is_inference() else x._version


def _written(x: Tensor) -> None:
    """Tell autograd that a kernel has written x."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def _holds(place: tuple, x: Tensor) -> bool:
    """Whether x begins with an element of the tensor of that place."""
    address, shape, stride, dtype, _ = place
    far, rest = divmod(x.data_ptr() - address, dtype.itemsize)
    for step, size in sorted(zip(stride, shape, strict=True), reverse=True):
        if step:
            far -= step * min(max(far, 0) // step, size - 1)
    return far == 0 == rest


def _names(name: str, line: tuple[str, set[str]]) -> bool:
    return re.search(rf"\b{name}\b", line[0]) is not None


def _below_autograd(func: Callable) -> Callable:
    """func without its gradient, which PyTorch looks for in Python and nobody asks for here."""

    def run(*args):
        with torch._C._AutoDispatchBelowAutograd():
            return func(*args)

    return run


def _view(x: Tensor, shape: tuple, stride: tuple, moved: int) -> Tensor:
    """A view of x that begins `moved` elements behind it; autograd takes it for no view."""
    return x.as_strided(shape, stride, x.storage_offset() + moved).data


def _owned(x: Tensor) -> Tensor:
    """x, which autograd does not take for a view: else it could not be changed in place."""
    return x.data if x._is_view() else x
