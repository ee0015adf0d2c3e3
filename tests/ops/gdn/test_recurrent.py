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


@pytest.mark.parametrize("wide", ["g", "gk", "gv", "beta", "initial_state"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_dtypes(wide, dtype, device):
    x = case(4, dtype=dtype, device=device, gates="g gk gv")
    for name in ("g", "gk", "gv", "beta", "initial_state"):
        x[name] = x[name].to(torch.float32 if name == wide else dtype)
    want = run(oracle, double(x))
    got = run(rec, x, cotangents(want[0]), output_final_state=True)
    assert all(dx.dtype == x[name].dtype for name, dx in got[1].items())
    check_all(got, want, dtype)


def test_float64_runs_in_the_reference(device):
    x = case(6, B=2, dtype=torch.float64, device=device, flags=ALL, gates="g gk gv")
    want = run(oracle, double(x), flags=ALL)
    got = run(rec, x, cotangents(want[0]), **options(ALL))
    for name, a, b in zip(("o", "S", *want[1]), flat(got), flat(want), strict=True):
        assert_close(name, a, b, 1e-12)


def flat(result):
    return [*result[0], *result[1].values()]


@pytest.mark.parametrize("impl", IMPLS)
def test_beta_left_out_is_one(impl, device):
    x = case(5, beta=False, device=device)
    one = torch.ones_like(x["v"][..., 0])
    for f in (lambda **a: rec(**a, impl=impl), lambda **a: run(rec, a, impl=impl)[0]):
        assert torch.equal(f(**x)[0], f(**{**x, "beta": one})[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_only_what_is_asked_for(impl, device):
    """A state on request, a gradient from one output, gradients of some inputs."""
    x = case(4, device=device)
    o, none = rec(**x, impl=impl)
    assert none is None
    x["v"].requires_grad_()
    got, none = rec(**x, impl=impl)
    assert none is None and torch.equal(got, o)
    got.sum().backward()
    want, _ = oracle(**double(x))
    (dv,) = torch.autograd.grad(want.sum(), x["v"])
    assert_close("dv", x["v"].grad, dv, 1e-5)
    _, S = rec(**x, impl=impl, output_final_state=True)
    (dv,) = torch.autograd.grad(S.sum(), x["v"])
    _, S = oracle(**double(x))
    assert_close("dv", dv, torch.autograd.grad(S.sum(), x["v"])[0], 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_scale_is_a_factor_of_the_output(impl, device):
    x = case(3, K=16, device=device)
    assert_close("o", rec(**x, scale=0.5, impl=impl)[0], 2 * rec(**x, impl=impl)[0], 1e-6)
    assert not rec(**x, scale=0, impl=impl)[0].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_non_contiguous_arguments_are_copied(impl, device):
    x = case(6, (2, 2), device=device, gates="g gk gv")
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.items()}
    assert not strided["q"].is_contiguous()
    got, want = (run(rec, y, impl=impl, output_final_state=True) for y in (strided, x))
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))


def test_same_bits_every_run_and_in_any_batch(device):
    B, shape = (300, (50, (2, 4), 64, 128)) if CUDA else (3, (5, (1, 2), 16, 12))
    x = case(*shape, B=B, device=device, gates="g gk gv", dtype=torch.bfloat16)
    first, second = (flat(run(rec, x, output_final_state=True)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with torch.no_grad():
        whole = rec(**x, output_final_state=True)
        alone = rec(**{n: t[1:2] for n, t in x.items()}, output_final_state=True)
    assert all(torch.equal(a[1:2], b) for a, b in zip(whole, alone, strict=True))


def test_a_nan_shows(device):
    x = case(5, device=device)
    x["g"][0, 2, 0] = torch.nan
    o, S = rec(**x, output_final_state=True)
    assert o[:, 2:, 0].isnan().all() and S[:, 0].isnan().any()
    assert o[:, :2].isfinite().all() and o[:, :, 1].isfinite().all()


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
