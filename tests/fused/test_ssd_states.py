"""The states of Mamba-2 for its backward pass, and their gradients: kernels against reference."""

import pytest
import stages
import torch
from gdn_checks import launches, without_gluon

from linattn_edu.kernels.fused import ssd_states as kernels
from linattn_edu.kernels.fused.ssd_bwd import ssd_ends_bwd
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.fused import ssd_states as references
from linattn_edu.testing import relative_rms

pytestmark = pytest.mark.usefixtures("poison")

test_kernels = stages.matches("ssd_states ssd_states_bwd", "ssd_fused")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "given"), [((8, 2), "all"), ((2, 1), "none")])
@pytest.mark.parametrize("cut", ["whole", "in pieces", "over ranks"])
def test_gluon(cut, heads, given, dtype, device, force):
    """The bits of plain Triton where a sequence is whole, both ways; in pieces as near to float64.
    Twice: tiles are copied ahead.
    """
    if why := without_gluon(device):
        pytest.skip(why)
    r = stages.parts("ssd_fused", 2176, 128, 64, 128, heads, given, dtype, device)
    force(ssd_states="gluon", SSD_PIECE=4096 if cut == "whole" else 512)
    forth, back, maps = (r.B, r.x, r.gs, r.gc, r.h0), (r.C, r.gc, r.dy, r.dht), {}
    if cut == "over ranks":
        maps = {"maps": ssd_ends_bwd(r.C, r.gc, r.dy, chunk_size=128)[:2]}
    for name, args, more in ("ssd_states", forth, {}), ("ssd_states_bwd", back, maps):
        f, reference = getattr(kernels, name), getattr(references, name)
        with forced(ssd_states="triton"):
            plain = f(*args, chunk_size=128)
        with launches() as ran:
            got, again = (f(*args, chunk_size=128, **more) for _ in range(2))
        assert ran.count(kernels.gluon.ssd_states_gluon_kernel) == 2
        wide = [x if x is None else x.double() for x in args]
        found = (got, again, plain, reference(*wide, chunk_size=128))
        if name == "ssd_states":
            found = tuple((x,) for x in found)
        for x, twice, y, exact in zip(*found, strict=True):
            assert torch.equal(x, twice) and (cut != "whole" or torch.equal(x, y))
            assert relative_rms(x, exact) <= 1.01 * relative_rms(y, exact) + 1e-7
