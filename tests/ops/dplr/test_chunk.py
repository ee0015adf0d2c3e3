"""The general delta rule in chunks: the rule, its other name, and where it goes by token.

What every operator over sequences keeps is asked in test_contract*.py.
"""

import pytest
import torch
from dplr.dplr_checks import exact, inputs, tolerance
from gdn_checks import DTYPES, check, cotangents, launches, run
from grids import parametrize
from ops.dplr.test_recurrent import ENDS, IMPLS, impls, of_rwkv7, valid
from ops.test_transforms import operations
from refusals import refuses

from linattn_edu import chunk_dplr_delta_rule, chunk_rwkv7, fused_recurrent_dplr_delta_rule
from linattn_edu.ops.dplr import chunk
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")
KINDS = ({}, {"strong": True}, {"alike": 5.0})


@parametrize(T=(1, 15, 16, 17, 37), kind=KINDS)
def test_reference_is_the_rule_and_its_gradient(T, kind):
    x = inputs(2, T, 2, 5, 6, torch.float64, seed=T, **kind)
    do, dht = cotangents(x)
    got = run(x, do, dht, chunk_dplr_delta_rule, **ENDS, chunk_size=16, impl="reference")
    want = exact(x, do, dht)
    for name, y in got.items():  # a gate that is shut is 150 in the sums of others
        assert_close(name, y, want[name], 1e-12 if "strong" in kind else 1e-13)


@parametrize(kind=KINDS, dtype=DTYPES, impl=IMPLS)
def test_it_is_the_rule(kind, dtype, impl, device):
    """Outputs and all gradients, over several chunks, the last not full."""
    x = inputs(2, 37, 2, 16, 12, dtype, device, **kind)
    do, dht = cotangents(x)
    got = run(x, do, dht, chunk_dplr_delta_rule, **ENDS, chunk_size=16, impl=impl)
    check(got, exact(x, do, dht), dtype, tolerance=tolerance)


@impls
def test_rwkv7_is_the_rule_by_its_names(impl, device):
    """With a scale of 1; no final state unless asked for."""
    x = inputs(1, 20, 2, 16, 12, torch.float32, device, N=2)
    bounds = torch.tensor([0, 4, 20])
    chunks = {"cu_seqlens_cpu": bounds, "chunk_size": 16, "safe_gate": True, "lower_bound": -5.0}
    options = {"cu_seqlens": bounds.to(device), "impl": impl, **chunks}
    want = chunk_dplr_delta_rule(**x, **options, **ENDS)
    got = chunk_rwkv7(**of_rwkv7(x), **options, **ENDS)
    assert_close("o", got[0], 4 * want[0], 1e-6)
    assert torch.equal(got[1], want[1])
    assert chunk_rwkv7(**of_rwkv7(x), **options)[1] is None
    pool, slots = torch.randn(3, 2, 16, 12, device=device), torch.tensor([2, 0], device=device)
    options |= {"scale": 1.0, "checkpoint_every_n_tokens": 16, **ENDS}
    want = chunk_dplr_delta_rule(**x | {"initial_state": pool[slots]}, **options)
    options |= {"inplace_final_state": True, "ssm_state_indices": slots}
    o, last, kept = chunk_rwkv7(**of_rwkv7(x) | {"initial_state": pool}, **options)
    assert last is pool and torch.equal(pool[slots], want[1])
    assert torch.equal(o, want[0]) and torch.equal(kept, want[2])


def test_wide_heads_go_by_token(device):
    """The bits of the recurrent kernel, and no others are launched."""
    x = inputs(1, 3, 1, 300, 16, torch.float32, device)
    with launches() as seen:
        got = chunk_dplr_delta_rule(**x, **ENDS, impl="triton")
    assert {kernel.fn.__name__ for kernel in seen} == {"dplr_recurrent_kernel"}
    want = fused_recurrent_dplr_delta_rule(**x, **ENDS, impl="triton")
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    slots = torch.tensor([1], device=device)
    pool = torch.cat([torch.zeros_like(x["initial_state"]), x["initial_state"]])
    place = {"inplace_final_state": True, "ssm_state_indices": slots}
    o, _ = chunk_dplr_delta_rule(**x | {"initial_state": pool}, **place, impl="triton")
    assert torch.equal(o, want[0]) and torch.equal(pool[1:], want[1]) and not pool[0].any()
    with pytest.raises(ValueError, match="_tokens must be None where kernels go token by token"):
        chunk_dplr_delta_rule(**x, checkpoint_every_n_tokens=64, impl="triton")


def test_flops(device):
    """Those of the products in the reference stages, but for the inverse, which wastes most of its
    own, and with those that stand there as sums over pairs of tokens.
    """
    T, K, C = 128, 16, 64
    x = inputs(1, T, 2, K, 24, torch.float32, device, state=False)
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    count = sum(operations(lambda: chunk_dplr_delta_rule(**x)).values())
    both = operations(
        lambda: torch.autograd.grad(chunk_dplr_delta_rule(**leaves)[0].sum(), leaves.values())
    )
    stages, do = chunk.stages("reference"), torch.ones_like(x["v"])
    staged = operations(lambda: chunk.forward(stages, **x, scale=1.0))
    back = operations(
        lambda: chunk.backward(stages, **x, residuals=chunk.Residuals(), do=do, scale=1.0)
    )
    inverse = operations(lambda: unit_lower_inverse(torch.zeros(4, C, C, device=device)))
    other = sum(inverse.values()) - 4 * 2 * T * 2 * C * K  # of four products of rows
    assert count == sum(staged.values()) - other
    assert sum(both.values()) - count == sum(back.values()) - other + 8 * 2 * T * 2 * C * K


CHUNKS = {
    "chunk_size": ({"chunk_size": 48}, "chunk_size must be one of 16, 32, 64, got 48"),
    "safe_gate": ({"safe_gate": 2}, TypeError, "safe_gate must be True or False, got 2"),
    "lower_bound": ({"lower_bound": "5"}, TypeError, "lower_bound must be a number or None"),
    "ranks": ({"cp_context": 1}, TypeError, "cp_context must come from build_cp_context"),
    "bounds": ({"cu_seqlens_cpu": torch.tensor([0, 3])}, "belongs to cu_seqlens"),
}
test_chunks_refused = refuses(chunk_dplr_delta_rule, valid, CHUNKS)
test_chunks_refused_by_its_names = refuses(chunk_rwkv7, lambda: of_rwkv7(valid()), CHUNKS)
