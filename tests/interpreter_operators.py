"""Operators of Triton's interpreter whose types were met before: only NumPy's operation."""

import functools
import math

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

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
# of integers with signs: what the builder calls them
INTEGER = {
    "floordiv": "create_sdiv",
    "mod": "create_srem",
    "minimum": "create_minsi",
    "maximum": "create_maxsi",
}
INTEGERS = {core.int32, core.int64}
WHOLE = {*INTEGERS, core.float16, core.bfloat16, core.float32, core.float64}
NUMBERS = {*core.dtype.SINT_TYPES, *core.dtype.UINT_TYPES, *core.dtype.STANDARD_FP_TYPES}


def straight_to_numpy(instead_of):
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
            beside = self.scalar_constant(0, dtype)
            number = self.binary_op_type_checking_impl(beside, value)[1]
            if number.dtype is not dtype:
                return None
            number.handle.place = None, None, 0  # of interpreter_replay.py: depends on nothing
            constants[key] = number
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

    def of_integers(name, create):
        original, results = getattr(language, name), {}

        @instead_of(language, name)
        def quick(self, input, other, *more, **named):
            a, b = input, other
            if self.builder is builder and type(a) is tensor and a.dtype in INTEGERS:
                b = constant(self, b, a.dtype) if type(b) is not tensor else b
                key = (a.type.name, b.type.name) if b is not None and b.dtype is a.dtype else None
                if key in results:
                    a, b = self.broadcast_impl_value(a, b)
                    return tensor(create(builder, a.handle, b.handle), results[key])
                if key:
                    result = original(self, input, other, *more, **named)
                    results[key] = result.type
                    return result
            return original(self, input, other, *more, **named)

    for name, create in INTEGER.items():
        of_integers(name, getattr(interpreter.InterpreterBuilder, create))

    where = language.where

    @instead_of(language, "where")
    def where_quickly(self, condition, x, y):
        a, b = x, y
        if type(a) is not tensor:
            a = constant(self, a, b.dtype) if type(b) is tensor else None
        elif type(b) is not tensor:
            b = constant(self, b, a.dtype)
        alike = a is not None and b is not None and a.dtype is b.dtype and a.dtype in WHOLE
        if self.builder is not builder or not alike or condition.dtype is not core.int1:
            return where(self, condition, x, y)
        a, b = self.broadcast_impl_value(a, b)
        if condition.type.is_block():
            condition, a = self.broadcast_impl_value(condition, a)
            a, b = self.broadcast_impl_value(a, b)
        else:
            condition, _ = self.broadcast_impl_value(condition, a)
        return tensor(builder.create_select(condition.handle, a.handle, b.handle), a.type)

    load = language.load

    @instead_of(language, "load")
    def load_quickly(self, ptr, mask, other, cache_policy, is_volatile):
        type_ = ptr.type
        if self.builder is builder and mask is not None and type_.is_block():
            element = type_.element_ty.element_ty
            plain = mask.type.is_block() and mask.type.shape is type_.shape
            if plain and element in WHOLE and not (other is not None and other.type.is_block()):
                if other is not None:
                    other = builder.create_splat(type_, self.cast(other, element).handle)
                read = builder.create_masked_load(ptr.handle, mask.handle, other, None, is_volatile)
                return tensor(read, type_.with_element_ty(element))
        return load(self, ptr, mask, other, cache_policy, is_volatile)

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
            return tensor(builder.create_reshape(input.handle, shape, False), type_)
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
            return lambda x: tensor(builder.create_broadcast(x.handle, shape), type_)
        return lambda x: tensor(builder.create_splat(type_, x.handle), type_)

    binary = interpreter.InterpreterBuilder.binary_op

    @instead_of(interpreter.InterpreterBuilder, "binary_op")
    def binary_quickly(self, lhs, rhs, op):
        if lhs.data.dtype == np.bool_:
            return binary(self, lhs, rhs, op)
        output, dtype = op(lhs.data, rhs.data), lhs.dtype.scalar
        if output.itemsize > 1 and not interpreter._validate_np_data_size(output, dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)
