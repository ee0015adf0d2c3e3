"""Stage chunk_scan_bwd_dc: kernel against reference."""

import pytest
import stages
import torch
from ssd.ssd_checks import check_stage

from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def check(kernel, reference, args, **options):
    """dgc from states that are rounded already, dC and dB from states that are not.

    The kernel rounds h to x's dtype. Where the decay leaves few dgc, the terms of each may cancel.
    """
    rounded = (*args[:5], args[5].to(args[2].dtype), *args[6:])
    (*_, got), (*_, wanted) = (f(*rounded, **options) for f in (kernel, reference))
    assert got.dtype == wanted.dtype == torch.float32
    assert_close("dgc", got, wanted, 5e-6)
    first = (lambda *a, f=f, **o: f(*a, **o)[:2] for f in (kernel, reference))
    check_stage(*first, args, **options)


test_kernel = stages.matches("chunk_scan_bwd_dc", "ssd", check=check)


@pytest.mark.parametrize(("H", "G"), [(3, 1), (3, 3), (6, 2)])
def test_heads_of_a_group(H, G, device):
    """N takes several tiles, whose parts of dgc are added afterwards."""
    sizes = (40, 200, 48, 16, "all", torch.bfloat16, device)
    stages.check("chunk_scan_bwd_dc", "ssd", *sizes, H=H, G=G, check=check)
