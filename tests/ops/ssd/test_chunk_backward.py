"""mamba_chunk_scan_combined: both passes against the recurrence in float64."""

import pytest
import torch
from grids import name, usual
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


@pytest.mark.parametrize(tuple(AXES), usual(**AXES), ids=name)
def test_both_passes(T, size, given, dtype, C, heads, impl, device):
    """Short sequences come in a batch: a sum of a handful of numbers may cancel."""
    x, options = inputs(max(1, 4 // T), T, *heads, *size, dtype, device, given)
    do, dht = cotangents(x)
    want = exact(x, do, dht, **options)
    check(run(x, do, dht, **options, chunk_size=C, impl=impl), want, dtype)


@pytest.mark.parametrize(
    ("T", "given", "C", "heads", "decay"),
    usual(T=(1, 64, 65, 130), given=tuple(GIVEN), C=(16, 64, 256), heads=HEADS, decay=DECAYS),
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


@impls
def test_one_tensor_as_B_and_C(impl, device):
    x, options = of_form("float32", 40, device, "none")
    do, dht = cotangents(x)
    del x["C"]
    tied = lambda f: lambda B, **rest: f(B=B, C=B, **rest)
    want = run(wide(x), do.double(), dht.double(), tied(recurrence), **options)
    for n, y in run(x, do, dht, tied(scan), **options, impl=impl).items():
        assert_close(n, y, want[n], 1e-5)


def test_arguments_alone_are_kept(device):
    """Between the passes: no states, no scores."""
    x, options = of_form("fused", 40, device)
    leaves = {n: t.requires_grad_() if t.is_floating_point() else t for n, t in x.items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        scan(**leaves, **options, impl="triton")
    own = {t.untyped_storage().data_ptr() for t in leaves.values()}
    others = [t for t in kept if t.untyped_storage().data_ptr() not in own]
    small = leaves["initial_states"].numel() * 4
    assert all(t.numel() * t.element_size() <= small for t in others)
