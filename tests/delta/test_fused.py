"""The fused stages: kernels against references, and the fused forward against the staged one."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs

from linattn_edu.kernels.delta import fused as kernels
from linattn_edu.ops.gdn import forward, fused_stages, stages
from linattn_edu.reference.delta import fused as references
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_intra_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc = gate_cumsum(x.g, chunk_size=C)
    args = (x.q, x.k, x.beta, gc)
    check_stage(kernels.intra, references.intra, args, chunk_size=C)
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    check_stage(kernels.intra, references.intra, args, **options)


@grid
def test_scan_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc = gate_cumsum(x.g, chunk_size=C)
    P, R, _ = references.intra(x.q, x.k, x.beta, gc, chunk_size=C)
    args = (x.q, x.k, x.v, gc, P, R, x.initial_state)
    check_stage(kernels.scan, references.scan, args, scale=0.3, output_final_state=True)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_fused_equals_staged_in_float64(C):
    x = inputs(130, 20, 12, torch.float64, "cpu")
    options = {"scale": 0.5, "output_final_state": True, "chunk_size": C}
    *got, _ = forward(fused_stages("reference"), **x.asdict(), **options)
    *want, _ = forward(stages("reference"), **x.asdict(), **options)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)
