"""ema_scan: both passes against the recurrence in float64, every form, what it refuses."""

import gdn_checks
import pytest
import torch
from gdn_checks import DTYPES, same_bits
from grids import parametrize
from ops.ema.ema_cases import check, cotangents, exact, run, tensors
from refusals import refuses
from ssd.ema_checks import GATES, GIVEN, loop
from torch.utils.flop_counter import FlopCounterMode

from linattn_edu import ema_scan
from linattn_edu.ops import ema as operator
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)


@parametrize(
    T=(1, 65, 130), D=(1, 20, 65), C=(16, 64), given=GIVEN, gate=GATES, dtype=DTYPES, impl=IMPLS
)
def test_both_passes(T, D, C, given, gate, dtype, impl, device):
    x = tensors(T, D, given, gate, dtype, device, B=3)
    dy, dht = cotangents(x)
    got = run(x, dy, dht, output_final_state=True, chunk_size=C, impl=impl)
    # sums of g over a chunk, of which decays are the differences: resets make them large
    shut = x["g"].clamp(min=-104)
    check(got, exact(x, dy, dht), dtype, every=gdn_checks.spacing(shut, C))


@pytest.mark.parametrize("given", GIVEN)
def test_reference_in_float64(given):
    x = tensors(100, 7, given, dtype=torch.float64)
    dy, dht = cotangents(x)
    check(run(x, dy, dht, output_final_state=True), exact(x, dy, dht), torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_channels(dtype, device):
    """More than one tile holds: the gradients of g and weight are sums over the tiles."""
    x = tensors(20, 4096 if device.type == "cuda" else 300, dtype=dtype, device=device, H=1)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": "triton"}
    got = run(x, dy, dht, **options)
    check(got, exact(x, dy, dht), dtype)
    same_bits(run(x, dy, dht, **options), got)


@impls
@pytest.mark.parametrize("given", ["both", "neither"])
def test_one_head_needs_no_axis(given, impl, device):
    x = tensors(40, 12, given, device=device, H=1)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl}
    want = run(x, dy, dht, **options)
    flat = {n: t.squeeze(1 if n == "initial_state" else 2) for n, t in x.items()}
    got = run(flat, dy.squeeze(2), dht.squeeze(1), **options)
    assert got["o"].shape == flat["x"].shape and got["ht"].shape == (len(flat["x"]), 12)
    same_bits({n: t.view(want[n].shape) for n, t in got.items()}, want)


@impls
def test_one_head_over_a_pool(impl, device):
    """Slots and checkpoints without an axis of heads."""
    x = tensors(40, 12, "weight", device=device, H=1, B=2)
    flat = {n: t.squeeze(2) for n, t in x.items()}
    pool = torch.randn(3, 12, device=device)
    slots, n = torch.tensor([2, 0], device=device), {"checkpoint_every_n_tokens": 16}
    options = {"output_final_state": True, "chunk_size": 16, "impl": impl} | n
    want = ema_scan(**x, initial_state=pool[slots][:, None], **options)
    place = {"initial_state": pool, "inplace_final_state": True, "ssm_state_indices": slots}
    y, last, kept = ema_scan(**flat, **place, **options)
    assert last is pool and torch.equal(y, want[0][:, :, 0])
    assert torch.equal(pool[slots], want[1][:, 0]) and torch.equal(kept, want[2][:, :, 0])


@impls
def test_a_probability_of_one(impl, device):
    """The gate of a boundary predictor, as the docstring writes it: no NaN, and the gradients."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(2, 50, 5, generator=generator, device=device)
    p = torch.rand(2, 50, generator=generator, device=device)
    p[:, ::5], p[:, ::7] = 0.0, 1.0

    def f(x, p, f=ema_scan, **options):
        return f(x, torch.log1p(-p.clamp(max=1 - 2**-20)), p, **options)

    def plain(x, g, weight):
        y, ht = loop(x[:, :, None], g[..., None], weight[..., None])
        return y[:, :, 0], ht[:, 0]

    dy = torch.randn_like(x)
    got = run({"x": x, "p": p}, dy, None, f, impl=impl)
    want = run({"x": x.double(), "p": p.double()}, dy.double(), None, lambda x, p: f(x, p, plain))
    for n in got:
        assert_close(n, got[n], want[n], 2e-5)
    reset = torch.log1p(-p).requires_grad_()  # -inf
    y, _ = ema_scan(x, reset, impl=impl)
    (dg,) = torch.autograd.grad(y, reset, dy)
    assert_close("y", y[:, ::7], x[:, ::7], 1e-6)
    assert dg.isfinite().all() and not dg[:, ::7].any()


def operations(f):
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_flop_counts()["Global"]


def test_flops(device):
    """Those of the products in the reference stages."""
    x = tensors(128, 20, device=device, B=2)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    y, _ = ema_scan(**x)
    both = operations(lambda: torch.autograd.grad(ema_scan(**leaves)[0].sum(), leaves.values()))
    stages = operator.stages("reference")
    *_, kept = operator.forward(stages, **x)
    staged = operations(lambda: operator.forward(stages, **x))
    staged_backward = operations(
        lambda: operator.backward(stages, **x, residuals=kept, dy=torch.ones_like(y))
    )
    assert [*both.values()] == [sum(staged.values()), sum(staged_backward.values())]


new = torch.zeros
REFUSED = {
    "x rank": ({"x": new(2, 20)}, "x must have 4 dimensions .*got 2"),
    "no channel": ({"x": new(2, 20, 3, 0)}, "x must have D >= 1, got D=0"),
    "no head": ({"x": new(2, 20, 0, 5)}, "x must have H >= 1, got H=0"),
    "g of one head": (
        {"x": new(2, 20, 5), "initial_state": None, "weight": None},
        r"g must have 2 dimensions \[B, T\], got 3",
    ),
    "weight": ({"weight": new(2, 20, 1)}, r"weight must have shape \[B=2, T=20, H=3\]"),
    "state": (
        {"initial_state": new(2, 5, 3)},
        r"initial_state must have shape \[N=2, H=3, D=5\], got \(2, 5, 3\)",
    ),
}


test_refused_before_any_kernel = refuses(ema_scan, lambda: tensors(20, 5, B=2), REFUSED)
