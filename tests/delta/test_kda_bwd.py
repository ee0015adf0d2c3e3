"""Stages kda_output_bwd and kda_wy_bwd: kernels against references."""

import pytest
import stages
import torch
from delta.stage_checks import check_stage
from fused.kda_checks import GATES, SCALE, backward_parts, once

from linattn_edu.kernels.delta import kda_bwd as kernels
from linattn_edu.reference.delta import kda_bwd as references

pytestmark = pytest.mark.usefixtures("poison")


BOTH = "kda_output_bwd kda_wy_bwd"

test_kernels_match_references = stages.matches(BOTH, "kda", once)
test_a_write_gate = stages.matches("kda_wy_bwd", "gdn2")


@pytest.mark.parametrize("gate", GATES)
def test_one_value_head_a_key_head(gate, device):
    stages.check(BOTH, "kda", 70, 33, 65, 32, torch.float32, device, H=2, gate=gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("V", [16, 200, 256])
def test_values_wider_than_a_tile(V, dtype, device):
    stages.check(BOTH, "kda", 40, 33, V, 32, dtype, device)


def test_nothing_is_divided_by_beta(device):
    x, r = backward_parts(70, 16, 16, 32, torch.float32, device)
    x.beta[:] = 0
    args = (x.v, x.beta, r.A, r.h, r.v_new, r.dh, r.dv_new)
    _, _, dv, _, dbeta, _ = kernels.kda_wy_bwd(*args)
    assert not dv.any() and dbeta.any()
    check_stage(kernels.kda_wy_bwd, references.kda_wy_bwd, args)


def test_gradients_stay_below_the_diagonal(device):
    """dP holds i >= j, dL i > j: what lies above belongs to no pair of tokens."""
    x, r = backward_parts(50, 16, 24, 32, torch.float32, device)
    _, dP = kernels.kda_output_bwd(r.v_new, r.h, r.do, scale=SCALE, chunk_size=32)
    dL = kernels.kda_wy_bwd(x.v, x.beta, r.A, r.h, r.v_new, r.dh, r.dv_new)[3]
    row = torch.arange(50, device=device)[:, None, None] % 32
    column = torch.arange(32, device=device)
    assert not dP.masked_fill(column <= row, 0).any()
    assert not dL.masked_fill(column < row, 0).any()
