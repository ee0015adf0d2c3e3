"""Stage output_bwd: kernel against reference."""

import pytest
import torch
from delta.stage_checks import backward_inputs, check_stage, grid

from linattn_edu.kernels.delta.output_bwd import output_bwd as kernel
from linattn_edu.reference.delta.output_bwd import output_bwd as reference

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x, r = backward_inputs(T, K, V, C, dtype, device)
    args = (x.q, x.k, r.v_new, r.h, r.gc, r.do)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=C)


def test_one_value_head_a_key_head(device):
    x, r = backward_inputs(70, 33, 65, 32, torch.float32, device, H=2)
    args = (x.q, x.k, r.v_new, r.h, r.gc, r.do)
    check_stage(kernel, reference, args, scale=0.3, chunk_size=32)
