"""The gate of a layer, forward and backward: kernels, references, autograd, and the limits."""

import math

import pytest
import torch
from delta.stage_checks import DTYPES
from fused.kda_checks import RAW, raw_gate
from grids import parametrize

from linattn_edu.kernels.delta import gate as kernels
from linattn_edu.kernels.delta.gate_bwd import gate_bwd as gate_bwd_kernel
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.delta.recurrent import recurrent
from linattn_edu.reference.delta import gate as references
from linattn_edu.reference.delta.gate_bwd import gate_bwd
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.usefixtures("poison"),
    # of NumPy, in the interpreter: of infinite arguments, and of lanes that are not stored
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

ROOMS = pytest.mark.parametrize(
    ("gate", "gate_bwd", "gate_cumsum", "layer_gate_bwd"),
    [
        (kernels.gate, gate_bwd_kernel, gate_cumsum_kernel, kernels.layer_gate_bwd),
        (references.gate, gate_bwd, gate_cumsum, references.layer_gate_bwd),
    ],
    ids=["kernel", "reference"],
)
INF = math.inf


def given(kind, T, channels, device, dtype=torch.float32):
    """Raw gates [2, T, 3, 33], or [2, T, 17] where heads alone have one, and their parameters."""
    a, A_log, dt_bias, bound = raw_gate(kind, T, *((3, 33) if channels else (17, 1)), device, dtype)
    return (a if channels else a[..., 0]), A_log, dt_bias, bound


@parametrize(T=(0, 1, 65), kind=RAW, channels=(False, True), dtype=DTYPES)
def test_kernels_match_references(T, kind, channels, dtype, device):
    a, A_log, dt_bias, bound = given(kind, T, channels, device, dtype)
    exact = [x if x is None else x.double() for x in (a, A_log, dt_bias)]
    y = kernels.gate(a, A_log, dt_bias, **bound)
    assert y.dtype == torch.float32 and y.shape == a.shape
    assert_close("gate", y, references.gate(*exact, **bound), 1e-6)
    dy = torch.randn_like(y)
    got = kernels.layer_gate_bwd(dy, a, A_log, dt_bias, **bound)
    want = references.layer_gate_bwd(dy.double(), *exact, **bound)
    tolerances = ({torch.float16: 4e-4, torch.bfloat16: 3e-3}.get(dtype, 2e-6), 1e-5, 1e-5)
    for name, x, y, like, tol in zip(
        ("dg", "dA_log", "ddt_bias"), got, want, (a, A_log, dt_bias), tolerances, strict=True
    ):
        assert (x is None) == (y is None) == (like is None)
        if x is not None:
            assert x.shape == like.shape and x.dtype == like.dtype
            assert_close(name, x, y, tol)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", RAW)
def test_reference_is_the_gradient(kind, channels):
    *x, bound = given(kind, 20, channels, "cpu")
    x = [None if y is None else y.double().requires_grad_() for y in x]
    y = references.gate(*x, **bound)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, [z for z in x if z is not None], dy)
    with torch.no_grad():
        got = references.layer_gate_bwd(dy, *x, **bound)
    for z, ref in zip([z for z in got if z is not None], want, strict=True):
        assert_close("gradient", z, ref, 1e-12)


def test_the_softplus_is_exact_in_float64():
    """log(1 + e^x) is x from 40 on; from 20 on it is not."""
    a = torch.linspace(-700, 60, 1001, dtype=torch.float64).view(1, -1, 1)
    got = -references.gate(a, torch.zeros(1, dtype=torch.float64))
    want = a.clamp(min=0) + torch.exp(-a.abs()).log1p()
    torch.testing.assert_close(got, want, rtol=1e-15, atol=0)


def test_a_small_gate_keeps_its_digits(device):
    """On a GPU e^a is 2^(a log2(e)), whose exponent is rounded to 24 bits."""
    a = torch.linspace(-60, 25, 64, device=device).view(1, 64, 1)
    zero = torch.zeros(1, device=device)
    want = references.gate(a.double(), zero.double())
    error = (kernels.gate(a, zero).double() - want).abs() / want.abs()
    assert (error <= 1e-6 + (2.0**-24 * a.double().abs() if a.is_cuda else 0)).all()


def test_the_sums_have_the_same_bits_each_time(device):
    x = given("softplus", 130, True, device)
    dy = torch.randn_like(x[0])
    first, second = (kernels.layer_gate_bwd(dy, *x[:3]) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(first, second, strict=True))


# A_log, a + dt_bias, the gate; at a bound of -2
LIMITS = [
    (INF, -INF, 0.0), (INF, -200.0, 0.0), (INF, -1.0, -INF), (INF, 0.0, -INF), (INF, INF, -INF),
    (90.0, -200.0, 0.0), (90.0, -INF, 0.0), (90.0, -3.0, -INF), (90.0, 0.0, -INF),
    (0.0, -INF, 0.0), (0.0, -200.0, 0.0), (0.0, INF, -INF), (0.0, 200.0, -200.0),
    (-INF, -INF, 0.0), (-INF, 1.0, 0.0), (-INF, INF, 0.0), (-200.0, 1e4, 0.0),
]  # fmt: skip
BOUNDED_LIMITS = [
    (INF, -INF, 0.0), (INF, -1.0, 0.0), (INF, 0.0, -1.0), (INF, 1.0, -2.0), (INF, INF, -2.0),
    (90.0, -1e-3, 0.0), (90.0, 0.0, -1.0), (90.0, 1e-3, -2.0), (88.5, -1.0, 0.0), (88.5, 1.0, -2.0),
    (0.0, -INF, 0.0), (0.0, -200.0, 0.0), (0.0, 200.0, -2.0), (0.0, INF, -2.0),
    (-INF, -INF, -1.0), (-INF, 3.0, -1.0), (-INF, INF, -1.0),
]  # fmt: skip


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bound", [None, -2.0])
@ROOMS
def test_limits(gate, gate_bwd, gate_cumsum, layer_gate_bwd, bound, bias, channels, device):
    """A head for each limit: the gate, both adjoints, the sum; nowhere a NaN."""
    rows = torch.tensor(LIMITS if bound is None else BOUNDED_LIMITS, device=device)
    A_log, raw, want = (x.contiguous() for x in rows.unbind(1))
    dt_bias = torch.zeros_like(raw) if bias else None
    a = raw.expand(1, 3, -1).contiguous()
    if bias:  # all of it from the bias
        a, dt_bias = torch.zeros_like(a), raw
    if channels:
        a = a[..., None].contiguous()
    want = want.expand(1, 3, -1).view(a.shape)
    y = gate(a, A_log, dt_bias, lower_bound=bound)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-30)
    gc = gate_cumsum(a, A_log, dt_bias, lower_bound=bound, chunk_size=16)
    sums = (want.double() * math.log2(math.e)).clamp(min=-150).cumsum(1)
    torch.testing.assert_close(gc, sums.float(), rtol=1e-6, atol=1e-30)
    ones = torch.ones_like(a)
    for got in (
        layer_gate_bwd(ones, a, A_log, dt_bias, lower_bound=bound),
        gate_bwd(ones, a, A_log, dt_bias, lower_bound=bound, chunk_size=16),
    ):
        da, dA_log, ddt_bias = got
        assert all(x is None or x.isfinite().all() for x in got)
        # the slope is 0 at an infinite rate, for a gate that is off, and for one at its bound
        flat = A_log.isinf() | (want[0, 0].flatten() == 0)
        if bound is not None:
            flat |= (want[0, 0].flatten() == bound) | (A_log == 90.0)
        per_head = da.abs().sum((0, 1)).flatten()
        assert not per_head[flat].any() and per_head[~flat & (raw < 1e4)].ne(INF).all()
        if bias:
            assert not ddt_bias[flat].any()
        assert not dA_log[flat].any()


@pytest.mark.parametrize("bound", [None, -2.0])
def test_ordinary_heads_beside_one_at_the_limit(bound, device):
    """One head's infinite rate leaves the gradients of the others as they were, to the bit."""
    a, A_log, dt_bias, _ = given("softplus", 65, True, device)
    dy = torch.randn_like(a)
    want = kernels.layer_gate_bwd(dy, a, A_log, dt_bias, lower_bound=bound)
    A_log = A_log.clone()
    A_log[1] = INF
    got = kernels.layer_gate_bwd(dy, a, A_log, dt_bias, lower_bound=bound)
    assert all(x.isfinite().all() for x in got)
    others = torch.tensor([0, 2], device=device)
    for x, y in zip(got[:2], want[:2], strict=True):
        axis = x.ndim - 1 if x.ndim == 1 else 2
        assert torch.equal(x.index_select(axis, others), y.index_select(axis, others))


@pytest.mark.parametrize("bound", [None, -2.0])
def test_the_recurrent_kernel_at_the_limits(bound, device):
    """Decoding takes the same decays: a state of ones, no key, and the head's decay comes out."""
    rows = torch.tensor(LIMITS if bound is None else BOUNDED_LIMITS, device=device)
    A_log, raw, want = (x.contiguous() for x in rows.unbind(1))
    HV = len(rows)
    q = torch.ones(1, 1, HV, 1, device=device)
    nothing, beta = torch.zeros_like(q), torch.ones(1, 1, HV, device=device)
    state = torch.ones(1, HV, 1, 1, device=device)
    for gates in ({"g": raw.view(1, 1, HV)}, {"g": None, "gk": raw.view(1, 1, HV, 1)}):
        if bound is not None and gates["g"] is not None:
            continue  # the gate of a head has no bound
        g = gates.pop("g")
        o, S = recurrent(
            q, nothing, nothing, g, beta, **gates, scale=1.0, initial_state=state, A_log=A_log,
            dt_bias=torch.zeros_like(raw), lower_bound=bound,
        )  # fmt: skip
        torch.testing.assert_close(o.flatten(), want.exp(), rtol=1e-5, atol=1e-30)
        torch.testing.assert_close(S.flatten(), want.exp(), rtol=1e-5, atol=1e-30)
