"""Stage gate_cumsum: kernel against reference, and what the floor is for."""

import math

import pytest
import torch
from delta.stage_checks import CHUNKS, TOKENS

from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as kernel
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum as reference
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("gate", ["trained", "reset", "closed"])
@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("T", TOKENS)
def test_kernel_matches_reference(T, C, gate, device):
    for HV in (1, 5, 17):
        g = gdn_inputs(2, T, 1, HV, 1, 1, device=device, seed=T, gate=gate).g
        assert_close("gc", kernel(g, chunk_size=C), reference(g, chunk_size=C), 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_gates(dtype, device):
    g = gdn_inputs(1, 100, 1, 3, 1, 1, device=device).g.to(dtype)
    assert_close("gc", kernel(g, chunk_size=64), reference(g, chunk_size=64), 5e-6)


def test_sums_start_at_each_chunk(device):
    g = gdn_inputs(1, 96, 1, 2, 1, 1, device=device).g
    whole = kernel(g, chunk_size=32)
    parts = [kernel(g[:, i : i + 32].contiguous(), chunk_size=32) for i in (0, 32, 64)]
    assert torch.equal(whole, torch.cat(parts, 1))


def test_floor_keeps_later_decays(device):
    """After a closed gate the sum is rounded at 150: up to 2^-17 a token, 3e-4 over 60 of them."""
    g = torch.full((1, 64, 1), -0.05, device=device)
    g[:, 3] = -1e4
    decay = decay_matrix(kernel(g, chunk_size=64)[0, :, 0])[63, 4]
    assert decay.item() == pytest.approx(math.exp(-0.05 * 59), rel=5e-4)
