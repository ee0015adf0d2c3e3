"""The declaration of an operator: what follows from it, and what it refuses."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from linattn_edu.ops.operator import Operator, like, widened

T, K = 70, 200


class Residuals(NamedTuple):
    """What the backward pass of the toy reads."""

    half: Tensor | None


def declare(name, **changes):
    """x, and a state with a token's sum added to it; a name that torch.library has once."""
    declared = {
        "options": {"scale": "float", "output_final_state": "bool", "chunk_size": "int"},
        "residuals": Residuals,
        "stages": lambda impl: impl,
        "packed": "chunks",
        "limited": "x",
    }
    return Operator(
        f"toy_{name}",
        {"x": "B T H K", "weight": "H?", "initial_state": "N H K?"},
        {
            "y": like("B T H K", "x", gradient="dy"),
            "final_state": widened("N H K", "x initial_state", gradient="dS"),
            "half": like("B T H K", "x"),
        },
        **declared | changes,
    )


toy, seen = declare("sum"), []


@toy.forward
def forward(stages, x, *, scale, chunk_size, output_final_state, initial_state, weight, keep):
    """y = scale weight x; S = S0 + the sum of x."""
    seen.append(("forward", stages, chunk_size, x.shape[1]))
    w = x.new_ones(x.shape[2]) if weight is None else weight
    S = x.float().sum(1) + (0 if initial_state is None else initial_state)
    return scale * w[:, None] * x, S if output_final_state else None, Residuals(x / 2)


@toy.backward
def backward(stages, dS, dy, x, weight, residuals, *, scale, chunk_size, initial_state):
    """In another order than the declaration's: names say what is what."""
    seen.append(("backward", stages, chunk_size, x.shape[1]))
    assert torch.equal(residuals.half, x / 2)
    w = x.new_ones(x.shape[2]) if weight is None else weight
    dx = scale * w[:, None] * dy + (0 if dS is None else dS[:, None])
    dweight = None if weight is None else (scale * dy * x).sum((0, 1, 3))
    return dx, dweight, torch.zeros_like(x[:, 0]) if dS is None else dS


def arguments(B=2, tokens=T, N=None, cu_seqlens=None, dtype=torch.float32):
    x = torch.randn(B, tokens, 2, K, dtype=dtype).requires_grad_()
    weight = torch.randn(2, requires_grad=True)
    state = torch.randn(N or B, 2, K, requires_grad=True)
    return (x, weight, state), (cu_seqlens, None, None, 0.5, True, 64)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_both_passes_have_chunks_of_one_length(impl):
    """Float32 heads of 200 leave a kernel no more than 32 tokens a chunk."""
    tensors, options = arguments()
    seen.clear()
    y, S, half = toy(*tensors, *options, impl, "", save="half")
    (y.sum() + S.sum()).backward()
    assert half is not None and tensors[0].grad.shape == tensors[0].shape
    length = 64 if impl == "reference" else 32
    assert seen == [("forward", impl, length, T), ("backward", impl, length, T)]


@pytest.mark.parametrize("lengths", [(3, 0, 5), (0, 0), (8,)], ids=str)
def test_packed_sequences_and_none(lengths):
    """Of the reference, each by itself; a state goes through a sequence without tokens."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    tensors, options = arguments(1, sum(lengths), len(lengths), cu_seqlens)
    y, S, _ = toy(*tensors, *options, "reference", "", save="half")
    dS = torch.randn_like(S)
    got = torch.autograd.grad((y, S), tensors, (torch.ones_like(y), dS), retain_graph=True)
    x, weight, state = tensors
    want_y = 0.5 * weight[:, None] * x
    parts = x[0].split(lengths)
    want_S = torch.stack([s + p.sum(0) for s, p in zip(state, parts, strict=True)])
    want = torch.autograd.grad((want_y, want_S), tensors, (torch.ones_like(y), dS))
    torch.testing.assert_close((y, S, *got), (want_y, want_S, *want))
    (only,) = torch.autograd.grad(S, state, dS, retain_graph=True)  # y has no gradient then
    torch.testing.assert_close(only, dS)


def test_what_was_not_asked_for_is_none():
    tensors, (*options, _, size) = arguments()
    with torch.no_grad():
        _, S, half = toy(*tensors, *options, False, size, "reference", "", save="half")
        assert S is None and half is None
        *_, half = toy(*tensors, *options, False, size, "reference", "half", save="half")
    assert half is not None


def test_undeclared_names_are_refused():
    operator = declare("refused")
    with pytest.raises(TypeError, match="toy_refused: nothing declares sclae of misspelt"):

        @operator.forward
        def misspelt(stages, x, sclae=1.0):
            """A default would hide it."""

    with pytest.raises(TypeError, match="must take x, for its chunks"):

        @operator.backward
        def no_length(stages, dy, weight):
            """The chunks' length hangs on x."""
