"""Rows of unit length: kernel against reference, the adjoint, rows of zeros, every layout."""

import pytest
import torch
from delta.stage_checks import DTYPES, check_stage

from linattn_edu import l2norm
from linattn_edu.kernels.delta import l2norm as kernels
from linattn_edu.reference.delta import l2norm as references
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

# a single number, rows that do not fill a program, more rows than one takes, odd and wide rows
SHAPES = ((1,), (7,), (1, 1), (3, 33), (2, 5, 3, 16), (700, 20), (9, 100), (2, 1000), (1, 5000))
LARGE = ((2, 4097, 8, 128), (70001, 256), (3, 8191))
IMPLS = ("triton", "reference")
PRECISION = {torch.float32: 5e-7, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def rows(shape, dtype, device):
    """Rows of lengths from 1e-2 to 1e2, and their cotangent."""
    torch.manual_seed(len(shape) * shape[-1])
    lengths = 10 ** (4 * torch.rand(*shape[:-1], 1, device=device) - 2)
    x = torch.nn.functional.normalize(torch.randn(shape, device=device), dim=-1) * lengths
    return x.to(dtype), torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES + LARGE * torch.cuda.is_available(), ids=str)
def test_kernels_match_references(shape, dtype, device):
    x, dy = rows(shape, dtype, device)
    check_stage(kernels.l2norm, references.l2norm, (x,))
    _, rstd = references.l2norm(x)
    if shape[-1] > 1:  # of one number nothing remains but rounding
        check_stage(kernels.l2norm_bwd, references.l2norm_bwd, (x, rstd, dy))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows past the end, which are not stored
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.0])
@pytest.mark.parametrize("impl", IMPLS)
def test_formula(impl, eps, device):
    x, _ = rows((40, 24), torch.float32, device)
    x64 = x.double()
    want = x64 / (x64.square().sum(-1, keepdim=True) + eps).sqrt()
    assert_close("y", l2norm(x, eps, impl=impl), want, 5e-7)


def test_rows_too_wide_for_the_kernel(device):
    x, dy = rows((2, 65537), torch.float32, device)
    y = l2norm(x.requires_grad_())
    (dx,) = torch.autograd.grad(y, x, dy)
    x64 = x.detach().double().requires_grad_()
    want = x64 / (x64.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    assert_close("y", y, want, 5e-7)
    assert_close("dx", dx, torch.autograd.grad(want, x64, dy.double())[0], 5e-7)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_of_zeros_stays_one(impl, device):
    x, dy = rows((5, 12), torch.float32, device)
    x[2] = 0
    x.requires_grad_()
    y = l2norm(x, impl=impl)
    assert not y[2].any() and y.isfinite().all()
    y.backward(dy)
    assert_close("dx of zeros", x.grad[2], 1e3 * dy[2], 1e-6)  # rstd is eps^-1/2


def test_gradient_in_float64(device):
    x, _ = rows((3, 2, 5), torch.float64, device)
    assert torch.autograd.gradcheck(l2norm, x.requires_grad_())
    assert torch.autograd.gradcheck(lambda x: l2norm(x, 0.1), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_of_the_public_function(impl, dtype, device):
    x, dy = rows((6, 3, 20), dtype, device)
    exact = x.double().requires_grad_()
    (want,) = torch.autograd.grad(
        exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt(), exact, dy.double()
    )
    y = l2norm(x.requires_grad_(), impl=impl)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert y.dtype == dx.dtype == dtype
    assert_close("dx", dx, want, PRECISION[dtype])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_output_dtype(output_dtype, impl, device):
    x, _ = rows((4, 10), torch.float16, device)
    y = l2norm(x.requires_grad_(), output_dtype=output_dtype, impl=impl)
    assert y.dtype == output_dtype
    tol = PRECISION[torch.bfloat16 if output_dtype == torch.bfloat16 else torch.float32]
    assert_close("y", y, references.l2norm(x.double())[0], tol)
    y.sum().backward()
    assert x.grad.dtype == torch.float16


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_rows(impl, device):
    x, dy = rows((6, 4, 10), torch.float32, device)
    y = x.transpose(0, 1)
    got, want = (l2norm(z.requires_grad_(), impl=impl) for z in (y.detach(), y.contiguous()))
    assert torch.equal(got, want)
    z = y.detach().requires_grad_()
    (dx,) = torch.autograd.grad(l2norm(z, impl=impl), z, dy.transpose(0, 1))
    _, rstd = references.l2norm(x)
    want = references.l2norm_bwd(x, rstd, dy).transpose(0, 1)
    assert_close("dx", dx, want, 5e-7)


def test_same_bits_wherever_a_row_stands(device):
    x, _ = rows((500, 20), torch.float32, device)
    assert torch.equal(l2norm(x)[300:311], l2norm(x[300:311].clone()))
