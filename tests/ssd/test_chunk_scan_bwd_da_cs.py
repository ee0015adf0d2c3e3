"""Stage chunk_scan_bwd_da_cs: kernel against reference."""

import pytest
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.chunk_scan_bwd_da_cs import chunk_scan_bwd_da_cs as kernel
from linattn_edu.reference.ssd.chunk_scan_bwd_da_cs import chunk_scan_bwd_da_cs as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device)
    args = (r.C, r.B, r.x, r.step, r.gc, r.dy, r.seq_idx)
    check_stage(kernel, reference, args, chunk_size=C)
