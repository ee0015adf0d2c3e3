"""mamba_chunk_scan_combined: both passes against the recurrence in float64."""

import pytest
import torch
from gdn_checks import GENERATIONS, pretend, same_bits
from grids import name, pairs
from ops.ssd.ssd_cases import (
    DTYPES,
    GIVEN,
    IMPLS,
    check,
    cotangents,
    exact,
    forms,
    impls,
    inputs,
    of_form,
    recurrence,
    run,
    scan,
    wide,
)

from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
# P and N: fused kernels for 16 bit in the first three
SIZES = ((33, 20), (64, 128), (5, 3), (20, 256), (128, 24))
HEADS = ((2, 1), (2, 2), (4, 2))
DECAYS = ("trained", "none", "reset", "closed")
AXES = {
    "T": (1, 63, 64, 65, 127, 128, 129, 300),
    "size": SIZES,
    "given": tuple(GIVEN),
    "dtype": DTYPES,
    "C": (64, 128, 256),
    "heads": HEADS,
    "impl": IMPLS,
}


@pytest.mark.parametrize(tuple(AXES), pairs(**AXES), ids=name)
def test_both_passes(T, size, given, dtype, C, heads, impl, device):
    """Short sequences come in a batch: a sum of a handful of numbers may cancel."""
    x, options = inputs(max(1, 4 // T), T, *heads, *size, dtype, device, given)
    do, dht = cotangents(x)
    want = exact(x, do, dht, **options)
    check(run(x, do, dht, **options, chunk_size=C, impl=impl), want, dtype)


@pytest.mark.parametrize(
    ("T", "given", "C", "heads", "decay"),
    pairs(T=(1, 64, 65, 130), given=tuple(GIVEN), C=(16, 64, 256), heads=HEADS, decay=DECAYS),
    ids=name,
)
def test_reference_in_float64(T, given, C, heads, decay):
    x, options = inputs(2, T, *heads, 9, 12, torch.float64, given=given, decay=decay)
    do, dht = cotangents(x)
    got = run(x, do, dht, **options, chunk_size=C, impl="reference")
    check(got, exact(x, do, dht, **options), torch.float64)


def test_gradcheck():
    """By differences: the recurrence's own autograd is right."""
    x, options = inputs(1, 5, 2, 1, 2, 3, torch.float64)
    idx = x.pop("seq_idx")
    f = lambda *y: recurrence(**dict(zip(x, y, strict=True)), seq_idx=idx, **options)
    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in x.values()], fast_mode=True)


@pytest.mark.parametrize(("P", "dtype"), [(128, torch.bfloat16), (256, torch.float32)], ids=str)
def test_largest_heads(P, dtype, device):
    x, options = inputs(1, 70, 1, 1, P, 256, dtype, device)
    do, dht = cotangents(x)
    check(run(x, do, dht, **options, impl="triton"), exact(x, do, dht, **options), dtype)


@forms
@pytest.mark.parametrize("decay", DECAYS[1:])
def test_strong_decay_and_none(decay, form, device):
    """A = 0; steps of 1e4; A = -1e4, where a state lives for one token alone."""
    x, options = of_form(form, 100, device, decay=decay)
    do, dht = cotangents(x)
    got, want = run(x, do, dht, **options, impl="triton"), exact(x, do, dht, **options)
    assert all(y.isfinite().all() for y in got.values())
    # each reset adds 1e5 to the sum whose spacing later decays are rounded to (chapter 02)
    check(got, want, x["x"].dtype, every=1e-4 if decay == "reset" else 0)


@forms
def test_steps_that_fade(form, device):
    """softplus down to numbers that a GPU's arithmetic takes for 0, and to 0 itself."""
    x, options = of_form(form, 100, device)
    fading = -torch.linspace(60, 110, 50, device=device)
    x["dt"][:, 20:70] = fading[:, None].to(x["dt"].dtype)
    do, dht = cotangents(x)
    got, want = run(x, do, dht, **options, impl="triton"), exact(x, do, dht, **options)
    assert all(y.isfinite().all() for y in got.values())
    check(got, want, x["x"].dtype)


@impls
@pytest.mark.parametrize("used", ["o", "ht"])
def test_only_one_output_is_used(used, impl, device):
    x, options = of_form("float32", 70, device)
    do, dht = cotangents(x)
    zeros = (do, 0 * dht) if used == "o" else (0 * do, dht)
    given = (do, None) if used == "o" else (None, dht)
    check(run(x, *given, **options, impl=impl), exact(x, *zeros, **options), torch.float32)


@impls
def test_without_the_states(impl, device):
    x, options = of_form("float32", 70, device, "none")
    do, _ = cotangents(x)
    got = run(x, do, None, **options, impl=impl, return_final_states=False)
    assert "ht" not in got
    check(got, exact(x, do, None, **options), torch.float32)


@forms
def test_same_bits_every_run_and_in_any_batch(form, device):
    x, options = of_form(form, 300 if GPU else 66, device, "limit", B=8 if GPU else 2)
    do, dht = cotangents(x)
    whole = run(x, do, dht, **options, impl="triton")
    same_bits(run(x, do, dht, **options, impl="triton"), whole)
    summed, one = ("A", "dt_bias"), slice(1, 2)
    alone = {n: t if n in summed else t[one] for n, t in x.items()}
    got = run(alone, do[one], dht[one], **options, impl="triton")
    without = [f"d{n}" for n in summed]
    same_bits(got, {n: t[one] for n, t in whole.items() if n not in without})


@forms
@pytest.mark.parametrize("cut", [40, 64])
def test_no_gradient_after_the_last_output_used(cut, form, device):
    """do is zero from the cut on: exact zeros there."""
    x, options = of_form(form, 100, device, "documents")
    do, _ = cotangents(x)
    do[:, cut:] = 0
    got = run(x, do, None, **options, impl="triton")
    for n in ("x", "dt", "B", "C"):
        assert not got[f"d{n}"][:, cut:].any(), n


@forms
def test_a_step_beyond_its_limits_gives_dt_no_gradient(form, device):
    x, options = of_form(form, 40, device, "limit")
    do, dht = cotangents(x)
    step = torch.nn.functional.softplus(x["dt"].double() + x["dt_bias"].double())
    low, high = options["dt_limit"]
    beyond = (step < low) | (step > high)
    assert beyond.any() and not beyond.all()
    got = run(x, do, dht, **options, impl="triton")["ddt"]
    assert not got[beyond].any() and got[~beyond].all()


@pytest.mark.parametrize("wider", ["dt", "A", "D", "z", "dt_bias", "initial_states"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_dtypes(wider, dtype, device):
    """One in float32, the others in 16 bit: each gradient has the dtype of its tensor."""
    x, options = inputs(1, 70, 2, 1, 24, 40, dtype, device)
    for n in ("dt", "A", "D", "z", "dt_bias", "initial_states"):
        x[n] = x[n].to(torch.float32 if n == wider else dtype)
    do, dht = cotangents(x)
    got = run(x, do, dht, **options, impl="triton")
    floats = [n for n, t in x.items() if t.is_floating_point()]
    assert all(got[f"d{n}"].dtype == x[n].dtype for n in floats)
    assert (got["o"].dtype, got["ht"].dtype) == (dtype, torch.float32)
    check(got, exact(x, do, dht, **options), dtype)


@impls
def test_gradients_and_arguments_that_are_not_contiguous(impl, device):
    x, options = of_form("float32", 40, device)
    do, dht = cotangents(x)
    want = run(x, torch.ones_like(do), dht, **options, impl=impl)
    apart = {n: torch.stack([t, t], -1)[..., 0] for n, t in x.items()}
    assert not apart["x"].is_contiguous() and not apart["seq_idx"].is_contiguous()
    do = torch.ones((), device=device).expand(do.shape)
    same_bits(run(apart, do, dht.mT.contiguous().mT, **options, impl=impl), want)


@impls
def test_one_tensor_as_B_and_C(impl, device):
    x, options = of_form("float32", 40, device, "none")
    do, dht = cotangents(x)
    del x["C"]
    tied = lambda f: lambda B, **rest: f(B=B, C=B, **rest)
    want = run(wide(x), do.double(), dht.double(), tied(recurrence), **options)
    for n, y in run(x, do, dht, tied(scan), **options, impl=impl).items():
        assert_close(n, y, want[n], 1e-5)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_generation(generation, dtype, device, monkeypatch):
    pretend(monkeypatch, generation)
    x, options = inputs(1, 70, 2, 1, 40, 72, dtype, device)
    do, dht = cotangents(x)
    check(run(x, do, dht, **options, impl="triton"), exact(x, do, dht, **options), dtype)


def test_values_in_float64_run_in_the_reference(device):
    x, options = inputs(1, 20, 2, 1, 5, 4, torch.float64, device)
    do, dht = cotangents(x)
    check(run(x, do, dht, **options), exact(x, do, dht, **options), torch.float64)
    got, want = (run(x, do, dht, **options, impl=impl) for impl in ("auto", "reference"))
    same_bits(got, want)
