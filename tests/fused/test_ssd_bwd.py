"""The fused backward pass of Mamba-2: kernel against reference, chunks of one tile and of two."""

import pytest
import stages
import torch
from gdn_checks import launches, without_gluon

from linattn_edu.kernels.delta.state_bwd import state_bwd
from linattn_edu.kernels.fused import ssd_bwd as kernels
from linattn_edu.kernels.fused.ssd_bwd import ssd_bwd_dx, ssd_ends_bwd
from linattn_edu.kernels.routes import forced
from linattn_edu.kernels.ssd.chunk_cumsum import chunk_cumsum_log
from linattn_edu.packing import pack
from linattn_edu.reference.fused import ssd_bwd as references
from linattn_edu.testing import assert_close, relative_rms


@pytest.fixture
def many(force):
    """Two heads a program where heads are summed."""
    force(SSD_MANY=2)


test_ends = stages.matches("ssd_ends_bwd", "ssd_fused")


@pytest.mark.parametrize("lengths", [(5,), (256,), (300,), (300, 0, 40, 256, 65)], ids=str)
def test_over_ranks_pieces_are_scanned_side_by_side(lengths, device, force):
    """By their maps; as the whole sequences, to the rounding of dS before each piece in fp32."""
    force(SSD_PIECE=128)
    several, options = len(lengths) > 1, {"chunk_size": 128}
    kinds = ((4, 2), "channels", torch.bfloat16, device)
    r = stages.parts("ssd_fused", sum(lengths), 40, 33, 128, *kinds)
    C, dy, dt, dht = r.C, r.dy, r.dt, r.dht
    if several:
        options["packing"] = pack(torch.tensor([0, *lengths], device=device).cumsum(0), 128)
        C, dy, dt = (y[:1] for y in (C, dy, dt))
        dht = torch.randn(len(lengths), *dht.shape[1:], device=device)
    _, gc = chunk_cumsum_log(dt, r.A, r.dt_bias, softplus=True, **options)
    *maps, _ = ssd_ends_bwd(C, gc, dy, rows=torch.tensor([], dtype=torch.int64), **options)
    args = (C, None, None, gc, dy, None, dht)
    got = state_bwd(*args, scale=1.0, maps=maps, **options)
    want = state_bwd(*args, scale=1.0, **options)
    for name, x, y in zip(("dh", "dv", "dh0"), got, want, strict=True):
        if y is None:
            assert x is None
        else:
            assert_close(name, x, y, 3e-3)


@pytest.mark.usefixtures("poison")
def test_tokens_behind_the_last_end_are_not_in_the_gradient_of_D(device):
    r = stages.parts("ssd_fused", 90, 40, 33, 128, (4, 2), "none", torch.bfloat16, device)
    given = (y[:1] for y in (r.C, r.B, r.x, r.gs, r.gc, r.dh, r.dy, r.inter, r.dgc))
    packing = pack(torch.tensor([0, 60], device=device), 128)
    *_, dD = ssd_bwd_dx(*given, torch.ones(4, 1, device=device), chunk_size=128, packing=packing)
    want = (r.x.double() * r.dy.double())[:1, :60].sum((0, 1, 3))
    assert_close("dD", dD[:, 0], want, 1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(6, 1), (8, 2)], ids=str)
def test_dx_gluon(heads, dtype, device, force):
    """No farther from float64 than the other kernels; twice, since a head is copied ahead of the
    one before it.
    """
    if why := without_gluon(device):
        pytest.skip(why)
    r = stages.parts("ssd_fused", 2048, 128, 64, 128, heads, "all", dtype, device)
    args = r.C, r.B, r.x, r.gs, r.gc, r.dh, r.dy, r.inter, r.dgc, r.D
    exact = references.ssd_bwd_dx(*(t.double() for t in args), chunk_size=128)
    with forced(ssd_bwd_dx="triton"):
        plain = ssd_bwd_dx(*args, chunk_size=128)
    force(ssd_bwd_dx="gluon")
    with launches() as ran:
        got, again = (ssd_bwd_dx(*args, chunk_size=128) for _ in range(2))
    assert ran.count(kernels.ssd_bwd.ssd_bwd_dx_gluon_kernel) == 2
    assert all(map(torch.equal, got, again))
    names = "dx", "dB", "dC", "dstep", "dgc", "m", "dD"
    for name, x, y, want in zip(names, got, plain, exact, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        most = 1e-6 if name in ("m", "dD") else 1.01 * relative_rms(y, want)
        assert relative_rms(x, want) <= most, name


test_kernels = pytest.mark.usefixtures("many")(stages.matches("ssd_bwd_dx", "ssd_fused"))
