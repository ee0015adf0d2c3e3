"""causal_conv1d_update: against the package's definition in float64, its callers, refusals."""

import pytest
import torch
import torch.nn.functional as F
from grids import parametrize
from refusals import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn_edu import causal_conv1d_fn, causal_conv1d_update
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
B, D, W = 3, 6, 4


def tensors(T=1, S=W, dtype=torch.float32, device="cpu", slots=B):
    """The arguments by name as layers have them: x [B, D, T] is the transpose of rows."""
    generator = torch.Generator().manual_seed(10 * T + S)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = {"x": randn(B, T, D).mT, "conv_state": randn(slots, D, S)}
    return x | {"weight": randn(D, W), "bias": randn(D)}


def oracle(x, conv_state, weight, bias, silu, lengths=None):
    """y and the state in float64, token by token, a ring or not."""
    x, state, weight, bias = (t.double().cpu().clone() for t in (x, conv_state, weight, bias))
    T, S, y = x.shape[2], state.shape[2], torch.empty_like(x)
    for n in range(len(x)):
        for t in range(T):
            ring = lengths is not None
            newest = (int(lengths[n]) + t) % S if ring else S - 1
            taps = [state[n, :, (newest + (0 if ring else 1) - i) % S] for i in range(W - 1, 0, -1)]
            u = torch.stack([*taps, x[n, :, t]], 1)
            y[n, :, t] = (weight * u).sum(1) + bias
            if not ring:
                state[n] = state[n].roll(-1, 1)
            state[n, :, newest] = x[n, :, t]
    return F.silu(y) if silu else y, state


@parametrize(
    T=(0, 1, 2, 7), S=(W - 1, W, 9), ring=(False, True), dtype=DTYPES, impl=IMPLS,
    activation=(None, "silu", "swish"),
)  # fmt: skip
def test_update(T, S, ring, dtype, impl, activation, device):
    """T = 0: one token without an axis."""
    x = tensors(max(T, 1), S, dtype, device)
    lengths = torch.tensor([0, S, 5 * S + 2], device=device, dtype=torch.int32) if ring else None
    y, state = oracle(*x.values(), activation is not None, lengths)
    x, place = x | ({"x": x["x"][:, :, 0]} if T == 0 else {}), x["conv_state"]
    got = causal_conv1d_update(**x, activation=activation, cache_seqlens=lengths, impl=impl)
    assert got.shape == x["x"].shape and got.dtype == dtype
    assert_close("y", got, y[:, :, 0] if T == 0 else y, TOLERANCES[dtype])
    assert torch.equal(place.double().cpu(), state)


@impls
@pytest.mark.parametrize(("T", "S"), [(1, W - 1), (3, W + 1), (3, 8)])
def test_rejected_tokens_are_written_over(T, S, impl, device):
    """Of each T tokens from one on are kept; what was guessed after them is another token."""
    x = tensors(T=12, S=S, device=device)
    x["conv_state"].zero_()
    want = causal_conv1d_fn(x["x"], x["weight"], x["bias"], impl=impl)
    done, parts = 0, []
    for kept in (1, 2, 1, 3, 2, 1, 1, 1, *12 * (1,)):
        kept = min(kept, T, 12 - done)
        if not kept:
            break
        given = x["x"][:, :, done : done + T].clone()
        given[:, :, kept:] += 1
        count = torch.full((B,), done, dtype=torch.int32, device=device)
        y = causal_conv1d_update(**x | {"x": given}, cache_seqlens=count, impl=impl)
        parts.append(y[:, :, :kept])
        done += kept
    assert_close("y", torch.cat(parts, 2), want, 0 if impl == "triton" else 1e-6)


@impls
def test_by_position_after_a_prefill(impl, device):
    """As transformers calls it: the cache holds W tokens, and the slice of a projection comes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(B, 9, 2 * D + 3, generator=generator).to(device)
    x, rest = rows[:, :, 2 : 2 + D].mT, tensors(device=device)
    weight, bias = rest["weight"], rest["bias"]
    want = causal_conv1d_fn(x, weight, bias, activation="silu", impl=impl)
    state = x[:, :, 1:5].clone()
    for t in range(5, 9):
        y = causal_conv1d_update(x[:, :, t : t + 1], state, weight, bias, "silu", impl=impl)
        torch.testing.assert_close(
            y, want[:, :, t : t + 1], rtol=0, atol=0 if impl == "triton" else 1e-6
        )
    assert torch.equal(state, x[:, :, 5:])


@impls
def test_dtypes_may_differ_and_pages_of_either_order(impl, device):
    x = tensors(2, 5, torch.bfloat16, device) | {"bias": torch.randn(D, device=device)}
    pages = torch.full((B, 2, 5, D), 7.0, device=device)
    pages[:, 1] = x["conv_state"].mT.float()
    y, state = oracle(*x.values(), False)
    got = causal_conv1d_update(**x | {"conv_state": pages[:, 1].mT}, impl=impl)
    assert got.dtype == torch.bfloat16
    assert_close("y", got, y, TOLERANCES[torch.bfloat16])
    assert torch.equal(pages[:, 1].mT.double().cpu(), state) and (pages[:, 0] == 7).all()


@impls
def test_no_tokens(impl, device):
    x = tensors(device=device)
    before = x["conv_state"].clone()
    y = causal_conv1d_update(**x | {"x": torch.empty(B, D, 0, device=device)}, impl=impl)
    assert y.shape == (B, D, 0) and torch.equal(x["conv_state"], before)


def test_shapes_without_numbers():
    with FakeTensorMode():
        x = tensors(2, dtype=torch.bfloat16)
        y = causal_conv1d_update(**x)
    assert y.shape == (B, D, 2) and y.dtype == torch.bfloat16


new, slots = torch.zeros, torch.tensor
# beside what test_contract_in_place has of all steps
REFUSED = {
    "x": ({"x": new(3, 6, 1, 1)}, r"x must have 3 dimensions \[B, D, T\], got 4"),
    "state": ({"conv_state": new(3, 5, 4)}, r"conv_state must have shape \[B=3, D=6"),
    "short": ({"conv_state": new(3, 6, 2)}, "must have S >= 3 with weight's W=4, got"),
    "no slot": (
        {"conv_state": new(0, 6, 4), "conv_state_indices": slots([-1, -1, -1])},
        "conv_state must have a slot"
    ),
    "overlap": (
        {"conv_state": new(1, 6, 4).expand(3, -1, -1)}, "conv_state must be contiguous"
    ),
    "gaps": ({"conv_state": new(3, 6, 8)[..., ::2]}, "conv_state must be contiguous"),
    "shared": (
        (lambda S: {"conv_state": S, "x": S[:, :, :1]})(new(3, 6, 4)),
        "conv_state must not share memory"
    ),
    "bias": ({"bias": new(5)}, r"bias must have shape \[D=6\]"),
    "activation": ({"activation": "gelu"}, "activation must be None, 'silu' or"),
    "lengths": ({"cache_seqlens": slots([1, 2])}, r"cache_seqlens must have shape \["),
    "negative": ({"cache_seqlens": slots([1, 2, -1])}, "cache_seqlens must be >= 0"),
    "floats": ({"cache_seqlens": new(3)}, TypeError, "cache_seqlens must be a tensor of int32 or"),
    "device": ({"weight": new(6, 4, device="meta")}, "weight must be on cpu like x"),
    "impl": ({"impl": 1}, "impl must be one of"),
    "unknown": ({"pad_slot_id": -1}, TypeError, "unexpected keyword argument 'pad_slot_id'"),
}  # fmt: skip


test_refused_before_any_kernel = refuses(causal_conv1d_update, tensors, REFUSED)
