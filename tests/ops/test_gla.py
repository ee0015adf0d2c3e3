"""Names over operators that are there: simple GLA, lightning attention, Gated DeltaProduct."""

from functools import partial

import pytest
import torch
from dplr.dplr_checks import exact, inputs, tolerance
from gdn_checks import check, cotangents, run
from recurrent_cases import case
from refusals import refuses

from linattn_edu import (
    chunk_gated_delta_product,
    chunk_gated_delta_rule,
    chunk_lightning_attn,
    chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_simple_gla,
)
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")
in_16 = partial(chunk_simple_gla, chunk_size=16)
impls = pytest.mark.parametrize("impl", ["reference", "triton"])
forms = pytest.mark.parametrize("f", [in_16, fused_recurrent_simple_gla], ids=["chunk", "token"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
ENDS = {"output_final_state": True}


def drawn(dtype, device, T=20, N=None):
    """(tensors with g of one number a head, those of the rule of which it is one)."""
    x = inputs(1, T, 2, 12, 8, dtype, device, N=N)
    del x["a"], x["b"]
    return x | {"gk": x["gk"][..., 0]}


def of_rule(x, do, dht, **options):
    """The rule without its matrix of rank one; the gradient of g is the sum over the channels."""
    zero = torch.zeros_like(x["k"])
    rows = x["gk"][..., None].expand(x["k"].shape)
    want = exact(x | {"a": zero, "b": zero, "gk": rows}, do, dht, **options)
    want["dgk"] = want["dgk"].sum(-1)
    return {n: t for n, t in want.items() if n not in ("da", "db")}


def by_name(f):
    return lambda gk, **x: f(g=gk, **x)


@impls
@dtypes
@forms
def test_simple_gla_is_the_rule_without_rank_one(f, dtype, impl, device):
    """Of packed sequences too."""
    bounds = torch.tensor([0, 7, 7, 20], device=device)
    for N, packed in ((None, {}), (3, {"cu_seqlens": bounds})):
        x = drawn(dtype, device, N=N)
        do, dht = cotangents(x, N)
        got = run(x, do, dht, by_name(f), **ENDS, impl=impl, **packed)
        check(got, of_rule(x, do, dht, **packed), dtype, tolerance=tolerance)


@forms
def test_a_decay_for_each_head_and_none(f, device):
    x = drawn(torch.float32, device)
    g = x.pop("gk")
    gamma = -torch.rand(2, device=device)
    for given, same in (({"g_gamma": gamma}, gamma.expand_as(g)), ({}, torch.zeros_like(g))):
        got, want = (f(**x, **more, **ENDS) for more in (given, {"g": same}))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@forms
def test_states_v_first(f, device):
    x = drawn(torch.float32, device)
    g, S = x.pop("gk"), x.pop("initial_state")
    want = f(**x, g=g, initial_state=S, **ENDS)
    S = S.mT.contiguous()
    o, S = f(**x, g=g, initial_state=S, state_v_first=True, **ENDS)
    assert torch.equal(o, want[0]) and torch.equal(S.mT, want[1])


def test_the_deprecated_name_of_state_v_first(device):
    x = drawn(torch.float32, device)
    x |= {"g": x.pop("gk"), "initial_state": x["initial_state"].mT.contiguous()}
    want = fused_recurrent_simple_gla(**x, state_v_first=True, **ENDS)
    with pytest.warns(DeprecationWarning, match="use state_v_first") as caught:
        got = fused_recurrent_simple_gla(**x, transpose_state_layout=True, **ENDS)
    assert [w.filename for w in caught] == [__file__]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(ValueError, match="state_v_first and transpose_state_layout are one"):
        fused_recurrent_simple_gla(**x, state_v_first=True, transpose_state_layout=False)


def test_reverse(device):
    x = drawn(torch.float32, device)
    g = x.pop("gk")
    got, _ = fused_recurrent_simple_gla(**x, g=g, reverse=True)
    S = x.pop("initial_state")
    flipped = {n: t.flip(1) for n, t in (x | {"g": g}).items()}
    want, _ = fused_recurrent_simple_gla(**flipped, initial_state=S)
    assert torch.equal(got, want.flip(1))


@pytest.mark.parametrize(
    "forms",
    [(chunk_lightning_attn, chunk_simple_gla),
     (fused_recurrent_lightning_attn, fused_recurrent_simple_gla)],
    ids=["chunk", "token"],
)  # fmt: skip
def test_lightning_attention_has_the_decays_of_its_layer(forms, device):
    """Heads from no decay to the strongest, 8 (1 - i / n) (H - 1) / H."""
    f, of_gamma = forms
    x = inputs(1, 9, 4, 12, 8, torch.float32, device)
    x = {n: x[n] for n in ("q", "k", "v", "initial_state")}
    got = f(**x, layer_idx=3, num_layers=12, **ENDS)
    gamma = torch.tensor([-0.0, -1.5, -3.0, -4.5], device=device)
    want = of_gamma(**x, g_gamma=gamma, **ENDS)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def product(q, k, v, g, beta, n, initial_state):
    """A decay, then n steps of the delta rule, at every token."""
    HV, S, o = v.shape[2], initial_state, []
    q, k = (x.repeat_interleave(HV // x.shape[2], 2) for x in (q, k))
    for t in range(q.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        for i in range(t * n, (t + 1) * n):
            row = k[:, i, :, None]
            S = S + row.mT @ (beta[:, i, :, None, None] * (v[:, i, :, None] - row @ S))
        o.append(q.shape[-1] ** -0.5 * (q[:, t, :, None] @ S).squeeze(-2))
    return torch.stack(o, 1), S


def of_products(dtype, device, n, N=1):
    """T = 10 tokens of n steps each, two value heads on a key head."""
    x = case(10 * n, (1, 2), 12, 8, N=N, dtype=dtype, device=device)
    x = {m: t for m, t in x.items() if t is not None}
    return x | {m: x[m][:, :10].contiguous() for m in ("q", "g")}


@impls
@dtypes
@pytest.mark.parametrize("n", [1, 2, 3])
def test_gated_delta_product(n, dtype, impl, device):
    x = of_products(dtype, device, n)
    do, dht = cotangents(x | {"v": x["v"][:, :10]})
    f = partial(chunk_gated_delta_product, num_householder=n, chunk_size=16, impl=impl, **ENDS)
    got = run(x, do, dht, f)
    wide = {m: t.double() for m, t in x.items()}
    check(got, run(wide, do.double(), dht.double(), partial(product, n=n)), dtype)


def test_products_of_packed_sequences(device):
    """Each as if it were alone; without a decay it is DeltaProduct."""
    x = of_products(torch.float32, device, 2, N=2)
    bounds = torch.tensor([0, 4, 10], device=device)
    f = partial(chunk_gated_delta_product, num_householder=2, chunk_size=16, **ENDS)
    o, S = f(**x, cu_seqlens=bounds, cu_seqlens_cpu=bounds.cpu())
    part = {m: t[:, 4:] if m in "qg" else t[1:] if m == "initial_state" else t[:, 8:]
            for m, t in x.items()}  # fmt: skip
    alone = f(**part)
    assert torch.equal(o[:, 4:], alone[0]) and torch.equal(S[1:], alone[1])
    part["g"] = torch.zeros_like(part["g"])
    want, got = (f(**part | {"g": g})[0] for g in (part["g"], None))
    assert_close("o", got, want, 1e-6)


def test_one_step_is_gated_deltanet(device):
    x = of_products(torch.float32, device, 1)
    got, want = chunk_gated_delta_product(**x, num_householder=1), chunk_gated_delta_rule(**x)
    assert torch.equal(got[0], want[0])


def valid():
    x = drawn(torch.float32, "cpu", T=3)
    return {n: x[n] for n in ("q", "k", "v")} | {"g": x["gk"]}


BOTH = ({"g_gamma": -torch.rand(2)}, "g and g_gamma are one argument")
CHANNELS = ({"g": -torch.rand(1, 3, 2, 12)}, "g must have 3 dimensions")
GROWS = ({"g": torch.ones(1, 3, 2)}, "g must be a log decay, <= 0")
LIST = ({"initial_state": [0.0], "state_v_first": True}, TypeError, "initial_state must be a torch")
GLA = {"both": BOTH, "channels": CHANNELS, "grows": GROWS, "list": LIST}
test_refused = refuses(chunk_simple_gla, valid, GLA)
test_refused_token_by_token = refuses(fused_recurrent_simple_gla, valid, GLA)
test_layers_refused = refuses(
    chunk_lightning_attn,
    lambda: {n: t for n, t in valid().items() if n != "g"} | {"layer_idx": 0, "num_layers": 2},
    {
        "layer": ({"layer_idx": 3}, "layer_idx must be an integer from 0 to 2, got 3"),
        "layers": ({"num_layers": 0}, "num_layers must be an integer >= 1"),
        "head_first": ({"head_first": True}, "head_first is not supported"),
    },
)
test_products_refused = refuses(
    chunk_gated_delta_product, lambda: of_products(torch.float32, "cpu", 2)
    | {"num_householder": 2},
    {
        "n": ({"num_householder": 3}, r"k must have shape \[B=1, T n=30, H=1, K=12\]"),
        "none": ({"num_householder": 0}, "num_householder must be an integer >= 1"),
        "a gate a step": ({"g": -torch.rand(1, 20, 2)}, "g must have shape"),
        "bounds": ({"cu_seqlens": [0, 10]}, TypeError, "cu_seqlens must be a torch.Tensor"),
    },
)  # fmt: skip
