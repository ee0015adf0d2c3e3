"""By the states before the chunks: kernel against reference, two heads a program."""

import pytest
import stages
import torch
from ssd.ssd_checks import check_stage

from linattn_edu.reference.ssd.chunk_cumsum import decays

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def many(force):
    """Two heads a program where heads are summed."""
    force(SSD_MANY=2)


def check(kernel, reference, args, chunk_size):
    """dlast is an inner product of terms of either sign: they are its yardstick, for each entry."""
    options, (_, gc, h, dh, _, seq_idx) = {"chunk_size": chunk_size}, args
    *got, dlast = kernel(*args, **options)
    others = (lambda *_, **__: tuple(got)), (lambda *x, **y: reference(*x, **y)[:2])
    check_stage(*others, args, **options)
    *_, exact = reference(*(x.double() for x in args[:5]), seq_idx, **options)
    a = decays(gc.double(), seq_idx, chunk_size)[3][..., 0, 0].transpose(1, 2)
    terms = (h.double() * dh.double()).abs().sum((-1, -2))
    assert dlast.dtype == torch.float32 and dlast.shape == exact.shape
    bound = (1e-6 * a + torch.finfo(torch.float32).tiny * (a > 0)) * terms
    assert ((dlast - exact).abs() <= bound).all()


test_kernel = pytest.mark.usefixtures("many")(
    stages.matches("ssd_bwd_dc", "ssd_fused", check=check)
)
