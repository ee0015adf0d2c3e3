"""The fused sets of stages are the staged ones: outputs and gradients, by the references."""

import pytest
import torch
from delta.stage_checks import inputs
from fused.kda_checks import GATES, kda_stage_inputs
from grids import parametrize

from linattn_edu.ops import gdn, kda
from linattn_edu.testing import assert_close

LEAST, MOST = ("P", "A"), ("P", "A", "gc", "kg", "qg", "kd")  # of what KDA's fused set keeps


def check(operator, x, C, keeps, **write):
    """In float64, each set told to keep this between the passes; the residuals of each."""
    results, kept = [], []
    for used, keep in zip((operator.fused_stages, operator.stages), keeps, strict=True):
        options = {"scale": 0.5, "output_final_state": True, "chunk_size": C, "keep": keep, **write}
        room = used("reference")
        o, last, residuals = operator.forward(room, **x.asdict(), **options)
        torch.manual_seed(0)
        results.append((o, last, *operator.backward(
            room, x.q, x.k, x.v, x.g, x.beta, residuals, torch.randn_like(o),
            torch.randn_like(last), scale=0.5, initial_state=x.initial_state, **write,
        )))  # fmt: skip
        kept.append(residuals)
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(f"output {i}", a, b, 1e-12)
    return kept


@pytest.mark.parametrize("C", [16, 32, 64])
def test_gated_deltanet(C):
    check(gdn, inputs(130, 20, 12, torch.float64, "cpu"), C, (("gc", "P", "AG"), ("gc", "A")))


@parametrize(gate=GATES, C=(16, 32, 64), gated=(False, True), keep=(LEAST, MOST))
def test_kimi_delta_attention(gate, C, gated, keep):
    """And GDN-2, with a write gate."""
    x = kda_stage_inputs(130, 20, 12, torch.float64, "cpu", H=2, gate=gate, gated=gated)
    fused, staged = check(kda, x, C, (keep, LEAST), write=x.write)
    assert torch.equal(fused.P, staged.P) and torch.equal(fused.A, staged.A)
    assert {n for n, y in fused._asdict().items() if y is not None} == {*keep}
