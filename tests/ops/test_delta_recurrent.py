"""fused_recurrent_*: any call against the recurrence in float64, with every gate and flag."""

from functools import partial

import pytest
import torch
from gdn_checks import boundaries
from grids import FULL, parametrize
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_cases import (
    GATES,
    TOLERANCE,
    case,
    check_all,
    close,
    cotangents,
    double,
    kda_case,
    kda_oracle,
    options,
    oracle,
    run,
)

from linattn_edu import fused_recurrent_gated_delta_rule as gdn
from linattn_edu import fused_recurrent_kda as kda
from linattn_edu.testing import assert_close, poison

CUDA = torch.cuda.is_available()
IMPLS = ("triton", "reference")
FLAGS = ("norm", "sigmoid", "neg", "v_first")
ALL = {gdn: frozenset((*FLAGS, "gate")), kda: frozenset(FLAGS)}
both = pytest.mark.parametrize("f", (gdn, kda), ids=lambda f: f.__name__)
# every gate at once, and each way to say one for a channel
MOST = [(gdn, "g gk gv"), (kda, "softplus"), (kda, "bounded")]
EVERY = [(gdn, "g gk gv"), *((kda, gate) for gate in GATES)]


def drawn(f, *shape, gate, flags=(), **kinds):
    """(tensors, the other arguments, the recurrence of the tensors) of a call."""
    if f is kda:
        x, rest = kda_case(*shape, gate=gate, flags=flags, **kinds)
        return x, rest, kda_oracle(rest, flags=flags)
    x = case(*shape, gates=gate, flags=flags, **kinds)
    tensors = {n: t for n, t in x.items() if t is not None}
    return tensors, options(flags), partial(oracle, flags=flags)


def check(f, got, want, dtype):
    check_all(got, want, dtype, 8e-3 if f is kda and dtype != torch.float32 else None)


@st.composite
def calls(draw, f):
    """What `drawn` returns, cu_seqlens and impl.

    K >= 2: a row of one number has length 1 whatever it is, and its gradient is what rounding left.
    """
    flags = set(draw(st.sets(st.sampled_from(sorted(ALL[f])))))
    flags -= set() if "sigmoid" in flags else {"neg"}
    lengths = draw(st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    N, device = None, "cuda" if CUDA else "cpu"
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, 70 if CUDA else 6))
    if lengths is not None:
        B, T, N = 1, sum(lengths), len(lengths)
    kinds = {"state": draw(st.booleans()), "seed": draw(st.integers(0, 2**31)), "device": device}
    if f is kda:
        gate = draw(st.sampled_from(list(GATES)))
    else:
        gate = " ".join(draw(st.sets(st.sampled_from(("g", "gk", "gv")))))
        kinds["beta"] = "sigmoid" in flags or draw(st.booleans())
    x, rest, exact = drawn(
        f, T, draw(st.sampled_from([(1, 1), (1, 3), (2, 4)])), draw(st.integers(2, 40)),
        draw(st.integers(1, 20)), B=B, N=N, dtype=draw(st.sampled_from(list(TOLERANCE))),
        gate=gate, flags=flags, **kinds,
    )  # fmt: skip
    packed = {"cu_seqlens": None if lengths is None else boundaries(lengths, device, torch.int64)}
    return x, rest, exact, packed, draw(st.sampled_from(("auto", "reference")))


def any_call(examples):
    """Every draw is a new kernel on a GPU; the interpreter is slow."""
    return lambda test: both(
        settings(
            max_examples=8 * examples if CUDA else examples, derandomize=not CUDA, deadline=None
        )(given(data=st.data())(test))
    )


@pytest.mark.long
@any_call(12)
def test_any_valid_call(f, data):
    """With gradients, and without, which another kernel computes."""
    x, rest, exact, packed, impl = data.draw(calls(f))
    want = run(exact, double(x), **packed)
    with poison():
        got = run(f, x, cotangents(want[0]), **rest, **packed, impl=impl)
        with torch.no_grad():
            alone = f(**x, **rest, **packed, impl=impl)
    assert [y.dtype for y in alone] == [x["q"].dtype, torch.float32]
    for name, a, b in zip(("o", "final_state"), alone, want[0], strict=True):
        close(name, a, b, TOLERANCE[x["q"].dtype][0])
    assert all(dx.dtype == x[n].dtype and dx.shape == x[n].shape for n, dx in got[1].items())
    check(f, got, want, x["q"].dtype)


@parametrize(form=MOST, dtype=TOLERANCE, impl=IMPLS)
def test_everything_at_once(form, dtype, impl, device):
    f, gate = form
    shape = (200, (2, 6), 100, 72) if CUDA else (7, (1, 2), 20, 12)
    x, rest, exact = drawn(f, *shape, B=2, dtype=dtype, device=device, gate=gate, flags=ALL[f])
    want = run(exact, double(x))
    check(f, run(f, x, cotangents(want[0]), **rest, impl=impl), want, dtype)


@pytest.mark.parametrize(("f", "gate"), EVERY, ids=lambda x: getattr(x, "__name__", x))
def test_without_a_gradient_the_same_result(f, gate, device):
    """All in one kernel, or the norms, the gate and the sigmoid as operators of their own."""
    every = [(dtype, flags) for dtype in TOLERANCE for flags in (ALL[f], frozenset())]
    for dtype, flags in every if CUDA or FULL else every[::2]:
        shape = (9 if f is gdn else 5, (1, 2), 16, 12)
        x, rest, _ = drawn(f, *shape, B=2, dtype=dtype, device=device, gate=gate, flags=flags)
        want, _ = run(f, x, **rest)
        with poison(), torch.no_grad():
            got = f(**x, **rest)
        for name, a, b in zip(("o", "final_state"), got, want, strict=True):
            assert a.dtype == b.dtype
            # nothing of a state is rounded to 16 bit
            assert_close(name, a, b, TOLERANCE[dtype][0] if name == "o" else 5e-6)
