"""States of 16 bits: the arithmetic of float32 states, rounded once where a call leaves them."""

import pytest
import torch
from grids import FULL, parametrize

from linattn_edu import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn2,
    fused_recurrent_kda,
    replay_gated_delta_rule,
    replay_kda,
)
from linattn_edu.layers import GatedDeltaNet, KimiDeltaAttention
from linattn_edu.ops.ring import commit_ring, make_ring
from linattn_edu.testing import gdn_inputs, kda_inputs

HALVES = (torch.bfloat16, torch.float16)
K, V, SLOTS = 16, 12, 4
FORMS = {
    "gdn": (fused_recurrent_gated_delta_rule, gdn_inputs, replay_gated_delta_rule),
    "kda": (fused_recurrent_kda, kda_inputs, replay_kda),
    "gdn2": (fused_recurrent_gdn2, kda_inputs, None),
}
both = pytest.mark.parametrize("impl", ["triton", "reference"])
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)


def tokens(name, T, device, seed=0):
    x = FORMS[name][1](2, T, 1, 2, K, V, seed=seed, device=device).asdict()
    x = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    if name == "gdn2":
        beta = x.pop("beta")
        x |= {"b": beta[..., None].expand(-1, -1, -1, K), "w": torch.sigmoid(x["v"])}
    return x


@parametrize(name=FORMS, pool=(None, 1, 3), dtype=HALVES, impl=("triton", "reference"))
@torch.no_grad()
def test_a_call_is_that_in_float32(name, pool, dtype, impl, device):
    """Alone, in slots, and with a slot for each token."""
    f, slots = FORMS[name][0], pool and torch.arange(2 * pool, device=device).view(2, pool)
    half = torch.randn(2 * pool if pool else 2, 2, K, V, device=device).to(dtype)
    for seed in range(3):
        x, state = tokens(name, 3, device, seed), half.float()
        how = {"inplace_final_state": True, "ssm_state_indices": slots, "impl": impl}
        want, _ = f(**x, initial_state=state, **how)
        o, same = f(**x, initial_state=half, **how)
        assert same is half and torch.equal(o, want) and torch.equal(half, state.to(dtype))


@both
@halves
@pytest.mark.parametrize("name", ["gdn", "kda"])
@torch.no_grad()
def test_a_ring_rounds_where_it_is_folded(name, dtype, impl, device):
    """And the tokens of that call read what was not rounded yet."""
    f, x = FORMS[name][2], tokens(name, 14, device)
    halved = torch.randn(SLOTS, 2, K, V, device=device).to(dtype)
    whole, slots = halved.float(), torch.tensor([3, 0], device=device)
    made = {"length": 4, "tokens": 2, "channels": name == "kda", "dtype": torch.float32}
    rings = [make_ring(s, 1, **made) for s in (halved, whole)]
    for t in range(0, 14, 2):
        one = {n: y[:, t : t + 2] for n, y in x.items()} | {"ssm_state_indices": slots}
        one["num_accepted_tokens"] = torch.tensor([1, 2], device=device) if t else None
        o, want = (
            f(**one, state=s, ring=r, impl=impl)
            for s, r in zip((halved, whole), rings, strict=True)
        )
        assert torch.equal(o, want) and all(map(torch.equal, rings[0][:4], rings[1][:4]))
        assert torch.equal(halved, whole.to(dtype))
        whole.copy_(halved)
    for s, r in zip((halved, whole), rings, strict=True):
        commit_ring(s, r, impl=impl)
    assert torch.equal(halved, whole.to(dtype))


@halves
@torch.no_grad()
def test_the_law_of_the_error(dtype):
    """A rounding each token, and with a ring of 8 each eighth (chapter 26, over 4096 tokens)."""
    T, alpha, K = 4096 if FULL else 1024, 0.95, 64
    x = gdn_inputs(1, T, 1, 1, K, K, dtype=torch.float64, seed=3).asdict()
    x = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    x["g"], x["beta"] = torch.full_like(x["g"], alpha).log(), torch.full_like(x["beta"], 0.5)
    exact, _ = fused_recurrent_gated_delta_rule(**x, impl="reference")
    x = {n: y.float() for n, y in x.items()}
    state, pool = torch.zeros(1, 1, K, K, dtype=dtype), torch.zeros(1, 1, K, K, dtype=dtype)
    ring, outputs = make_ring(pool, 1, tokens=1, dtype=torch.float32), ([], [])
    for t in range(T):
        one = {n: y[:, t : t + 1] for n, y in x.items()} | {"impl": "reference"}
        step = {"initial_state": state, "inplace_final_state": True}
        outputs[0].append(fused_recurrent_gated_delta_rule(**one, **step)[0])
        outputs[1].append(replay_gated_delta_rule(**one, state=pool, ring=ring))
    z = torch.randn(10**5, generator=torch.Generator().manual_seed(0))
    epsilon = ((z.to(dtype).float() - z).square().mean() / z.square().mean()).sqrt().item()
    rho = alpha**2 * (1 - 0.75 / K)
    for o, n in zip(outputs, (1, 8), strict=True):
        o, want = torch.cat(o, 1)[:, T // 2 :].double(), exact[:, T // 2 :]
        error = ((o - want).square().mean() / want.square().mean()).sqrt().item()
        # n tokens without a rounding: rho^n, and of these tokens the mean
        law = epsilon * (sum(rho**i for i in range(n)) / n / (1 - rho**n)) ** 0.5
        assert 0.8 < error / law < 1.25


@halves
@torch.no_grad()
def test_a_prompt_and_then_tokens(dtype, device):
    """A pool is filled in chunks, and read on in steps."""
    x, pool = tokens("gdn", 20, device), torch.zeros(SLOTS, 2, K, V, device=device, dtype=dtype)
    slots = torch.tensor([2, 1], device=device)
    how = {"inplace_final_state": True, "ssm_state_indices": slots}
    first, last = ({n: y[:, c] for n, y in x.items()} for c in (slice(17), slice(17, 20)))
    o, same = chunk_gated_delta_rule(**first, initial_state=pool, chunk_size=16, **how)
    want, state = chunk_gated_delta_rule(**first, chunk_size=16, output_final_state=True)
    assert same is pool and torch.equal(o, want) and torch.equal(pool[slots], state.to(dtype))
    o, _ = fused_recurrent_gated_delta_rule(**last, initial_state=pool, **how)
    want, _ = fused_recurrent_gated_delta_rule(**last, initial_state=state.to(dtype).float())
    assert torch.equal(o, want)


@pytest.mark.parametrize("ring", [None, 4])
@pytest.mark.parametrize("cls", [GatedDeltaNet, KimiDeltaAttention])
@torch.no_grad()
def test_a_layer_keeps_them(cls, ring, device):
    layer = cls(24, expand_v=1, head_dim=8, num_heads=2, device=device)
    cache, other = (layer.make_cache(1, ring=ring, state_dtype=d) for d in (torch.bfloat16, None))
    assert cache.recurrent_state.dtype == torch.bfloat16
    assert other.recurrent_state.dtype == torch.float32
    x = torch.randn(1, 12, 24, device=device)
    for cut in (slice(4), *(slice(t, t + 1) for t in range(4, 12))):
        y, want = (layer(x[:, cut], cache=c) for c in (cache, other))
        torch.testing.assert_close(y, want, atol=2e-2 * want.abs().max().item(), rtol=0)
    assert cache.recurrent_state.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="state_dtype must be a floating-point dtype, got int"):
        layer.make_cache(1, state_dtype="int")
    with pytest.raises(TypeError, match=r"state_dtype must be torch.float32 or"):
        layer.make_cache(1, state_dtype=torch.float64)
