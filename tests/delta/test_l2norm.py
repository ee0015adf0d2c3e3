"""Rows of unit length: kernel against reference, the adjoint, rows of zeros, every layout."""

import pytest
import torch
from delta.stage_checks import DTYPES, check_stage

from linattn_edu import l2norm
from linattn_edu.kernels.delta import l2norm as kernels
from linattn_edu.kernels.delta.recurrent import recurrent
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


def extreme(dtype, device):
    """Rows of lengths up to the largest of the dtype and down to its smallest, and a cotangent."""
    torch.manual_seed(5)
    top, bottom = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    sizes = (top / 40, top**0.9, top**0.5, 1.0, bottom**0.5, bottom**0.9, 2**12 * bottom)
    lengths = torch.tensor(sizes, dtype=torch.float64)
    x = torch.nn.functional.normalize(torch.randn(7, 24, dtype=torch.float64), dim=-1)
    x = (x * lengths[:, None]).to(dtype)
    x[0, 3] = top  # a length beyond the dtype
    return x.to(device), torch.randn(7, 24, device=device).to(dtype)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows past the end, which are not stored
@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-30])
@pytest.mark.parametrize(
    ("room", "dtype"),
    [(room, d) for room in (kernels, references) for d in DTYPES],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_rows_whose_squares_leave_the_dtype(room, dtype, eps, device):
    """Row by row, the largest among them: relative to its own length, and so is its gradient."""
    x, dy = extreme(dtype, device)
    y, rstd = room.l2norm(x, eps)
    dx = room.l2norm_bwd(x, rstd, dy)
    assert y.isfinite().all() and y.dtype == dx.dtype == dtype
    # float64 itself has no squares of its own extremes: there, of x / 2^k, exactly
    shift = x.double().abs().amax(-1, keepdim=True)
    shift = torch.exp2(-torch.frexp(shift).exponent.double())
    x64 = shift * x.double()
    exact = (x64.square().sum(-1, keepdim=True) + eps * shift * shift).rsqrt()
    want = exact * x64
    tol = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    for i in range(len(x)):
        assert_close(f"y of row {i}", y[i], want[i], tol[dtype])
    dwant = dy.double() - want * (want * dy.double()).sum(-1, keepdim=True)
    for i in range(len(x)):
        row = (shift * exact * dwant)[i]
        # where the dtype holds the gradient as a normal number, and rstd
        sizes = row.abs().amax().item(), (shift * exact)[i].item()
        info = torch.finfo(dtype), torch.finfo(rstd.dtype)
        if all(32 * f.tiny / f.eps < z < f.max / 32 for f, z in zip(info, sizes, strict=True)):
            assert_close(f"dx of row {i}", dx[i], row, 4 * tol[dtype])
        else:
            assert not dx[i].isnan().any() or eps == 0.0


@pytest.mark.parametrize("room", [kernels, references], ids=["kernel", "reference"])
def test_one_huge_number_among_ordinary_ones(room, device):
    """The squares of the others vanish beside its own, and their gradient with them."""
    x = torch.ones(2, 50, device=device)
    x[0, 7] = 1e30
    y, rstd = room.l2norm(x)
    want = torch.zeros(50, device=device)
    want[7] = 1
    assert_close("y", y[0], want, 1e-6)
    assert rstd[0].item() == pytest.approx(1e-30, rel=1e-6)
    alone, _ = room.l2norm(x[1:])
    assert torch.equal(y[1:], alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("room", [kernels, references], ids=["kernel", "reference"])
@pytest.mark.parametrize("eps", [1e-6, 0.0])
def test_ordinary_rows_keep_the_bits_of_the_plain_formula(eps, room, device):
    """The kernel scales by powers of two, or not at all; the reference adds up in float64."""
    x, _ = rows((300, 33), torch.float32, device)
    y, rstd = room.l2norm(x, eps)
    squares = x.square().sum(-1) if room is kernels else x.double().square().sum(-1)
    same = (rstd == torch.rsqrt(squares + eps).float()).float().mean().item()
    assert same > (0.5 if room is kernels else 0.99)  # NumPy and CUDA add in other orders
    assert torch.equal(y, rstd[:, None] * x)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_rows_in_the_recurrent_kernel(dtype, device):
    """It normalises q and k itself, and to the same."""
    torch.manual_seed(3)
    q, k = (torch.randn(2, 3, 1, 24, device=device).to(dtype) for _ in range(2))
    v, beta = torch.randn(2, 3, 1, 16, device=device).to(dtype), torch.ones(2, 3, 1, device=device)
    state = torch.randn(2, 1, 24, 16, device=device)
    options = {"scale": 1.0, "initial_state": state}
    want, S_want = recurrent(*(l2norm(x.float()) for x in (q, k)), v.float(), None, beta, **options)
    for size in (2.0**60, 2.0**100, 2.0**120):
        o, S = recurrent(q * size, k * size, v, None, beta, normalise=True, **options)
        small, S_small = recurrent(q, k * size, v, None, beta, normalise=True, **options)
        tol = 1e-6 if dtype == torch.float32 else 4e-3
        for x, y in ((o, want), (S, S_want), (small, want), (S_small, S_want)):
            assert_close(f"times {size:.0e}", x, y, tol)
