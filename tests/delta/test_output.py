"""Stage output: kernel against reference."""

import pytest
from delta.stage_checks import check_stage, grid, inputs
from fused import kda_checks

from linattn_edu.kernels.delta.output import output as kernel
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.output import output as reference
from linattn_edu.reference.delta.solve import solve
from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.wy import wy

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc, A = gate_cumsum(x.g, chunk_size=C), solve(x.k, x.beta, chunk_size=C)
    w, u = wy(x.k, x.v, x.beta, gc, A)
    h, v_new, _ = state(x.k, w, u, gc, x.initial_state, chunk_size=C)
    check_stage(kernel, reference, (x.q, x.k, v_new, h, gc), scale=0.3, chunk_size=C)


@kda_checks.grid
def test_a_gate_for_each_channel(T, K, V, C, dtype, device):
    x = kda_checks.kda_stage_inputs(T, K, V, dtype, device)
    r = kda_checks.forward_parts(x, C)
    args = (r.qg, r.kg, r.v_new, r.h, r.gc, r.P)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=C)
