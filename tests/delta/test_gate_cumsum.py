"""Stage gate_cumsum: kernel against reference, and what the floor is for."""

import itertools
import math

import pytest
import torch
from delta.stage_checks import CHUNKS, DTYPES, TOKENS
from fused.kda_checks import RAW, kda_gate, raw_gate
from grids import parametrize

from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as kernel
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum as reference
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


@parametrize(T=TOKENS, C=CHUNKS, gate=("trained", "reset", "closed"))
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


@pytest.mark.parametrize("gate", ["mixed", "shut"])
@pytest.mark.parametrize(("T", "C"), list(zip(TOKENS, itertools.cycle(CHUNKS), strict=False)))
def test_a_gate_for_each_channel(T, C, gate, device):
    for HV, K in ((1, 1), (3, 33)):  # in one tile of channels, in two
        g = kda_gate(gate, 2, T, HV, K, seed=T, device=device)
        assert_close("gc", kernel(g, chunk_size=C), reference(g, chunk_size=C), 5e-6)


@parametrize(T=(1, 65, 130), kind=RAW, dtype=DTYPES)
def test_raw_gates_of_channels(T, kind, dtype, device):
    a, A_log, dt_bias, bound = raw_gate(kind, T, 3, 33, device, dtype)
    exact = (x if x is None else x.double() for x in (a, A_log, dt_bias))
    options = {"chunk_size": 32, **bound}
    got, want = kernel(a, A_log, dt_bias, **options), reference(*exact, **options)
    assert_close("gc", got, want, 5e-6)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of NumPy, in the interpreter
@pytest.mark.parametrize("raw", [-1e4, -30.0, 30.0, 1e4])
def test_raw_gates_at_their_ends(raw, device):
    """The softplus reaches no decay and a shut gate; the bounded gate stops at its bound."""
    a = torch.full((1, 1, 1, 16), raw, device=device)
    A_log = torch.zeros(1, device=device)
    log2e = math.log2(math.e)
    want = max(-150.0, -raw * log2e) if raw > 0 else 0.0
    got = kernel(a, A_log, chunk_size=16)
    torch.testing.assert_close(got, torch.full_like(a, want), rtol=1e-6, atol=1e-12)
    got = kernel(a, A_log, lower_bound=-5.0, chunk_size=16)
    want = -5 * log2e if raw > 0 else 0.0
    torch.testing.assert_close(got, torch.full_like(a, want), rtol=1e-6, atol=1e-12)


def test_a_small_bounded_gate_keeps_its_digits(device):
    """5 sigmoid(-20) is 1e-8: 1 - sigmoid(20) would lose it all."""
    a = torch.linspace(-20, 25, 64, device=device).view(1, 1, 1, 64)
    got = kernel(a, lower_bound=-5.0, chunk_size=16).double()
    want = reference(a.double(), lower_bound=-5.0, chunk_size=16)
    assert (got / want - 1).abs().max().item() < 1e-6
