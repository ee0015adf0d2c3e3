"""Stage chunk_state: kernel against reference."""

import pytest
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.chunk_state import chunk_state as kernel
from linattn_edu.reference.ssd.chunk_state import chunk_state as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device)
    check_stage(kernel, reference, (r.B, r.x, r.step, r.gc, r.seq_idx), chunk_size=C)
