"""Stages dplr_rows_bwd and dplr_intra_bwd, and all stages of chunks on gates that are shut."""

import pytest
import stages
import torch
from delta.stage_checks import DTYPES
from grids import parametrize

KINDS = ({"strong": True}, {"steep": True}, {"alike": 5.0})
NAMES = "dplr_intra dplr_scan dplr_states dplr_scan_bwd dplr_rows_bwd dplr_intra_bwd"

pytestmark = pytest.mark.usefixtures("poison")
test_kernels_match_the_reference = stages.matches("dplr_rows_bwd dplr_intra_bwd", "dplr")


@parametrize(1, kinds=KINDS, dtype=DTYPES)
def test_gates_that_are_shut_or_steep_and_keys_alike(kinds, dtype, device):
    """Rows near their block's first one and far from it, in one block."""
    stages.check(NAMES, "dplr", 70, 40, 24, 32, dtype, device, **kinds)


def test_without_a_state_at_either_end(device):
    without = ("initial_state", "dht")
    nothing = {"output_final_state": False}
    stages.check("dplr_states dplr_scan_bwd", "dplr", 20, 16, 20, 16, torch.float32, device,
                 without=without)  # fmt: skip
    stages.check("dplr_scan", "dplr", 20, 16, 20, 16, torch.float32, device, without=without,
                 more=nothing)  # fmt: skip
