"""Programs of a launch in Triton's interpreter that take one path: only NumPy's operations.

The first program of a kernel is run as ever, and what it computes is written down: operations on
arrays, and where Python looks at a number (a condition, the bounds of a loop) what it saw. Others
do these operations alone. Who sees another number there takes back what it stored and runs as
ever, and its path is written down beside the first. What depends on no argument is computed once,
what depends on no program once a launch.
"""

import gc
import inspect
import re
from collections import OrderedDict

import numpy as np
from interpreter_launches import Unknown, value
from triton.language import core, standard
from triton.runtime import interpreter

ROOM = 400_000  # operations that are kept; the oldest kernels go
LONGEST, PATHS = 60_000, 32  # operations of a program, paths of a kernel
FIXED, LAUNCH, PROGRAM = 0, 1, 2  # what numbers depend on: the path, the arguments, the program
GUARD, STORE = -1, -2  # kinds of steps; of others the number of arrays that they take

Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
builder, c = interpreter.interpreter_builder, interpreter._interpreter
recording = [None]  # the path that is being written down
# what makes handles of handles; every other method that is no short name of these ends a recording
PURE = re.compile(
    r"(binary|unary|ternary)_op|cast_impl|get_(u?int|fp|bf)\d+|get_(null|all_ones)_value|create_("
    r"addptr|ashr|bitcast|broadcast|cat|clampf|dot|erf|expand_dims|fabs|fma|fp_to_fp|gather|idiv|"
    r"int_to_ptr|join|make_range|ptr_to_int|reshape|rsqrt|splat|split|trans|umulhi|unsplat|"
    r"get_program_id|get_num_programs|(masked_)?(load|store))"
)
# reductions and scans by NumPy; others are in a kernel's own language, and need it
BY_NUMPY = [
    *(standard._sum_combine, standard._prod_combine),
    *(standard._elementwise_max, standard._elementwise_min),
    *(standard._argmax_combine_tie_break_left, standard._argmax_combine_tie_break_fast),
    *(standard._argmin_combine_tie_break_left, standard._argmin_combine_tie_break_fast),
]


class Another(Exception):
    """A program takes another path."""


class Path:
    """The operations of one path. Registers: the program's three numbers, the grid's, the
    arguments; then whatever comes. Each handle has its `place`: whose register, which, and what its
    numbers depend on.
    """

    def __init__(self, arguments):
        self.registers = [None] * (6 + len(arguments))
        self.steps, self.constants, self.length, self.once = ([], [], []), {}, 0, None
        self.taken = 0  # how often, after the first time
        for i, x in enumerate(arguments):
            x.handle.place = self, 6 + i, LAUNCH

    def stop(self):
        self.steps = recording[0] = None

    @property
    def stopped(self):
        return self.steps is self.once is None

    def place(self, handle):
        """(register, what it depends on), or None of a handle made in a way that is not known."""
        owner, register, level = getattr(handle, "place", (None, None, None))
        if level == FIXED:
            if id(handle.data) not in self.constants:
                self.constants[id(handle.data)] = len(self.registers)
                self.registers.append(handle.data)
            return self.constants[id(handle.data)], FIXED
        return (register, level) if owner is self else None

    def add(self, name, handles, out, make):
        """An operation on these handles; `make` makes it one on arrays."""
        inputs = [self.place(x) for x in handles]
        if None in inputs or self.length > LONGEST:
            return self.stop()
        level = max((x[1] for x in inputs), default=FIXED)
        if name == "create_addptr":
            size = max(1, handles[0].get_element_ty().primitive_bitwidth // 8)
            (pointer, _), (by, of_by) = inputs
            scaled = self.step(of_by, 1, lambda x: size * x.astype(np.uint64), [by])
            out.place = self, self.step(level, 2, np.add, [pointer, scaled]), level
            return
        outs = out if type(out) is tuple else (out,)
        if level == FIXED and "load" not in name and "store" not in name:
            for x in outs:
                x.place = None, None, FIXED
            return
        level = PROGRAM if "load" in name or "store" in name else level
        registers = [x[0] for x in inputs]
        if out is None:
            self.step(level, STORE, make(), registers)
            return
        whole = self.step(level, len(inputs), make(), registers)
        out_of = lambda i: self.step(level, 1, lambda arrays: arrays[i], [whole])
        for i, x in enumerate(outs):
            x.place = self, out_of(i) if type(out) is tuple else whole, level

    def step(self, level, kind, function, inputs, seen=None):
        self.registers.append(None)
        self.length += 1
        self.steps[level].append((kind, function, inputs, seen, len(self.registers) - 1))
        return len(self.registers) - 1

    def look(self, handle, see):
        """What Python sees of a handle's numbers."""
        seen, place = see(handle.data), self.place(handle)
        if place is None:
            self.stop()
        elif place[1] != FIXED:
            self.step(place[1], GUARD, see, [place[0]], seen)
        return seen

    def finish(self):
        """What `play` takes; programs use a register again when its numbers are not wanted."""
        program, last, new, free, steps = self.steps[PROGRAM], {}, {}, [], []
        for i, (_, _, inputs, _, _) in enumerate(program):
            last.update(dict.fromkeys(inputs, i))
        guards = [i for i, x in enumerate(program) if x[0] == GUARD]
        for i, (kind, function, inputs, seen, out) in enumerate(program):
            at = [new.get(x, x) for x in inputs]
            free += [new[x] for x in {*inputs} if x in new and last[x] == i]
            if kind == STORE and guards and i < guards[-1]:
                function = remembering(function)
            if kind > 0:
                new[out] = free.pop() if free else out
                free += [new[out]] if out not in last else []
            steps.append(plain(kind, function, at, seen, new.get(out)))
        play([plain(*x) for x in self.steps[FIXED]], self.registers)
        self.once, self.each = [plain(*x) for x in self.steps[LAUNCH]], steps
        self.steps = self.constants = None


def plain(kind, function, inputs, seen, out):
    if kind in (1, 2, GUARD):
        return kind, function, inputs[0], seen if kind == GUARD else inputs[-1], out
    return kind, function, inputs, None, out


def play(steps, r):
    """The steps, on registers r."""
    for kind, function, a, b, out in steps:
        if kind == 2:
            r[out] = function(r[a], r[b])
        elif kind == 1:
            r[out] = function(r[a])
        elif kind > 0:
            r[out] = function(*[r[i] for i in a])
        elif kind == STORE:
            function(*[r[i] for i in a])
        elif function(r[a]) != b:
            raise Another


_stored = []  # pointers, what was there, the mask


def remembering(store):
    """A store after which a program may turn out to take another path."""

    def remember(pointers, values, mask=None):
        all_ = np.ones_like(pointers, dtype=bool) if mask is None else mask
        nothing = np.zeros_like(pointers, dtype=values.dtype)
        _stored.append((pointers, c.load(pointers, all_, nothing, values.dtype), all_))
        store(pointers, values, *([] if mask is None else [mask]))

    return remember


_natural = {}


def natural(function, a, b):
    """The type of what a function of NumPy gives for two types."""
    key = function, a.dtype, b.dtype
    if key not in _natural:
        _natural[key] = function(np.empty(0, a.dtype), np.empty(0, b.dtype)).dtype
    return _natural[key]


def on_arrays(name, method, args, out):
    """What a method does, from array to array; of those that are called most, without it."""
    first, more = args[0], args[1] if len(args) > 1 else None
    kind = out.data.dtype if type(out) is Handle else None
    if name == "binary_op":
        op, bits = args[2], first.data.dtype == more.data.dtype == np.bool_
        if bits:
            return lambda a, b: (op(a.astype(np.int8), b.astype(np.int8)) & 1).astype(np.bool_)
        if natural(op, first.data, more.data) == kind:
            return op
    elif name == "create_masked_load":
        zero = np.zeros_like(first.data, dtype=kind) if args[2] is None else None
        return lambda x, mask, other=zero: c.load(x, mask, other, kind)
    elif name == "create_load":
        every, zero = np.ones_like(first.data, dtype=bool), np.zeros_like(first.data, dtype=kind)
        return lambda x: c.load(x, every, zero, kind)
    elif name == "create_masked_store":
        return c.store
    elif name == "create_store":
        every = np.ones_like(first.data, dtype=bool)
        return lambda x, values: c.store(x, values, every)
    elif name == "create_broadcast":
        return lambda x: np.broadcast_to(x, more)
    elif name == "create_reshape":
        return lambda x: x.reshape(more)
    elif name == "create_splat" and not isinstance(more.dtype, core.block_type):
        shape = out.data.shape
        return lambda x: np.full(shape, x, dtype=kind)
    elif name == "unary_op":
        return more
    elif name == "ternary_op" and args[3] is np.where:
        if more.data.dtype == kind == args[2].data.dtype:
            return np.where
    elif name == "cast_impl":
        old, new = first.dtype.scalar, more.scalar
        if {old, new} == {core.bfloat16, core.float32}:
            return lambda x: interpreter._convert_float(x, old, new, None).view(kind)
        return lambda x: x.astype(kind)
    elif name == "create_trans":
        return lambda x: np.transpose(x, more)
    elif name == "create_dot" and min(x.data.itemsize for x in args[:2]) > 1:
        return lambda a, b, d: np.matmul(a, b, dtype=d.dtype) + d
    given = [None if type(x) is Handle else x for x in args]
    places = [(i, x.dtype) for i, x in enumerate(args) if type(x) is Handle]

    def by_method(*arrays):
        now = given.copy()
        for (i, dtype), x in zip(places, arrays, strict=True):
            now[i] = Handle(x, dtype)
        out = method(builder, *now)
        return tuple(x.data for x in out) if type(out) is tuple else out.data

    return by_method


def reduction(self, apply, inputs):
    """A sum, a scan or the like, from arrays to a tuple of arrays."""
    types = [(x.handle.dtype, x.type) for x in inputs]
    if isinstance(self, interpreter.ReduceOps) and self.combine_fn is standard._sum_combine:
        axis, keep, kind = self.axis, self.keep_dims, interpreter._get_np_dtype(inputs[0].dtype)

        def summed(x):
            x = np.sum(x, axis=axis, keepdims=keep)
            return ((x if x.shape else np.array([x])).astype(kind),)

        return summed
    by_numpy = any(self.combine_fn is x for x in BY_NUMPY)

    def reduced(*arrays):
        given = [core.tensor(Handle(x, d), t) for x, (d, t) in zip(arrays, types, strict=True)]
        if by_numpy:
            return [x.handle.data for x in apply(self, tuple(given))]
        scope = interpreter._patch_lang(self.combine_fn.fn)
        try:
            return [x.handle.data for x in apply(self, tuple(given))]
        finally:
            scope.restore()

    return reduced


def replay_programs(instead_of):
    """Put what writes down into the places of the interpreter's methods; returns what launches."""
    gc.set_threshold(50_000, 20, 50)  # what is written down is much to go through, and no garbage
    for name, method in vars(Builder).copy().items():
        ends = name.startswith("create_") and method.__name__ != "<lambda>"
        if PURE.fullmatch(name) or (ends and name != "create_barrier"):  # of one thread: nothing
            _write_down(name, method, instead_of)

    apply = interpreter.ReduceScanOpInterface.apply

    @instead_of(interpreter.ReduceScanOpInterface, "apply")
    def applied(self, input):
        inputs, path = input if isinstance(input, tuple) else (input,), recording[0]
        recording[0] = None
        try:
            out = apply(self, inputs)
        finally:
            recording[0] = path
        if path:
            make = lambda: reduction(self, apply, inputs)
            path.add("apply", [x.handle for x in inputs], tuple(x.handle for x in out), make)
        return out if isinstance(input, tuple) else out[0]

    patch_tensor = interpreter._patch_lang_tensor
    sees = {
        "__index__": lambda x: int(x.squeeze()),
        "__bool__": lambda x: bool(x) if x.size == 1 else True,
        "__repr__": None,
        "__str__": None,
    }

    @instead_of(interpreter, "_patch_lang_tensor")
    def patch_tensor_and_look(tensor, scope):
        patch_tensor(tensor, scope)
        for name, see in sees.items():
            setattr(tensor, name, looking(getattr(tensor, name), see))

    def looking(plain, see):
        def look(self):
            path = recording[0]
            if path and see:
                return path.look(self.handle, see)
            if path:
                path.stop()
            return plain(self)

        return look

    return launches()


def _write_down(name, method, instead_of):
    pure = PURE.fullmatch(name)

    @instead_of(Builder, name)
    def written_down(self, *args, **kwargs):
        path = recording[0]
        if path is None:
            return method(self, *args, **kwargs)
        recording[0] = None
        try:
            out = method(self, *args, **kwargs)
        finally:
            recording[0] = path
        if not pure or kwargs:
            path.stop()
        elif name == "create_get_program_id":
            out.place = path, args[0], PROGRAM
        elif name == "create_get_num_programs":
            out.place = path, 3 + args[0], LAUNCH
        else:
            handles = [x for x in args if type(x) is Handle]
            path.add(name, handles, out, lambda: on_arrays(name, method, args, out))
        return out


def launches():
    """launch(executor, what its kernel is, args, kwargs): as GridExecutor.__call__, on the CPU."""
    kept, room, specs = OrderedDict(), [ROOM], {}

    def launch(self, kernel, args, kwargs):
        args, scopes = arguments(self.fn, args, kwargs), []
        for name, x in args.items():
            args[name] = x if name in self.constexprs else interpreter._implicit_cvt(x)
        tensors = [x for x in args.values() if type(x) is core.tensor]
        grid = (*self.grid, 1, 1)[:3]
        builder.set_grid_dim(*grid)
        (paths, met), ready, last = paths_of(kernel, args), {}, tuple(n - 1 for n in grid)
        numbers = [np.array([n], dtype=np.int32) for n in grid] + [x.handle.data for x in tensors]
        try:
            for idx in np.ndindex(grid):
                builder.set_grid_idx(*idx)
                if not any(taken(path, ready, idx, numbers) for path in paths):
                    if not scopes:
                        scopes.append(interpreter._patch_lang(self.fn))
                    if met or idx != last:
                        run(self.fn, args, tensors, paths)
                    else:
                        self.fn(**args)
        except Exception as e:
            if interpreter.triton.knobs.compilation.front_end_debugging:
                raise
            raise interpreter.InterpreterError(repr(e)) from e
        finally:
            for scope in scopes:
                scope.restore()

    def arguments(fn, args, kwargs):
        if fn not in specs:
            specs[fn] = inspect.getfullargspec(fn)
        names, defaults = specs[fn].args, specs[fn].defaults or ()
        kwargs = {k: v for k, v in kwargs.items() if k in names or k in specs[fn].kwonlyargs}
        given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | kwargs
        given |= zip(names, args, strict=False)
        if len(given) < len(names) or len(args) + len(kwargs) > len(given):
            return inspect.getcallargs(fn, *args, **kwargs)
        return {name: given[name] for name in names}

    def paths_of(kernel, args):
        """The paths of such a launch, and whether there was one before."""
        try:
            given = [x.type.name if type(x) is core.tensor else value(x, {}) for x in args.values()]
        except Unknown:
            return [], False
        key = kernel, tuple(given)
        met = key in kept
        kept.setdefault(key, [])
        kept.move_to_end(key)
        while room[0] < 0 and len(kept) > 1:
            room[0] += sum(path.length for path in kept.popitem(last=False)[1])
        return kept[key], met

    def run(fn, args, tensors, paths):
        """A program as ever; what it computes becomes one of the paths, if programs share paths."""
        alone = len(paths) > 3 + sum(path.taken for path in paths)
        if alone or len(paths) == PATHS or (paths and paths[-1].stopped):
            fn(**args)
            return
        path = recording[0] = Path(tensors)
        try:
            fn(**args)
        finally:
            recording[0] = None
        paths.append(path)
        room[0] -= path.length

    return launch


def taken(path, ready, idx, numbers):
    """Whether a program takes this path; then it has run."""
    if path not in ready:
        if path.steps:
            path.finish()
        ready[path] = None if path.stopped else path.registers.copy()
        if not path.stopped:
            ready[path][3 : 3 + len(numbers)] = numbers
            try:
                play(path.once, ready[path])
            except Another:
                ready[path] = None
    if ready[path] is None:
        return False
    registers = ready[path].copy()
    registers[:3] = [np.array([i], dtype=np.int32) for i in idx]
    _stored.clear()
    try:
        play(path.each, registers)
    except Another:
        for pointers, before, mask in reversed(_stored):
            c.store(pointers, before, mask)
        return False
    path.taken += 1
    return True
