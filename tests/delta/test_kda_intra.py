"""Stage kda_intra: kernel against reference, for any gate and with one that is promised."""

import pytest
import stages
import torch
from delta.stage_checks import DTYPES, check_stage
from fused.kda_checks import gates, kda_stage_inputs, once

from linattn_edu.kernels.delta import kda_intra as module
from linattn_edu.kernels.delta.kda_intra import ALL, FAR, NONE, halving
from linattn_edu.kernels.delta.kda_intra import kda_intra as kernel
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra as reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def arguments(T, K, C, dtype, device, **kinds):
    x = kda_stage_inputs(T, K, 16, dtype, device, **kinds)
    return x.q, x.k, x.beta, gate_cumsum(x.g, chunk_size=C)


PROMISED = {"gate": "bounded", "more": {"lower_bound": -5.0}}

test_kernel_matches_reference = stages.matches("kda_intra", "kda")
test_an_erase_gate = stages.matches("kda_intra", "gdn2")
test_with_a_promise = stages.matches("kda_intra", "kda", once, **PROMISED)


@gates
def test_any_gate(C, gate, dtype, device):
    """One value head a key head; channels that are shut, open, or decay by any factor."""
    for family in ("kda", "gdn2"):
        stages.check("kda_intra", family, 33, 20, 16, C, dtype, device, H=2, gate=gate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bound", [-5.0, -0.5])
def test_every_gate_at_its_bound(bound, dtype, device):
    """The largest exponents a promise allows: finite, and right."""
    q, k, beta, gc = arguments(64, 33, 64, dtype, device)
    gc = gate_cumsum(torch.full_like(gc, bound), chunk_size=64)
    options = {"chunk_size": 64, "lower_bound": bound}
    check_stage(kernel, reference, (q, k, beta, gc), **options)


@pytest.mark.parametrize("bound", [-5.0, -1.0, -100.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whom_a_promise_serves(dtype, bound, device, monkeypatch):
    """fp16 has no room for the exponents: its bits are those without the promise."""
    used = []

    def noted(*asked):
        used.append(halving(*asked))
        return used[-1]

    monkeypatch.setattr(module, "halving", noted)
    args = arguments(17, 16, 32, dtype, device, gate="bounded")
    got = kernel(*args, chunk_size=32, lower_bound=bound)
    serves = bound >= -5 and dtype != torch.float16
    assert used == [NONE if serves else ALL if dtype == torch.float16 else FAR]
    if not serves:
        want = kernel(*args, chunk_size=32)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("t", [1, 18, 40])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_far_row_changes_no_earlier_one(dtype, t, device):
    """A block with near rows alone, and the same one with a shut gate: to the bit."""
    x = kda_stage_inputs(64, 40, 16, dtype, device, H=2)
    x.g = -torch.rand_like(x.g)
    before = kernel(x.q, x.k, x.beta, gate_cumsum(x.g, chunk_size=64), chunk_size=64)
    x.g[:, t, :, ::7] = -1e4
    after = x.q, x.k, x.beta, gate_cumsum(x.g, chunk_size=64)
    check_stage(kernel, reference, after, chunk_size=64)
    for a, b in zip(before, kernel(*after, chunk_size=64), strict=True):
        assert torch.equal(a[:, :t], b[:, :t]) and not torch.equal(a[:, t:], b[:, t:])


def test_equal_channels_are_the_scalar_gate(device):
    """P is the score of the scalar gate: its decay may be multiplied on afterwards."""
    q, k, beta, gc = arguments(64, 33, 64, torch.float32, device)
    gc = gc[..., :1].expand_as(gc).contiguous()
    P, _ = kernel(q, k, beta, gc, chunk_size=64)
    q, k = (x.double().expand(-1, -1, 2, -1) for x in (q, k))
    G = gc[..., 0].double().mT
    G = (G[..., :, None] - G[..., None, :]).exp2().tril()
    assert_close("P", P, (torch.einsum("bihd,bjhd->bhij", q, k) * G).transpose(1, 2), 5e-6)


def test_a_short_chunk_has_zeros_after_its_tokens(device):
    """What a missing token would add is zero: the backward stages read whole rows of A and P."""
    args = arguments(20, 16, 64, torch.float32, device, gate="shut")
    for x in kernel(*args, chunk_size=64):
        assert not x[..., 20:].any()
