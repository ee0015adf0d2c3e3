"""Names for the kernels in Gluon: those by which Triton 3.6 to 3.9 call the same, and records."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma
from triton.language.core import _aggregate

barrier = getattr(gl, "barrier", None) or gl.thread_barrier  # its name in 3.6
# copies of tiles by the copy engine, and of what pointers say; the second names are from before 3.8
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
async_read = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_NAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # from 3.9 on


@gluon.jit
def reinterpret(x, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The bytes of a whole allocation as another; from Triton 3.8 on a part of one may not be x."""
    if _NAMED:
        return x.reinterpret(dtype, shape, layout)
    else:
        return x._reinterpret(dtype, shape, layout)


def record(cls: type) -> type:
    """A class of named values that functions of a kernel hand on, made of all of them in order.

    Whatever can be an argument can be one: tensors, memory, tuples, None. Numbers are constants,
    and stay constants, as those of a tuple in a variable do not.
    """
    names = list(cls.__annotations__)

    def __init__(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if hasattr(value, "_flatten_ir") else gl.constexpr(value))

    __init__.__triton_builtin__ = True
    cls.__init__ = __init__
    return _aggregate(cls)
