"""Models of transformers on our operators, against transformers' own PyTorch."""

import copy
import functools
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from integrations import models
from torch import Tensor

from linattn_edu.integrations.transformers import use
from linattn_edu.testing import assert_close

transformers.logging.set_verbosity_error()  # that it has no kernels
ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
every_model = pytest.mark.parametrize("name", models.NAMES)


def tokens(*shape: int) -> Tensor:
    return torch.randint(
        2, models.VOCABULARY - 1, shape, generator=torch.Generator().manual_seed(0)
    )


def gradients(model: torch.nn.Module, out: Tensor) -> dict[str, Tensor]:
    """Of a sum of the logits with random weights."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad((out * weight).sum(), list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        assert_close(name, x, wanted[name], TOLERANCE)


def logits(model: torch.nn.Module, ids: Tensor, **given) -> Tensor:
    return model(input_ids=ids, use_cache=False, **given)[0]


def attributes(model: torch.nn.Module) -> dict:
    """All that a use may touch: the model's and its layers' attributes, and its files' names."""
    owners = [*model.modules(), *{sys.modules[type(m).__module__] for m in model.modules()}]
    return {id(owner): dict(vars(owner)) for owner in owners}


@every_model
def test_logits_and_gradients(name):
    model, ids = models.build(name), tokens(2, 100)
    model.train()  # Mamba-2's layers call another function then
    wanted = logits(model, ids)
    of_wanted = gradients(model, wanted)
    with use(model):
        got = logits(model, ids)
        of_got = gradients(model, got)
    model.eval()
    assert_close("logits", got, wanted, TOLERANCE)
    assert_same(of_got, of_wanted)


@every_model
def test_generation_with_left_padding(name):
    if not hasattr(models.build(name), "generate"):
        pytest.skip("a model without a head")
    model, ids = models.build(name), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    options = {
        "attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0,
        "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    wanted = model.generate(ids, **options)
    with use(model):
        got = model.generate(ids, **options)
    assert torch.equal(got.sequences, wanted.sequences)
    for step, x, y in zip(range(8), got.logits, wanted.logits, strict=True):
        assert_close(f"logits of step {step}", x, y, TOLERANCE)


LENGTHS = (37, 70, 1, 3, 64)
SEQUENCES = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None]
PACKED = {
    "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
    "cu_seq_lens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int(),
    "seq_idx": SEQUENCES.int(),
}
# Boundaries come under one name, the other, or both.
NAMED = {"a": ("cu_seq_lens_q",), "b": ("seq_idx",), "c": ("cu_seq_lens_q", "seq_idx")}


def softmax_apart(name: str) -> dict:
    """What keeps sequences apart in the layers with softmax attention too."""
    if name != "granitemoehybrid":
        return {"position_ids": PACKED["position_ids"]}
    # its mask does not look at positions: only flash attention keeps sequences apart, or a mask
    apart = (SEQUENCES.mT == SEQUENCES).tril()
    mask = torch.zeros(apart.shape).masked_fill(~apart, -1e30)[None, None]
    return {"attention_mask": {"full_attention": mask, "linear_attention": None}}


@functools.cache
def packable(name: str) -> torch.nn.Module:
    """Glm5-Next's indexed attention knows no boundaries: a model without it."""
    if name == "glm5_next":
        return models.build(name, layer_types=("linear_attention", "linear_attention"))
    return models.build(name)


@every_model
def test_packed_sequences_are_as_alone(name):
    model, ids = packable(name), tokens(1, sum(LENGTHS))
    more = softmax_apart(name)
    with use(model):
        alone = torch.cat([logits(model, part) for part in ids.split(LENGTHS, 1)], 1)
        wanted = gradients(model, alone)
        for names in NAMED.values():
            got = logits(model, ids, **more, **{key: PACKED[key] for key in names})
            assert_close(f"logits, given {names}", got, alone, TOLERANCE)
        assert_same(gradients(model, got), wanted)
        # the test sees sequences that run into each other
        mixed = logits(model, ids, **more)
        with pytest.raises(AssertionError, match="exceeds"):
            assert_close("logits without boundaries", mixed, alone, 0.05)
