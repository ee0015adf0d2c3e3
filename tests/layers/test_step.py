"""One token of each sequence as a captured step, beside the call that it repeats."""

import copy

import pytest
import torch
from grids import few
from layers.layer_checks import HIDDEN, MAIN, hidden, make

from benchmarks import steps
from linattn_edu.layers import Step
from linattn_edu.models import Config, LanguageModel

SIZES = {"vocabulary": 64, "width": 32, "heads": 2, "key_dim": 8, "value_dim": 16, "hidden": 48}


def both(layer, device):
    """A cache, a step of it, and a second cache of the same prompt."""
    x = hidden(2, 9, torch.float32, device)
    caches = [layer.make_cache(2) for _ in range(2)]
    for cache in caches:
        layer(x[:, :4], cache=cache)
    return x[:, 4:].split(1, 1), caches[0], layer.make_step(caches[0]), caches[1]


@pytest.mark.parametrize("kind", MAIN)
@torch.no_grad()
def test_a_step_is_the_call(kind, device):
    """To the bit, and the states; between steps the layer may be called, and the cache be reset."""
    layer = make(kind, torch.float32, device)
    xs, cache, step, other = both(layer, device)
    for i, x in enumerate(xs):
        y = layer(x, cache=cache) if i == 2 else step(x)
        assert torch.equal(y, layer(x, cache=other))
        assert all(map(torch.equal, cache.states, other.states))
        if i == 3:
            cache.reset(), other.reset()
    assert (step._graph is not None) == (device.type == "cuda")


@pytest.mark.parametrize("kind", few("gdn", more=("kda", "mamba2")))
@torch.no_grad()
def test_a_step_of_guesses_is_the_call(kind, device):
    """Some of which are taken back, and a call of fewer at the end."""
    layer, x = make(kind, torch.float32, device), hidden(2, 24, torch.float32, device)
    cache, other = (layer.make_cache(2, ring=8, guesses=4) for _ in range(2))
    step = layer.make_step(cache)
    for some, wrong in ((x[:, :5], 2), (x[:, 5:10], 0), (x[:, 10:15], 4), (x[:, 15:18], 1)):
        look = step if some.shape[1] == 5 else lambda x: layer(x, cache=cache)
        assert torch.equal(look(some), layer(some, cache=other))
        for each in (cache, other):
            each.take_back(wrong)
        assert all(map(torch.equal, cache.memory, other.memory))
    assert (step._graph is not None) == (device.type == "cuda")


@torch.no_grad()
def test_parameters_that_change(device):
    """In place, their memory, themselves, and the module that has them."""
    layer = make("gdn", torch.float32, device)
    xs, _, step, other = both(layer, device)

    def other_memory():
        layer.k_proj.weight.data = layer.k_proj.weight.data.flip(0).clone()

    def replaced():
        layer.A_log = torch.nn.Parameter(layer.A_log / 2)

    changes = (
        lambda: None, lambda: layer.o_norm.weight.mul_(2), other_memory, replaced,
        lambda: setattr(layer, "q_proj", copy.deepcopy(layer.k_proj)),
    )  # fmt: skip
    for x, change in zip(xs, changes, strict=True):
        change()
        assert torch.equal(step(x), layer(x, cache=other))
        on_gpu = device.type == "cuda"
        assert step.reason == (
            None if on_gpu else "there are graphs on a GPU alone, and x is on cpu"
        )


@torch.no_grad()
def test_outputs_are_apart(device):
    layer = make("gdn", torch.float32, device)
    xs, _, step, _ = both(layer, device)
    first = step(xs[0])
    kept = first.clone()
    step(xs[1])
    assert torch.equal(first, kept)


def test_a_refused_token_leaves_the_states(device):
    layer = make("kda", torch.float32, device)
    with torch.no_grad():
        xs, cache, step, _ = both(layer, device)
        step(xs[0])
    before = [state.clone() for state in cache.states]
    for wrong in (xs[1][:1], xs[1][..., 1:], None):
        with pytest.raises((TypeError, ValueError)):
            step(wrong)
        assert all(map(torch.equal, before, cache.states))
    assert step(xs[1]).shape == (2, 1, HIDDEN)


def test_states_that_became_others(device):
    """After a call that recorded a gradient, whose states are new tensors."""
    layer = make("gdn", torch.float32, device)
    with torch.no_grad():
        xs, cache, step, other = both(layer, device)
        step(xs[0]), layer(xs[0], cache=other)
    for each in (cache, other):
        layer(xs[1], cache=each)
    with torch.no_grad():
        assert torch.equal(step(xs[2]), layer(xs[2], cache=other))
        assert torch.equal(step(xs[3]), layer(xs[3], cache=other))


@torch.no_grad()
def test_what_cannot_be_captured_is_called(device):
    """A module that waits for the device."""

    class Waits(torch.nn.Module):
        def forward(self, x, cache):
            assert x.sum().item() == x.sum().item()
            return layer(x, cache=cache)

    layer = make("mamba2", torch.float32, device)
    xs, cache, _, other = both(layer, device)
    step = Step(Waits(), cache)
    for x in xs:
        assert torch.equal(step(x), layer(x, cache=other))
    assert step._graph is None and ("on a GPU alone" in step.reason or "captured" in step.reason)


@pytest.mark.parametrize(
    "mixers", [("gdn", "kda", "mamba2", "ema", "rwkv7", "rwkv7"), ("gdn", "attention")]
)
@torch.no_grad()
def test_a_model(mixers, device):
    """Steps as calls, and what is generated with them; attention has no captured step."""
    torch.manual_seed(0)
    model = LanguageModel(Config(mixers, **SIZES)).to(device)
    x = torch.randint(64, (2, 5), generator=torch.Generator().manual_seed(1)).to(device)
    caches = [model.make_cache(2) for _ in range(2)]
    logits, _ = (model(x, cache=cache)[:, -1:] for cache in caches)
    step, said = model.make_step(caches[0]), [x]
    for _ in range(5):
        said.append(logits.argmax(-1))
        logits = step(said[-1])
        assert torch.equal(logits, model(said[-1], cache=caches[1]))
    said.append(logits.argmax(-1))
    assert torch.equal(model.generate(x, 6), torch.cat(said, 1))
    assert (step._graph is not None) == (device.type == "cuda" and "attention" not in mixers)


@torch.no_grad()
def test_guesses_of_a_draft_as_steps(device):
    """The tokens of plain steps, where both models' calls are captured."""
    torch.manual_seed(0)
    model = LanguageModel(Config(("gdn", "mamba2"), **SIZES)).to(device)
    draft, x = copy.deepcopy(model), torch.randint(64, (1, 5), device=device)
    for p in draft.parameters():
        p += 0.3 * p.std() * torch.randn_like(p)
    assert torch.equal(model.generate(x, 24, draft=draft), model.generate(x, 24))


def test_the_benchmark(tmp_path, device):
    out, cases = tmp_path / "steps.json", few("gdn", more=[c for c in steps.OF if c != "gdn"])
    assert (
        steps.main(
            ["--device", device.type, "--out", str(out), "--batches", "2", "--cases", *cases]
        )
        == 0
    )
    rows = steps.tables.load(out)["rows"]
    assert len(rows) == 2 * len(cases) * len(steps.GUESSED)
    assert all(row["same_bits"] and row["ms"] > 0 for row in rows)
