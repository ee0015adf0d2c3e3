"""Tensors of more than 2^31 elements."""

import pytest
import torch

from linattn_edu import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    mamba_chunk_scan_combined,
)
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.gpu
T, H, D = 2**17 + 65, 128, 128


def needs(gib):
    if torch.cuda.get_device_properties(0).total_memory < gib * 2**30:
        pytest.skip(f"needs a GPU of {gib} GiB")


@pytest.fixture
def inputs():
    assert T * H * D > 2**31
    needs(110)
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


HEADS, P, CHUNK, WINDOW = 64, 64, 256, 1024
LONG = (2**31 // (HEADS * P) // CHUNK + 20) * CHUNK + 33  # tokens


@pytest.mark.parametrize("backward", [False, True])
def test_mamba_beyond_two_to_the_31(backward):
    """mamba #1015, #1034, #1036: x, out and a gradient of out that is not contiguous have more
    numbers than an offset of 32 bit tells apart. Tokens about the 2^31st number and the last ones
    are as in a sequence that begins a little before them: what was before has decayed.
    """
    assert LONG * HEADS * P > 2**31
    needs(70)
    x = of_mamba(LONG)
    for t in x:
        t.requires_grad_(backward)
    out = mamba_chunk_scan_combined(*x, CHUNK)
    ends = (2**31 // (HEADS * P) + WINDOW // 2, LONG)
    if backward:
        do = torch.zeros(1, LONG, P, HEADS, device=out.device, dtype=out.dtype).mT
        assert not do.is_contiguous()
        for end in ends:
            do[:, end - WINDOW : end] = 1
        gradients = torch.autograd.grad(out, x, do)
    for end in ends:
        begin = (end - 4 * WINDOW) // CHUNK * CHUNK  # the same chunks
        part = [t if t.ndim == 1 else t[:, begin:end] for t in x]
        part = [t.detach().clone().requires_grad_(backward) for t in part]
        want = mamba_chunk_scan_combined(*part, CHUNK)
        assert_close("out", out[:, end - WINDOW : end], want[:, -WINDOW:], 1e-3)
        if backward:
            do = torch.zeros_like(want)
            do[:, -WINDOW:] = 1
            found = torch.autograd.grad(want, part, do)
            for name, got, one in zip(("x", "dt", "A", "B", "C"), gradients, found, strict=True):
                if name != "A":  # which sums over all tokens
                    got, one = got[:, end - WINDOW : end], one[:, -WINDOW:]
                    assert_close(f"d{name}", got, one, 1e-3)


def of_mamba(T, device="cuda"):
    """x, dt, A, B and C of T tokens, drawn in pieces."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape):
        y = torch.empty(1, T, *shape, device=device, dtype=torch.bfloat16)
        for part in y.split(2**16, 1):
            part.normal_(generator=generator)
        return y

    dt = 0.05 + torch.rand(1, T, HEADS, device=device, generator=generator)
    B, C = randn(1, 64), randn(1, 64)
    return [randn(HEADS, P), dt, -torch.ones(HEADS, device=device), B, C]
