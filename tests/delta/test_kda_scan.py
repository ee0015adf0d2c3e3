"""Stage kda_scan: kernel against reference, and against the two stages whose place it takes."""

import pytest
import stages
import torch
from fused.kda_checks import SCALE, forward_parts, gates, kda_stage_inputs

from linattn_edu.kernels.delta.kda_scan import kda_scan
from linattn_edu.kernels.delta.output import output
from linattn_edu.kernels.delta.state import state
from linattn_edu.ops import kda
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


test_kernel_matches_reference = stages.matches("kda_scan", "kda")


@gates
def test_any_gate(C, gate, dtype, device):
    nothing = {"without": ["h0"], "more": {"output_final_state": False}}
    stages.check("kda_scan", "kda", 70, 16, 24, C, dtype, device, H=2, gate=gate, **nothing)


def test_the_state_is_rounded_where_state_and_output_round_it(device):
    """The same products of the same rounded factors: the same bits as by way of h and v_new."""
    x = kda_stage_inputs(150, 48, 40, torch.bfloat16, device, H=2)
    r = forward_parts(x, 32)
    args = (r.qg, r.kg, r.w, r.u, r.gc, r.P, x.initial_state)
    o, final_state = kda_scan(*args, scale=SCALE, output_final_state=True)
    options = {"chunk_size": 32, "output_final_state": True}
    h, v_new, want = state(r.kg, r.w, r.u, r.gc, x.initial_state, **options)
    assert torch.equal(final_state, want)
    staged = output(r.qg, None, v_new, h, None, r.P, scale=SCALE, chunk_size=32)
    assert_close("o", o, staged, 1e-3)


@pytest.mark.parametrize("keep", [("P", "A"), ()], ids=str)
def test_without_states_in_float64(keep):
    x = kda_stage_inputs(130, 20, 12, torch.float64, "cpu", H=2)
    options = {"scale": 0.5, "output_final_state": True, "chunk_size": 32}
    *want, kept = kda.forward(kda.stages("reference"), **x.asdict(), **options)
    *got, less = kda.forward(kda.stages("reference"), **x.asdict(), **options, keep=keep)
    assert kept.h is not None and less.h is None
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)
