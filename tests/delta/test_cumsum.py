"""The cumulative sum in chunks: kernel against reference, both directions, packed sequences."""

from itertools import pairwise

import pytest
import torch
from delta.stage_checks import CHUNKS, DTYPES, TOKENS, check_stage
from grids import parametrize

from linattn_edu import chunk_local_cumsum
from linattn_edu.kernels.delta import cumsum as kernels
from linattn_edu.kernels.delta.cumsum import cumsum as kernel
from linattn_edu.packing import pack
from linattn_edu.reference.delta import cumsum as references
from linattn_edu.reference.delta.cumsum import cumsum as reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("triton", "reference")
LENGTHS = (0, 20, 1, 0, 33, 16, 0)
SIZES = (16, 32, 64, 128, 256)


def bounds(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def plain(x, chunk_size, reverse=False, scale=1.0, lengths=None):
    """The definition, a token at a time."""
    y, at = torch.empty_like(x), 0
    for length in (x.shape[1],) if lengths is None else lengths:
        for first in range(at, at + length, chunk_size):
            last = min(first + chunk_size, at + length)
            for i in range(first, last):
                part = x[:, i:last] if reverse else x[:, first : i + 1]
                y[:, i] = scale * part.sum(1)
        at += length
    return y


@parametrize(
    T=TOKENS,
    C=CHUNKS,
    dtype=DTYPES,
    reverse=(False, True),
)
def test_kernel_matches_reference(T, C, dtype, reverse, device):
    for D in (1, 5, 40) if T < 70 or device.type == "cuda" else (5,):
        x = torch.randn(2, T, D, device=device).to(dtype)
        if dtype == torch.float32:
            check_stage(kernel, reference, (x,), chunk_size=C, reverse=reverse, scale=1.5)
        else:  # 16-bit inputs are added up in float32 all the same
            got = kernel(x, chunk_size=C, reverse=reverse, scale=1.5)
            want = reference(x.double(), chunk_size=C, reverse=reverse, scale=1.5)
            assert got.dtype == torch.float32
            assert_close("y", got, want, 5e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("C", SIZES)
def test_reference_is_the_definition(C, reverse):
    x = torch.randn(2, 300, 3, dtype=torch.float64)
    got = reference(x, chunk_size=C, reverse=reverse, scale=-0.5)
    assert_close("y", got, plain(x, C, reverse, -0.5), 1e-13)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("C", CHUNKS)
def test_kernel_on_packed_sequences(C, reverse, device):
    x = torch.randn(1, sum(LENGTHS), 5, device=device)
    packing = pack(bounds(LENGTHS, device), C)
    got = kernel(x, chunk_size=C, reverse=reverse, packing=packing)
    assert_close("y", got, plain(x.double(), C, reverse, lengths=LENGTHS), 5e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("C", [1, 2, 4, 8, 512, 4096])
def test_chunks_of_any_power_of_two(C, reverse, device):
    for T in (0, 1, 13) if C < 16 else (0, 37, 700):
        x = torch.randn(2, T, 18, device=device)
        got = kernel(x, chunk_size=C, reverse=reverse, scale=0.7)
        want = plain(x.double(), C, reverse, 0.7) if C < 16 else reference(
            x.double(), chunk_size=C, reverse=reverse, scale=0.7
        )  # fmt: skip
        assert_close("y", got, want, 5e-6)
    packing = pack(bounds(LENGTHS, device), C)
    x = torch.randn(1, sum(LENGTHS), 5, device=device)
    got = kernel(x, chunk_size=C, reverse=reverse, packing=packing)
    assert_close("y", got, plain(x.double(), C, reverse, lengths=LENGTHS), 5e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [0, 1, 255, 256, 257, 700])
def test_sums_of_whole_sequences(T, dtype, reverse, device):
    """The kernel adds in float32, whatever the input; a block of 256 tokens at a time."""
    for D in (1, 18):
        x = torch.randn(2, T, D, device=device).to(dtype)
        got = kernels.global_cumsum(x, reverse=reverse, scale=-0.5)
        want = references.global_cumsum(x.double(), reverse=reverse, scale=-0.5)
        assert got.dtype == torch.float32
        assert_close("y", got, want, 5e-6)


def test_the_reference_of_whole_sequences():
    x = torch.randn(2, 33, 3, dtype=torch.float64)
    for reverse in (False, True):
        got = references.global_cumsum(x, reverse=reverse, scale=1.5)
        assert_close("y", got, plain(x, 33, reverse, 1.5), 1e-13)
    assert references.global_cumsum(x[:, :0]).shape == (2, 0, 3)


@pytest.mark.parametrize("reverse", [False, True])
def test_whole_packed_sequences(reverse, device):
    """A sequence has the bits that it has alone."""
    lengths = (0, 20, 1, 0, 300, 256, 0)
    x = torch.randn(1, sum(lengths), 5, device=device)
    cu_seqlens = bounds(lengths, device)
    got = kernels.global_cumsum(x, reverse=reverse, cu_seqlens=cu_seqlens)
    for a, b in pairwise(cu_seqlens.tolist()):
        alone = x[:, a:b].contiguous()
        assert torch.equal(got[:, a:b], kernels.global_cumsum(alone, reverse=reverse))
        want = references.global_cumsum(alone.double(), reverse=reverse)
        assert_close("y", got[:, a:b], want, 5e-6)


def test_no_sequence_at_all(device):
    x = torch.empty(1, 0, 3, device=device)
    for cu_seqlens in (None, bounds((), device), bounds((0, 0), device)):
        packing = None if cu_seqlens is None else pack(cu_seqlens, 16)
        assert kernels.global_cumsum(x, cu_seqlens=cu_seqlens).shape == x.shape
        assert kernel(x, chunk_size=16, packing=packing).shape == x.shape


@pytest.mark.parametrize("shape", [(2, 70, 3), (2, 70, 3, 8), (1, 1, 1), (1, 40, 1, 1)], ids=str)
@pytest.mark.parametrize("impl", IMPLS)
def test_three_and_four_axes(shape, impl, device):
    g = torch.randn(shape, device=device)
    got = chunk_local_cumsum(g, 32, impl=impl)
    assert got.shape == g.shape and got.dtype == torch.float32
    assert_close("y", got, plain(g.double(), 32), 5e-6)


@pytest.mark.parametrize("C", SIZES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_gradient(impl, reverse, C, device):
    g = torch.randn(2, 300, 2, device=device, requires_grad=True)
    dy = torch.randn_like(g)
    y = chunk_local_cumsum(g, C, reverse, 1.4427, impl=impl)
    assert_close("y", y, plain(g.detach().double(), C, reverse, 1.4427), 5e-6)
    (dg,) = torch.autograd.grad(y, g, dy)
    assert_close("dg", dg, plain(dy.double(), C, not reverse, 1.4427), 5e-6)


@pytest.mark.parametrize("given", ["cu_seqlens_cpu", "chunk_indices", "both", "neither"])
@pytest.mark.parametrize("impl", IMPLS)
def test_packed_sequences_and_their_gradient(impl, given, device):
    g = torch.randn(1, sum(LENGTHS), 2, 3, device=device, requires_grad=True)
    cu_seqlens = bounds(LENGTHS, device)
    options = {
        "cu_seqlens_cpu": cu_seqlens.cpu() if given in ("cu_seqlens_cpu", "both") else None,
        "chunk_indices": pack(cu_seqlens, 16).chunk_indices
        if given in ("chunk_indices", "both")
        else None,
    }
    y = chunk_local_cumsum(g, 16, cu_seqlens=cu_seqlens.int(), impl=impl, **options)
    assert_close("y", y, plain(g.detach().double(), 16, lengths=LENGTHS), 5e-6)
    dy = torch.randn_like(y)
    (dg,) = torch.autograd.grad(y, g, dy)
    assert_close("dg", dg, plain(dy.double(), 16, True, lengths=LENGTHS), 5e-6)


def test_gradient_in_float64(device):
    g = torch.randn(1, 19, 2, dtype=torch.float64, device=device, requires_grad=True)
    cu_seqlens = bounds((3, 0, 16), device)
    options = {"output_dtype": None, "cu_seqlens": cu_seqlens}
    assert torch.autograd.gradcheck(lambda g: chunk_local_cumsum(g, 16, True, 2.0, **options), g)
    assert torch.autograd.gradgradcheck(lambda g: chunk_local_cumsum(g, 16, **options), g)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("output_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_output_dtype(output_dtype, dtype, device):
    g = torch.randn(1, 20, 2, device=device, dtype=dtype, requires_grad=True)
    y = chunk_local_cumsum(g, 16, output_dtype=output_dtype)
    assert y.dtype == (output_dtype or dtype)
    assert_close("y", y, plain(g.detach().double(), 16), 3e-3)
    y.sum().backward()
    assert g.grad.dtype == dtype


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_input(impl, device):
    g = torch.randn(2, 3, 40, device=device).transpose(1, 2)
    want = chunk_local_cumsum(g.contiguous(), 16, impl=impl)
    assert torch.equal(chunk_local_cumsum(g, 16, impl=impl), want)
    x = g.detach().requires_grad_()
    (dx,) = torch.autograd.grad(chunk_local_cumsum(x, 16, impl=impl), x, g)
    assert_close("dx", dx, plain(g.double(), 16, True), 5e-6)
