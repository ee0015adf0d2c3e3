"""The fused gradients of a chunk: kernel against reference, whole chunks and halves."""

import pytest
import torch
from grids import parametrize
from ssd.ssd_checks import GIVEN, TOKENS, check_stage, parts

from linattn_edu.kernels.ssd import fused as kernels
from linattn_edu.reference.ssd.fused import chunk_scores
from linattn_edu.reference.ssd.fused import ssd_bwd as reference

pytestmark = pytest.mark.usefixtures("poison")


@parametrize(
    T=(*TOKENS, 130, 192),
    N=(16, 33, 64, 100, 128),
    P=(16, 33, 64),
    C=(128, 64, 32),
    heads=((4, 2), (3, 3), (5, 1)),
    given=GIVEN,
    dtype=(torch.float16, torch.bfloat16),
)
def test_kernel(T, N, P, C, heads, given, dtype, device, monkeypatch):
    monkeypatch.setattr(kernels, "HEADS", 2)
    r = parts(T, N, P, C, given, dtype, device, *heads)
    h, dh = r.h.to(dtype), r.ds.to(dtype)
    S = chunk_scores(r.C, r.B, chunk_size=C)
    args = (r.C, r.B, S, r.x, r.step, r.gc, h, dh, r.dy, r.D, r.seq_idx)
    check_stage(kernels.ssd_bwd, reference, args)
    check_stage(kernels.chunk_scores, chunk_scores, (r.C, r.B), chunk_size=C)
