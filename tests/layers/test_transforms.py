"""Layers under torch.compile, checkpointing, autocast, copies, the meta device."""

import copy
import io
import pickle

import pytest
import torch
from grids import few
from layers.layer_checks import KINDS, MAIN, hidden, make
from torch.utils.checkpoint import checkpoint

from linattn_edu.layers import EMA, Mamba2
from linattn_edu.testing import assert_close, relative_rms

each_class = pytest.mark.parametrize("kind", MAIN)


def some(*kinds):
    """Classes that a push takes, since to compile one takes seconds: each of them in some test."""
    return pytest.mark.parametrize("kind", few(*kinds, more=[k for k in MAIN if k not in kinds]))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def both(f, x):
    y = f(x)
    return y, torch.autograd.grad(y.square().sum(), x)[0]


@some("gdn2", "rwkv7", "mamba2")
def test_compiled_training(kind):
    layer, x = make(kind), hidden(2, 20).requires_grad_()
    mask = torch.ones(2, 20)
    mask[0, :5] = 0
    backend = "aot_eager" if kind in ("gdn", "mamba2") else "eager"  # which takes half the time
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for found, want in zip(
        both(lambda x: compiled(x, mask), x), both(lambda x: layer(x, mask), x), strict=True
    ):
        assert_close("compiled", found, want, 1e-12)


@some("kda")
def test_compiled_with_a_mask_that_is_no_left_padding(kind):
    """Its numbers are not known: what would be wrong is NaN, and nothing else is."""
    layer, x = make(kind), hidden(3, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    mask = torch.ones(3, 12)
    mask[0, :2], mask[1, 9:], mask[2, 5] = 0, 0, 0  # left, right, between
    alone = layer(x)
    with torch.no_grad():
        y = compiled(x, mask)
        assert_close("left", y[0, 2:], layer(x[:1, 2:])[0], 1e-12)
        assert_close("right", y[1, :9], alone[1, :9], 1e-12)
        assert not y[0, :2].any() and not y[1, 9:].any()
        assert y[2, 5:].isnan().all()
        cache = layer.make_cache(3)
        assert compiled(x, mask, cache)[1, 9:].isnan().all()
        assert compiled(x[:, :1], None, cache).flatten(1).isnan().all(1).tolist() == [0, 1, 1]
        late = torch.tensor([[1.0], [1.0], [0.0]])  # after tokens of an earlier call
        cache = layer.make_cache(3)
        layer(x, cache=cache)
        assert compiled(x[:, :1], late, cache).flatten(1).isnan().any(1).tolist() == [0, 0, 1]


@some("mamba2", "ema")
def test_compiled_with_a_mask_of_ones_beside_boundaries(kind):
    layer, x, bounds = make(kind), hidden(1, 12), torch.tensor([0, 5, 9])
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        want = layer(x, cu_seqlens=bounds)
        assert_close("ones", compiled(x, torch.ones(1, 12), cu_seqlens=bounds), want, 1e-12)
        y = compiled(x, torch.tensor([[0] + 11 * [1]]), cu_seqlens=bounds)
        assert y[0, :5].isnan().all()
        assert_close("another", y[0, 5:], want[0, 5:], 1e-12)


@some("gdn", "mamba2", "ema")
def test_compiled_steps(kind):
    layer, x = make(kind), hidden(2, 12)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        cache = layer.make_cache(2)
        layer(x[:, :10], cache=cache)
        pieces = [compiled(x[:, t : t + 1], cache=cache) for t in (10, 11)]
        assert_close("y", torch.cat(pieces, 1), layer(x)[:, 10:], 1e-12)


@each_class
def test_checkpointed(kind):
    layer, x = make(kind), hidden(2, 20).requires_grad_()
    again = both(lambda x: checkpoint(layer, x, use_reentrant=False), x)
    assert all(map(torch.equal, again, both(layer, x)))


@each_class
def test_autocast(kind, device):
    layer = make(kind, torch.float32, device)
    x = hidden(2, 20, torch.float32, device)
    exact = layer(x)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x.requires_grad_())
        (dx,) = torch.autograd.grad(y.float().sum(), x)
        with torch.no_grad():
            cache = layer.make_cache(2)
            pieces = [layer(x[:, a:b], cache=cache) for a, b in ((0, 18), (18, 19), (19, 20))]
            with pytest.raises(TypeError, match=r"state in torch.(bfloat16|float32)"):
                layer(x, cache=layer.make_cache(2, dtype=torch.float64))
    assert y.dtype == torch.bfloat16 and dx.dtype == torch.float32
    assert_close("autocast", y, exact, 2e-2)
    assert_close("pieces", torch.cat(pieces, 1), exact, 2e-2)


@each_class
def test_copies(kind):
    layer, x = make(kind), hidden(2, 9)
    with torch.no_grad():
        cache = layer.make_cache(2)
        layer(x[:, :8], cache=cache)
        y = layer(x[:, 8:], cache=copy.deepcopy(cache))
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        fresh = make(kind, seed=5)
        fresh.load_state_dict(torch.load(file))
        for f in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), fresh):
            assert torch.equal(f(x[:, 8:], cache=pickle.loads(pickle.dumps(cache))), y)


@each_class
def test_meta_device(kind):
    cls, arguments = KINDS[kind]
    layer = cls(**arguments, device="meta", dtype=torch.float64)
    with torch.device("meta"):
        other = cls(**arguments).double()
    assert layer(hidden(2, 9, device="meta")).shape == (2, 9, 24)
    shapes = {n: x.shape for n, x in layer.state_dict().items()}
    assert shapes == {n: x.shape for n, x in other.state_dict().items()}
    # D of mamba_ssm does not follow dtype
    assert all(x.dtype == torch.float64 for n, x in layer.state_dict().items() if n != "D")
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert layer.double()(hidden(2, 9)).isfinite().all()


def test_first_numbers_do_not_depend_on_the_order_of_reset():
    ema, mamba = make("ema"), Mamba2(24, headdim=8, d_state=8, conv_init=1e-3)
    assert mamba.conv1d.weight.abs().max() <= 1e-3
    for module in (*ema.modules(), *mamba.modules()):  # a layer before the modules inside
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert not ema.a_proj.weight.any() and 0 < mamba.conv1d.weight.abs().max() <= 1e-3
    assert torch.equal(ema.a_proj.bias, EMA(24, 3).a_proj.bias.double())


@each_class
def test_half_precision_is_rounding(kind, device):
    layer, x = make(kind, torch.bfloat16, device), hidden(2, 30, torch.bfloat16, device)
    exact = make(kind, device=device)
    exact.load_state_dict(layer.state_dict())
    y = layer(x)
    assert y.dtype == torch.bfloat16
    assert relative_rms(y, exact(x.double())) < 1.5e-2
    with torch.no_grad():
        cache = layer.make_cache(2)
        pieces = [layer(x[:, a:b], cache=cache) for a, b in ((0, 28), (28, 29), (29, 30))]
    assert relative_rms(torch.cat(pieces, 1), exact(x.double())) < 1.5e-2
