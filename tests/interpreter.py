"""Triton's interpreter without what it does again and again for the same result.

Most of its time goes into Python objects: types of blocks, shapes of tensors, functions of
triton.language that the launch has replaced already, and checks for overflow whose result it drops.
"""

import functools
import math
from dataclasses import replace

import numpy as np
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

# where and under which name; what stood there is the replacement's `__wrapped__`
REPLACED = []

# of TritonSemantic, each one function of NumPy for all types
UFUNCS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "less_than": np.less,
    "less_equal": np.less_equal,
    "greater_than": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
    "and_": np.bitwise_and,
    "or_": np.bitwise_or,
}
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
NUMBERS = {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES, *core.dtype.STANDARD_FP_TYPES}


def instead_of(where, name):
    """Put a function in the place of another."""

    def put(quick):
        REPLACED.append((where, name))
        setattr(where, name, functools.wraps(getattr(where, name))(quick))

    return put


def quicken():
    """Replace functions of the interpreter by ones that remember; the results are the same."""
    if not triton.__version__.startswith(("3.7.", "3.8.", "3.9.")):
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # without it, nobody reads what the check finds
        builder.options = replace(builder.options, sanitize_overflow=False)
    _remember_what_is_replaced()
    _remember_shapes()
    _fewer_calls()
    if not builder.options.sanitize_overflow:
        _straight_to_numpy()


def _remember_what_is_replaced():
    patch, languages = interpreter._patch_lang, {}
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    @instead_of(interpreter, "_patch_lang")
    def patch_once(fn):
        if fn not in languages:
            languages[fn] = {
                x.__name__: x for x in fn.__globals__.values() if any(x is y for y in (tl, tl.core))
            }
        if all(x.static_print is print for x in languages[fn].values()):
            return interpreter._LangPatchScope()  # in a launch: nothing to replace or to restore
        return patch(fn)

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
            inner = member.__wrapped__  # the wrapper looks whether there is a `_semantic`

            def new(*args, **kwargs):
                kwargs["_semantic"] = semantic
                return inner(*args, **kwargs)
        else:
            return patch_attr(obj, name, member, builder, scope)
        scope.set_attr(obj, name, new)

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
                return input.astype(np.uint32, order="C") << 16
        elif rounding_mode is None and kinds == ("fp32", "bf16", "float32"):
            bits = np.ascontiguousarray(input).view(np.uint32)
            if not ((bits & 0x7FFFFFFF) - np.uint32(1) < 0x7FFFFF).any():
                return (bits >> 16).astype(np.uint16)
        return convert(input, input_dtype, output_dtype, rounding_mode)


def _straight_to_numpy():
    """Operators and casts whose types were met before: only the operation on NumPy's arrays.

    NumPy stretches operands itself, so none is broadcast first. A number beside a block was a
    block in C's order: such a result is in C's order too, which a product sees in its last bits.
    """
    builder, handle, tensor = interpreter.interpreter_builder, interpreter.TensorHandle, core.tensor
    language, constants = semantic.TritonSemantic, {}

    def constant(self, value, dtype):
        """A number as a tensor of the other operand's type; None if that type does not win."""
        kind = type(value)
        if kind not in (int, float) or value != value:
            return None
        key = kind, value, math.copysign(1, value) if kind is float else 0, dtype.name
        if key not in constants:
            if dtype.is_ptr():
                return self.to_tensor(value) if kind is int else None
            beside = self.to_tensor_type(value)
            if self.computation_type_impl(dtype, False, beside, True, False) is not dtype:
                return None
            constants[key] = self._cast_to_computation_type(value, dtype)
        return constants[key]

    def straight(name, ufunc):
        original, plans = getattr(language, name), {}

        @instead_of(language, name)
        def quick(self, input, other, *more, **named):
            if self.builder is not builder:
                return original(self, input, other, *more, **named)
            a, b = input, other
            if type(a) is not tensor:
                a = constant(self, a, b.dtype) if type(b) is tensor else None
            elif type(b) is not tensor:
                b = constant(self, b, a.dtype)
            if a is None or b is None:
                return original(self, input, other, *more, **named)
            key = a.type.name, b.type.name
            if key not in plans:
                result = original(self, input, other, *more, **named)
                plans[key] = plan(self, a, b, result.type)
                return result
            dtype, type_, call = plans[key]
            if dtype is None:
                return original(self, input, other, *more, **named)
            if dtype == "pointer":
                type_ = a.type if type_ is None else core.block_type(a.dtype, type_.shape)
                return tensor(builder.create_addptr(a.handle, b.handle), type_)
            if a.dtype is not dtype:
                a = self.cast(a, dtype)
            if b.dtype is not dtype:
                b = self.cast(b, dtype)
            if call is None:
                a, b = self.broadcast_impl_value(a, b)
                call = ufunc
            return tensor(builder.binary_op(a.handle, b.handle, call), type_)

        def plan(self, a, b, type_):
            """The type to compute in, the result's, what to call (None: of what is broadcast)."""
            if type(a.dtype) is type(b.dtype) is core.dtype:
                dtype = self.computation_type_impl(a.dtype, False, b.dtype, False, False)
                if dtype == core.int1:  # binary_op copies what is broadcast, in another order
                    return dtype, type_, None
                mixed = a.type.is_block() != b.type.is_block()
                return dtype, type_, functools.partial(ufunc, order="C") if mixed else ufunc
            if name == "add" and a.dtype.is_ptr() and b.dtype.is_int_signed():
                return "pointer", None if type_ == a.type else type_, None
            return None, None, None

    for name, ufunc in UFUNCS.items():
        straight(name, ufunc)

    cast, casts = language.cast, {}

    @instead_of(language, "cast")
    def cast_quickly(self, input, dst_ty, fp_downcast_rounding=None):
        target = dst_ty.scalar
        if input.dtype is target:
            return input
        key = input.type.name, target.name
        if self.builder is not builder or fp_downcast_rounding is not None:
            return cast(self, input, dst_ty, fp_downcast_rounding)
        if key in casts:
            return tensor(builder.cast_impl(input.handle, casts[key]), casts[key])
        result = cast(self, input, dst_ty)
        targets = {"fp16": {"fp32"}, "bf16": {"fp32"}}.get(input.dtype.name, NUMBERS - {"int1"})
        if input.dtype.name in NUMBERS and target.name in targets:  # one cast_impl in Triton too
            casts[key] = result.type
        return result

    expand, expanded = language.expand_dims, {}

    @instead_of(language, "expand_dims")
    def expand_quickly(self, input, axis):
        key = input.type.name, axis
        if self.builder is builder and type(axis) is int and key in expanded:
            type_, shape = expanded[key]
            x = input.handle
            return tensor(handle(x.data.reshape(shape), x.dtype.scalar), type_)
        result = expand(self, input, axis)
        if input.type.is_block() and type(input.dtype) is core.dtype:
            expanded[key] = result.type, tuple(result.type.shape)
        return result

    broadcast, stretched = language.broadcast_impl_value, {}

    @instead_of(language, "broadcast_impl_value")
    def broadcast_quickly(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return lhs, rhs
        key = a.name, b.name
        if self.builder is builder and key in stretched:
            to_a, to_b = stretched[key]
            return to_a(lhs), to_b(rhs)
        results = broadcast(self, lhs, rhs)
        if not (a.is_block() and b.is_block() and len(a.shape) != len(b.shape)):
            changes = [stretch(*xs) for xs in zip((lhs, rhs), results, strict=True)]
            if all(changes):
                stretched[key] = changes
        return results

    def stretch(x, to):
        """What makes `to` of x."""
        if to is x:
            return lambda x: x
        if type(x.dtype) is not core.dtype:
            return None  # a pointer's name does not say all
        type_, shape = to.type, tuple(to.type.shape)
        if x.type.is_block():
            make = lambda x: np.broadcast_to(x.data, shape)
        else:
            make = lambda x: np.full(shape, x.data, dtype=interpreter._get_np_dtype(x.dtype))
        return lambda x: tensor(handle(make(x.handle), x.handle.dtype.scalar), type_)

    binary = interpreter.InterpreterBuilder.binary_op

    @instead_of(interpreter.InterpreterBuilder, "binary_op")
    def binary_quickly(self, lhs, rhs, op):
        if lhs.data.dtype == np.bool_:
            return binary(self, lhs, rhs, op)
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if output.itemsize > 1 and not interpreter._validate_np_data_size(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)
