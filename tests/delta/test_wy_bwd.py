"""Stage wy_bwd: kernel against reference."""

import pytest
import stages
import torch

pytestmark = pytest.mark.usefixtures("poison")

test_kernel_matches_reference = stages.matches("wy_bwd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_value_head_a_key_head(dtype, device):
    stages.check("wy_bwd", "gdn", 70, 33, 65, 32, dtype, device, H=2)


def test_nothing_is_divided_by_beta(device):
    sizes = (70, 16, 16, 32, torch.float32, device)
    stages.check("wy_bwd", "gdn", *sizes, change=lambda r: r.beta.zero_())
