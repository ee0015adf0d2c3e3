"""chunk_global_cumsum, and the chunks of chunk_local_cumsum: sums, gradients, second gradients."""

from itertools import pairwise

import pytest
import torch
from grids import parametrize
from refusals import refuses

from linattn_edu import chunk_global_cumsum, chunk_local_cumsum
from linattn_edu.testing import assert_close, poison

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
directions = pytest.mark.parametrize("reverse", [False, True])
BOUNDS = {"alone": [0, 75], "packed": [0, 1, 1, 40, 75, 75]}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(T, tail, dtype=torch.float32, device=DEVICE):
    generator = torch.Generator(device=device).manual_seed(0)
    return torch.randn(1, T, *tail, generator=generator, device=device).to(dtype)


def matrix(bounds, reverse, scale=1.0, chunk_size=None):
    """y = L s: ones where a token counts for another, in float64."""
    i = torch.arange(bounds[-1])
    L = torch.zeros(bounds[-1], bounds[-1], dtype=torch.float64)
    for a, b in pairwise(bounds):
        C = chunk_size or max(1, b - a)
        same = (i[:, None] - a) // C == (i - a) // C
        inside = (a <= i) & (i < b)
        L += (same & inside & inside[:, None]).double()
    return scale * (L.triu() if reverse else L.tril())


def sums(L, s):
    return torch.einsum("ij,bj...->bi...", L.to(s.device), s.double())


@parametrize(impl=IMPLS, reverse=(False, True), packed=BOUNDS, dtype=DTYPES, tail=((3,), (2, 5)))
def test_value_and_gradients(impl, reverse, packed, dtype, tail, device):
    """The adjoint is the same sum the other way round, and so is its adjoint."""
    bounds, s = BOUNDS[packed], draw(75, tail, dtype, device).requires_grad_()
    known = {} if packed == "alone" else {"cu_seqlens": torch.tensor(bounds, device=device)}
    L = matrix(bounds, reverse, 0.5)
    with poison():
        y = chunk_global_cumsum(s, reverse, 0.5, **known, impl=impl)
        assert y.dtype == torch.float32 and y.shape == s.shape
        assert_close("y", y, sums(L, s.detach()), 1e-6)
        dy = draw(75, tail, device=device).flip(1).requires_grad_()
        (ds,) = torch.autograd.grad(y, s, dy, create_graph=True)
        assert ds.dtype == dtype
        tol = 1e-6 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        assert_close("ds", ds, sums(L.mT, dy.detach()), tol)
        dds = draw(75, tail, dtype, device)
        (ddy,) = torch.autograd.grad(ds, dy, dds)
        assert_close("ddy", ddy, sums(L, dds), 1e-6)


@directions
@impls
def test_the_square_of_a_sum_has_a_second_gradient(impl, reverse):
    s = draw(9, (2,)).requires_grad_()
    (ds,) = torch.autograd.grad(
        chunk_global_cumsum(s, reverse, impl=impl).square().sum(), s, create_graph=True
    )
    (dds,) = torch.autograd.grad(ds.sum(), s)
    L = matrix([0, 9], reverse)
    assert_close("dds", dds, (2 * L.mT @ L).sum(0)[None, :, None].expand_as(dds), 1e-6)


def test_float64():
    s = draw(75, (3,)).double()
    y = chunk_global_cumsum(s, cu_seqlens=torch.tensor(BOUNDS["packed"], device=DEVICE))
    assert y.dtype == torch.float32
    y = chunk_global_cumsum(
        s, cu_seqlens=torch.tensor(BOUNDS["packed"], device=DEVICE), output_dtype=None
    )
    assert_close("y", y, sums(matrix(BOUNDS["packed"], False), s), 1e-14)


@impls
def test_output_dtype(impl):
    s = draw(20, (3,), torch.bfloat16)
    want = chunk_global_cumsum(s, impl=impl)
    for dtype in (None, torch.float16, torch.float32):
        y = chunk_global_cumsum(s, output_dtype=dtype, impl=impl)
        assert torch.equal(y, want.to(dtype or torch.bfloat16))


@impls
def test_a_sequence_has_the_bits_it_has_alone(impl, device):
    s, bounds = draw(75, (3,), device=device), BOUNDS["packed"]
    y = chunk_global_cumsum(s, cu_seqlens=torch.tensor(bounds, device=device), impl=impl)
    for a, b in pairwise(bounds):
        assert torch.equal(y[:, a:b], chunk_global_cumsum(s[:, a:b], impl=impl))


@impls
def test_a_strided_argument(impl, device):
    s = draw(20, (6,), device=device)[..., ::2]
    assert torch.equal(
        chunk_global_cumsum(s, impl=impl), chunk_global_cumsum(s.contiguous(), impl=impl)
    )


@parametrize(impl=IMPLS, C=(1, 2, 8, 128, 1024), packed=BOUNDS)
def test_local_sums_in_chunks_of_any_power_of_two(impl, C, packed, device):
    bounds, g = BOUNDS[packed], draw(75, (3,), device=device).requires_grad_()
    known = {} if packed == "alone" else {"cu_seqlens": torch.tensor(bounds, device=device)}
    L = matrix(bounds, True, -2.0, C)
    y = chunk_local_cumsum(g, C, True, -2.0, **known, impl=impl)
    assert_close("y", y, sums(L, g.detach()), 1e-6)
    dy = draw(75, (3,), device=device).flip(1)
    (dg,) = torch.autograd.grad(y, g, dy)
    assert_close("dg", dg, sums(L.mT, dy), 1e-6)


REFUSED = {
    "no tensor": ({"s": None}, TypeError, "s must be a torch.Tensor .*got NoneType"),
    "rank": ({"s": torch.zeros(20, 2)}, r"s must have 3 dimensions \[B, T, H\], got 2"),
    "dtype": ({"s": torch.zeros(1, 2, 2).int()}, TypeError, "s must be float.*int32"),
    "empty": ({"s": torch.zeros(1, 4, 0)}, "s must have no empty axis but T"),
    "reverse": ({"reverse": "yes"}, TypeError, "reverse must be True or False, got 'yes'"),
    "scale": ({"scale": "2"}, TypeError, "scale must be a number or None, got str"),
    "output_dtype": ({"output_dtype": torch.int8}, TypeError, "output_dtype must be a floating"),
    "bounds": ({"cu_seqlens": torch.tensor([0, 29])}, "must end at T=20 or before"),
    "bounds dtype": ({"cu_seqlens": torch.zeros(2)}, TypeError, "cu_seqlens must be int32 or int"),
    "batch": (
        {"s": torch.zeros(2, 9, 1), "cu_seqlens": torch.tensor([0, 9])},
        "s must have B = 1 with cu_seqlens",
    ),
    "device": (
        {"cu_seqlens": torch.tensor([0, 20], device="meta")},
        "cu_seqlens must be on cpu like s, got meta",
    ),
    "impl": ({"impl": "gpu"}, "impl must be one of"),
    "float64": (
        {"s": torch.zeros(1, 2, 2, device=DEVICE).double(), "impl": "triton"},
        "float64 was given",
    ),
    "misspelt": ({"head_first": False}, TypeError, "unexpected keyword argument"),
}


test_refused = refuses(chunk_global_cumsum, lambda: {"s": torch.zeros(1, 20, 2)}, REFUSED)
