"""fused_recurrent_gated_delta_rule: against the recurrence in float64, and how it is used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_cases import (
    TOLERANCE,
    case,
    check_all,
    close,
    cotangents,
    double,
    options,
    oracle,
    run,
)

from linattn_edu import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from linattn_edu.testing import assert_close, poison

CUDA = torch.cuda.is_available()
FLAGS = ("norm", "gate", "sigmoid", "neg", "v_first")
ALL = frozenset(FLAGS)
IMPLS = ("triton", "reference")


def rec(**arguments):
    return fused_recurrent_gated_delta_rule(**arguments)


def bounds(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


@st.composite
def calls(draw):
    """Arguments of a call, its flags, cu_seqlens and impl.

    K >= 2: a row of one number has length 1 whatever it is, and its gradient is what rounding left.
    """
    flags = set(draw(st.sets(st.sampled_from(FLAGS))))
    flags -= set() if "sigmoid" in flags else {"neg"}
    gates = draw(st.sets(st.sampled_from(("g", "gk", "gv"))))
    lengths = draw(st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any))
    N, device = None, "cuda" if CUDA else "cpu"
    B, T = draw(st.integers(1, 2)), draw(st.integers(1, 70 if CUDA else 6))
    if lengths is not None:
        B, T, N = 1, sum(lengths), len(lengths)
    x = case(
        T, draw(st.sampled_from([(1, 1), (1, 3), (2, 4)])), draw(st.integers(2, 40)),
        draw(st.integers(1, 20)), B=B, N=N, dtype=draw(st.sampled_from(list(TOLERANCE))),
        gates=" ".join(gates), flags=flags, state=draw(st.booleans()),
        beta="sigmoid" in flags or draw(st.booleans()), seed=draw(st.integers(0, 2**31)),
        device=device,
    )  # fmt: skip
    cu_seqlens = None if lengths is None else bounds(lengths, device)
    return x, flags, {"cu_seqlens": cu_seqlens}, draw(st.sampled_from(("auto", "reference")))


def any_call(examples):
    """Every draw is a new kernel on a GPU; the interpreter is slow."""
    return lambda test: settings(
        max_examples=8 * examples if CUDA else examples, derandomize=not CUDA, deadline=None
    )(given(calls())(test))


@any_call(14)
def test_any_valid_arguments(call):
    x, flags, packed, impl = call
    want = oracle(**double(x), flags=flags, **packed)
    with poison(), torch.no_grad():
        got = rec(**x, **options(flags), **packed, impl=impl)
    dtype = x["q"].dtype
    assert [y.dtype for y in got] == [dtype, torch.float32]
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        close(name, a, b, TOLERANCE[dtype][0])


@any_call(10)
def test_any_valid_gradient(call):
    x, flags, packed, impl = call
    want = run(oracle, double(x), flags=flags, **packed)
    with poison():
        got = run(rec, x, cotangents(want[0]), **options(flags), **packed, impl=impl)
    for name, dx in got[1].items():
        assert dx.dtype == x[name].dtype and dx.shape == x[name].shape
    check_all(got, want, x["q"].dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_everything_at_once(dtype, impl, device):
    shape = (200, (2, 6), 100, 72) if CUDA else (8, (1, 2), 20, 12)
    x = case(*shape, B=2, dtype=dtype, device=device, gates="g gk gv", flags=ALL)
    want = run(oracle, double(x), flags=ALL)
    got = run(rec, x, cotangents(want[0]), **options(ALL), impl=impl)
    check_all(got, want, dtype)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("flags", [frozenset(), ALL - {"v_first"}, ALL], ids=len)
def test_equals_the_chunked_form(flags, impl, device):
    x = case(300 if CUDA else 20, (1, 2), 16, 12, device=device, flags=flags)
    kept = {n: x.pop(n) for n in ("gk", "gv")}
    assert set(kept.values()) == {None}
    want = run(chunk_gated_delta_rule, x, **options(flags), impl=impl, chunk_size=16)
    check_all(run(rec, x, **options(flags), impl=impl), want, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("flags", [frozenset(), ALL], ids=len)
def test_without_a_gradient_the_same_result(flags, dtype, device):
    """All in one kernel, or the norms, the gate and the sigmoid as operators of their own."""
    x = case(9, B=2, dtype=dtype, device=device, flags=flags, gates="g gk gv")
    want, _ = run(rec, x, **options(flags))
    with poison(), torch.no_grad():
        got = rec(**x, **options(flags))
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert a.dtype == b.dtype
        tol = TOLERANCE[dtype][0] if name == "o" else 5e-6  # of which nothing is rounded to 16 bit
        assert_close(name, a, b, tol)


@pytest.mark.parametrize("impl", IMPLS)
def test_beta_left_out_is_one(impl, device):
    x = case(5, beta=False, device=device)
    one = torch.ones_like(x["v"][..., 0])
    for f in (lambda **a: rec(**a, impl=impl), lambda **a: run(rec, a, impl=impl)[0]):
        assert torch.equal(f(**x)[0], f(**{**x, "beta": one})[0])


def test_packed_sequences_keep_no_more_states_than_a_batch(device, monkeypatch):
    """States of blocks are kept by the length of a sequence, not of them all."""
    original, sizes = torch.Tensor.new_empty, []

    def new_empty(self, *shape, **options):
        y = original(self, *shape, **options)
        sizes.append(y.numel())
        return y

    largest = []
    for B, T, lengths in ((9, 4, None), (1, 36, [4] * 9)):
        x = case(T, B=B, N=9, device=device)
        x = {name: y for name, y in x.items() if y is not None}
        x["v"].requires_grad_()
        cu_seqlens = None if lengths is None else bounds(lengths, device)
        o, _ = rec(**x, cu_seqlens=cu_seqlens, impl="triton")
        with monkeypatch.context() as m:
            m.setattr(torch.Tensor, "new_empty", new_empty)
            o.sum().backward()
        largest.append(max(sizes))
        sizes.clear()
    in_a_batch, packed = largest
    assert packed <= 2 * in_a_batch
