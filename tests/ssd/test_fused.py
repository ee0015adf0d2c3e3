"""The fused stages of Mamba-2: kernel against reference, chunks of one tile and of two."""

import pytest
import torch
from grids import EVERY, name, pairs
from ssd.ssd_checks import GIVEN, TOKENS, check_stage, parts

from linattn_edu.kernels.ssd import fused as kernels
from linattn_edu.reference.ssd import fused as reference

pytestmark = pytest.mark.usefixtures("poison")
AXES = {
    "T": (*TOKENS, 130, 192),
    "N": (16, 33, 64, 100, 128),
    "P": (16, 33, 64),
    "C": (128, 64, 32),
    "heads": ((4, 2), (3, 3), (5, 1)),
    "given": GIVEN,
    "dtype": (torch.float16, torch.bfloat16),
}
CASES = pairs(**AXES) + ([c[::-1] for c in pairs(**dict(reversed(AXES.items())))] if EVERY else [])


@pytest.fixture(params=[4096, 128], ids="PART={}".format)
def split(request, monkeypatch):
    """Two heads a program where heads are summed; sequences of one part, or of several."""
    monkeypatch.setattr(kernels, "MANY", 2)
    monkeypatch.setattr(kernels, "PART", request.param)


@pytest.mark.parametrize(tuple(AXES), CASES, ids=name)
def test_kernels(T, N, P, C, heads, given, dtype, device, split):
    r = parts(T, N, P, C, given, dtype, device, *heads)
    check_stage(kernels.chunk_scores, reference.chunk_scores, (r.C, r.B, r.seq_idx), chunk_size=C)
    S = reference.chunk_scores(r.C, r.B, r.seq_idx, chunk_size=C)
    h, dh = r.h.to(dtype), r.ds.to(dtype)
    args = (r.C, r.B, S, r.x, r.step, r.gc, r.h0, r.D, r.z, r.seq_idx)
    check_stage(kernels.ssd_fwd, reference.ssd_fwd, args, output_final_state=True)
    args = (r.C, r.B, r.x, r.step, r.gc, r.dy, r.h0, r.dht, r.seq_idx)
    first3 = [
        (lambda *y, f=f, **o: f(*y, **o)[:3]) for f in (kernels.ssd_states, reference.ssd_states)
    ]
    check_stage(*first3, args, chunk_size=C)
    check_dlast(args, dtype, C)
    args = (r.C, r.B, S, r.x, r.step, r.gc, h, dh, r.dy, r.D, r.seq_idx)
    check_stage(kernels.ssd_bwd, reference.ssd_bwd, args)


def check_dlast(args, dtype, C):
    """dlast is an inner product that may cancel: its error beside the largest that it could be."""
    dlast = kernels.ssd_states(*args, chunk_size=C)[3]
    wide = [y.double() if y is not None and y.is_floating_point() else y for y in args]
    h, ds, _, exact = reference.ssd_states(*wide, chunk_size=C)
    largest = (h.square().sum((-1, -2)) * ds.square().sum((-1, -2))).sqrt()
    assert ((dlast.double() - exact).abs() <= torch.finfo(dtype).eps * largest + 1e-30).all()
