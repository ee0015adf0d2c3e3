"""By the states before the chunks: kernel against reference, two heads a program."""

import pytest
import stages
import torch
from gdn_checks import launches, without_gluon
from ssd.ssd_checks import check_stage

from linattn_edu.kernels.fused import ssd_bwd_dc as kernels
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.fused import ssd_bwd_dc as references
from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.testing import relative_rms

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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(6, 1), (8, 2), (9, 1)], ids=str)
def test_gluon(heads, dtype, device, force):
    """No farther from float64 than the other kernel; twice, since heads are copied ahead."""
    if why := without_gluon(device):
        pytest.skip(why)
    r = stages.parts("ssd_fused", 2048, 128, 64, 128, heads, "none", dtype, device)
    args, options = (r.C, r.gc, r.h, r.dh, r.dy), {"chunk_size": 128}
    exact = references.ssd_bwd_dc(*(t.double() for t in args), **options)
    with forced(ssd_bwd_dc="triton"):
        plain = kernels.ssd_bwd_dc(*args, **options)
    force(ssd_bwd_dc="gluon")
    with launches() as ran:
        got, again = (kernels.ssd_bwd_dc(*args, **options) for _ in range(2))
    assert ran.count(kernels.gluon.ssd_bwd_dc_gluon_kernel) == 2
    assert all(map(torch.equal, got, again))
    for name, x, y, want in zip(("dC", "dgc", "dlast"), got, plain, exact, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        most = 1e-6 if name == "dlast" else 1.01 * relative_rms(y, want) + 1e-7
        assert relative_rms(x, want) <= most, name
