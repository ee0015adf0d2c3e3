"""Assisted generation of transformers' models: guesses are taken back through rings."""

import copy
import pickle

import pytest
import torch
import transformers
from grids import few
from integrations import models

from linattn_edu.integrations import rings
from linattn_edu.integrations.transformers import use
from linattn_edu.testing import assert_close

SERVED = [name for name in models.WITH_HEAD if "mamba" not in name]
FEW = ("qwen3_next", "kimi_linear", "falcon_h1")  # a rule each, and both kinds of layers in one
IDS = torch.randint(2, 95, (1, 60), generator=torch.Generator().manual_seed(0))
NEW, TOLERANCE = 18, 1e-5
ABLE = hasattr(transformers.Cache, "get_recurrent_state")
served = pytest.mark.skipif(
    not ABLE, reason="needs transformers 5.21 or later, with Cache.get_recurrent_state"
)
OPTIONS = {
    "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
    "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip


@pytest.fixture
def taken_back(monkeypatch):
    """How many guesses each round of the model took back, and its assistant."""
    counts, crop = [], rings.RingedLayer.crop

    def counting(layer, n):
        counts.append(-n)
        crop(layer, n)

    monkeypatch.setattr(rings.RingedLayer, "crop", counting)
    return counts


def assistant(name, noise=0.05):
    """A model whose guesses are right now and then."""
    guessing = copy.deepcopy(models.build(name))
    draw = torch.Generator().manual_seed(1)
    for x in guessing.parameters():
        x.data += noise * x.std().nan_to_num() * torch.randn(x.shape, generator=draw)
    guessing.generation_config.num_assistant_tokens = 5
    guessing.generation_config.assistant_confidence_threshold = 0
    return guessing


def assert_equal(got, wanted):
    assert torch.equal(got.sequences, wanted.sequences)
    for step, (x, y) in enumerate(zip(got.logits, wanted.logits, strict=True)):
        assert_close(f"logits of step {step}", x, y, TOLERANCE)


@served
@pytest.mark.parametrize("name", few(*FEW, more=[n for n in SERVED if n not in FEW]))
def test_guesses_that_are_right_now_and_then(name, taken_back):
    """Logits and all: over folds of rings, with the prompt longer than what may be taken back."""
    model, guessing = models.build(name), assistant(name)
    wanted = model.generate(IDS, **OPTIONS)
    with use(model, impl="reference"), use(guessing, impl="reference"):
        got = model.generate(IDS, **OPTIONS, assistant_model=guessing)
    assert_equal(got, wanted)
    assert sum(taken_back) > 0 and taken_back.count(5) < len(taken_back)


@served
@pytest.mark.parametrize("name", FEW)
def test_guesses_of_the_model_itself_and_of_the_text(name, taken_back):
    model, text = models.build(name), IDS[:, :20].repeat(1, 3)
    with use(model, impl="reference"):
        for ids, guesses in ((IDS, {"assistant_model": model}),
                             (text, {"prompt_lookup_num_tokens": 4})):  # fmt: skip
            wanted = model.generate(ids, **OPTIONS)
            taken_back.clear()
            assert_equal(model.generate(ids, **OPTIONS, **guesses), wanted)
            assert taken_back and any(taken_back) == ("assistant_model" not in guesses)


@served
@pytest.mark.parametrize("name", FEW)
def test_an_end_among_guesses_and_the_cache_after_it(name):
    """The cache goes on with other tokens, also a copy, and has the states of transformers' own."""
    model = models.build(name)
    wanted = model.generate(IDS, **OPTIONS)
    end = wanted.sequences[0, 67]
    stop = OPTIONS | {"eos_token_id": end.item()}
    wanted = model.generate(IDS, **stop)
    seen = torch.cat([wanted.sequences[:, :-1], IDS[:, :11]], 1)
    more = model.generate(seen, **OPTIONS)
    with use(model, impl="reference"):
        got = model.generate(IDS, **stop, assistant_model=model)
        assert_equal(got, wanted)
        cache = got.past_key_values
        assert len(wanted.logits) < NEW and cache.get_seq_length() == len(wanted.sequences[0]) - 1
        copies = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
        for one in (cache, *copies):
            assert_equal(model.generate(seen, **OPTIONS, past_key_values=one), more)
    for one in copies:
        assert not any(isinstance(layer, rings.RingedLayer) for layer in one.layers)


@served
@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_as_many_as_may_be_are_taken_back(name):
    """Of steps of one token, over folds of rings, and of one call that is longer."""
    model = models.build(name)
    with use(model, impl="reference"):
        for calls in ((5, *[1] * 35), (10, 30)):
            cache = transformers.DynamicCache(config=model.config)
            rings.give_rings(cache, "reference")
            cache.activate_past_recording()
            for part in IDS[:, :40].split(calls, 1):
                model(part, past_key_values=cache)
            cache.crop(-rings.GUESSES)
            y = model(IDS[:, 50:], past_key_values=cache).logits
            whole = torch.cat([IDS[:, : 40 - rings.GUESSES], IDS[:, 50:]], 1)
            assert_close(f"logits after {calls}", y, model(whole).logits[:, -10:], TOLERANCE)


@served
@pytest.mark.parametrize("name", (*FEW, "mamba2"))
def test_steps_that_do_not_write_their_states(name, monkeypatch):
    """As on a GPU, in batches with padding, among beams, and after a cache of the user's."""
    if name == "falcon_h1" and transformers.__version__ < "5.23":
        pytest.skip("before 5.23 its gated norm drops the axis of tokens when there is one")
    monkeypatch.setattr(rings, "pays", lambda cache, model: True)
    steps, take = [], rings.RingedLayer.take
    monkeypatch.setattr(rings.RingedLayer, "take", lambda *x: steps.append(x[2]) or take(*x))
    model, ids = models.build(name), IDS.view(2, 30)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    plain = OPTIONS | {
        "attention_mask": mask, "return_dict_in_generate": False, "output_logits": False,
    }  # fmt: skip
    layers = sum(hasattr(m, "A_log") for m in model.modules())
    for beams in (1, 3):
        wanted = model.generate(ids, **plain, num_beams=beams)
        with use(model, impl="reference"):
            steps.clear()
            assert torch.equal(model.generate(ids, **plain, num_beams=beams), wanted)
            assert steps == [1] * layers * (NEW - 1)


@served
@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_what_a_cache_with_rings_refuses(name):
    model = models.build(name)
    with use(model, impl="reference"):
        cache = model.generate(IDS, **OPTIONS, assistant_model=model).past_key_values
        with pytest.raises(ValueError, match="at most 24 tokens can be taken back, got 25: let"):
            cache.crop(-25)
        with pytest.raises(ValueError, match="a cache with rings takes no packed sequences"):
            model(IDS, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 60]))
        whole = copy.deepcopy(cache)
    for more in (IDS, IDS[:, :1]):
        with pytest.raises(AttributeError, match=r"which use\(model\) knows: go on in use, or"):
            model(more, past_key_values=cache)
    model(IDS, past_key_values=whole)


def test_a_model_whose_cache_transformers_does_not_find():
    with use(models.build("mamba2")), pytest.raises(ValueError, match="assisted generation is not"):
        models.build("mamba2").generate(IDS, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", FEW)
def test_a_transformers_whose_models_do_not_ask_the_cache(name, monkeypatch):
    """Its refusal stays, and says what is needed; plain generation has no rings."""
    model = copy.deepcopy(models.build(name))
    wanted = model.generate(IDS, **OPTIONS)
    monkeypatch.setattr(rings, "pays", lambda cache, model: True)
    with monkeypatch.context() as older:
        older.delattr(transformers.Cache, "get_recurrent_state", raising=False)
        undo = use(model, impl="reference")
    with undo:
        for guesses in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 3}):
            with pytest.raises(ValueError, match=r"needs transformers 5\.21 or later, whose"):
                model.generate(IDS, **OPTIONS, **guesses)
        got = model.generate(IDS, **OPTIONS)
    assert_equal(got, wanted)
    assert not any(isinstance(layer, rings.RingedLayer) for layer in got.past_key_values.layers)
    assert not {rings.PREPARE, rings.VALIDATE, "_is_stateful"} & vars(model).keys()


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_a_model_that_reads_states_beside_their_rings(name):
    model = models.build(name)
    cache = transformers.DynamicCache(config=model.config)
    with use(model, impl="reference"):
        model(IDS[:, :9], past_key_values=cache)
        rings.give_rings(cache, "reference")
        cache.activate_past_recording()
        with pytest.raises(ValueError, match="at most 24 tokens can be taken back, got 1: "):
            cache.crop(-1)  # of a prompt that is in the states
        cache.get_recurrent_state = lambda i, state_idx: cache.layers[i].recurrent_states[state_idx]
        with pytest.raises(ValueError, match=r"a model must get .* got a Tensor computed beside"):
            model(IDS[:, 9:14], past_key_values=cache)


@served
@pytest.mark.parametrize("name", FEW)
def test_a_step_whose_gradient_is_recorded_has_no_ring(name):
    model = models.build(name)
    with use(model, impl="reference"):
        whole = model.generate(IDS, **OPTIONS, assistant_model=model)
        seen = torch.cat([whole.sequences, IDS[:, :4]], 1)
        y = model(seen[:, -5:], past_key_values=whole.past_key_values).logits
        assert y.requires_grad
        assert_close("logits", y, model(seen).logits[:, -5:], TOLERANCE)


@served
@pytest.mark.parametrize("name", few(*FEW[1:], more=FEW[:1]))
def test_the_kernels(name, device, monkeypatch):
    """Of assisted and plain generation, which has rings on a GPU."""
    monkeypatch.setattr(rings, "pays", lambda cache, model: True)
    model, guessing = (copy.deepcopy(m).to(device) for m in (models.build(name), assistant(name)))
    ids, short = IDS[:, :9].to(device), OPTIONS | {"max_new_tokens": 4}
    wanted = model.generate(ids, **short)
    with use(model, impl="triton"), use(guessing, impl="triton"):
        assert_equal(model.generate(ids, **short, assistant_model=guessing), wanted)
        plain = short | {"return_dict_in_generate": False, "output_logits": False}
        assert torch.equal(model.generate(ids, **plain), wanted.sequences)
