"""Stage state: kernel against reference, with and without the states at the ends."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs
from fused import kda_checks

from linattn_edu.kernels.delta.state import state as kernel
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.solve import solve
from linattn_edu.reference.delta.state import state as reference
from linattn_edu.reference.delta.wy import wy

pytestmark = pytest.mark.usefixtures("poison")


def arguments(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc, A = gate_cumsum(x.g, chunk_size=C), solve(x.k, x.beta, chunk_size=C)
    return x.k, *wy(x.k, x.v, x.beta, gc, A), gc, x.initial_state


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    args = arguments(T, K, V, C, dtype, device)
    check_stage(kernel, reference, args, chunk_size=C, output_final_state=True)


def test_no_state_in_and_none_out(device):
    *args, h0 = arguments(100, 33, 64, 32, torch.float32, device)
    check_stage(kernel, reference, args, chunk_size=32)
    zero = kernel(*args, torch.zeros_like(h0), chunk_size=32)
    none = kernel(*args, chunk_size=32)
    assert torch.equal(zero[0], none[0])
    assert none[2] is None


def test_first_state_is_the_initial_state(device):
    *args, h0 = arguments(70, 16, 16, 32, torch.float32, device)
    h, _, _ = kernel(*args, h0, chunk_size=32)
    assert torch.equal(h[:, 0], h0)


def channel_arguments(T, K, V, C, dtype, device, **kinds):
    x = kda_checks.kda_stage_inputs(T, K, V, dtype, device, **kinds)
    r = kda_checks.forward_parts(x, C)
    return r.kg, r.w, r.u, r.gc, x.initial_state


@kda_checks.grid
def test_a_gate_for_each_channel(T, K, V, C, dtype, device):
    args = channel_arguments(T, K, V, C, dtype, device)
    check_stage(kernel, reference, args, chunk_size=C, output_final_state=True)


@pytest.mark.parametrize("gate", kda_checks.GATES)
def test_channels_without_a_state(gate, device):
    *args, _ = channel_arguments(70, 33, 65, 32, torch.float32, device, H=2, gate=gate)
    check_stage(kernel, reference, args, chunk_size=32, output_final_state=True)
