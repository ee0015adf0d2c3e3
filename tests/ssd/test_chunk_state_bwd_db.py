"""Stage chunk_state_bwd_db: kernel against reference."""

import pytest
import torch
from ssd.ssd_checks import check_stage, grid, parts

from linattn_edu.kernels.ssd.chunk_state_bwd_db import chunk_state_bwd_db as kernel
from linattn_edu.reference.ssd.chunk_state_bwd_db import chunk_state_bwd_db as reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def check(r, C):
    """All outputs from states that are rounded already, and dB from states that are not.

    The kernel rounds ds to x's dtype. Of dlast there are few, and the terms of each may cancel.
    """
    args = (r.B, r.x, r.step, r.gc)
    ds, options = r.ds.to(r.x.dtype), {"chunk_size": C}
    wanted = reference(*args, ds, r.seq_idx, **options)
    got = kernel(*args, ds, r.seq_idx, **options)
    for name, x, ref in zip(("dB", "dgc", "dlast"), got, wanted, strict=True):
        assert x.dtype == ref.dtype == torch.float32
        assert_close(name, x, ref, 5e-6)
    stages = (lambda *a, f=f, **o: f(*a, **o)[0] for f in (kernel, reference))
    check_stage(*stages, (*args, r.ds, r.seq_idx), **options)


@grid
def test_kernel(T, N, P, C, given, dtype, device):
    check(parts(T, N, P, C, given, dtype, device), C)


@pytest.mark.parametrize(("H", "G"), [(3, 1), (3, 3), (6, 2)])
def test_heads_of_a_group(H, G, device):
    """N takes several tiles, whose parts of dgc and dlast are added afterwards."""
    check(parts(40, 200, 48, 16, "all", torch.bfloat16, device, H, G), 16)
