"""Triton's interpreter without what it does again and again for the same result.

Most of its time goes into Python objects: types of blocks, shapes of tensors, functions of
triton.language that the launch has replaced already, and checks for overflow whose result it drops.
"""

import functools
import inspect
import operator
from dataclasses import replace

import numpy as np
import triton
import triton.language as tl
from interpreter_launches import remember_launches
from interpreter_operators import straight_to_numpy
from interpreter_replay import replay_programs
from triton.language import core
from triton.runtime import interpreter

# where and under which name; what stood there is the replacement's `__wrapped__`
REPLACED = []

# of a tensor: the method of TritonSemantic, whether the tensor stands on the right, more arguments
OPERATORS = {
    "__add__": ("add", False, True),
    "__radd__": ("add", True, True),
    "__sub__": ("sub", False, True),
    "__rsub__": ("sub", True, True),
    "__mul__": ("mul", False, True),
    "__rmul__": ("mul", True, True),
    "__lt__": ("less_than", False),
    "__le__": ("less_equal", False),
    "__gt__": ("greater_than", False),
    "__ge__": ("greater_equal", False),
    "__eq__": ("equal", False),
    "__ne__": ("not_equal", False),
    "__and__": ("and_", False),
    "__or__": ("or_", False),
}


def instead_of(where, name):
    """Put a function in the place of another."""

    def put(quick):
        REPLACED.append((where, name))
        setattr(where, name, functools.wraps(getattr(where, name))(quick))

    return put


def quicken(replay=True):
    """Replace functions of the interpreter by ones that remember; the results are the same. replay:
    whether Python runs only the first of a kernel's programs; a chapter may watch them all.
    """
    if not triton.__version__.startswith(("3.7.", "3.8.", "3.9.")):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # without it, nobody reads what the check finds
        builder.options = replace(builder.options, sanitize_overflow=False)
    _remember_what_is_replaced()
    _remember_shapes()
    if not triton.__version__.startswith("3.9."):
        remember_launches(instead_of)
        return  # operators took numbers in another way
    _fewer_calls()
    launch = None
    if not builder.options.sanitize_overflow:
        straight_to_numpy(instead_of)
        launch = replay_programs(instead_of) if replay else None
    remember_launches(instead_of, launch)


def _remember_what_is_replaced():
    patch, languages, builtins = interpreter._patch_lang, {}, {}
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    nothing = interpreter._LangPatchScope()

    @instead_of(interpreter, "_patch_lang")
    def patch_once(fn):
        if fn not in languages:
            seen = [*fn.__globals__.values()]
            languages[fn] = [x for x in (tl, tl.core) if any(x is y for y in seen)]
        for x in languages[fn]:
            if x.static_print is not print:
                return patch(fn)
        return nothing  # in a launch: nothing to replace or to restore

    @instead_of(interpreter, "_patch_builtin")
    def patch_builtin_quickly(pkg, builder, scope):
        now = vars(pkg)
        before, found = builtins.get(pkg, ((), ()))
        if len(before) != len(now) or not all(map(operator.is_, before, now.values())):
            found = [x for x in inspect.getmembers(pkg) if tl.core.is_builtin(x[1])]
            builtins[pkg] = [*now.values()], found
        for name, member in found:
            interpreter._patch_attr(pkg, name, member, builder, scope)

    @instead_of(interpreter, "_get_np_dtype")
    def numpy_dtype_once(dtype):
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(dtype)
        return numpy_dtypes[name]


def _remember_shapes():
    unwrap, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type}
    block_init, tensor_init = core.block_type.__init__, core.tensor.__init__
    # the types of blocks that there were; one shape for all of its sizes; of its id, a tensor's
    blocks, shapes, of_tensors = {}, {}, {}

    @instead_of(core, "_unwrap_if_constexpr")
    def unwrap_quickly(o):
        kind = type(o)
        return o.value if kind is constexpr else o if kind in plain else unwrap(o)

    equal = core.dtype.__eq__

    @instead_of(core.dtype, "__eq__")
    def equal_quickly(self, other):
        return self is other or equal(self, other)

    @instead_of(core.block_type, "__init__")
    def block_once(self, element_ty, shape):
        sizes = tuple([s.value if type(s) is constexpr else s for s in shape])
        kind = type(shape), sizes, tuple(map(type, sizes)), element_ty.name
        if kind not in blocks:
            block_init(self, element_ty, shape)
            blocks[kind] = shapes.setdefault(sizes, self.shape), self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[kind]

    @instead_of(core.tensor, "__init__")
    def tensor_once(self, handle, type):
        shape = id(type.shape) if type.is_block() else None
        if shape in of_tensors:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = of_tensors[shape]
            return
        tensor_init(self, handle, type)
        # an id is a shape's own as long as the shape lives
        if shape is None or type.shape is shapes.get(tuple(type.shape)):
            of_tensors[shape] = self.shape, self.numel


def _fewer_calls():
    """Of a call to a builtin, and of making a handle, only what they do."""
    patch_attr, wrapper = interpreter._patch_attr, core.builtin(lambda: None).__code__
    index, called = core.tensor.__getitem__.__wrapped__, {}

    @instead_of(interpreter, "_patch_attr")
    def patch_attr_quickly(obj, name, member, builder, scope):
        semantic = interpreter.interpreter_semantic
        if obj is core.tensor and name in OPERATORS:
            operator, swapped, *more = OPERATORS[name]
            run = getattr(semantic, operator)
            if swapped:
                new = lambda y, x, _semantic=None: run(core._unwrap_if_constexpr(x), y, *more)
            else:
                new = lambda x, y, _semantic=None: run(x, core._unwrap_if_constexpr(y), *more)
        elif getattr(member, "__code__", None) is wrapper:
            if (member, semantic) not in called:
                called[member, semantic] = call(member.__wrapped__, semantic)
            new = called[member, semantic]
        else:
            return patch_attr(obj, name, member, builder, scope)
        scope.set_attr(obj, name, new)

    def call(inner, semantic):
        """Of a builtin, whose wrapper looks whether there is a `_semantic`."""

        def new(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        def new_axis(x, slices, _semantic=None):
            if type(slices) is tuple and len(slices) == 2 and x.type.is_block():
                axis = 1 if slices[1] is None else 0
                new, kept = slices[axis], slices[1 - axis]
                whole = type(kept) is slice and kept.start is kept.stop is kept.step is None
                if new is None and whole and len(x.type.shape) == 1:
                    return semantic.expand_dims(x, axis)
            return inner(x, slices, _semantic=semantic)

        return new_axis if inner is index else new

    @instead_of(interpreter.TensorHandle, "__init__")
    def handle_quickly(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1 and (
            type(dtype) is not core.dtype or data.itemsize * 8 > dtype.primitive_bitwidth
        ):
            self.__post_init__()

    convert = interpreter._convert_float

    @instead_of(interpreter, "_convert_float")
    def convert_quickly(input, input_dtype, output_dtype, rounding_mode):
        """bfloat16 is the upper half of a float32's bits; subnormal numbers are left to Triton."""
        kinds = input_dtype.name, output_dtype.name, input.dtype.name
        if rounding_mode is None and kinds == ("bf16", "fp32", "uint16"):
            if not ((input & 0x7FFF) - np.uint16(1) < 0x7F).any():
                return np.asarray(input.astype(np.uint32, order="C") << 16)
        elif rounding_mode is None and kinds == ("fp32", "bf16", "float32"):
            bits = np.asarray(input, order="C").view(np.uint32)
            if not ((bits & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF).any():
                return np.asarray(bits >> 16).astype(np.uint16)
        return convert(input, input_dtype, output_dtype, rounding_mode)
