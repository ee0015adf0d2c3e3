"""Triton's interpreter without what it does again and again for the same result.

Most of its time goes into Python objects: types of blocks, shapes of tensors, functions of
triton.language that the launch has replaced already, and checks for overflow whose result it drops.
"""

import functools
from dataclasses import replace

import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

# where and under which name; what stood there is the replacement's `__wrapped__`
REPLACED = []


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
    broadcast = semantic.TritonSemantic.broadcast_impl_value
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

    @instead_of(semantic.TritonSemantic, "broadcast_impl_value")
    def broadcast_quickly(self, lhs, rhs):
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape is b.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)
