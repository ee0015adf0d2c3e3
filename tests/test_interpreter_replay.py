"""interpreter_replay.py: programs that are replayed store the bits that they stored as ever."""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")
REPLACED = pytest.importorskip("interpreter").REPLACED

pytestmark = pytest.mark.skipif(
    "_patch_lang_tensor" not in [name for _, name in REPLACED], reason="programs are not replayed"
)


class Counter:
    """How often Python has run a kernel."""

    runs = 0

    def __call__(self):
        self.runs += 1
        return 0


count = Counter()


@triton.jit
def add(a, b):
    return a + 2 * b


@triton.jit
def kernel(x_ptr, n_ptr, out_ptr, scale, WIDTH: tl.constexpr, DTYPE: tl.constexpr):
    """A loop whose length is loaded, a condition on what was loaded after a first store, sums,
    scans of two kinds, splits, all three numbers of a program and of the grid.
    """
    count()
    i, j, k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = (i * tl.num_programs(1) + j) * tl.num_programs(2) + k
    o = tl.arange(0, WIDTH)
    b_x = tl.load(x_ptr + i * WIDTH + o, mask=o < WIDTH - 1, other=1.0).to(tl.float32)
    out_ptr += i * WIDTH + o
    tl.store(out_ptr, tl.load(out_ptr) + 1.0)
    for _ in range(tl.load(n_ptr + i)):
        b_x = b_x * scale + tl.cumsum(b_x, 0, reverse=True)
    if tl.sum(b_x) > 0:
        left, right = tl.split(tl.reshape(b_x, [WIDTH // 2, 2]))
        b_m = tl.dot(left[:, None] * right[None, :], tl.trans(right[:, None] * left[None, :]))
        b_x += tl.max(tl.join(tl.sum(b_m, 0), tl.exp2(left))) + (i % 3 if k == 1 else 0)
    else:
        b_x = tl.associative_scan(b_x, 0, add)
    b_x = tl.where(b_x.to(tl.int32, bitcast=True) < 7, -b_x, tl.minimum(b_x, 3.0))
    tl.store(out_ptr, (tl.load(out_ptr) + b_x.to(DTYPE).to(tl.float32)))


GRID = (2, 3, 4)


def launch(seed, scale=0.5, dtype=tl.float32, most=3):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(24, 16, generator=generator)
    n = torch.randint(0, most, (24,), generator=generator)
    out = torch.randn(24, 16, generator=generator)
    kernel[GRID](x, n, out, scale, 16, dtype)
    return out


@pytest.mark.parametrize("dtype", [tl.float32, tl.float16, tl.bfloat16])
def test_same_bits(dtype, undo):
    """Each program twice: in the first launch met or not, in the second one of other numbers."""
    calls = [(seed, scale, dtype) for seed in (1, 2, 3) for scale in (0.5, 1)]
    quick = [launch(*call) for call in calls]
    undo()
    for call, found in zip(calls, quick, strict=True):
        want = launch(*call)
        assert torch.isfinite(want).all()
        assert torch.equal(found, want)


def test_python_runs_a_path_once():
    """Loops of 0 to 2 steps, two signs, two sides of `k == 1`: at most 12 paths of 24 programs."""
    before = count.runs
    launch(4, 0.25)
    ran = count.runs - before
    assert 4 < ran <= 12
    launch(5, 0.25)
    assert count.runs - before <= 12
    launch(4, 0.125)  # another number in Python
    assert count.runs - before > 4 + ran // 2


@triton.jit
def seen_kernel(x_ptr, out_ptr, HOW: tl.constexpr):
    count()
    i = tl.program_id(0)
    b_x = tl.load(x_ptr + 4 * i + tl.arange(0, 4)[:, None] + tl.zeros([1, 4], tl.int32))
    if HOW == "print":
        tl.device_print("", b_x)
    elif HOW == "transpose":
        b_x = b_x.T
    elif HOW == "text":
        text(b_x)
    elif HOW == "atomic":
        tl.atomic_add(out_ptr, 1.0)
    o = tl.arange(0, 4)
    tl.store(out_ptr + 16 * i + 4 * o[:, None] + o[None, :], b_x)


def text(x):
    return str(x)


@pytest.mark.parametrize("how", ["", "print", "transpose", "text", "atomic"])
def test_what_cannot_be_written_down_is_run(how, undo, capsys):
    """What prints, what adds in place, arrays that no operation of Triton made."""

    def run():
        out = torch.full((48,), 0.0)
        before = count.runs
        seen_kernel[(3,)](torch.arange(12.0), out, how)
        return out, count.runs - before, capsys.readouterr().out

    out, ran, printed = run()
    assert ran == (3 if how else 1)
    undo()
    want, _, said = run()
    assert torch.equal(out, want) and printed == said


@triton.jit
def index_kernel(n_ptr, out_ptr):
    i = tl.program_id(0)
    n = tl.load(n_ptr + i)
    tl.static_assert(n < 3)
    tl.store(out_ptr + i, n)


def test_an_error_is_the_program_s(undo):
    """In a program of a path that is known, after programs without one."""
    n = torch.tensor([1, 2, 0, 5])

    def refused():
        out = torch.zeros(4, dtype=torch.int64)
        with pytest.raises(interpreter.InterpreterError) as error:
            index_kernel[(4,)](n, out)
        return str(error.value), out.tolist()

    quick = refused()
    assert quick[1] == [1, 2, 0, 0]
    undo()
    assert quick == refused()


def test_what_was_stored_is_taken_back(undo):
    """A program adds in place before it turns out to take another path."""
    runs = [launch(7, 0.75, most=n) for n in (1, 2, 4)]
    undo()
    for n, found in zip((1, 2, 4), runs, strict=True):
        assert np.array_equal(found.numpy(), launch(7, 0.75, most=n).numpy())
