"""The fused backward pass of Mamba-2: kernel against reference, chunks of one tile and of two."""

import pytest
from fused.test_ssd_fwd import AXES, CASES
from grids import name
from ssd.ssd_checks import check_stage, parts

from linattn_edu.kernels.fused import ssd_bwd as kernels
from linattn_edu.reference.fused import ssd_bwd as reference

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize(tuple(AXES), CASES, ids=name)
def test_kernels(T, N, P, C, heads, given, dtype, device, force):
    """With two heads a program where heads are summed."""
    force(SSD_MANY=2)
    r = parts(T, N, P, C, given, dtype, device, *heads)
    h, dh = r.h.to(dtype), r.ds.to(dtype)
    inputs = (r.C, r.B, r.x, r.gs, r.gc)
    args = (*inputs, h, dh, r.dy, r.seq_idx)
    check_stage(kernels.ssd_bwd_bc, reference.ssd_bwd_bc, args, chunk_size=C)
    *_, dgc, xdy = reference.ssd_bwd_bc(*args, chunk_size=C)
    args = (*inputs, dh, r.dy, xdy, dgc, r.D, r.seq_idx)
    check_stage(kernels.ssd_bwd_dx, reference.ssd_bwd_dx, args, chunk_size=C)
