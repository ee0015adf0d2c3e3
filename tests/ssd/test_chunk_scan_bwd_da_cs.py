"""Stage chunk_scan_bwd_da_cs: kernel against reference."""

import pytest
import stages
import torch
from ssd.ssd_checks import check_stage, parts

from linattn_edu.kernels.ssd.chunk_scan_bwd_da_cs import chunk_scan_bwd_da_cs as kernel
from linattn_edu.reference.ssd.chunk_scan_bwd_da_cs import chunk_scan_bwd_da_cs as reference

pytestmark = pytest.mark.usefixtures("poison")


test_kernel = stages.matches("chunk_scan_bwd_da_cs", "ssd")


def test_a_strong_decay_keeps_its_digits(device):
    """Between neighbours 2^-29 is left: a diagonal that cancels would leave more than that."""
    r = parts(64, 33, 20, 16, "none", torch.float32, device)
    gc = -29.0 * (torch.arange(64, device=device) % 16 + 1).float()
    args = (r.C, r.B, r.x, r.step, gc[None, :, None].expand_as(r.gc).contiguous(), r.dy)
    check_stage(kernel, reference, args, chunk_size=16)
