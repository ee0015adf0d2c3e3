"""Stage state: kernel against reference, with and without the states at the ends."""

import pytest
import stages
import torch
from fused.kda_checks import GATES

from linattn_edu.kernels.delta.state import state as kernel

pytestmark = pytest.mark.usefixtures("poison")

test_kernel_matches_reference = stages.matches("state")
test_a_gate_for_each_channel = stages.matches("state", "kda")


def test_no_state_in_and_none_out(device):
    sizes = (100, 33, 64, 32, torch.float32, device)
    none_out = {"output_final_state": False}
    stages.check("state", "gdn", *sizes, without=["h0"], more=none_out)
    *args, h0 = stages.arguments("state", "gdn", *sizes)
    zero = kernel(*args, torch.zeros_like(h0), chunk_size=32)
    none = kernel(*args, chunk_size=32)
    assert torch.equal(zero[0], none[0])
    assert none[2] is None


def test_first_state_is_the_initial_state(device):
    *args, h0 = stages.arguments("state", "gdn", 70, 16, 16, 32, torch.float32, device)
    h, _, _ = kernel(*args, h0, chunk_size=32)
    assert torch.equal(h[:, 0], h0)


@pytest.mark.parametrize("gate", GATES)
def test_channels_without_a_state(gate, device):
    sizes = (70, 33, 65, 32, torch.float32, device)
    stages.check("state", "kda", *sizes, H=2, gate=gate, without=["h0"])
