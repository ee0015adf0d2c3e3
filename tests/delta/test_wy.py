"""Stage wy: kernel against reference."""

import pytest
import stages
import torch
from fused.kda_checks import GATES

test_kernel_matches_reference = stages.matches("wy")
test_a_gate_for_each_channel = stages.matches("wy", "kda")
test_erase_and_write_gates = stages.matches("wy", "gdn2")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("gate", GATES)
def test_one_value_head_a_key_head(gate, device):
    stages.check("wy", "kda", 70, 33, 65, 32, torch.float32, device, H=2, gate=gate)
