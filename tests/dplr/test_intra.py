"""Stage dplr_intra: kernels against the reference."""

import pytest
import stages
import torch
from delta.stage_checks import DTYPES, check_stage
from dplr.dplr_checks import inputs

from linattn_edu.kernels.dplr.intra import dplr_intra as kernel
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.dplr.intra import dplr_intra as reference

test_kernels_match_the_reference = stages.matches("dplr_intra", "dplr")


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", [1, 18, 40])
def test_a_far_row_changes_no_earlier_one(t, dtype, device):
    """A block with near rows alone, and the same one with a shut gate: to the bit. What a reads at
    a token does not have the token's gate, and kg and bg have that of the chunk's last.
    """
    x = inputs(1, 64, 2, 40, 16, dtype, device)
    tokens = [x[n] for n in "qkab"]
    before = kernel(*tokens, gate_cumsum(x["gk"], chunk_size=64), chunk_size=64)
    x["gk"][:, t, :, ::7] = -1e4
    args = *tokens, gate_cumsum(x["gk"], chunk_size=64)
    check_stage(kernel, reference, args, chunk_size=64)
    names = "M", "ak", "qb", "qk", "qg", "kg", "ag", "bg"
    for name, y, z in zip(names, before, kernel(*args, chunk_size=64), strict=True):
        first = t + (name in ("M", "ak", "ag")) if name not in ("kg", "bg") else 0
        assert torch.equal(y[:, :first], z[:, :first]), name
        assert not torch.equal(y[:, first:], z[:, first:]), name
