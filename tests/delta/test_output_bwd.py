"""Stage output_bwd: kernel against reference."""

import pytest
import stages
import torch

test_kernel_matches_reference = stages.matches("output_bwd")


@pytest.mark.usefixtures("poison")
def test_one_value_head_a_key_head(device):
    stages.check("output_bwd", "gdn", 70, 33, 65, 32, torch.float32, device, H=2)
