"""Stage chunk_state_bwd_db: kernel against reference."""

import pytest
import stages
import torch
from ssd.ssd_checks import check_stage

from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def check(kernel, reference, args, **options):
    """All outputs from states that are rounded already, and dB from states that are not.

    The kernel rounds ds to x's dtype. Of dlast there are few, and the terms of each may cancel.
    """
    rounded = (*args[:4], args[4].to(args[1].dtype), *args[5:])
    got, wanted = (f(*rounded, **options) for f in (kernel, reference))
    for name, x, ref in zip(("dB", "dgc", "dlast"), got, wanted, strict=True):
        assert x.dtype == ref.dtype == torch.float32
        assert_close(name, x, ref, 5e-6)
    first = (lambda *a, f=f, **o: f(*a, **o)[0] for f in (kernel, reference))
    check_stage(*first, args, **options)


test_kernel = stages.matches("chunk_state_bwd_db", "ssd", check=check)


@pytest.mark.parametrize(("H", "G"), [(3, 1), (3, 3), (6, 2)])
def test_heads_of_a_group(H, G, device):
    """N takes several tiles, whose parts of dgc and dlast are added afterwards."""
    sizes = (40, 200, 48, 16, "all", torch.bfloat16, device)
    stages.check("chunk_state_bwd_db", "ssd", *sizes, H=H, G=G, check=check)
