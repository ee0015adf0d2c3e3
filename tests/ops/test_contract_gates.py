"""Gates as servers pass them: the decay as a factor in the place of its logarithm."""

import pytest
import torch
from gdn_checks import by_value, launches, same_bits
from grids import few
from ops.contract import DELTA, IMPLS, forms, recurrent_gdn

from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

F32 = (torch.float32,)
LINEAR = {"gate_domain": "linear"}


@pytest.fixture(autouse=True)
def numbers_by_value(monkeypatch):
    by_value(monkeypatch)


def factors(form, x, change=torch.exp):
    return x | {n: change(t.float()) for n, t in x.items() if n in ("g", "gk", "gv")}


def logarithms(form, x):
    """Of factors, as float32 has them."""
    return factors(form, x, lambda t: t.log().clamp(min=-1000.0))


@forms("test_factors", *DELTA, dtypes=few(torch.float32, torch.bfloat16), impl=IMPLS)
def test_factors(form, dtype, impl, device):
    """The bits of a call with their logarithms, a shut gate among them; gradients by the factor."""
    x, do, dht, options = form.short(dtype, device, strong="safe" not in form.name)
    x = factors(form, x)
    options["impl"] = impl
    got = form.run(x, do, dht, **options, **LINEAR)
    want = form.run(logarithms(form, x), do, dht, **options)
    for n, t in x.items():
        if n in ("g", "gk", "gv"):
            shut = t == 0
            assert not got[f"d{n}"][shut].any() and (shut.any() or "safe" in form.name or n != "g")
            want[f"d{n}"] = torch.where(shut, 0, want[f"d{n}"] / t)
    same_bits(got, want)


@forms("test_factors_by_autograd", *DELTA, dtypes=F32)
def test_factors_by_autograd(form, dtype, device):
    """In float64 the gradient by a factor is autograd's of the recurrence of its logarithm."""
    x, do, dht, options = form.short(dtype, device)
    x = {n: t.double() for n, t in x.items()}
    do, dht = do.double(), dht.double()
    gates = [n for n in ("g", "gk", "gv") if n in x]
    want = form.exact(x, do, dht, **options)
    y = x | {n: x[n].exp() for n in gates}
    got = form.run(y, do, dht, **options, impl="reference", **LINEAR)
    for n in gates:
        want[f"d{n}"] = want[f"d{n}"] / y[n]
    for n in ("o", "ht", *(f"d{n}" for n in x)):
        assert_close(n, got[n], want[n], 1e-11)


@pytest.mark.parametrize("form", DELTA, ids=str)
def test_refused(form):
    x, options = form.draw(1, 5, torch.float32, "cpu")
    x = factors(form, x)
    raw, raw_options = form.draw(1, 5, torch.float32, "cpu", raw=True)
    names = ("g", "gk", "gv") if form is recurrent_gdn else ("g",)
    message = "must be a factor from 0 to 1 with gate_domain='linear', got"
    cases = [(x | {n: x[n] + 1}, options | LINEAR, f"{n} {message}") for n in names]
    cases += [(x | {n: -x[n]}, options | LINEAR, f"{n} {message}") for n in names]
    cases += [
        (x, options | {"gate_domain": "exp"}, "gate_domain must be one of 'log', 'linear'"),
        (raw, raw_options | LINEAR, "gate_domain must be 'log' with use_gate_in_kernel=True"),
    ]
    for tensors, given, message in cases:
        with launches() as ran, pytest.raises(ValueError, match=message):
            form(tensors, **given)
        assert not ran
