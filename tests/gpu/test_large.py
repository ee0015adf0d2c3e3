"""Tensors of more than 2^31 elements."""

import pytest
import torch

from linattn_edu import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.gpu
T, H, D = 2**17 + 65, 128, 128
NEEDED = 110 * 2**30


@pytest.fixture
def inputs():
    assert T * H * D > 2**31
    if torch.cuda.get_device_properties(0).total_memory < NEEDED:
        pytest.skip("needs a GPU of 110 GiB")
    g = torch.Generator("cuda").manual_seed(0)
    size = {"generator": g, "device": "cuda", "dtype": torch.bfloat16}
    q, k = (torch.randn(1, T, H, D, **size).div_(D**0.5) for _ in "qk")
    v = torch.randn(1, T, H, D, **size)
    decay = -torch.rand(1, T, H, device="cuda", generator=g)
    beta = torch.rand(1, T, H, device="cuda", generator=g)
    return [q, k, v, decay, beta]


def test_last_head(inputs):
    """A head's result and gradients when it is computed alone, from small tensors.

    Not to the bit: with another number of heads the decay is summed in another order.
    """
    alone = [x[:, :, -1:].clone().requires_grad_() for x in inputs]
    for x in inputs:
        x.requires_grad_()
    o, _ = chunk_gated_delta_rule(*inputs)
    o_alone, _ = chunk_gated_delta_rule(*alone)
    assert_close("o", o[:, :, -1:], o_alone, 1e-3)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, inputs, do)
    grads_alone = torch.autograd.grad(o_alone, alone, do[:, :, -1:].contiguous())
    names = ("dq", "dk", "dv", "dg", "dbeta")
    for name, got, expected in zip(names, grads, grads_alone, strict=True):
        assert_close(name, got[:, :, -1:], expected, 1e-3)


def test_last_tokens_of_a_batch():
    """The last sequence of a batch whose tensors are large, through the recurrent form."""
    batch = 2**17 + 1
    x = gdn_inputs(batch, 1, 1, H, 16, D, dtype=torch.bfloat16, device="cuda")
    assert x.v.numel() > 2**31
    o, _ = fused_recurrent_gated_delta_rule(x.q, x.k, x.v, g=x.g, beta=x.beta)
    last = [t[-1:].clone() for t in (x.q, x.k, x.v)]
    expected, _ = fused_recurrent_gated_delta_rule(*last, g=x.g[-1:], beta=x.beta[-1:])
    assert torch.equal(o[-1:], expected)
