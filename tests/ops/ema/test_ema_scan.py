"""ema_scan: both passes against the recurrence in float64, every form, what it refuses."""

import re
from itertools import pairwise

import gdn_checks
import pytest
import torch
from gdn_checks import DTYPES, GENERATIONS, launches, same_bits
from grids import parametrize
from ssd.ema_checks import GATES, GIVEN, draw, loop
from ssd.test_ema import in_pieces
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from linattn_edu import ema_scan
from linattn_edu.kernels.ssd import ema as kernels
from linattn_edu.kernels.ssd import ema_bwd as backward_kernels
from linattn_edu.ops import ema as operator
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
# relative RMS against float64 of y and the final state, and of the gradients
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}
LENGTHS = (15, 0, 64, 1, 81, 0)


def tensors(T, D, given="both", gate="trained", dtype=torch.float32, device="cpu", **sizes):
    """The arguments by name."""
    names = ("x", "g", "weight", "initial_state")
    drawn = zip(names, draw(T, D, given, gate, dtype, device, **sizes), strict=True)
    return {n: t for n, t in drawn if t is not None}


def cotangents(x, N=None):
    dht = torch.randn(N or len(x["x"]), *x["x"].shape[2:], device=x["x"].device)
    return torch.randn_like(x["x"]), dht.to(torch.promote_types(dht.dtype, x["x"].dtype))


def run(x, dy, dht, f=ema_scan, **options):
    return gdn_checks.run(x, dy, dht, f, **options)


def exact(x, dy, dht):
    """What `run` should give: autograd of the recurrence in float64."""
    wide = {n: t.double() for n, t in x.items()}
    dht = dht if dht is None else dht.double()
    return run(wide, dy if dy is None else dy.double(), dht, lambda **x: loop(**x))


def check(got, want, dtype, **at_least):
    gdn_checks.check(
        got, want, dtype, tolerance=lambda n, dtype: TOLERANCES[dtype][n not in ("o", "ht")],
        **at_least,
    )  # fmt: skip


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


def part(x, n, tokens):
    """Sequence n of packed tensors."""
    states = ("ht", "initial_state", "dinitial_state")
    return {m: t[n : n + 1] if m in states else t[:, tokens] for m, t in x.items()}


@impls
@pytest.mark.parametrize(("chunks", "dtype"), [(2, torch.float32), (64, torch.bfloat16)], ids=str)
def test_packed_sequences_are_each_by_itself(chunks, dtype, impl, device, monkeypatch):
    """To the bit; those that are cut into pieces too."""
    in_pieces(monkeypatch, kernels, backward_kernels, chunks=chunks)
    N, options = len(LENGTHS), {"output_final_state": True, "impl": impl, "chunk_size": 16}
    x = tensors(sum(LENGTHS), 20, "weight", dtype=dtype, device=device, B=1)
    x["initial_state"] = torch.randn(N, 3, 20, device=device)
    dy, dht = cotangents(x, N)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    rows = [(n, c) for n, T in enumerate(LENGTHS) for c in range(-(-T // 16))]
    got = run(x, dy, dht, cu_seqlens=bounds, **options)
    if chunks == 2:  # however the boundaries are given
        known = {"cu_seqlens_cpu": bounds.cpu(), "chunk_indices": torch.tensor(rows).to(device)}
        same_bits(run(x, dy, dht, cu_seqlens=bounds.int(), **known, **options), got)
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        if a == b:
            assert torch.equal(got["ht"][n], x["initial_state"][n])
            assert torch.equal(got["dinitial_state"][n], dht[n])
            continue
        t = slice(a, b)
        want = run(part(x, n, t), dy[:, t], dht[n : n + 1], **options)
        same_bits(part(got, n, t), want)


@impls
def test_no_tokens(impl, device):
    x = tensors(1, 6, device=device, B=2)
    x = {n: t if n == "initial_state" else t[:, :0] for n, t in x.items()}
    dy, dht = cotangents(x)
    got = run(x, dy, dht, output_final_state=True, impl=impl)
    assert torch.equal(got["ht"], x["initial_state"]) and torch.equal(got["dinitial_state"], dht)
    assert got["dx"].shape == x["x"].shape and got["dg"].shape == x["g"].shape
    del x["initial_state"]
    assert not run(x, dy, dht, output_final_state=True, impl=impl)["ht"].any()


@impls
@pytest.mark.parametrize("used", ["o", "ht"])
def test_only_one_output_is_used(used, impl, device):
    x = tensors(40, 6, device=device)
    dy, dht = cotangents(x)
    given = (dy, None) if used == "o" else (None, dht)
    zeros = (dy, 0 * dht) if used == "o" else (0 * dy, dht)
    got = run(x, *given, output_final_state=True, impl=impl)
    check(got, exact(x, *zeros), torch.float32)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [1, 40, 64, 100])
def test_causal_to_the_bit(cut, dtype, device):
    """Other tokens after the cut, gates and weights included, or none at all."""
    x = tensors(130, 20, dtype=dtype, device=device, B=1)
    y = tensors(130, 20, dtype=dtype, device=device, B=1, gate="reset", seed=1)
    y["weight"] *= 100
    state = x.pop("initial_state")
    joined = {n: torch.cat([x[n][:, :cut], y[n][:, cut:]], 1) for n in x}
    want, _ = ema_scan(**x, initial_state=state, impl="triton")
    for z in (joined, {n: t[:, :cut] for n, t in x.items()}):
        got, _ = ema_scan(**z, initial_state=state, impl="triton")
        assert torch.equal(got[:, :cut], want[:, :cut])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_in_any_batch(dtype, device):
    x = tensors(100, 140, dtype=dtype, device=device, B=3)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": "triton"}
    got = run(x, dy, dht, **options)
    alone = run({n: t[1:2] for n, t in x.items()}, dy[1:2], dht[1:2], **options)
    same_bits({n: t[1:2] for n, t in got.items()}, alone)


@impls
@pytest.mark.parametrize("cut", [1, 64, 77])
def test_splitting_a_sequence_equals_one_call(cut, impl, device):
    x = tensors(130, 20, device=device, B=1)
    y, ht = ema_scan(**x, output_final_state=True, impl=impl)
    state, parts = x.pop("initial_state"), []
    for tokens in (slice(cut), slice(cut, None)):
        one = {n: t[:, tokens] for n, t in x.items()}
        part, state = ema_scan(**one, initial_state=state, output_final_state=True, impl=impl)
        parts.append(part)
    assert_close("y", torch.cat(parts, 1), y, 2e-6)
    assert_close("ht", state, ht, 2e-6)


@pytest.mark.parametrize("gen", GENERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_generation(gen, dtype, device, monkeypatch):
    operator.stages("triton")
    gdn_checks.pretend(monkeypatch, gen)
    x = tensors(70, 140, dtype=dtype, device=device, B=1)
    dy, dht = cotangents(x)
    got = run(x, dy, dht, output_final_state=True, impl="triton")
    check(got, exact(x, dy, dht), dtype)


@pytest.mark.parametrize("wide", ["g", "weight", "initial_state"])
def test_gradients_have_the_dtypes_of_their_tensors(wide, device):
    x = tensors(40, 20, dtype=torch.bfloat16, device=device)
    x = {n: t if n == wide else t.bfloat16() for n, t in x.items()}
    dy, dht = cotangents(x)
    got = run(x, dy, dht.float(), output_final_state=True, impl="triton")
    assert {n: got[f"d{n}"].dtype for n in x} == {n: t.dtype for n, t in x.items()}
    assert got["ht"].dtype == torch.float32
    check(got, exact(x, dy, dht), torch.bfloat16)


@impls
def test_strides_and_what_is_left_alone(impl, device):
    """Non-contiguous tensors and gradients; neither is changed."""
    x = tensors(40, 20, device=device)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl}
    want = run(x, dy, dht, **options)
    odd = {n: t.mT.contiguous().mT for n, t in x.items()}
    kept = {n: t.clone() for n, t in odd.items()}
    same_bits(run(odd, dy.mT.contiguous().mT, dht.mT.contiguous().mT, **options), want)
    same_bits(odd, kept)


@impls
def test_checkpointing_autocast_and_a_changed_output(impl, device):
    x = tensors(40, 20, device=device)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl}
    want = run(x, dy, dht, **options)

    def again(**arguments):
        return checkpoint(ema_scan, **arguments, use_reentrant=False)

    same_bits(run(x, dy, dht, again, **options), want)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        same_bits(run(x, dy, dht, **options), want)

    def changed(**arguments):
        y, ht = ema_scan(**arguments)
        return y.mul_(2), ht.add_(1)

    got = run(x, dy / 2, dht, changed, **options)
    same_bits(got, want, "o", "ht")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", [False, True])
def test_fullgraph(packed, backend, device):
    """One graph for two lengths, and the bits of eager mode."""

    def f(x, **given):
        bounds = {}
        if packed:
            T = x.shape[1]
            bounds["cu_seqlens"] = torch.tensor([0, 3, 3, T], device=x.device)
            bounds["cu_seqlens_cpu"] = torch.tensor([0, 3, 3, T])
        return ema_scan(x, **given, **bounds, output_final_state=True, chunk_size=16)

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for T in (17, 33):
        x = tensors(T, 6, device=device, B=1)
        if packed:
            x["initial_state"] = torch.randn(3, 3, 6, device=device)
        dy, dht = cotangents(x, 3 if packed else 1)
        with torch._dynamo.config.patch(error_on_recompile=T == 33):
            got = run(x, dy, dht, g)
        same_bits(got, run(x, dy, dht, f))


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


def new(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


BOUNDS = {"cu_seqlens": torch.tensor([0, 20])}
REFUSED = {
    "x no tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor .*got list"),
    "x rank": ({"x": new(2, 20)}, ValueError, "x must have 4 dimensions .*got 2"),
    "x dtype": ({"x": new(2, 20, 3, 5).int()}, TypeError, "x must be float.*int32"),
    "no channel": ({"x": new(2, 20, 3, 0)}, ValueError, "x must have D >= 1, got D=0"),
    "no head": ({"x": new(2, 20, 0, 5)}, ValueError, "x must have H >= 1, got H=0"),
    "g missing": ({"g": None}, TypeError, "g must be a torch.Tensor .*got NoneType"),
    "g rank": ({"g": new(2, 20)}, ValueError, r"g must have 3 dimensions \[B, T, H\], got 2"),
    "g of one head": (
        {"x": new(2, 20, 5), "initial_state": None, "weight": None},
        ValueError,
        r"g must have 2 dimensions \[B, T\], got 3",
    ),
    "g shape": ({"g": new(2, 19, 3)}, ValueError, r"g must have shape \[B=2, T=20, H=3\]"),
    "positive g": ({"g": new(2, 20, 3) + 0.5}, ValueError, "g must be a log decay, <= 0.*0.5"),
    "weight": ({"weight": new(2, 20, 1)}, ValueError, r"weight must have shape \[B=2, T=20, H=3\]"),
    "state": (
        {"initial_state": new(2, 5, 3)},
        ValueError,
        r"initial_state must have shape \[N=2, H=3, D=5\], got \(2, 5, 3\)",
    ),
    "device": (
        {"weight": new(2, 20, 3, device="meta")},
        ValueError,
        "weight must be on cpu like x, got meta",
    ),
    "flag": ({"output_final_state": "yes"}, TypeError, "output_final_state must be True or False"),
    "chunk_size": ({"chunk_size": 128}, ValueError, "chunk_size must be one of 16, 32, 64"),
    "impl": ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'reference'"),
    "float64": (
        {"x": new(2, 20, 3, 5).double(), "impl": "triton"},
        ValueError,
        "impl='triton' cannot run here",
    ),
    "packed batch": (BOUNDS, ValueError, "x must have B = 1 with cu_seqlens"),
    "bounds": (
        {n: new(1, 20, 3) for n in ("g", "weight")}
        | {"x": new(1, 20, 3, 5), "initial_state": None, "cu_seqlens": torch.tensor([0, 19])},
        ValueError,
        "cu_seqlens must end at T=20, got 19",
    ),
    "no bounds": ({"chunk_indices": new(1, 2).int()}, ValueError, "chunk_indices belongs to"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_kernel(name):
    change, error, message = REFUSED[name]
    x = tensors(20, 5, B=2) | change
    with launches() as ran, pytest.raises(error, match=message):
        ema_scan(**x)
    assert not ran


def test_impl_and_unknown_arguments(device):
    x = tensors(20, 5, device=device)
    with launches() as ran:
        ema_scan(**x, impl="reference")
        ema_scan(**{n: t.double() for n, t in x.items()})
    assert not ran
    with launches() as ran:
        ema_scan(**x)
    names = [re.sub(r"\W", "", f.fn.__name__) for f in ran]
    assert names == ["gate_cumsum_kernel", "ema_kernel"]
    with pytest.raises(TypeError, match="unexpected keyword"):
        ema_scan(**x, decay=1)
