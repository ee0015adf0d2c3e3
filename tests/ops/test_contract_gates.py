"""Gates and heads as servers pass them: the decay as a factor, fewer heads of v than of q and k."""

import pytest
import torch
from gdn_checks import launches, same_bits
from grids import few
from ops.contract import BY_TOKEN, DELTA, IMPLS, forms, gdn, kda, recurrent_gdn

from linattn_edu import make_ring, replay_gated_delta_rule, replay_kda
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison", "numbers_by_value")

F32 = (torch.float32,)
LINEAR = {"gate_domain": "linear"}


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


def of_four_heads(form, dtype, device):
    """A call of four heads of q and k, two of v, and the same one with these repeated."""
    sizes = form.sizes[1:] if form.known == BY_TOKEN["known"] else form.sizes[2:]
    heads = ((4, 4),) if form.known == BY_TOKEN["known"] else (4, 4)
    x, options = form.draw(1, 5, dtype, device, sizes=(*heads, *sizes))
    few_heads = x | {"v": x["v"][:, :, ::2].contiguous()}
    return few_heads, x | {"v": few_heads["v"].repeat_interleave(2, 2)}, options


@forms("test_fewer_heads_of_v", *DELTA, dtypes=F32, impl=IMPLS)
def test_fewer_heads_of_v(form, dtype, impl, device):
    """Heads side by side write the same values: the bits of v repeated, the sum of gradients."""
    x, y, options = of_four_heads(form, dtype, device)
    do, dht = form.cotangents(y)
    got, want = (form.run(t, do, dht, **options, impl=impl) for t in (x, y))
    dv = want.pop("dv").unflatten(2, (2, 2)).sum(3)
    assert got["o"].shape[2] == got["ht"].shape[1] == 4
    assert_close("dv", got.pop("dv"), dv, 1e-6)
    same_bits(got, want)


@pytest.mark.parametrize("form", DELTA, ids=str)
def test_heads_that_do_not_divide(form):
    """And numbers of a head of v, where each of q has its own."""
    x, _, options = of_four_heads(form, torch.float32, "cpu")
    three = x | {"v": torch.cat([x["v"], x["v"][:, :, :1]], 2)}
    message = (
        r"v must have a multiple of q's 4 heads \(HV % H == 0\), or a divisor of them, got HV=3"
    )
    of_v = x | {"g": x["g"][:, :, :2]}
    for tensors, said in ((three, message), (of_v, r"g must have shape .*HV=4.*that of q")):
        with launches() as ran, pytest.raises(ValueError, match=said):
            form(tensors, **options)
        assert not ran


@pytest.mark.parametrize(
    ("form", "replay"), [(gdn, replay_gated_delta_rule), (kda, replay_kda)], ids=("gdn", "kda")
)
@pytest.mark.parametrize("impl", IMPLS)
def test_fewer_heads_of_v_from_a_ring(form, replay, impl, device):
    outputs = []
    for x in of_four_heads(form, torch.float32, device)[:2]:
        state = x.pop("initial_state").clone()
        ring = make_ring(state, 4, channels=form is kda, dtype=torch.float32)
        outputs += [(replay(**x, state=state, ring=ring, impl=impl), ring.keys, state)]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
