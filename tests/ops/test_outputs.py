"""Outputs belong to the caller: they may be changed in place before the backward pass."""

import pytest
import torch
from grids import parametrize
from ops.calls import CALLS, IN_PLACE, call

from linattn_edu import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
    kda_decay,
    kernel_delta_attention,
    solve_tril,
)
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

IMPLS = ("reference", "triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLAGS = {
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "output_final_state": True,
}


def delta(f, inputs, **options):
    """A form of the delta rule, of all its tensors."""
    x = inputs(1, 5, 1, 2, 6, 4, device=DEVICE, initial_state=True).asdict()
    if options.pop("packed", False):
        options["cu_seqlens"] = torch.tensor([0, 2, 5], device=DEVICE)
        x["initial_state"] = torch.randn(2, 2, 6, 4, device=DEVICE)
    return x, lambda impl, **x: f(**x, **FLAGS, **options, impl=impl)


def one(f, *shape):
    return {"x": torch.randn(shape, device=DEVICE) / 4}, f


GATE = torch.tensor([0.5, 1.0], device=DEVICE)
OPERATORS = {
    "chunk_gated_delta_rule, packed": delta(chunk_gated_delta_rule, gdn_inputs, packed=True),
    "chunk_kda": delta(chunk_kda, kda_inputs),
    "chunk_kda, all kept": delta(chunk_kda, kda_inputs, disable_recompute=True),
    "fused_recurrent_gated_delta_rule": delta(fused_recurrent_gated_delta_rule, gdn_inputs),
    "fused_recurrent_kda": delta(fused_recurrent_kda, kda_inputs),
    "fused_recurrent_kda, v first": delta(
        fused_recurrent_kda, lambda *sizes, **kinds: kda_inputs(1, 5, 1, 2, 6, 6, **kinds),
        state_v_first=True,
    ),
    "kernel_delta_attention": one(
        lambda x, impl: kernel_delta_attention(x, x, x, x[..., 0].sigmoid(), impl=impl), 1, 5, 2, 4
    ),
    "kda_decay": one(lambda x, impl: kda_decay(x, GATE, GATE), 1, 5, 2),
}  # fmt: skip


def of(name):
    """The float tensors of ops.calls, and the function of them."""
    f, x, options = call(name, DEVICE)
    floats = {n: t for n, t in x.items() if t.is_floating_point()}
    return floats, lambda impl, **given: f(**x | given, **options, impl=impl)


# the gradient of an inverse needs it as it was
NAMES = [n for n in CALLS if n not in (*IN_PLACE, "solve_tril")]
OPERATORS |= {f"{n}, every tensor": of(n) for n in NAMES}


def gradients(f, x, impl, change):
    """Of every tensor, where `change` is done to the outputs."""
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    outputs = f(**leaves, impl=impl)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    changed = [change(y) for y in outputs]
    return torch.autograd.grad([y.square().sum() for y in changed], list(leaves.values()))


@parametrize(1, name=OPERATORS, impl=IMPLS)
def test_an_output_may_be_changed_in_place(name, impl):
    """As `o.mul_(gate)` in a layer."""
    x, f = OPERATORS[name]
    got = gradients(f, x, impl, lambda y: y.mul_(0.5).add_(1))
    want = gradients(f, x, impl, lambda y: 0.5 * y + 1)
    for n, a, b in zip(x, got, want, strict=True):
        assert_close(f"d{n}", a, b, 1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_inverse_is_needed_for_its_gradient(impl):
    """As with torch.sigmoid: PyTorch says so, and nothing is computed from what it has become."""
    A = (torch.randn(1, 5, 1, 16, device=DEVICE) / 4).requires_grad_()
    X = solve_tril(A, impl=impl).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        X.sum().backward()


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_states_of_chunks_are_the_callers(impl, keep):
    """Where the backward pass reads them they must not be changed, which PyTorch sees."""
    x, _ = OPERATORS["chunk_kda"]
    leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
    options = {"return_intermediate_states": True, "disable_recompute": keep, "impl": impl}
    o, _, h = chunk_kda(**leaves, **options)
    want = torch.autograd.grad(o.sum(), leaves["v"], retain_graph=True)
    h.zero_()
    if keep:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()
    else:
        assert torch.equal(*torch.autograd.grad(o.sum(), leaves["v"]), *want)
