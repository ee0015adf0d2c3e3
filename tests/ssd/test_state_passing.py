"""Stage state_passing: kernel against reference."""

import pytest
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.state_passing import state_passing as kernel
from linattn_edu.reference.ssd.state_passing import state_passing as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    r = parts(T, N, P, C, given, dtype, device)
    args = (r.s, r.gc, r.h0, r.seq_idx)
    check_stage(kernel, reference, args, chunk_size=C, output_final_state=r.h0 is not None)
