"""interpreter.py: Triton's interpreter as conftest.py makes it gives the bits that it gave."""

import itertools
import operator
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import few, parametrize

from linattn_edu import chunk_kda, mamba_chunk_scan_combined
from linattn_edu.testing import kda_inputs, ssd_inputs

triton = pytest.importorskip("triton")
interpreter = pytest.importorskip("triton.runtime.interpreter")
tl = pytest.importorskip("triton.language")
core = tl.core
REPLACED = pytest.importorskip("interpreter").REPLACED

pytestmark = pytest.mark.skipif(not REPLACED, reason="Triton's own interpreter, or none")


def kda(x):
    return chunk_kda(**x, impl="triton", output_final_state=True, chunk_size=16)


def ssd(x):
    more = {"dt_softplus": True, "return_final_states": True, "chunk_size": 16}
    return mamba_chunk_scan_combined(**x, **more, impl="triton")


INPUTS = {
    kda: lambda dtype: kda_inputs(1, 17, 1, 1, 20, 16, dtype=dtype, initial_state=True),
    ssd: lambda dtype: ssd_inputs(1, 17, 2, 1, 20, 16, dtype=dtype),
}


@parametrize(1, dtype=(torch.float32, torch.float16, torch.bfloat16), run=INPUTS)
def test_same_bits(dtype, run, undo):
    x = INPUTS[run](dtype).asdict()
    leaves = [t.requires_grad_() for t in x.values() if t.is_floating_point()]

    def both_passes():
        out = run(x)
        return *out, *torch.autograd.grad(out, leaves, [o.detach() for o in out])

    quick = both_passes()
    undo()
    for a, b in zip(quick, both_passes(), strict=True):
        assert torch.equal(a, b)


def test_what_a_block_may_not_be_is_refused_each_time(undo):
    """After a block that is remembered, and after a refusal."""

    def refusals():
        for good, bad in (([16], [16.0]), ([4, 4], [4, 3]), ([1], [])):
            core.block_type(core.float32, good)
            for _ in range(2):
                with pytest.raises((TypeError, ValueError)) as refused:
                    core.block_type(core.float32, bad)
                yield str(refused.value)

    quick = list(refusals())
    undo()
    assert quick == list(refusals())


def test_shapes_and_types(undo):
    """Of blocks and numbers, from lists and from Triton's own tuples."""

    def made():
        sizes = [core.constexpr(4), 8]
        for shape in (sizes, core.tuple(sizes), [8, 4]):
            for element in (core.float32, core.int32, core.pointer_type(core.float32)):
                block = core.block_type(element, shape)
                for kind in (block, element):
                    x = core.tensor(None, kind)
                    yield str(x), x.type, x.dtype, x.numel.value, list(x.shape), kind.name
                yield block.numel, block.name, list(block.shape)

    quick = list(made())
    undo()
    assert quick == list(made())


def values(dtype, shape):
    """Random numbers, zeros of both signs, the smallest, the largest, inf and NaN: as NumPy's."""
    kind = interpreter._get_np_dtype(dtype)
    rng = np.random.default_rng(0)
    if kind == np.bool_:
        return rng.random(shape) < 0.5
    x = np.frombuffer(rng.bytes(kind.itemsize * int(np.prod(shape))), kind).copy()
    ordinary = rng.standard_normal(x.shape) * 3
    if dtype == tl.bfloat16:
        x[::2] = torch.tensor(ordinary).bfloat16().view(torch.uint16).numpy()[::2]
        special = [0, 0x8000, 1, 0x807F, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0]
    elif dtype.is_floating():
        x[::2] = ordinary.astype(kind)[::2]
        tiny = np.finfo(kind).smallest_subnormal
        special = [0.0, -0.0, tiny, -tiny, np.finfo(kind).max, np.inf, -np.inf, np.nan]
    else:
        special = [0, 1, np.iinfo(kind).min, np.iinfo(kind).max]
    n = min(len(special), x.size)
    x[-n:] = np.array(special, kind)[:n]
    return x.reshape(shape)


def tensor(dtype, shape=(), layout="C"):
    data = np.asarray(values(dtype, shape or (1,)), order=layout)
    handle = interpreter.TensorHandle(data, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def told(f, *args):
    """All that a result is, or how it is refused."""
    try:
        with np.errstate(all="ignore"):
            found = f(*args)
    except Exception as e:
        return type(e), str(e)
    return [
        (
            x.handle.data.tobytes(),
            x.handle.data.dtype,
            x.dtype.is_ptr() or x.handle.data.strides,  # nobody sees the order of pointers
            x.handle.dtype,
            x.type,
            str(x.type),
            [n.value for n in x.shape],
            x.numel.value,
        )
        for x in (found if isinstance(found, tuple) else (found,))
    ]


def same(undo, make):
    """make() yields calls: told the same when met first, when met again, and by Triton's own."""

    def act():
        scope = interpreter._patch_lang(told)
        try:
            return [(call[1:], told(*call)) for call in make()]
        finally:
            scope.restore()

    first, quick = act(), act()
    undo()
    for (what, a), (_, b), (_, c) in zip(quick, act(), first, strict=True):
        assert a == b == c, what
    return quick


KINDS = [tl.float32, tl.float16, tl.bfloat16, tl.float64, tl.int32, tl.int64, tl.uint8, tl.int1]
SHAPES = [((), "C"), ((4,), "C"), ((8, 1), "C"), ((1, 4), "C"), ((8, 4), "C"), ((8, 4), "F")]
OPERATORS = [
    *(operator.add, operator.sub, operator.mul, operator.and_, operator.or_),
    *(operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne),
    *(operator.floordiv, operator.mod),
]


@pytest.mark.parametrize("f", OPERATORS, ids=lambda f: f.__name__)
def test_operators(f, undo):
    """Every pair of types, of each every pair of shapes; numbers on both sides."""
    more = (3, 2**40, 0.0, 1e-45, 1e300, np.inf)
    numbers = few(0, -1, 2**31, 2.5, -0.0, np.nan, True, more=more)

    def made():
        for a, b in itertools.product(KINDS, repeat=2):
            for x, y in itertools.product(SHAPES, repeat=2):
                if a == b or (x[1] == "F" and y in SHAPES[::2]):
                    yield f, tensor(a, *x), tensor(b, *y)
        for a, x, number in itertools.product(KINDS, SHAPES[::5], numbers):
            yield f, tensor(a, *x), number
            yield f, number, tensor(a, *x)
            yield f, tensor(a, *x), tl.constexpr(number)

    same(undo, made)


def test_operators_of_what_compared(undo):
    """The result of a comparison keeps the type of what it compared in its handle."""

    def made():
        for a, b in itertools.product(KINDS, repeat=2):
            less = tensor(a, (8, 4)) < tensor(a, (8, 1))
            for f in (operator.and_, operator.or_, operator.add):
                yield f, less, tensor(b, (8, 4)) > tensor(b, (4,))
            yield less.to, b

    same(undo, made)


def test_pointers(undo):
    def made():
        for kind, (shape, _) in itertools.product(KINDS[::3], SHAPES[:-1]):
            for const in (False, True):
                pointer = tl.pointer_type(kind, const=const)
                data = np.arange(int(np.prod(shape or (1,))), dtype=np.uint64).reshape(shape or 1)
                type_ = tl.block_type(pointer, list(shape)) if shape else pointer
                x = tl.tensor(interpreter.TensorHandle(data, pointer), type_)
                for y in [3, -1, 2**40, 1.5, *(tensor(t, *s) for t in KINDS[4:] for s in SHAPES)]:
                    yield operator.add, x, y
                    yield operator.add, y, x
                yield operator.sub, x, 3
                yield x.__getitem__, (None, slice(None))

    same(undo, made)


def test_the_smaller_and_the_larger(undo):
    """Of every pair of types, and beside numbers."""

    def made():
        for f, a in itertools.product((tl.minimum, tl.maximum), KINDS):
            for b, (x, y) in itertools.product(KINDS, itertools.product(SHAPES[::2], repeat=2)):
                yield f, tensor(a, *x), tensor(b, *y)
            for number in (0, -3, 2**40, 2.5, np.nan):
                yield f, tensor(a, (8, 4)), number
                yield f, number, tensor(a, (8, 4))

    same(undo, made)


def test_where(undo):
    """Of every pair of types; numbers on both sides; conditions of several shapes."""

    def made():
        for c, a, x in itertools.product(few(*SHAPES[::5], more=SHAPES[1:5]), KINDS, SHAPES[::2]):
            condition = tensor(tl.int1, *c)
            for b in KINDS:
                yield tl.where, condition, tensor(a, *x), tensor(b, *SHAPES[-1])
            for number in (0, -1, 2.5, -0.0, -np.inf, np.nan, 2**40):
                yield tl.where, condition, tensor(a, *x), number
                yield tl.where, condition, number, tensor(a, *x)
        yield tl.where, tensor(tl.int32, (4,)), 1.0, tensor(tl.float32, (4,))

    with pytest.warns(UserWarning, match="non-boolean condition"):
        same(undo, made)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_loads(kind, undo):
    """With masks and other values, numbers or of its shape, or without."""
    memory = values(kind, (40,))
    pointer = tl.pointer_type(kind)

    def made():
        for shape, layout in SHAPES:
            order = np.random.default_rng(1).permutation(40)[: int(np.prod(shape or (1,)))]
            where = memory.ctypes.data + memory.itemsize * order.astype(np.uint64)
            data = np.asarray(where.reshape(shape or (1,)), order=layout)
            type_ = tl.block_type(pointer, list(shape)) if shape else pointer
            x = tl.tensor(interpreter.TensorHandle(data, pointer), type_)
            yield tl.load, x
            for mask in (None, True, tensor(tl.int1), tensor(tl.int1, shape)):
                for other in (None, 0.0, 3, tensor(tl.float32), tensor(kind, shape)):
                    yield tl.load, x, mask, other

    same(undo, made)


def test_casts(undo):
    def made():
        for a, b, (shape, layout) in itertools.product(KINDS, KINDS, SHAPES):
            yield tensor(a, shape, layout).to, b
            yield interpreter.interpreter_semantic.cast, tensor(a, shape, layout), b

    same(undo, made)


def test_shapes(undo):
    semantic = interpreter.interpreter_semantic

    def made():
        for kind, (shape, layout) in itertools.product(KINDS, SHAPES):
            x = tensor(kind, shape, layout)
            for axis in range(-1, 4):
                yield semantic.expand_dims, x, axis
            for slices in (None, (None, slice(None)), (slice(None), None), (slice(1),)):
                yield x.__getitem__, slices
            for other in SHAPES:
                yield semantic.broadcast_impl_value, x, tensor(tl.int1, *other)
                yield semantic.broadcast_impl_value, tensor(tl.float32, *other), x

    same(undo, made)


def test_every_bfloat16_and_many_float32():
    """As float32 and back; a subnormal number among others and alone."""
    quick = interpreter._convert_float
    own = getattr(quick, "__wrapped__", quick)  # of Triton 3.8, nothing stands in its place
    pair = tl.bfloat16, tl.float32
    x = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    wide = np.random.default_rng(0).integers(0, 2**32, (256, 256), dtype=np.uint32)
    normal = (wide & 0x7F800000) != 0
    for mode in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        for rows in (x, x.T, x[1:127], x[127:129], x[1::2, ::3], x[:1, :1], x[:1], x[3, 9, ...]):
            assert np.array_equal(quick(rows, *pair, mode), own(rows, *pair, mode))
            assert isinstance(quick(rows, *pair, mode), np.ndarray)
        for bits in (wide, np.where(normal, wide, 0), wide.T, wide & 0x807FFFFF, wide | 0x7F800000):
            for y in (bits.view(np.float32), bits.view(np.float32)[3, 9, ...]):
                assert np.array_equal(quick(y, *pair[::-1], mode), own(y, *pair[::-1], mode))
                assert isinstance(quick(y, *pair[::-1], mode), np.ndarray)


def test_a_handle_refuses_data_that_is_too_wide(undo):
    def made():
        for kind, data in itertools.product((*KINDS, tl.pointer_type(tl.int8)), KINDS):
            try:
                handle = interpreter.TensorHandle(values(data, (4,)), kind)
                yield handle.dtype, handle.data.dtype, handle.attr
            except ValueError as e:
                yield str(e)

    quick = list(made())
    undo()
    assert quick == list(made())
    assert any("exceeds" in str(x) for x in quick)


@triton.jit
def twice(x):
    return x * FACTOR


@triton.jit
def once(x):
    return x


@triton.jit
def sum_kernel(x_ptr, out_ptr, n: tl.constexpr, more=0.0):
    i_n = tl.program_id(0)
    b_x = tl.load(x_ptr + tl.arange(0, n))
    tl.store(out_ptr + i_n, tl.load(out_ptr + i_n) + twice(tl.sum(b_x)) + more)


FACTOR = tl.constexpr(2.0)


def test_a_launch_is_run_again_where_anything_that_it_reads_is_another(monkeypatch):
    """A number of a tensor, of what it writes over too, an argument, the grid, a view, a constant
    of its module, what it calls; else it writes what it wrote.
    """
    ran = []
    begin = interpreter.InterpreterBuilder.set_grid_dim
    counted = lambda self, *grid: ran.append(self) or begin(self, *grid)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "set_grid_dim", counted)
    numbers = torch.arange(9.0)

    def launch(x=numbers[:8], out=(0.0, 5.0), grid=(1,), n=8, **more):
        out = torch.tensor(out)
        sum_kernel[grid](x.clone() if x.storage_offset() == 0 else x, out, n=n, **more)
        return out.tolist()

    other = numbers[:8].clone()
    other[3] = -1
    for new, want in (
        ({}, [56, 5]),
        ({"x": other}, [48, 5]),
        ({"out": (1.0, 5.0)}, [57, 5]),
        ({"grid": (2,)}, [56, 61]),
        ({"n": 4}, [12, 5]),
        ({"more": 1.0}, [57, 5]),
        ({"x": numbers[1:]}, [72, 5]),
    ):
        before = len(ran)
        assert launch(**new) == launch(**new) == want
        assert len(ran) == before + 1, new
    for name, new, want in (
        ("FACTOR", tl.constexpr(3.0), [84, 5]),
        ("twice", once, [28, 5]),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), name, new)
            assert launch() == launch() == want, name
    before = len(ran)
    assert launch() == [56, 5] and len(ran) == before


def test_chapters_have_it_too():
    """After the cell that imports Triton, and no name more."""
    code = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.user_ns["__file__"] = sys.argv[1]  # as IPython does it for a file of its start
shell.safe_execfile(sys.argv[1], shell.user_ns, raise_exceptions=True)
assert not {"os", "sys", "start"} & set(shell.user_ns)
shell.run_cell("import triton.language").raise_error()
shell.run_cell("from triton.runtime import interpreter").raise_error()
interpreter = shell.user_ns["interpreter"]
print(interpreter._patch_lang.__wrapped__.__name__)
"""
    command = [sys.executable, "-c", code, str(Path(__file__).parent / "chapters_startup.py")]
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "_patch_lang", done.stderr
