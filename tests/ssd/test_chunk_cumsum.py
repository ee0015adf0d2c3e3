"""Stage chunk_cumsum: kernel against reference, with every form of the step."""

import pytest
import torch
from grids import name, usual
from ssd import ssd_checks

from linattn_edu.kernels.ssd.chunk_cumsum import chunk_cumsum as kernel
from linattn_edu.kernels.ssd.chunk_cumsum import chunk_cumsum_log as kernel_log
from linattn_edu.reference.ssd.chunk_cumsum import chunk_cumsum as reference
from linattn_edu.reference.ssd.chunk_cumsum import chunk_cumsum_log as reference_log
from linattn_edu.testing import assert_close, ssd_inputs

pytestmark = pytest.mark.usefixtures("poison")


AXES = {
    "T": ssd_checks.TOKENS,
    "H": (1, 5, 16, 33),
    "C": ssd_checks.CHUNKS,
    "softplus": (True, False),
    "limit": ((0.0, float("inf")), (0.05, 0.3)),
    "decay": ("trained", "none", "reset", "closed"),
    "dtype": ssd_checks.DTYPES,
}


@pytest.mark.parametrize(tuple(AXES), usual(**AXES), ids=name)
def test_kernel(T, H, C, softplus, limit, decay, dtype, device):
    x = ssd_inputs(2, T, H, 1, 16, 16, dtype=dtype, device=device, decay=decay)
    bias = x.dt_bias if T % 2 else None
    options = {"softplus": softplus, "limit": limit, "chunk_size": C}
    args = (x.dt, x.A, bias)
    wanted = reference(*args, **options)
    for what, got, ref in zip(("step", "gc"), kernel(*args, **options), wanted, strict=True):
        assert got.dtype == torch.float32 and got.shape == ref.shape
        assert_close(what, got, ref, 1e-6)
    if limit[0] > 0 or softplus:  # with a step below 0 the operator takes the other kernel
        got, wanted = kernel_log(*args, **options), reference_log(*args, **options)
        for what, y, ref in zip(("gs", "gc"), got, wanted, strict=True):
            assert y.dtype == torch.float32 and y.shape == ref.shape
            assert torch.equal(y.isinf(), ref.isinf())
            assert_close(what, y.where(y.isfinite(), 0), ref.where(ref.isfinite(), 0), 1e-6)


@pytest.mark.parametrize("stage", [kernel_log, reference_log])
def test_a_step_too_small_to_divide_by_is_none(stage, device):
    """2^-126 and less is 0 to a GPU's powers of two: 0 / 0 in the gradient of the step."""
    dt = torch.tensor([0.0, 2.0**-140, 2.0**-101, 2.0**-99, 1.0], device=device).view(1, 5, 1)
    gs, gc = stage(dt, dt.new_tensor([-1.0]), chunk_size=16)
    assert gs.isinf().flatten().tolist() == [True, True, True, False, False]
    assert torch.exp2(gc - gs)[0, 3:, 0].tolist() == [2.0**-99, 1.0]


def test_a_missing_number_stays_missing(device):
    x = ssd_inputs(1, 20, 2, 1, 16, 16, device=device)
    x.dt[0, 7, 1] = torch.nan
    for stage in (kernel, reference):
        step, gc = stage(x.dt, x.A, softplus=True, limit=(0.1, 0.5), chunk_size=16)
        assert step.isnan().nonzero().tolist() == [[0, 7, 1]]
        assert gc[0, 7:16, 1].isnan().all() and not gc[..., 0].isnan().any()
