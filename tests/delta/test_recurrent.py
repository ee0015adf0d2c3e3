"""The recurrence: kernel against reference, and the properties the delta rule is chosen for."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs

from linattn_edu.kernels.delta.recurrent import recurrent as kernel
from linattn_edu.reference.delta.recurrent import recurrent as reference
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(min(T, 17 if device.type == "cpu" else T), K, V, dtype, device)
    args = (x.q, x.k, x.v, x.g, x.beta)
    check_stage(kernel, reference, args, scale=0.3, initial_state=x.initial_state)


def test_full_write_replaces_what_was_stored():
    """beta = 1 and unit keys: after the write, reading the key gives the new value exactly."""
    x = gdn_inputs(1, 1, 1, 1, 16, 8, dtype=torch.float64, initial_state=True)
    x.beta[:] = 1
    x.g[:] = 0
    o, _ = reference(x.k, x.k, x.v, x.g, x.beta, scale=1.0, initial_state=x.initial_state)
    assert_close("o", o, x.v, 1e-12)


def test_nothing_written_and_nothing_forgotten():
    x = gdn_inputs(1, 9, 1, 1, 16, 8, dtype=torch.float64, initial_state=True, gate="none")
    x.beta[:] = 0
    _, S = reference(**x.asdict())
    assert torch.equal(S, x.initial_state)


def test_closed_gate_forgets():
    x = gdn_inputs(1, 5, 1, 1, 16, 8, dtype=torch.float64, initial_state=True, gate="closed")
    _, S = reference(**x.asdict())
    last = x.k[:, -1, :, :, None] * (x.beta[:, -1, :, None] * x.v[:, -1])[:, :, None, :]
    assert_close("S", S, last, 1e-12)


def test_state_shrinks_without_writes_of_value():
    """v = 0: |S| never grows for beta in [0, 2] and unit keys."""
    x = gdn_inputs(1, 40, 1, 1, 16, 8, dtype=torch.float64, initial_state=True, gate="none")
    beta = torch.linspace(0, 2, 40, dtype=torch.float64).view(1, 40, 1)
    S = x.initial_state
    for t in range(40):
        one = slice(t, t + 1)
        _, after = reference(
            x.q[:, one], x.k[:, one], 0 * x.v[:, one], x.g[:, one], beta[:, one], initial_state=S
        )
        assert after.norm() <= S.norm() * (1 + 1e-12)
        S = after
