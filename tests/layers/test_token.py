"""A token of a layer by the program of earlier ones: the same bits, and what changed is seen."""

import copy

import pytest
import torch
from grids import FULL
from layers.layer_checks import KINDS, hidden, make

from linattn_edu.kernels.host import plan, tape
from linattn_edu.layers import RMSNormGated, token

LAYERS = [k for k in KINDS if not k.startswith(("rwkv7", "ema"))]


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Calls in the interpreter are written down too."""
    monkeypatch.setattr(plan, "DEVICES", {"cuda", "cpu"})


def programs() -> list:
    return [*token._programs["plans"].values()] if token._programs else []


class Both:
    """A layer with a cache, and a second cache of the same tokens, which no program writes."""

    def __init__(self, kind, device, ring=None, dtype=torch.float32, batch=2):
        self.layer, self.batch = make(kind, dtype, device, impl="triton"), batch
        self.cache, self.other = (self.layer.make_cache(batch, ring=ring) for _ in range(2))
        self.tokens = iter(hidden(batch, 40, dtype, device).split(1, 1))

    @torch.no_grad()
    def step(self, times=1):
        """Tokens in both ways: the same bits."""
        for _ in range(times):
            x = next(self.tokens)
            y = self.layer(x, cache=self.cache)
            with plan.off():
                want = self.layer(x, cache=self.other)
            assert torch.equal(y, want) and not y.requires_grad
            assert all(map(torch.equal, self.cache.memory, self.other.memory))


RINGED = [k for k in LAYERS if not k.startswith("gdn2")]
# on a push each once, every other one with a ring
ONCE = [(k, 4 if k in RINGED[::2] else None) for k in LAYERS]
EVERY = [(k, None) for k in LAYERS] + [(k, 4) for k in RINGED]


@pytest.mark.parametrize(("kind", "ring"), EVERY if FULL else ONCE)
def test_a_program_gives_the_bits_of_the_layer(kind, ring, device, monkeypatch):
    both = Both(kind, device, ring)
    both.step(3)
    assert [callable(p) for p in programs()] == [True]
    composed = type(both.layer)._mixed
    monkeypatch.setattr(
        type(both.layer), "_mixed",
        lambda *a: composed(*a) if plan._is_off() else pytest.fail("composed"),
    )  # fmt: skip
    versions = [x._version for x in both.cache.memory]
    both.step(4)
    assert all(x._version > v for x, v in zip(both.cache.memory, versions, strict=True))


def scaled(layer):
    with torch.no_grad():
        layer.o_norm.weight.mul_(2)


def replaced(layer):
    layer.A_log = torch.nn.Parameter(layer.A_log.detach() / 2)


def other_data(layer):
    layer.k_conv1d.weight.data = layer.k_conv1d.weight.data.flip(0).clone()


def other_norm(layer):
    class Doubled(RMSNormGated):
        def forward(self, *args):
            return 2 * super().forward(*args)

    layer.o_norm.__class__ = Doubled


CHANGES = {
    "a weight in place": scaled,
    "a parameter": replaced,
    "the numbers of a parameter": other_data,
    "an option of the layer": lambda layer: setattr(layer, "allow_neg_eigval", True),
    "an option of a module": lambda layer: setattr(layer.o_norm, "eps", 0.5),
    "an activation": lambda layer: setattr(layer.q_conv1d, "activation", None),
    "a forward": lambda layer: setattr(
        layer.v_conv1d, "forward", lambda y, **given: (2 * y, given["cache"])
    ),
    "a hook": lambda layer: layer.o_norm.register_forward_hook(lambda m, i, y: 2 * y),
    "a hook before": lambda layer: layer.o_norm.register_forward_pre_hook(
        lambda m, i: (2 * i[0], i[1])
    ),
    "a hook of all": lambda layer: torch.nn.modules.module.register_module_forward_hook(
        lambda m, i, y: 2 * y if isinstance(m, RMSNormGated) else None
    ),
    "a class": other_norm,
    "an attribute that is no key": lambda layer: setattr(layer, "notes", []),
    "a bias": lambda layer: layer.k_conv1d.register_parameter(
        "bias", torch.nn.Parameter(torch.ones_like(layer.k_conv1d.weight[:, 0, 0]))
    ),
    "a projection": lambda layer: setattr(layer, "q_proj", copy.deepcopy(layer.k_proj)),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change, device):
    both = Both("gdn", device)
    both.step(3)
    before = copy.deepcopy(both.other)
    handle = CHANGES[change](both.layer)
    both.step(2)
    if hasattr(handle, "remove"):
        handle.remove()
    if change != "an attribute that is no key":
        layer, x = make("gdn", torch.float32, device, impl="triton"), next(both.tokens)
        with torch.no_grad(), plan.off():
            assert not torch.equal(layer(x, cache=before), both.layer(x, cache=both.other))


def test_layers_share_programs_and_nothing_else(device):
    """Two layers of one shape, batches of other sizes, other caches of the same layer."""
    one, two = Both("gdn", device), Both("gdn", device)
    for p in two.layer.parameters():
        p.data.mul_(0.5)
    for both in (one, two):
        both.step(3)
    assert len(programs()) == 1
    three = Both("gdn", device, batch=3)
    three.layer = one.layer
    three.step(3), one.step(3), two.step(3)
    one.cache, one.other = (one.layer.make_cache(2) for _ in range(2))
    one.step(3)
    assert len(programs()) == 2 and tape.NEVER not in programs()


def test_what_is_wrong_is_refused_after_right_tokens(device):
    both = Both("gdn", device)
    both.step(4)
    x, cache = next(both.tokens), both.cache
    with torch.no_grad():
        for wrong in (x[:1], x[..., 1:], x.double(), None):
            with pytest.raises((TypeError, ValueError), match=r"x must|cache must"):
                both.layer(wrong, cache=cache)
        with pytest.raises(ValueError, match="of a GatedDeltaNet, got one of a Mamba2"):
            both.layer(x, cache=make("mamba2", torch.float32, device).make_cache(2))
        cache.conv_states[0].data = both.layer.q_conv1d.weight.data.view(1, -1, 4).expand(2, -1, 4)
        with pytest.raises(ValueError, match="contiguous"):
            both.layer(x, cache=cache)
        one = make("gdn", torch.float32, device, impl="triton")
        small = one.make_cache(1)
        for _ in range(4):
            one(x[:1], cache=small)
        small.conv_states[0].data = one.q_conv1d.weight.data.view(1, -1, 4)
        with pytest.raises(ValueError, match="conv_state must not share memory"):
            one(x[:1], cache=small)


def test_autocast_has_programs_of_its_own(device):
    both = Both("mamba2", device)
    both.step(3)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        both.cache, both.other = (both.layer.make_cache(2) for _ in range(2))
        both.step(4)
    both.cache, both.other = (both.layer.make_cache(2) for _ in range(2))
    both.step(4)


def test_a_gradient_is_recorded_after_programs(device):
    both = Both("kda", device)
    both.step(4)
    y = both.layer(next(both.tokens), cache=both.cache)
    y.sum().backward()
    assert both.layer.A_log.grad is not None
