"""The layers in the calls of fla and mamba_ssm, against those here."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from linattn_edu import layers as ours
from linattn_edu.integrations import layers
from linattn_edu.testing import assert_close

HIDDEN, T = 24, 11
SIZES = {"hidden_size": HIDDEN, "head_dim": 8, "num_heads": 2, "layer_idx": 1}
DELTA = dict.fromkeys(("GatedDeltaNet", "GatedDeltaNet2", "KimiDeltaAttention"), SIZES)
MAMBA = {"d_model": HIDDEN, "d_state": 8, "headdim": 8, "chunk_size": 16, "layer_idx": 1}


def pair(name, arguments):
    """A layer in the call of another library, and the same here."""
    torch.manual_seed(0)
    theirs = getattr(layers, name)(**arguments, dtype=torch.float64, impl="reference")
    layer = getattr(ours, name)(**arguments, dtype=torch.float64, impl="reference")
    layer.load_state_dict(theirs.state_dict())
    return theirs, layer


def hidden(B):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, T, HIDDEN, generator=generator, dtype=torch.float64)


class Memory:
    """What fla's layers ask of its Cache."""

    def __init__(self):
        self.held, self.seen = [None], 0

    def __len__(self):
        return len(self.held)

    def __getitem__(self, i):
        return self.held[i]

    def update(self, layer_idx, offset, **states):
        if layer_idx == len(self.held):
            self.held.append(None)
        self.held[layer_idx], self.seen = states, self.seen + offset


@pytest.mark.parametrize("short_conv", (True, False))
@pytest.mark.parametrize("name", DELTA)
def test_layers_of_fla(name, short_conv):
    theirs, layer = pair(name, DELTA[name] | {"use_short_conv": short_conv})
    x, mask = hidden(2), torch.ones(2, T)
    mask[0, :3] = 0
    want = layer(x, mask)
    y, attentions, memory = theirs(x, mask, use_cache=True, output_attentions=False, unknown=1)
    assert torch.equal(y, want) and attentions is None and memory is None
    (dx,) = torch.autograd.grad(theirs(x.requires_grad_())[0].sum(), x)
    assert torch.equal(dx, torch.autograd.grad(layer(x).sum(), x)[0])
    with torch.no_grad():
        memory, parts = Memory(), []
        for a, b in ((0, 6), (6, 7), (7, T)):  # a mask of all tokens so far, as transformers has it
            y, _, same = theirs(x[:, a:b], mask[:, :b], memory, True)
            assert same is memory
            parts.append(y)
        assert_close("pieces", torch.cat(parts, 1), want, 1e-12)
        assert memory.seen == T and (memory[1]["conv_state"] is None) == (not short_conv)
        bounds, memory = torch.tensor([0, 4, T]), Memory()
        y, *_ = theirs(x[:1], past_key_values=memory, cu_seqlens=bounds)
        assert torch.equal(y, layer(x[:1], cu_seqlens=bounds))
        assert len(memory[1]["recurrent_state"]) == 2
    memory = Memory()
    parts = [theirs(x[:, a:b], past_key_values=memory)[0] for a, b in pairwise((0, 6, 7, T))]
    (again,) = torch.autograd.grad(torch.cat(parts, 1).sum(), x)
    assert_close("dx over pieces", again, dx, 1e-10)
    theirs.layer_idx = None
    with pytest.raises(ValueError, match=f"layer_idx of {name} must be given"):
        theirs(x, past_key_values=Memory())


def test_layer_of_mamba_ssm():
    theirs, layer = pair("Mamba2", MAMBA)
    x = hidden(2)
    want = layer(x)
    assert torch.equal(theirs(x), want)
    assert torch.equal(theirs(x.flatten(0, 1), T), want.flatten(0, 1))
    with torch.no_grad():
        params = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
        for again in range(2):  # the second time its states are those of the first, zeroed
            parts, params.seqlen_offset = [], 0
            for a, b in ((0, 6), (6, 7), (7, 8), (8, T)):
                parts.append(theirs(x[:, a:b], inference_params=params))
                params.seqlen_offset += b - a
            assert_close(f"with states, {again}", torch.cat(parts, 1), want, 1e-12)
    params, parts = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0), []
    x.requires_grad_()
    for a, b in ((0, 6), (6, 7), (7, T)):  # training over the pieces of a document
        parts.append(theirs(x[:, a:b], inference_params=params))
        params.seqlen_offset += b - a
    (dx,) = torch.autograd.grad(torch.cat(parts, 1).sum(), x)
    assert_close("dx over pieces", dx, torch.autograd.grad(layer(x).sum(), x)[0], 1e-10)
    one = SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    theirs(x[:, :6], inference_params=one)
    (held,) = one.key_value_memory_dict.values()
    for t in (6, 7):  # steps write states that training has left, too
        y, *_ = theirs.step(x[:, t : t + 1], *held)
        assert_close("a step after training", y, want[:, t : t + 1], 1e-12)
    with torch.no_grad():
        conv_state, state = theirs.allocate_inference_cache(2, 100)
        assert conv_state.shape == (2, *theirs.conv_shapes[0]) and not state.any()
        assert state.shape == (2, 6, 8, 8) and state.dtype == torch.float64
    steps = []
    for t in range(T):  # where a gradient would be recorded, too
        y, *same = theirs.step(x[:, t : t + 1], conv_state, state)
        assert same[0] is conv_state and same[1] is state and not y.requires_grad
        steps.append(y)
    assert_close("steps", torch.cat(steps, 1), want, 1e-12)
    assert theirs.allocate_inference_cache(1, 1, torch.bfloat16)[0].dtype == torch.bfloat16


def test_sequences_by_number_in_every_row():
    theirs, layer = pair("Mamba2", MAMBA)
    x = hidden(2)
    seq_idx = torch.tensor([[0] * 4 + [1] * 7, [5] * 1 + [2] * 9 + [5] * 1], dtype=torch.int32)
    y = theirs(x, seq_idx=seq_idx)
    for row, bounds in ((0, (0, 4, 11)), (1, (0, 1, 10, 11))):
        for a, b in pairwise(bounds):
            alone = layer(x[row : row + 1, a:b])
            assert_close("alone", y[row : row + 1, a:b], alone, 1e-12)


def test_refusals_of_the_layer_of_mamba_ssm():
    theirs, _ = pair("Mamba2", MAMBA | {"layer_idx": None})
    x, params = hidden(2), SimpleNamespace(key_value_memory_dict={}, seqlen_offset=0)
    seq_idx = torch.zeros(2, T, dtype=torch.int32)
    for given, error, match in (
        ({"inference_params": params}, ValueError, "layer_idx must be given"),
        ({"inference_params": params, "seq_idx": seq_idx}, ValueError, "seq_idx must be None with"),
        ({"seq_idx": seq_idx[:1]}, ValueError, r"seq_idx must have shape \[B, T\]"),
        ({"seq_idx": seq_idx.float()}, TypeError, "seq_idx must be a tensor of int32 or int64"),
        ({"seqlen": 4}, ValueError, "u must have 2 dimensions"),
    ):
        with pytest.raises(error, match=match):
            theirs(x, **given)
    with pytest.raises(ValueError, match=r"hidden_states must be \[B, 1, d_model\], one token"):
        theirs.step(x, *theirs.allocate_inference_cache(2, 1))
