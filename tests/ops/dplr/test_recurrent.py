"""The general delta rule under its four names: the rule, and what it contains.

What every operator over sequences keeps is asked in test_contract*.py.
"""

import pytest
import torch
from dplr.dplr_checks import NAMES, exact, inputs, tolerance
from gdn_checks import DTYPES, check, cotangents, run
from grids import parametrize
from refusals import refuses

from linattn_edu import (
    fused_mul_recurrent_rwkv7,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_kda,
    fused_recurrent_rwkv7,
)
from linattn_edu.testing import assert_close, kda_inputs

pytestmark = pytest.mark.usefixtures("poison")
IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
ENDS = {"output_final_state": True}


def of_rwkv7(x):
    """The same tensors under RWKV-7's names."""
    return {{"q": "r", "gk": "w"}.get(n, n): t for n, t in x.items()}


@parametrize(kind=({}, {"strong": True}, {"alike": 5.0}), dtype=DTYPES, impl=IMPLS)
def test_it_is_the_rule(kind, dtype, impl, device):
    """Outputs and all gradients; with gates that are shut, and with removal keys alike."""
    x = inputs(2, 9, 2, 16, 12, dtype, device, **kind)
    do, dht = cotangents(x)
    got = run(x, do, dht, fused_recurrent_dplr_delta_rule, **ENDS, impl=impl)
    check(got, exact(x, do, dht), dtype, tolerance=tolerance)


@impls
def test_packed_sequences_in_reverse(impl, device):
    """Each from its last token, an empty one and padding behind the last among them."""
    x = inputs(1, 12, 2, 16, 12, torch.float32, device, N=3)
    bounds = torch.tensor([0, 3, 3, 10], device=device)
    do, dht = cotangents(x, 3)
    options = {"cu_seqlens": bounds, "reverse": True}
    got = run(x, do, dht, fused_recurrent_dplr_delta_rule, **ENDS, impl=impl, **options)
    short = {n: t[:, :10] if n in NAMES else t for n, t in x.items()}
    want = exact(short, do[:, :10], dht, **options)
    for n, t in got.items():
        if n not in ("ht", "dinitial_state"):
            assert not t[:, 10:].any(), n
            got[n] = t[:, :10]
    check(got, want, torch.float32, tolerance=tolerance)


@impls
def test_kimi_delta_attention_is_one(impl, device):
    """k = beta c, b = c, a = -beta c e^g."""
    x = kda_inputs(1, 9, 2, 2, 16, 12, device=device, initial_state=True)
    want, state = fused_recurrent_kda(**x.asdict(), **ENDS, impl=impl)
    k = x.beta[..., None] * x.k
    got, S = fused_recurrent_dplr_delta_rule(
        x.q, k, x.v, -k * x.g.exp(), x.k, x.g, initial_state=x.initial_state, **ENDS, impl=impl
    )
    assert_close("o", got, want, 1e-6)
    assert_close("S", S, state, 1e-6)


@impls
def test_without_rank_one_it_is_gated_linear_attention(impl, device):
    x = inputs(1, 9, 2, 16, 12, torch.float32, device)
    x["a"] = torch.zeros_like(x["a"])
    got, _ = fused_recurrent_dplr_delta_rule(**x, impl=impl)
    S, want = x["initial_state"], []
    for t in range(9):
        S = x["gk"][:, t, ..., None].exp() * S + x["k"][:, t, ..., None] * x["v"][:, t, :, None]
        want.append(0.25 * (x["q"][:, t, :, None] @ S).squeeze(-2))
    assert_close("o", got, torch.stack(want, 1), 1e-6)


@impls
def test_rwkv7_is_the_rule_by_its_names(impl, device):
    x = inputs(1, 9, 2, 16, 12, torch.float32, device)
    got = fused_recurrent_rwkv7(**of_rwkv7(x), impl=impl)
    want = fused_recurrent_dplr_delta_rule(**x, **ENDS, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    o, S = fused_recurrent_rwkv7(**of_rwkv7(x), scale=1.0, output_final_state=False, impl=impl)
    assert S is None
    assert_close("o", o, 4 * got[0], 1e-6)


@impls
def test_rwkv7_of_a_layers_numbers(impl, device):
    """a = -kk and b = kk a; without a final state and with a scale of 1 unless asked."""
    x = of_rwkv7(inputs(1, 9, 2, 16, 12, torch.float32, device))
    kk, rate = -x.pop("a"), torch.rand(1, 9, 2, 16, device=device)
    x["b"] = kk * rate
    want = fused_recurrent_rwkv7(**x, a=-kk, scale=1.0, impl=impl)
    del x["b"]
    got = fused_mul_recurrent_rwkv7(**x, kk=kk, a=rate, **ENDS, impl=impl)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert fused_mul_recurrent_rwkv7(**x, kk=kk, a=rate, impl=impl)[1] is None
    kk = kk.requires_grad_()
    o, _ = fused_mul_recurrent_rwkv7(**x, kk=kk, a=rate, reverse=True, impl=impl)
    (got,) = torch.autograd.grad(o.sum(), kk)
    a, b = (-kk).detach().requires_grad_(), (kk * rate).detach().requires_grad_()
    x = {{"r": "q", "w": "gk"}.get(n, n): t for n, t in x.items()}
    o, _ = fused_recurrent_dplr_delta_rule(**x, a=a, b=b, scale=1.0, reverse=True, impl=impl)
    da, db = torch.autograd.grad(o.sum(), (a, b))
    assert_close("dkk", got, rate * db - da, 1e-6)


def test_wide_heads(device):
    """K beyond what a chunk takes."""
    x = inputs(1, 3, 1, 300, 40, torch.float32, device)
    do, dht = cotangents(x)
    got = run(x, do, dht, fused_recurrent_dplr_delta_rule, **ENDS, impl="triton")
    check(got, exact(x, do, dht), torch.float32, tolerance=tolerance)


def valid():
    return inputs(1, 3, 2, 8, 6, torch.float32)


test_refused = refuses(
    fused_recurrent_dplr_delta_rule, valid,
    {
        "heads of v": ({"v": torch.randn(1, 3, 4, 6)},
                       r"v must have shape \[B=1, T=3, H=2, V\], got \(1, 3, 4, 6\): H=2 is that"),
        "wide": ({"a": torch.randn(1, 3, 2, 9)}, "a must have shape .*K=8"),
        "dtype": ({"b": torch.randn(1, 3, 2, 8).half()}, TypeError, "b must be torch.float32"),
        "a gate for the head": ({"gk": -torch.rand(1, 3, 2)}, "gk must have 4 dim"),
        "reverse": ({"reverse": 2}, TypeError, "reverse must be True or False, got 2"),
    },
)  # fmt: skip
test_refused_by_its_names = refuses(
    fused_recurrent_rwkv7, lambda: of_rwkv7(valid()),
    {
        "head_first": ({"head_first": True}, "head_first is not supported"),
        "decay": ({"w": torch.ones(1, 3, 2, 8)}, "w must be a log decay, <= 0"),
        "r": ({"r": torch.randn(1, 3, 2)}, "r must have 4 dimensions"),
        "K": ({n: torch.randn(1, 3, 2, 513) for n in "rkab"}
              | {"w": -torch.rand(1, 3, 2, 513), "initial_state": None},
              "r and k must have K <= 512, got K=513"),
    },
)  # fmt: skip


test_refused_of_a_layers_numbers = refuses(
    fused_mul_recurrent_rwkv7,
    lambda: {{"a": "kk", "b": "a"}.get(n, n): t for n, t in of_rwkv7(valid()).items()},
    {
        "head_first": ({"head_first": True}, "head_first is not supported"),
        "kk": ({"kk": torch.randn(1, 3, 2)}, "kk must have 4 dimensions"),
        "a": ({"a": torch.randn(1, 3, 2, 8).half()}, TypeError, "a must be torch.float32"),
    },
)  # fmt: skip


def test_names_of_fla(device):
    """By position, in the order of fla-core."""
    x = inputs(1, 3, 2, 8, 6, torch.float32, device)
    *tokens, S = (x[n] for n in (*NAMES, "initial_state"))
    got = fused_recurrent_dplr_delta_rule(*tokens, 0.5, S, True, False, None)
    q, k, v, a, b, gk = tokens
    want = fused_recurrent_rwkv7(q, gk, k, v, a, b, 0.5, S, True, None, False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
