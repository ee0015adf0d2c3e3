"""The small language model: one token after the other as all at once, alone as in a batch."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grids import few

from linattn_edu.cp import build_cp_context, simulate
from linattn_edu.models import MIXERS, Attention, Config, LanguageModel
from linattn_edu.recall import IGNORE, Recall, accuracy, learn, small_model
from linattn_edu.testing import assert_close

SMALL = Config(("gdn",), 64, 32, 2, 8, 16, 48)
EVERY = [*((name,) * 2 for name in MIXERS), ("gdn", "attention", "ema")]
each = pytest.mark.parametrize("mixers", EVERY, ids="+".join)


def model_of(mixers, **changes):
    torch.manual_seed(0)
    config = replace(SMALL, mixers=mixers, **changes)
    return LanguageModel(config, impl="reference").requires_grad_(False)


def tokens(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


@each
def test_with_a_cache_as_without(mixers):
    model, x = model_of(mixers), tokens(2, 12)
    cache = model.make_cache(2)
    parts = [x[:, :5], x[:, 5:9], x[:, 9:10], x[:, 10:11], x[:, 11:]]
    got = torch.cat([model(part, cache=cache) for part in parts], 1)
    assert_close("logits", got, model(x), 1e-5)


def test_one_sequence_over_ranks():
    """Logits, and the gradients that the ranks add up, are those of one."""
    model, x = model_of(("gdn", "kda", "mamba2", "ema")).double().requires_grad_(), tokens(1, 50)
    dy = torch.randn(1, 50, 64, dtype=torch.float64)
    want = model(x)
    want.backward(dy)
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()

    def rank(group):
        context = build_cp_context(torch.tensor([0, 50]), group)
        own = slice(*context.parts[0].tokens)
        y = model(x[:, own], cp_context=context)
        y.backward(dy[:, own])
        return y.detach()

    assert_close("logits", torch.cat(simulate(3, rank), 1), want, 1e-12)
    for p, dp in zip(model.parameters(), gradients, strict=True):
        assert_close("gradient", p.grad, dp, 1e-10)


@each
def test_left_padding_changes_nothing(mixers):
    model, x = model_of(mixers), tokens(2, 9)
    padded, mask = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.long)
    padded[0, 3:], padded[1, 7:] = x[0], x[1, :5]
    mask[0, 3:], mask[1, 7:] = 1, 1
    logits = model(padded, attention_mask=mask)
    assert_close("long", logits[:1, 3:], model(x[:1]), 1e-5)
    assert_close("short", logits[1:, 7:], model(x[1:, :5]), 1e-5)
    said = model.generate(padded, 6, attention_mask=mask)
    assert torch.equal(said[:1, 3:], model.generate(x[:1], 6))
    assert torch.equal(said[1:, 7:], model.generate(x[1:, :5], 6))


@each
def test_packed_as_alone(mixers):
    model, x = model_of(mixers), tokens(1, 14)
    packed = model(x, cu_seqlens=torch.tensor([0, 5, 6, 14]))
    alone = torch.cat([model(x[:, a:b]) for a, b in ((0, 5), (5, 6), (6, 14))], 1)
    assert_close("logits", packed, alone, 1e-5)


@each
def test_causal(mixers):
    model, x = model_of(mixers), tokens(1, 10)
    other = x.clone()
    other[:, 6] = (x[:, 6] + 1) % 64
    before, after = model(x), model(other)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_attention_is_softmax_over_rotated_keys():
    """Against the formula, and positions enter as differences alone."""
    from linattn_edu.models.attention import rotate

    torch.manual_seed(2)
    layer, x = Attention(16, 2, 8, impl="reference").double(), torch.randn(1, 7, 16).double()
    qkv, _ = layer.qkv_conv1d(layer.qkv_proj(x))
    q, k, v = qkv.view(1, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
    scores = rotate(q, 0) @ rotate(k, 0).mT / math.sqrt(8)
    later = rotate(q, 100) @ rotate(k, 100).mT / math.sqrt(8)
    assert_close("scores", later, scores, 1e-6)
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    o = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    assert_close("o", layer(x), layer.o_proj(o.transpose(1, 2).flatten(2)), 1e-10)


def test_all_parameters_learn():
    """After three steps: rwkv7 begins with zeros, one behind the other."""
    torch.manual_seed(0)
    mixers = (*MIXERS, "rwkv7")
    model, x = LanguageModel(replace(SMALL, mixers=mixers), impl="reference"), tokens(1, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x)[0], x[0])
        loss.backward()
        optimizer.step()
    still = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_generate_draws_from_the_softmax():
    model, x = model_of(("gdn",)), tokens(1, 5)
    drawn = [
        model.generate(x, 8, temperature=t, generator=torch.Generator().manual_seed(s))
        for t, s in ((1.0, 3), (1.0, 3), (1.0, 4), (1e-6, 5))
    ]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[3], model.generate(x, 8))
    greedy = x
    for _ in range(8):
        greedy = torch.cat([greedy, model(greedy)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(x, 8), greedy)
    assert torch.equal(model.generate(x, 0), x)


@pytest.mark.parametrize("guesses", few(4, more=(1,)))
def test_guesses_of_a_draft(guesses):
    """The same tokens, of rows with padding too; fewer calls where guesses are right."""
    mixers, x, calls = ("gdn", "kda", "mamba2", "attention"), tokens(2, 9), []
    model, draft, mask = model_of(mixers), model_of(mixers), torch.ones_like(x)
    mask[0, :4] = 0
    for p in draft.parameters():
        p += 0.3 * p.std() * torch.randn(p.shape, generator=torch.Generator().manual_seed(2))
    want = model.generate(x, 11, attention_mask=mask)
    model.register_forward_pre_hook(lambda model, args: calls.append(args[0].shape[1]))
    how = {"attention_mask": mask, "guesses": guesses}
    least = 1 + math.ceil(10 / (1 + guesses))
    for other, cold in ((draft, 0.0), (draft, 1e-6), (model_of(mixers), 0.0)):
        calls.clear()
        assert torch.equal(model.generate(x, 11, cold, **how, draft=other), want)
        assert (len(calls) > least) == (other is draft) and max(calls[1:]) == guesses + 1
    for n in (0, 1, 2):
        assert torch.equal(model.generate(x, n, **how, draft=draft), want[:, : 9 + n])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mixers": ()}, "mixers must be names among gdn"),
        ({"mixers": ("gdn", "rwkv")}, "got 'rwkv'"),
        ({"width": 0}, "width must be an integer >= 1, got 0"),
        ({"width": 32.0}, "width must be an integer >= 1, got 32.0"),
        ({"hidden": -1}, "hidden must be an integer of at least 0, got -1"),
        ({"hidden": None}, "hidden must be an integer of at least 0, got None"),
        ({"mixers": ("attention",), "key_dim": 7}, "key_dim must be even"),
        ({"mixers": ("rwkv7",), "heads": 3}, "heads must divide width=32 for rwkv7, got 3"),
        ({"mixers": ("mamba2",), "value_dim": 12}, "multiple of width=32 for mamba2, got 2 [*] 12"),
    ],
)
def test_a_config_that_makes_no_model(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompt": torch.zeros(3, dtype=torch.long)}, r"prompt must be \[B, T\]"),
        ({"prompt": torch.zeros(1, 0, dtype=torch.long)}, "T > 0"),
        ({"new_tokens": -1}, "new_tokens must be at least 0, got -1"),
        ({"temperature": -1.0}, "temperature must be finite"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"prompt": tokens(1, 3) + 64}, "prompt must be in 0 to 63"),
        ({"attention_mask": torch.zeros(1, 3)}, "must end with a token in each row"),
        ({"draft": model_of(("gdn",))}, "the model must have layers with a ring, .* got ema"),
        ({"draft": model_of(("gdn",)), "guesses": 64}, "guesses must be at most 63, got 64"),
    ],
)
def test_generate_refuses(arguments, says):
    with pytest.raises(ValueError, match=says):
        model_of(("ema",)).generate(**{"prompt": tokens(1, 3), "new_tokens": 2, **arguments})


@pytest.mark.parametrize("wrong", [1.5, "3", None, True])
def test_generate_refuses_what_is_no_number_of_tokens(wrong):
    with pytest.raises(TypeError, match=f"new_tokens must be an integer, got {wrong!r}"):
        model_of(("ema",)).generate(tokens(1, 3), wrong)


@each
def test_weights_that_come_when_a_module_is_called(mixers):
    """As accelerate offloads them: between the calls of their module they are on meta."""
    model, x = model_of(mixers), tokens(2, 6)
    want, said = model(x), model.generate(x, 4)

    def bring(module, args, kwargs):
        for name, p in away[module].items():
            module._parameters[name] = p

    def take(module, args, kwargs=None, out=None):
        for name, p in away[module].items():
            module._parameters[name] = torch.nn.Parameter(p.to("meta"), requires_grad=False)

    own = {m: dict(m.named_parameters(recurse=False)) for m in model.modules()}
    away = {m: parameters for m, parameters in own.items() if parameters}
    for module in away:
        module.register_forward_pre_hook(bring, with_kwargs=True)
        module.register_forward_hook(take)
        module._hf_hook = SimpleNamespace(execution_device="cpu")
        take(module, ())
    assert torch.equal(model(x), want)
    assert torch.equal(model.generate(x, 4), said)


def dtypes(cache):
    """Of a layer's cache: of its convolutions, of its state."""
    states = getattr(cache, "states", None) or (cache.conv_state,)
    return [(x.dtype, x.device.type) for x in states]


@each
def test_where_a_cache_is_made(mixers):
    model, x = model_of(mixers), tokens(2, 3)
    want = [dtypes(c) for c in model.make_cache(2)]
    for block in model.blocks:  # packed weights, of bytes or under other names
        first = "qkv_proj" if hasattr(block.mixer, "qkv_proj") else None
        projection = getattr(block.mixer, first) if first else block.mixer._projection()
        byte = torch.nn.Parameter(projection.weight.to(torch.uint8), requires_grad=False)
        projection.weight = byte
        assert [dtypes(c) for c in model.make_cache(2)] == want
        del projection.weight
        projection.qweight = byte
        assert [dtypes(c) for c in model.make_cache(2)] == want
    cache = model.make_cache(2, "meta", torch.bfloat16)
    assert all(kind[1] == "meta" for c in cache for kind in dtypes(c))
    assert all(dtypes(c)[0][0] == torch.bfloat16 or "ema" in mixers for c in cache)
    model = model_of(mixers)
    assert torch.equal(model.generate(x, 2, device="cpu", dtype=torch.float32),
                       model.generate(x, 2))  # fmt: skip
    for size, error in (("2", TypeError), (0, ValueError)):
        with pytest.raises(error, match="batch_size must be"):
            model.make_cache(size)


def test_training_over_pieces_with_attention():
    """Gradients over the pieces of a sequence; none across detach, nor a step without one."""
    layer, x = Attention(16, 2, 8, impl="reference").double(), torch.randn(1, 7, 16).double()
    x.requires_grad_()
    cache = layer.make_cache(1)
    y = torch.cat([layer(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 7))], 1)
    (want,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert_close("dx", torch.autograd.grad(y.square().sum(), x)[0], want, 1e-10)

    def step(cache):
        with torch.no_grad():
            layer(x[:, 3:4], cache=cache)

    for end in (lambda cache: cache.detach(), step):
        cache = layer.make_cache(1)
        layer(x[:, :3], cache=cache)
        end(cache)
        (dx,) = torch.autograd.grad(layer(x[:, 4:], cache=cache).square().sum(), x)
        assert not dx[:, :4].any()
        assert dx[:, 4:].any()


@pytest.mark.parametrize("mixer", ["gdn", "attention"])
def test_a_cache_of_another_batch_is_refused_and_unchanged(mixer):
    model, x = model_of((mixer,)), tokens(2, 4)
    cache = model.make_cache(2)
    model(x, cache=cache)
    with pytest.raises(ValueError, match="cache"):
        model(x[:1], cache=cache)
    again = model.make_cache(2)
    model(x, cache=again)
    step = tokens(2, 1)
    assert torch.equal(model(step, cache=cache), model(step, cache=again))


def test_a_cache_that_is_not_the_model_s_is_refused_and_unchanged():
    model, x = model_of(("gdn", "attention")), tokens(1, 4)
    cache = model.make_cache(1)
    for given, match in (
        ({"cache": cache[:1]}, "of 2 layers, got 1"),
        ({"cache": cache, "cu_seqlens": torch.tensor([0, 4])}, "None with a cache of attention"),
    ):
        with pytest.raises(ValueError, match=match):
            model(x, **given)
        assert not any(state.any() for state in cache[0].states) and not cache[1].length


def test_attention_takes_left_padding_alone():
    with pytest.raises(ValueError, match="zero after a one"):
        model_of(("attention",))(tokens(1, 3), attention_mask=torch.tensor([[1, 1, 0]]))


def test_attention_is_not_cut_over_ranks():
    """Refused before the layers in front of it have talked to other ranks."""
    context = build_cp_context(torch.tensor([0, 3]), None)
    model = model_of(("gdn", "attention"))
    for f, x in ((model, tokens(1, 3)), (model.blocks[1].mixer, torch.zeros(1, 3, 32))):
        with pytest.raises(ValueError, match="cp_context must be None: attention"):
            f(x, cp_context=context)


def test_the_coldest_draw_is_the_most_likely_token():
    model, x = model_of(("ema",)), tokens(2, 5)
    for temperature in (1e-40, 1e-46, 5e-324):  # which float32 holds, or not
        assert torch.equal(model.generate(x, 4, temperature=temperature), model.generate(x, 4))


def test_first_numbers_of_the_embedding():
    model = model_of(("ema",))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert model.embedding.weight.std() < 0.03


# ---- associative recall


def test_recall_asks_for_what_it_told():
    task = Recall(5, 24, 32)
    inputs, targets = task.batch(16, seed=0, step=3)
    assert torch.equal(inputs, task.batch(16, 0, 3)[0])
    assert not torch.equal(inputs, task.batch(16, 0, 4)[0])
    assert not torch.equal(inputs, task.batch(16, 1, 3)[0])
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        told = dict(zip(row[0:10:2], row[1:10:2], strict=True))
        assert len(told) == 5 and all(0 < k < 16 <= v < 32 for k, v in told.items())
        asked = [t for t in range(24) if wanted[t] != IGNORE]
        assert min(asked) >= 10 and sorted(row[t] for t in asked) == sorted(told)
        assert all(wanted[t] == told[row[t]] for t in asked)
        assert all(row[t] == 0 for t in range(10, 24) if t not in asked)


def test_recall_asks_for_what_it_told_last():
    inputs, targets = Recall(3, 24, 32, told=3).batch(16, seed=0, step=3)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        times = [row[start : start + 6] for start in (0, 6, 12)]
        assert len({tuple(sorted(pairs[::2])) for pairs in times}) == 1
        assert all(0 < k < 16 for k in row[0:18:2]) and all(16 <= v < 32 for v in row[1:18:2])
        told = dict(zip(times[2][::2], times[2][1::2], strict=True))
        assert len(told) == 3
        assert sorted(row[t] for t in range(24) if wanted[t] != IGNORE) == sorted(told)
        assert all(w in (IGNORE, told.get(row[t])) for t, w in enumerate(wanted))
    orders = {tuple(times) for times in inputs[:, 0:18:2].tolist()}
    assert any(o[:3] != o[6:] for o in orders)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 9, 8), "length must be at least 3 times pairs"),
        ((4, 11, 16), "got 11 for 4"),
        ((4, 12, 9), "vocabulary must be even"),
        ((4, 12, 8), "at least 10 for 4 pairs, got 8"),
        ((4, 19, 16, 2), "at least 5 times pairs, got 19 for 4"),
        ((4, 20, 16, 0), "told must be at least 1, got 0"),
    ],
)
def test_recall_that_cannot_be_asked(sizes, says):
    with pytest.raises(ValueError, match=says):
        Recall(*sizes)


@pytest.mark.parametrize("mixer", few("gdn", more=("rwkv7",)))
def test_a_small_model_learns_to_recall(mixer):
    task = Recall(2, 8, 16)
    model, losses = small_model(mixer, 8, 16, seed=0, impl="reference"), []
    assert accuracy(model, task) < 0.3
    learn(model, [task], 80, 2e-2, batch=32, report=lambda step, loss: losses.append(loss))
    assert len(losses) == 80 and losses[-1] < 0.2 * losses[0]
    assert accuracy(model, task) > 0.9
