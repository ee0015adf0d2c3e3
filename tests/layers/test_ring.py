"""Layers whose steps write a ring and not the state."""

import copy

import pytest
import torch
from grids import parametrize
from layers.layer_checks import hidden, make

from linattn_edu.models import Config, LanguageModel
from linattn_edu.testing import assert_close

KINDS = ("gdn", "kda", "mamba2")
each = parametrize(1, kind=KINDS, impl=("triton", "reference"))


@each
@torch.no_grad()
def test_steps_are_those_without_a_ring(kind, impl, device):
    """A prompt, tokens over a fold, more of a prompt, tokens, a reset, tokens."""
    layer = make(kind, torch.float32, device, impl=impl)
    x = hidden(2, 20, torch.float32, device)
    cache, other = layer.make_cache(2, ring=4), layer.make_cache(2)
    cuts = [*range(3, 12), 15, *range(16, 21)]
    for begin, end in zip((0, *cuts[:-1]), cuts, strict=True):
        y, want = (layer(x[:, begin:end], cache=c) for c in (cache, other))
        assert_close(f"y {end}", y, want, 2e-5)
        if end == 18:
            cache.reset(), other.reset()
    cache.commit()
    for state, want in zip(cache.states, other.states, strict=True):
        assert_close("state", state, want, 2e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_step_is_the_call(kind, device):
    """To the bit, from a graph on a GPU, which gives the ring back what the capture wrote."""
    layer = make(kind, torch.float32, device)
    x = hidden(2, 12, torch.float32, device)
    cache, other = layer.make_cache(2, ring=4), layer.make_cache(2, ring=4)
    step = layer.make_step(cache)
    for t in range(12):
        assert torch.equal(step(x[:, t : t + 1]), layer(x[:, t : t + 1], cache=other))
        assert all(map(torch.equal, cache.memory, other.memory))
    assert (step._graph is not None) == (device.type == "cuda")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_copies_and_rows(kind, device):
    layer = make(kind, torch.float32, device)
    x = hidden(2, 7, torch.float32, device)
    cache = layer.make_cache(2, ring=8)
    for t in range(5):
        layer(x[:, t : t + 1], cache=cache)
    second, rows = copy.deepcopy(cache), torch.tensor([1, 1], device=device)
    cache.reorder(rows)
    y, again = layer(x[:, 5:6], cache=cache), layer(x[:, 5:6], cache=second)
    assert torch.equal(y[1], again[1]) and not torch.equal(y[0], again[0])
    layer(x[:, 6:7], cache=second)
    assert second.ring.counts[1, 0, 0].tolist() == [0, 6, 1]
    assert cache.ring.counts[1, 0, 0].tolist() == [0, 5, 1]


def test_training_goes_through_the_state(device):
    """Where a gradient is recorded, tokens of a ring are in the state before."""
    layer = make("gdn", torch.float32, device)
    x = hidden(1, 5, torch.float32, device)
    cache, other = layer.make_cache(1, ring=8), layer.make_cache(1)
    with torch.no_grad():
        for c in (cache, other):
            layer(x[:, :1], cache=c), layer(x[:, 1:2], cache=c)
    for t in (2, 3):
        y, want = (layer(x[:, t : t + 1], cache=c) for c in (cache, other))
        assert_close("y", y, want, 2e-5)
    y.sum().backward()
    assert cache.recurrent_state.requires_grad and not cache.ring.counts[..., 1:].any()
    with torch.no_grad():
        y, want = (layer(x[:, 4:], cache=c) for c in (cache, other))
    assert_close("y", y, want, 2e-5)


@each
@torch.no_grad()
def test_tokens_that_are_taken_back(kind, impl, device):
    """Of a prompt, of calls of some tokens over folds, and of calls of one: as if they had not been
    there, whatever they were.
    """
    layer = make(kind, torch.float32, device, impl=impl)
    x, wrong = hidden(2, 30, torch.float32, device), hidden(2, 4, torch.float32, device) * 10
    cache, other = layer.make_cache(2, ring=6, guesses=4), layer.make_cache(2)
    kept = copy.deepcopy(cache)
    at = 0
    for tokens, guesses in ((7, 0), (2, 3), (1, 1), (1, 4), (1, 4), (5, 0), (1, 0), (4, 1), (1, 2)):
        now = x[:, at : at + tokens]
        y = layer(torch.cat([now, wrong[:, :guesses]], 1), cache=cache)[:, :tokens]
        cache.take_back(guesses)
        want = torch.cat([layer(token, cache=other) for token in now.split(1, 1)], 1)
        assert_close(f"y {at}", y, want, 2e-5)
        at += tokens
    cache.commit()
    for token in wrong[:, :3].split(1, 1):
        layer(token, cache=cache)
    cache.take_back(3)
    y, want = (layer(x[:, at : at + 1], cache=c) for c in (cache, other))
    assert_close("y after single tokens", y, want, 2e-5)
    kept.reset()
    with pytest.raises(ValueError, match=r"from 0 to guesses=4 of make_cache, got 5"):
        kept.take_back(5)
    with pytest.raises(ValueError, match="cu_seqlens must be None with a cache of guesses"):
        layer(x[:1], cache=kept, cu_seqlens=torch.tensor([0, 9, 30], device=device))


def test_refusals(device):
    layer = make("gdn", torch.float32, device)
    for guesses, ring in ((3, None), (3, 3), (True, 3), (-1, 8)):
        with pytest.raises(ValueError, match="guesses must be"):
            layer.make_cache(1, ring=ring, guesses=guesses)
    for ring, message in ((0, "length must be an integer >= 1"), (65, "length must be at most 64")):
        with pytest.raises(ValueError, match=message):
            layer.make_cache(1, ring=ring)
    with pytest.raises(ValueError, match="ring must be None for EMA, got 4"):
        make("ema", torch.float32, device).make_cache(1, ring=4)


@torch.no_grad()
def test_a_model(device):
    sizes = {"vocabulary": 64, "width": 32, "heads": 2, "key_dim": 8, "value_dim": 16, "hidden": 48}
    mixers = ("gdn", "kda", "mamba2", "ema", "attention")
    model = LanguageModel(Config(mixers=mixers, **sizes)).to(device)
    tokens = torch.randint(64, (2, 6), device=device)
    cache, other = model.make_cache(2, ring=4), model.make_cache(2)
    for t in range(6):
        y, want = (model(tokens[:, t : t + 1], cache=c) for c in (cache, other))
        assert_close("logits", y, want, 2e-5)
