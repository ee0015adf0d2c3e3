"""Stage chunk_scan_chunk_state_bwd_dx: kernel against reference."""

import pytest
import stages
import torch
from ssd.ssd_checks import parts

from linattn_edu.kernels.ssd.chunk_scan_chunk_state_bwd_dx import (
    chunk_scan_chunk_state_bwd_dx as kernel,
)
from linattn_edu.reference.ssd.chunk_scan_chunk_state_bwd_dx import (
    chunk_scan_chunk_state_bwd_dx as reference,
)

pytestmark = pytest.mark.usefixtures("poison")


test_kernel = stages.matches("chunk_scan_chunk_state_bwd_dx", "ssd")


def test_one_column_of_D_is_one_number_a_head(device):
    r = parts(40, 20, 33, 16, "all", torch.float32, device)
    args = (r.C, r.B, r.x, r.step, r.gc, r.ds, r.dy)
    for stage in (kernel, reference):
        *same, dD = stage(*args, r.D, chunk_size=16)
        *column, dD_column = stage(*args, r.D[:, None], chunk_size=16)
        assert all(torch.equal(y, z) for y, z in zip(same, column, strict=True))
        assert dD_column.shape == (len(r.D), 1) and torch.equal(dD_column[:, 0], dD)
