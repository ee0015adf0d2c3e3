"""Stage chunk_scan_bwd_dc: kernel against reference."""

import pytest
import torch
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.chunk_scan_bwd_dc import chunk_scan_bwd_dc as kernel
from linattn_edu.reference.ssd.chunk_scan_bwd_dc import chunk_scan_bwd_dc as reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def check(r, C):
    """dgc from states that are rounded already, dC and dB from states that are not.

    The kernel rounds h to x's dtype. Where the decay leaves few dgc, the terms of each may cancel.
    """
    args = (r.C, r.B, r.x, r.step, r.gc)
    rest, options = (r.dy, r.dB_state, r.seq_idx), {"chunk_size": C}
    h = r.h.to(r.x.dtype)
    *_, wanted = reference(*args, h, *rest, **options)
    *_, got = kernel(*args, h, *rest, **options)
    assert got.dtype == wanted.dtype == torch.float32
    assert_close("dgc", got, wanted, 5e-6)
    stages = (lambda *a, f=f, **o: f(*a, **o)[:2] for f in (kernel, reference))
    check_stage(*stages, (*args, r.h, *rest), **options)


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    check(parts(T, N, P, C, given, dtype, device), C)


@pytest.mark.parametrize(("H", "G"), [(3, 1), (3, 3), (6, 2)])
def test_heads_of_a_group(H, G, device):
    """N takes several tiles, whose parts of dgc are added afterwards."""
    check(parts(40, 200, 48, 16, "all", torch.bfloat16, device, H, G), 16)
