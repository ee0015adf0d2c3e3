"""Unit keys made of numbers of mean -50 and deviation 10 (any two have a cosine of .96), a bounded
gate that hardly forgets: what bfloat16 costs, and that chunks of 16 tokens halve it.

In float64, with one rounding of the forward pass at a time, most of it comes from three, each of
them some 8e-3 with chunks of 64: P and v_new of the product that makes o, and A * G diag(beta), or
in Kimi Delta Attention A at half of that. The rows of all three, or what they are summed with,
nearly cancel. The state, what is left of v, and the keys cost 2e-3 and less.
"""

import pytest
import torch

from linattn_edu import chunk_gated_delta_rule, chunk_kda
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import relative_rms

K = 128
MOST = {64: 1.5e-2, 16: 8e-3}  # chunk size -> error of o
F = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}


def nearly_parallel(channels, T, dtype, device):
    """q, k, v, g and beta of one head; g is between -5 and 0."""
    torch.manual_seed(0)
    shape = (1, T, 1, K)
    q, k, v = torch.randn(shape) + 1, torch.randn(shape) * 10 - 50, torch.randn(shape)
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    g = -5 * torch.sigmoid(4 * (torch.randn(shape if channels else shape[:3]) - 6))
    beta = torch.sigmoid(torch.randn(shape[:3]))
    q, k, v, beta = (x.to(device, dtype) for x in (q, k, v, beta))
    return q, k, v, g.to(device), beta


def error(family, chunk_size, dtype, device, **options):
    q, k, v, g, beta = nearly_parallel(family == "kda", 128, dtype, device)
    o, _ = F[family](q, k, v, g, beta, chunk_size=chunk_size, impl="triton", **options)
    gate = {"gk": g.double()} if family == "kda" else {"g": g.double()}
    q, k, v, beta = (x.double() for x in (q, k, v, beta))
    want, _ = recurrent(q, k, v, beta=beta, scale=K**-0.5, **{"g": None, **gate})
    return relative_rms(o, want)


@pytest.mark.parametrize("family", F)
def test_what_bfloat16_costs(family, device):
    errors = {C: error(family, C, torch.bfloat16, device) for C in (64, 16)}
    assert all(e < MOST[C] for C, e in errors.items()), errors
    assert errors[16] < 0.7 * errors[64], errors


@pytest.mark.parametrize("family", F)
def test_float32_has_its_digits(family, device):
    assert error(family, 16, torch.float32, device) < 1e-6


def test_halves_have_them_too(device):
    """allow_neg_eigval keeps P, A * G and what is multiplied with them in two halves."""
    assert error("gdn", 64, torch.bfloat16, device, allow_neg_eigval=True) < 2.5e-3
