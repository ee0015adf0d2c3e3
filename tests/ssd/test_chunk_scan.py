"""Stage chunk_scan: kernel against reference."""

import pytest
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.chunk_scan import chunk_scan as kernel
from linattn_edu.reference.ssd.chunk_scan import chunk_scan as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device)
    args = (r.C, r.B, r.x, r.step, r.gc, r.h, r.D, r.z, r.seq_idx)
    check_stage(kernel, reference, args, chunk_size=C)
