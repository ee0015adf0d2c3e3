"""Stage solve: kernel against reference, the inverse itself, and hard matrices."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs

from linattn_edu.kernels.delta.solve import solve as kernel
from linattn_edu.reference.delta.solve import solve as reference
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    check_stage(kernel, reference, (x.k, x.beta), chunk_size=C)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_inverse_is_the_inverse(C):
    L = torch.randn(3, C, C, dtype=torch.float64).tril(-1) / C**0.5
    eye = torch.eye(C, dtype=torch.float64).expand_as(L)
    assert_close("A (I + L)", unit_lower_inverse(L) @ (eye + L), eye, 1e-12)


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_near_collinear_keys(beta, noise, device):
    """Keys that almost repeat: powers of L grow like binomials, the inverse stays bounded."""
    k = torch.nn.functional.normalize(
        torch.ones(1, 64, 1, 32, device=device) + noise * torch.randn(1, 64, 1, 32, device=device),
        dim=-1,
    )
    b = torch.full((1, 64, 1), beta, device=device)
    exact = reference(k.double(), b.double(), chunk_size=64)
    assert exact.abs().max() <= max(1.0, beta) + 1e-9
    # the condition number of I + L grows as (beta C)^2 / 2: 8e3 at beta = 2 (chapter 03)
    assert_close("A", kernel(k, b, chunk_size=64), exact, 2e-5 if beta == 2 else 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_repeated_keys_in_half_precision(dtype, device):
    k = torch.zeros(1, 64, 1, 32, device=device, dtype=dtype)
    k[..., 0] = 1
    check_stage(
        kernel, reference, (k, torch.ones(1, 64, 1, device=device).to(dtype)), chunk_size=64
    )
