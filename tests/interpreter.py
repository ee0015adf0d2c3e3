"""Triton's interpreter without what it does again and again for the same result.

At each call of a device function it looks through all of triton.language for what to replace, which
the launch around it has replaced already: that is half of its time.
"""

import functools

import triton.language as tl
from triton.runtime import interpreter


def quicken():
    """Replace two functions of the interpreter by ones that remember; the results are the same."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # before Triton 3.7
    patch, languages = interpreter._patch_lang, {}
    numpy_dtype, numpy_dtypes = interpreter._get_np_dtype, {}

    @functools.wraps(patch)
    def patch_once(fn):
        if fn not in languages:
            languages[fn] = {
                x.__name__: x for x in fn.__globals__.values() if any(x is y for y in (tl, tl.core))
            }
        if all(x.static_print is print for x in languages[fn].values()):
            return interpreter._LangPatchScope()  # in a launch: nothing to replace or to restore
        return patch(fn)

    @functools.wraps(numpy_dtype)
    def numpy_dtype_once(dtype):
        name = dtype.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = numpy_dtype(dtype)
        return numpy_dtypes[name]

    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_dtype_once
