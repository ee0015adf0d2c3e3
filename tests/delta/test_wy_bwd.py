"""Stage wy_bwd: kernel against reference."""

import pytest
import torch
from delta.stage_checks import backward_inputs, check_stage, grid

from linattn_edu.kernels.delta.wy_bwd import wy_bwd
from linattn_edu.reference.delta.wy_bwd import wy_bwd as reference

pytestmark = pytest.mark.usefixtures("poison")


def kernel(*args):
    """The kernel on copies of dk and dgc, which it adds to in place."""
    *args, dk, dgc = args
    return wy_bwd(*args, dk.clone(), dgc.clone())


def arguments(x, r):
    return (x.k, x.v, x.beta, r.gc, r.A, r.h, r.v_new, r.dh, r.dv_new, r.dk_out, r.dgc_out)


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x, r = backward_inputs(T, K, V, C, dtype, device)
    check_stage(kernel, reference, arguments(x, r))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_value_head_a_key_head(dtype, device):
    x, r = backward_inputs(70, 33, 65, 32, dtype, device, H=2)
    check_stage(kernel, reference, arguments(x, r))


def test_nothing_is_divided_by_beta(device):
    x, r = backward_inputs(70, 16, 16, 32, torch.float32, device)
    x.beta[:] = 0
    check_stage(kernel, reference, arguments(x, r))
