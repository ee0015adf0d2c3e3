"""Stage chunk_scan_chunk_state_bwd_dx: kernel against reference."""

import pytest
import torch
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.chunk_scan_chunk_state_bwd_dx import (
    chunk_scan_chunk_state_bwd_dx as kernel,
)
from linattn_edu.reference.ssd.chunk_scan_chunk_state_bwd_dx import (
    chunk_scan_chunk_state_bwd_dx as reference,
)

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device)
    args = (r.C, r.B, r.x, r.step, r.gc, r.ds, r.dy, r.D, r.seq_idx)
    check_stage(kernel, reference, args, chunk_size=C)


def test_one_column_of_D_is_one_number_a_head(device):
    r = parts(40, 20, 33, 16, "all", torch.float32, device)
    args = (r.C, r.B, r.x, r.step, r.gc, r.ds, r.dy)
    for stage in (kernel, reference):
        *same, dD = stage(*args, r.D, chunk_size=16)
        *column, dD_column = stage(*args, r.D[:, None], chunk_size=16)
        assert all(torch.equal(y, z) for y, z in zip(same, column, strict=True))
        assert dD_column.shape == (len(r.D), 1) and torch.equal(dD_column[:, 0], dD)
