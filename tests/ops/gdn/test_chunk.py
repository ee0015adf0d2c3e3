"""The public function: against the recurrence, and the properties a user relies on."""

import pytest
import torch
from grids import parametrize

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs, poison, relative_rms

# relative RMS of o against float64, for outputs of ordinary size
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@parametrize(
    shape=((2, 130, 2, 4, 24, 40), (1, 70, 1, 1, 256, 256), (3, 5, 3, 3, 2, 3)),
    dtype=TOLERANCE,
    state=(True, False),
)
def test_kernels_match_the_recurrence(shape, dtype, state, device):
    x = gdn_inputs(*shape, dtype=dtype, device=device, initial_state=state)
    want = recurrent(**x.double().asdict())
    with poison():
        got = chunk_gated_delta_rule(**x.asdict(), output_final_state=state, impl="triton")
    assert got[0].dtype == dtype
    assert_close("o", got[0], want[0], TOLERANCE[dtype])
    if state:
        assert got[1].dtype == torch.float32
        assert_close("final_state", got[1], want[1], TOLERANCE[dtype])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_values_too_small_for_float16(impl, device):
    """A quarter wrong, as the documentation says; a power of two lifts them exactly."""
    x = gdn_inputs(1, 70, 1, 2, 24, 40, dtype=torch.float16, device=device)
    x.v, lift = (1e-6 * x.v.double()).half(), 2.0**20
    want, S = recurrent(**x.double().asdict())
    options = {"output_final_state": True, "impl": impl}
    got, _ = chunk_gated_delta_rule(**x.asdict(), **options)
    assert 0.01 < relative_rms(got, want) < 0.5
    x.v = x.v * lift
    got, state = chunk_gated_delta_rule(**x.asdict(), **options)
    assert_close("o", got.double() / lift, want, TOLERANCE[torch.float16])
    assert_close("final_state", state.double() / lift, S, TOLERANCE[torch.float16])
