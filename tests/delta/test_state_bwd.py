"""Stage state_bwd: kernel against reference."""

import pytest
import stages
import torch
from fused import kda_checks

from linattn_edu.kernels.delta.state_bwd import state_bwd as kernel

pytestmark = pytest.mark.usefixtures("poison")

test_kernel_matches_reference = stages.matches("state_bwd")
test_a_gate_for_each_channel = stages.matches("state_bwd", "kda", kda_checks.once)


def test_without_a_gradient_of_the_final_state(device):
    sizes = (100, 33, 64, 32, torch.float32, device)
    stages.check("state_bwd", "gdn", *sizes, without=["dht"])
    *args, dht = stages.arguments("state_bwd", "gdn", *sizes)
    zero = kernel(*args, torch.zeros_like(dht), scale=0.3, chunk_size=32)
    none = kernel(*args, scale=0.3, chunk_size=32)
    assert all(torch.equal(a, b) for a, b in zip(zero, none, strict=True))


def test_last_gradient_is_that_of_the_final_state(device):
    args = stages.arguments("state_bwd", "gdn", 70, 16, 16, 32, torch.float32, device)
    dh, _, _ = kernel(*args, scale=0.3, chunk_size=32)
    assert torch.equal(dh[:, -1], args[-1])


@pytest.mark.parametrize("gate", kda_checks.GATES)
def test_channels_without_a_gradient_of_the_final_state(gate, device):
    sizes = (70, 33, 65, 32, torch.float32, device)
    stages.check("state_bwd", "kda", *sizes, H=2, gate=gate, without=["dht"])
