"""The layers against plain PyTorch in float64; padding, packing, caches, first values."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from layers.layer_checks import KINDS, MAIN, hidden, make, plain
from torch.utils.checkpoint import checkpoint

from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba2,
    RMSNormGated,
    ShortConvolution,
)
from linattn_edu.testing import assert_close

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
T = 37
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
every_kind = pytest.mark.parametrize("kind", KINDS)
each_class = pytest.mark.parametrize("kind", MAIN)


def gradients(layer, y, x, dy):
    names = dict(layer.named_parameters())
    found = torch.autograd.grad(y, [x, *names.values()], dy)
    return dict(zip(["x", *names], found, strict=True))


@every_kind
def test_plain_pytorch_is_the_layer(kind, device):
    layer = make(kind, device=device)
    x, dy = hidden(2, T, device=device).requires_grad_(), hidden(2, T, device=device, seed=2)
    results = []
    for f in (layer, lambda x: plain(layer, x)):
        y = f(x)
        results.append({"y": y} | gradients(layer, y, x, dy))
    ours, exact = results
    for name, want in exact.items():
        assert_close(name, ours[name], want, 1e-10)


@every_kind
@dtypes
def test_padded_rows_are_as_alone(kind, dtype, device):
    layer, x = make(kind, dtype, device), hidden(3, T, dtype, device)
    padding = [7, T - 2, 0]
    mask = torch.ones(3, T, dtype=torch.int64, device=device)
    for row, n in enumerate(padding):
        mask[row, :n], x[row, :n] = 0, torch.nan
    x.requires_grad_()
    y = layer(x, mask)
    (dx,) = torch.autograd.grad(y.sum(), x)
    for row, n in enumerate(padding):
        own = x.detach()[row : row + 1, n:].requires_grad_()
        alone = layer(own)
        assert_close("y", y[row : row + 1, n:], alone, TOLERANCES[dtype])
        (of_own,) = torch.autograd.grad(alone.sum(), own)
        assert_close("dx", dx[row : row + 1, n:], of_own, TOLERANCES[dtype])
        assert not y[row, :n].any() and not dx[row, :n].any()


@every_kind
def test_packed_sequences_are_as_alone(kind, device):
    layer, x = make(kind, device=device), hidden(1, T, device=device)
    bounds = [0, 3, 3, 20, T]
    cu_seqlens = torch.tensor(bounds, device=device)
    given = {} if device.type == "cpu" else {"cu_seqlens_cpu": cu_seqlens.cpu()}
    with torch.no_grad():
        cache = layer.make_cache(4)
        y = layer(x, cache=cache, cu_seqlens=cu_seqlens, **given)
        for n, (a, b) in enumerate(itertools.pairwise(bounds)):
            own = layer.make_cache(1)
            alone = layer(x[:, a:b], cache=own)
            assert_close("y", y[:, a:b], alone, 1e-12) if b > a else None
            for packed, state in zip(cache.states, own.states, strict=True):
                assert_close("state", packed[n], state[0], 1e-12)
    assert torch.equal(layer(x, cu_seqlens=cu_seqlens), y)


@every_kind
def test_tokens_behind_packed_sequences(kind, device):
    """They are padding: y is zero there, whatever they hold."""
    layer, x = make(kind, device=device), hidden(1, T, device=device)
    cu_seqlens = torch.tensor([0, 3, 20], device=device)
    x[:, 20:] = torch.nan
    y = layer(x.requires_grad_(), cu_seqlens=cu_seqlens)
    (dx,) = torch.autograd.grad(y.sum(), x)
    own = x.detach()[:, :20].requires_grad_()
    want = layer(own, cu_seqlens=cu_seqlens)
    (of_own,) = torch.autograd.grad(want.sum(), own)
    assert_close("y", y[:, :20], want, 1e-12)
    assert_close("dx", dx[:, :20], of_own, 1e-12)
    assert not y[:, 20:].any() and not dx[:, 20:].any()


@every_kind
@dtypes
def test_pieces_are_the_whole(kind, dtype, device):
    layer, x = make(kind, dtype, device), hidden(3, T, dtype, device)
    whole = layer(x).detach()
    cuts = [0, 9, 10, 11, 11, 12, 30, 31, T]
    with torch.inference_mode():
        cache = layer.make_cache(3)
        places = [state.data_ptr() for state in cache.states]
        pieces = [layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(cuts)]
        assert_close("y", torch.cat(pieces, 1), whole, TOLERANCES[dtype])
        assert [state.data_ptr() for state in cache.states] == places
        cache.reset()
        assert torch.equal(layer(x[:, :9], cache=cache), pieces[0])


CUTS = [0, 5, 6, 6, 20, T]


@every_kind
def test_gradients_through_the_pieces_of_a_document(kind, device):
    layer, x = make(kind, device=device), hidden(2, T, device=device).requires_grad_()
    dy = hidden(2, T, device=device, seed=3)
    whole = layer(x)
    want = {"y": whole} | gradients(layer, whole, x, dy)
    cache = layer.make_cache(2)
    first = cache.states
    y = torch.cat([layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(CUTS)], 1)
    assert not any(state.any() for state in first)  # which a backward pass may need
    got = {"y": y} | gradients(layer, y, x, dy)
    for name, right in want.items():
        assert_close(name, got[name], right, 1e-10)
    with torch.no_grad():  # decoding goes on from what was trained on
        layer(x[:, :1], cache=cache)
        assert not any(state.requires_grad for state in cache.states)


@each_class
def test_no_gradient_crosses_a_detached_cache(kind, device):
    layer, x = make(kind, device=device), hidden(2, T, device=device).requires_grad_()
    dy = hidden(2, T, device=device, seed=3)
    cache, parts = layer.make_cache(2), []
    for a, b in itertools.pairwise(CUTS):
        y = layer(x[:, a:b], cache=cache)
        cache.detach()
        assert_close("y", y, layer(x)[:, a:b], 1e-12)
        (dx,) = torch.autograd.grad(y, x, dy[:, a:b])
        assert not dx[:, :a].any()
        parts.append(dx[:, a:b])
    within = [
        torch.autograd.grad(layer(x)[:, a:b], x, dy[:, a:b])[0][:, a:b]
        for a, b in itertools.pairwise(CUTS)
    ]
    assert_close("dx", torch.cat(parts, 1), torch.cat(within, 1), 1e-10)


@each_class
def test_a_cache_with_a_history_is_reset_and_reordered(kind, device):
    layer, x = make(kind, device=device), hidden(2, 9, device=device).requires_grad_()
    cache, rows = layer.make_cache(2), torch.tensor([1, 1], device=device)
    first = layer(x[:, :5], cache=cache)
    cache.reorder(rows)
    second = layer(x[:, 5:], cache=cache)
    swapped = torch.cat([x[rows, :5], x[:, 5:]], 1)
    (dx,) = torch.autograd.grad(second.square().sum(), x, retain_graph=True)
    want = torch.autograd.grad(layer(swapped)[:, 5:].square().sum(), x)[0]
    assert_close("dx", dx, want, 1e-10)
    cache.reset()
    assert not any(state.requires_grad or state.any() for state in cache.states)
    assert torch.equal(layer(x[:, :5], cache=cache), first)
    first.sum().backward()  # what it kept is as it was


@each_class
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_training_goes_on_after_a_step_without_a_gradient(kind, mode, device):
    """And after reset, reorder and a copy there: what they write may be trained on."""
    layer, x = make(kind, device=device), hidden(2, 12, device=device).requires_grad_()
    rows = torch.tensor([1, 0], device=device)
    for act in (
        lambda cache: layer(x[:, 5:6], cache=cache),
        lambda cache: cache.reorder(rows),
        lambda cache: cache.reset(),
    ):
        cache = layer.make_cache(2)
        layer(x[:, :5], cache=cache)
        with mode():
            act(cache)
        (dx,) = torch.autograd.grad(layer(x[:, 6:], cache=cache).square().sum(), x)
        assert not dx[:, :6].any()
        assert dx[:, 6:].any()


@each_class
def test_a_copy_of_a_cache_keeps_its_history(kind, device):
    layer, x = make(kind, device=device), hidden(2, 9, device=device).requires_grad_()
    cache = layer.make_cache(2)
    layer(x[:, :5], cache=cache)
    copied = copy.deepcopy(cache)
    pieces = [layer(x[:, 5:], cache=c) for c in (cache, copied)]
    assert torch.equal(*pieces)
    grads = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in pieces]
    assert_close("dx", *grads, 1e-12)


@each_class
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_cache_under_activation_checkpointing_is_refused(kind, reentrant, device):
    """It would run the layer a second time on the states of later tokens."""
    layer, x = make(kind, device=device), hidden(2, 9, device=device).requires_grad_()
    cache = layer.make_cache(2)

    def piece(x):
        return layer(x, cache=cache)

    y = checkpoint(piece, x, use_reentrant=reentrant)
    with pytest.raises(ValueError, match="cache must be None under activation checkpointing"):
        y.sum().backward()


@each_class
def test_padded_prefill_then_steps(kind, device):
    layer, x = make(kind, device=device), hidden(2, T, device=device)
    mask = torch.ones(2, 20, device=device)
    mask[1, :15] = 0
    with torch.no_grad():
        cache = layer.make_cache(2)
        for a, b in ((0, 6), (6, 7), (7, 20)):  # the second row begins in the third piece
            layer(x[:, a:b], mask[:, a:b], cache)
        y = torch.cat([layer(x[:, t : t + 1], cache=cache) for t in range(20, T)], 1)
        assert_close("y", y[:1], layer(x[:1])[:, 20:], 1e-12)
        assert_close("y", y[1:], layer(x[1:, 15:])[:, 5:], 1e-12)


@each_class
def test_reordered_states(kind, device):
    layer, x = make(kind, device=device), hidden(3, 9, device=device)
    rows = torch.tensor([2, 0, 0], device=device)
    with torch.no_grad():
        cache = layer.make_cache(3)
        layer(x[:, :8], cache=cache)
        cache.reorder(rows)
        y = layer(x[rows, 8:], cache=cache)
    assert_close("y", y, layer(x)[rows, 8:], 1e-12)


@each_class
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_ranks_are_one(kind, layout):
    layer, x, dy = make(kind), hidden(1, 45), hidden(1, 45, seed=2)
    bounds = torch.tensor([0, 21, 45])
    x.requires_grad_()
    y = layer(x, cu_seqlens=bounds)
    want = {"y": y} | gradients(layer, y, x, dy)

    def one(group):
        context = build_cp_context(bounds, group, layout=layout)
        tokens = torch.cat([torch.arange(*part.tokens) for part in context.parts])
        own = x.detach()[:, tokens].requires_grad_()
        part = layer(own, cp_context=context)
        return tokens, {"y": part} | gradients(layer, part, own, dy[:, tokens])

    ranks = simulate(2, one)
    tokens = torch.cat([t for t, _ in ranks]).argsort()
    for name, exact in want.items():
        each = [found[name] for _, found in ranks]
        x_like = name in ("y", "x")
        found = torch.cat(each, 1)[:, tokens] if x_like else sum(each)
        assert_close(name, found, exact, 1e-10)


def test_first_values():
    torch.manual_seed(0)
    gdn = GatedDeltaNet(16, head_dim=4, num_heads=256, expand_v=1)
    kda = KimiDeltaAttention(16, head_dim=4, num_heads=256)
    ssd = Mamba2(64, headdim=1, d_state=4, conv_init=0.01, dt_init_floor=0.01)
    for layer, least, largest in ((gdn, 0, 16), (kda, 1, 16), (ssd, 1, 16)):
        rate = layer.A_log.exp()
        assert least < rate.min() < least + 2 and largest - 2 < rate.max() < largest * 1.0001
        assert abs(rate.mean() - (least + largest) / 2) < 1.5
        floor = 0.01 if layer is ssd else 1e-3
        step = F.softplus(layer.dt_bias)
        assert floor * 0.999 < step.min() < floor * 1.2 and 0.08 < step.max() < 0.1001
        for name in ("A_log", "dt_bias"):
            assert getattr(layer, name)._no_weight_decay
    assert abs(F.softplus(kda.dt_bias).log().mean() - math.log(1e-2)) < 0.1  # log-uniform
    assert not KimiDeltaAttention(16, head_dim=4, safe_gate=True, lower_bound=-1.0).A_log.any()
    assert ssd.conv1d.weight.abs().max() <= 0.01 and (ssd.D == 1).all()
    assert (gdn.o_norm.weight == 1).all() and (ssd.norm.weight == 1).all()
    assert 0.4 < gdn.q_conv1d.weight.abs().max() <= 0.5  # W ** -0.5
    memory = 1 / torch.sigmoid(make("ema").to(torch.float64).a_proj.bias)
    assert len(memory) == 3


def test_first_memories_of_the_average():
    from linattn_edu.layers import EMA

    layer = EMA(16, 4, memory=(2.0, 128.0), dtype=torch.float64)
    assert_close(
        "memory", 1 / torch.sigmoid(layer.a_proj.bias), torch.tensor([2, 8, 32, 128.0]), 1e-6
    )
    assert not layer.a_proj.weight.any()


def test_short_convolution_has_the_call_of_fla(device):
    torch.manual_seed(0)
    conv = ShortConvolution(5, 4, bias=True, dtype=torch.float64, device=device)
    x = torch.randn(2, 9, 5, dtype=torch.float64, device=device)
    residual, mask = torch.randn_like(x), (torch.arange(9, device=device) > 3).expand(2, 9)
    want = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), conv.weight, conv.bias, groups=5)).mT
    y, none = conv(x)
    assert none is None
    assert_close("y", y, want, 1e-12)
    assert_close("residual", conv(x, residual)[0], want + residual, 1e-12)
    assert_close("mask", conv(x, mask=mask)[0], conv(x * mask[..., None])[0], 1e-12)
    with torch.no_grad():
        _, state = conv(x[:, :6], output_final_state=True)
        place = state.data_ptr()
        for t in range(6, 9):
            y, state = conv(x[:, t : t + 1], residual[:, t : t + 1], None, state, True)
            assert_close("step", y, (want + residual)[:, t : t + 1], 1e-12)
        assert state.data_ptr() == place
        assert_close("state", state, x[:, 5:].mT, 1e-12)
    assert conv.state_size == 5 * 4
    with torch.no_grad():  # one token of each packed sequence, in place too
        _, state = conv(x[:, :6], output_final_state=True)
        place, bounds = state.data_ptr(), torch.tensor([0, 1, 2], device=device)
        for t, of in ((6, conv), (7, conv.step), (8, conv)):
            given = {"cache": state, "output_final_state": True, "cu_seqlens": bounds}
            y, state = of(x[None, :, t], residual=residual[None, :, t], **given)
            assert_close("packed step", y[0], (want + residual)[:, t], 1e-12)
            assert state.data_ptr() == place
        assert_close("state", state, x[:, 5:].mT, 1e-12)
        y, none = conv.step(x[:, :1], None, None)
        assert none is None
        assert_close("first", y, want[:, :1], 1e-12)
        # as many tokens as sequences, but not one each: a new state
        uneven = torch.tensor([0, 0, 2], device=device)
        y, new = conv(x[:1, :2], cache=state, output_final_state=True, cu_seqlens=uneven)
        assert new.data_ptr() != place
    with pytest.raises(ValueError, match=r"x must be \[N, 1, D\], got \(2, 9, 5\)"):
        conv.step(x, None, None)
    with pytest.raises(ValueError, match="mask must be None with cu_seqlens"):
        conv(x[:1], mask=mask[:1], cu_seqlens=torch.tensor([0, 9], device=device))


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("before", [True, False])
def test_norm(activation, before, device):
    torch.manual_seed(0)
    norm = RMSNormGated(
        12, activation=activation, group_size=4, norm_before_gate=before, dtype=torch.float64,
        device=device, eps=0.1,
    )  # fmt: skip
    with torch.no_grad():
        norm.weight.normal_()
    x, z = (torch.randn(3, 12, dtype=torch.float64, device=device) for _ in range(2))
    gate = torch.sigmoid(z) * (z if activation == "swish" else 1)

    def rms(x):
        each = x.view(3, 3, 4)
        return (each / (each.square().mean(-1, keepdim=True) + 0.1).sqrt()).view(3, 12)

    assert_close("bare", norm(x), rms(x) * norm.weight, 1e-12)
    want = rms(x) * norm.weight * gate if before else rms(x * gate) * norm.weight
    assert_close("gated", norm(x, z), want, 1e-12)
    assert not list(RMSNormGated(4, elementwise_affine=False).parameters())
