"""Stage wy: kernel against reference."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs
from fused import kda_checks

from linattn_edu.kernels.delta.wy import wy as kernel
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.solve import solve
from linattn_edu.reference.delta.wy import wy as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc, A = gate_cumsum(x.g, chunk_size=C), solve(x.k, x.beta, chunk_size=C)
    check_stage(kernel, reference, (x.k, x.v, x.beta, gc, A))


def check_channels(x, C):
    r = kda_checks.forward_parts(x, C)
    check_stage(kernel, reference, (x.k, x.v, x.beta, r.gc, r.A, x.q))


@kda_checks.grid
def test_a_gate_for_each_channel(T, K, V, C, dtype, device):
    check_channels(kda_checks.kda_stage_inputs(T, K, V, dtype, device), C)


@pytest.mark.parametrize("gate", kda_checks.GATES)
def test_one_value_head_a_key_head(gate, device):
    x = kda_checks.kda_stage_inputs(70, 33, 65, torch.float32, device, H=2, gate=gate)
    check_channels(x, 32)
