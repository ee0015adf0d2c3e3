"""Stage gate_bwd, and the gate a layer computes: kernels against references and autograd."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from delta.stage_checks import CHUNKS, TOKENS
from fused import kda_checks
from grids import parametrize

from linattn_edu.kernels.delta.gate_bwd import gate_bwd as kernel
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.gate_bwd import gate_bwd as reference
from linattn_edu.reference.delta.gate_cumsum import gate
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum as gate_cumsum_reference
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


def raw_gate(T, HV, device, dtype=torch.float32):
    """Raw gates on both sides of zero, A_log and dt_bias; no decay reaches the floor of fp32."""
    torch.manual_seed(T)
    a = (3 * torch.randn(2, T, HV, device=device)).to(dtype)
    return a, 0.5 * torch.randn(HV, device=device), torch.randn(HV, device=device)


@parametrize(T=TOKENS, C=CHUNKS, gate=("trained", "reset", "closed"))
def test_kernel_matches_reference(T, C, gate, device):
    for HV in (1, 5, 17):
        g = gdn_inputs(2, T, 1, HV, 1, 1, device=device, seed=T, gate=gate).g
        dgc = torch.randn_like(g)
        assert_close(
            "dg", kernel(dgc, g, chunk_size=C)[0], reference(dgc, g, chunk_size=C)[0], 5e-6
        )


@parametrize(HV=(1, 5, 17), T=(1, 65, 130), bias=(True, False))
def test_gate_of_a_layer(HV, T, bias, device):
    a, A_log, dt_bias = raw_gate(T, HV, device)
    parameters = (A_log, dt_bias if bias else None)
    exact = [x if x is None else x.double() for x in parameters]
    gc = gate_cumsum(a, *parameters, chunk_size=32)
    assert_close("gc", gc, gate_cumsum_reference(a.double(), *exact, chunk_size=32), 5e-6)
    dgc = torch.randn_like(a)
    got = kernel(dgc, a, *parameters, chunk_size=32)
    want = reference(dgc.double(), a.double(), *exact, chunk_size=32)
    for name, x, y in zip(("da", "dA_log", "ddt_bias"), got, want, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            # a sum of T terms of either sign has the rounding of its terms
            assert_close(name, x, y, 1e-5 * max(1.0, T / 16 if name != "da" else 1.0))


def test_a_small_gate_keeps_its_digits(device):
    """softplus(-20) is 2e-9: log(1 + e^-20) would lose it all."""
    a = torch.linspace(-20, 25, 64, device=device).view(1, 64, 1)
    one = torch.zeros(1, device=device)
    got = gate_cumsum(a, one, chunk_size=64)
    want = gate_cumsum_reference(a.double(), one.double(), chunk_size=64)
    first = (got[0, 0, 0].double() / want[0, 0, 0] - 1).abs().item()
    assert first < 1e-6
    assert_close("gc", got, want, 1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_an_infinite_raw_gate_is_no_nan(lower_bound, device):
    """The gate is flat there: it adds nothing to the gradients."""
    a = torch.randn(1, 20, 2, device=device)
    a[0, 3, 0], a[0, 5, 1] = torch.inf, -torch.inf
    A_log, dt_bias = torch.zeros(2, device=device), torch.ones(2, device=device)
    dgc = torch.ones_like(a)
    for f in (kernel, reference):
        got = f(dgc, a, A_log, dt_bias, lower_bound=lower_bound, chunk_size=16)
        assert all(x.isfinite().all() for x in got), f.__module__
        assert got[0][0, 3, 0] == 0 and got[0][0, 5, 1] == 0


def test_reference_is_the_gradient_of_the_cumulative_sum():
    a, A_log, dt_bias = (x.double().requires_grad_() for x in raw_gate(50, 3, "cpu"))
    gc = gate_cumsum_reference(a, A_log, dt_bias, chunk_size=16)
    dgc = torch.randn_like(gc)
    # dgc is in natural units: by ln(2) gc
    want = torch.autograd.grad(
        gc * torch.log(torch.tensor(2.0, dtype=torch.float64)), (a, A_log, dt_bias), dgc
    )
    with torch.no_grad():
        got = reference(dgc, a, A_log, dt_bias, chunk_size=16)
    for name, x, y in zip(("da", "dA_log", "ddt_bias"), got, want, strict=True):
        assert_close(name, x, y, 1e-12)


def test_gate_is_that_of_the_formula():
    a, A_log, dt_bias = raw_gate(9, 3, "cpu", torch.float64)
    want = -A_log.double().exp() * F.softplus(a + dt_bias)
    assert_close("gate", gate(a, A_log.double(), dt_bias.double()), want, 1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_gates(dtype, device):
    g = gdn_inputs(1, 100, 1, 3, 1, 1, device=device).g.to(dtype)
    dgc = torch.randn(1, 100, 3, device=device)
    dg, _, _ = kernel(dgc, g, chunk_size=64)
    assert dg.dtype == dtype
    assert_close("dg", dg, reference(dgc.double(), g.double(), chunk_size=64)[0], 5e-3)


@pytest.mark.parametrize("gate", ["mixed", "shut"])
@pytest.mark.parametrize(("T", "C"), list(zip(TOKENS, itertools.cycle(CHUNKS), strict=False)))
def test_a_gate_for_each_channel(T, C, gate, device):
    for HV, K in ((1, 1), (3, 33)):  # in one tile of channels, in two
        g = kda_checks.kda_gate(gate, 2, T, HV, K, seed=T, device=device)
        dgc = torch.randn_like(g)
        got, *none = kernel(dgc, g, chunk_size=C)
        assert none == [None, None]
        assert_close("dg", got, reference(dgc, g, chunk_size=C)[0], 5e-6)


@pytest.mark.parametrize("kind", kda_checks.RAW)
@pytest.mark.parametrize("T", [1, 65, 130])
def test_raw_gates_of_channels(T, kind, device):
    a, A_log, dt_bias, bound = kda_checks.raw_gate(kind, T, 3, 33, device)
    dgc, options = torch.randn_like(a), {"chunk_size": 32, **bound}
    exact = (x if x is None else x.double() for x in (dgc, a, A_log, dt_bias))
    got = kernel(dgc, a, A_log, dt_bias, **options)
    for name, x, y in zip(("da", "dA_log", "ddt_bias"), got, reference(*exact, **options),
                          strict=True):  # fmt: skip
        assert (x is None) == (y is None)
        if x is not None:
            # a sum of terms of either sign has the rounding of its terms
            assert_close(name, x, y, 1e-5 * max(1.0, T / 16 if name != "da" else 1.0))


@pytest.mark.parametrize("kind", kda_checks.RAW)
def test_reference_is_the_gradient_of_the_sum_of_channels(kind):
    *given, bound = kda_checks.raw_gate(kind, 50, 3, 5, "cpu")
    given = [x if x is None else x.double().requires_grad_() for x in given]
    gc = gate_cumsum_reference(*given, chunk_size=16, **bound)
    dgc = torch.randn_like(gc)
    used = [x for x in given if x is not None]
    want = torch.autograd.grad(gc * torch.log(torch.tensor(2.0, dtype=gc.dtype)), used, dgc)
    with torch.no_grad():
        got = [x for x in reference(dgc, *given, chunk_size=16, **bound) if x is not None]
    for x, y in zip(got, want, strict=True):
        assert_close("gradient", x, y, 1e-12)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of NumPy, in the interpreter
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_no_gradient_and_no_nan_at_the_ends(lower_bound, device):
    """Raw gates so large that the decay is shut, or at its bound, or absent."""
    a = torch.tensor([-1e4, -200.0, 200.0, 1e4], device=device).view(1, 4, 1, 1)
    zero = torch.zeros(1, device=device)
    da, dA_log, ddt_bias = kernel(
        torch.ones_like(a), a, zero, zero, lower_bound=lower_bound, chunk_size=16
    )
    for x in (da, dA_log, ddt_bias):
        torch.testing.assert_close(x, torch.zeros_like(x), rtol=0, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", kda_checks.RAW)
def test_low_precision_gates_of_channels(kind, dtype, device):
    a, A_log, dt_bias, bound = kda_checks.raw_gate(kind, 40, 3, 33, device, dtype)
    dgc, options = torch.randn(a.shape, device=device), {"chunk_size": 32, **bound}
    da, *sums = kernel(dgc, a, A_log, dt_bias, **options)
    exact = [x if x is None else x.double() for x in (dgc, a, A_log, dt_bias)]
    want, *exact_sums = reference(*exact, **options)
    assert da.dtype == dtype
    assert_close("da", da, want, 5e-3)
    for x, y in zip(sums, exact_sums, strict=True):
        if x is not None:  # of the terms before they are rounded
            assert x.dtype == torch.float32
            assert_close("sum", x, y, 3e-5)
