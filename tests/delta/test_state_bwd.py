"""Stage state_bwd: kernel against reference."""

import pytest
import torch
from delta.stage_checks import backward_inputs, check_stage, grid
from fused import kda_checks

from linattn_edu.kernels.delta.state_bwd import state_bwd as kernel
from linattn_edu.reference.delta.state_bwd import state_bwd as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x, r = backward_inputs(T, K, V, C, dtype, device)
    args = (x.q, x.k, r.w, r.gc, r.do, r.dv_out, r.dht)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=C)


def test_without_a_gradient_of_the_final_state(device):
    x, r = backward_inputs(100, 33, 64, 32, torch.float32, device)
    args = (x.q, x.k, r.w, r.gc, r.do, r.dv_out)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=32)
    zero = kernel(*args, torch.zeros_like(r.dht), scale=0.3, chunk_size=32)
    none = kernel(*args, scale=0.3, chunk_size=32)
    assert all(torch.equal(a, b) for a, b in zip(zero, none, strict=True))


def test_last_gradient_is_that_of_the_final_state(device):
    x, r = backward_inputs(70, 16, 16, 32, torch.float32, device)
    dh, _, _ = kernel(x.q, x.k, r.w, r.gc, r.do, r.dv_out, r.dht, scale=0.3, chunk_size=32)
    assert torch.equal(dh[:, -1], r.dht)


@kda_checks.once
def test_a_gate_for_each_channel(T, K, V, C, dtype, device):
    _, r = kda_checks.backward_parts(T, K, V, C, dtype, device)
    args = (r.qg, r.kg, r.w, r.gc, r.do, None, r.dht, None, None, r.P)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=C)


@pytest.mark.parametrize("gate", kda_checks.GATES)
def test_channels_without_a_gradient_of_the_final_state(gate, device):
    _, r = kda_checks.backward_parts(70, 33, 65, 32, torch.float32, device, H=2, gate=gate)
    args = (r.qg, r.kg, r.w, r.gc, r.do, None, None, None, None, r.P)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=32)
