"""Stage solve: kernel against reference, the inverse itself, and hard matrices."""

import pytest
import stages
import torch
from delta.stage_checks import CHUNKS, DTYPES, TOKENS, check_stage
from grids import parametrize

from linattn_edu import solve_tril
from linattn_edu.kernels.delta import solve as kernels
from linattn_edu.kernels.delta.solve import solve as kernel
from linattn_edu.packing import pack
from linattn_edu.reference.delta import solve as references
from linattn_edu.reference.delta.solve import solve as reference
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


test_kernel_matches_reference = stages.matches("solve")


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


IMPLS = ("triton", "reference")
LENGTHS = (0, 20, 1, 0, 33, 16, 0)


def matrices(T, C, H=2, dtype=torch.float32, device="cpu"):
    """Matrices whose strict lower triangles count; a batch of one if it can be LENGTHS packed."""
    torch.manual_seed(T + C)
    B = 1 if sum(LENGTHS) == T else 2
    return (torch.randn(B, T, H, C, device=device) / C**0.5).to(dtype)


def inverses(A, lengths=None):
    """(I + A)^-1 of every chunk by torch.linalg, in float64."""
    C, X, at = A.shape[-1], torch.zeros_like(A, dtype=torch.float64), 0
    for length in (A.shape[1],) if lengths is None else lengths:
        for first in range(at, at + length, C):
            n = min(C, at + length - first)
            rows = A[:, first : first + n, :, :n].double().transpose(1, 2).tril(-1)
            eye = torch.eye(n, dtype=torch.float64, device=A.device)
            X[:, first : first + n, :, :n] = torch.linalg.inv(rows + eye).transpose(1, 2)
        at += length
    return X


def unread(A, lengths=None):
    """Where A is on or above the diagonal of its chunk, or past the end of its sequence."""
    C, mask, at = A.shape[-1], torch.ones_like(A, dtype=torch.bool), 0
    for length in (A.shape[1],) if lengths is None else lengths:
        for i in range(length):
            mask[:, at + i, :, : i % C] = False
        at += length
    return mask


@parametrize(T=TOKENS, C=CHUNKS, dtype=DTYPES)
def test_solve_tril_kernel(T, C, dtype, device):
    A = matrices(T, C, 1 if T > 64 else 2, dtype, device)
    got = kernels.solve_tril(A)
    assert got.dtype == torch.float32
    assert_close("X", got, inverses(A), 5e-6)
    assert_close("X", references.solve_tril(A), inverses(A), 5e-6)


@pytest.mark.parametrize("C", CHUNKS)
def test_solve_tril_kernel_on_packed_sequences(C, device):
    A = matrices(sum(LENGTHS), C, device=device)
    packing = pack(torch.tensor([0, *LENGTHS], device=device).cumsum(0), C)
    assert_close("X", kernels.solve_tril(A, packing=packing), inverses(A, LENGTHS), 5e-6)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("C", CHUNKS)
@pytest.mark.parametrize("impl", IMPLS)
def test_gradient_of_solve_tril(impl, C, packed, device):
    lengths = LENGTHS if packed else None
    A = matrices(sum(LENGTHS), C, device=device).requires_grad_()
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0) if packed else None
    exact = A.detach().double().requires_grad_()
    want = inverses(exact, lengths)
    dX = torch.randn_like(A)
    (dA,) = torch.autograd.grad(want, exact, dX.double())
    X = solve_tril(A, cu_seqlens, impl=impl)
    assert_close("X", X, want, 5e-6)
    assert_close("dA", torch.autograd.grad(X, A, dX)[0], dA, 1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_solve_tril_reads_the_lower_triangle_only(impl, packed, device):
    """NaN elsewhere changes no bit, and the gradient there is 0."""
    lengths = LENGTHS if packed else None
    A = matrices(sum(LENGTHS), 16, device=device)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0) if packed else None
    mask = unread(A, lengths)
    spoilt = A.masked_fill(mask, torch.nan).requires_grad_()
    X = solve_tril(spoilt, cu_seqlens, impl=impl)
    assert torch.equal(X, solve_tril(A, cu_seqlens, impl=impl))
    X.sum().backward()
    assert not spoilt.grad[mask].any() and spoilt.grad.isfinite().all()


def test_gradient_of_solve_tril_in_float64(device):
    A = matrices(19, 16, 1, torch.float64, device)[:1].requires_grad_()
    cu_seqlens = torch.tensor([0, 2, 2, 19], device=device)
    f = lambda A: solve_tril(A, cu_seqlens, output_dtype=torch.float64)
    assert torch.autograd.gradcheck(f, A)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(
    "output_dtype", [None, torch.float32, torch.bfloat16, torch.float64], ids=str
)
def test_output_dtype_of_solve_tril(output_dtype, dtype, device):
    A = matrices(20, 16, dtype=dtype, device=device).requires_grad_()
    X = solve_tril(A, output_dtype=output_dtype)
    assert X.dtype == (dtype if output_dtype is None else output_dtype)
    tol = {torch.float16: 4e-4, torch.bfloat16: 3e-3}.get(X.dtype, 5e-6)
    assert_close("X", X, inverses(A.detach()), tol)
    X.sum().backward()
    assert A.grad.dtype == dtype


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_input_of_solve_tril(impl, device):
    A = matrices(20, 16, device=device).transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(solve_tril(A, impl=impl), solve_tril(A.contiguous(), impl=impl))


@pytest.mark.parametrize("given", ["cu_seqlens_cpu", "chunk_indices"])
def test_solve_tril_with_what_the_host_knows(given, device):
    A = matrices(sum(LENGTHS), 16, device=device).requires_grad_()
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    known = {
        "cu_seqlens_cpu": cu_seqlens.cpu(),
        "chunk_indices": pack(cu_seqlens, 16).chunk_indices,
    }
    X = solve_tril(A, cu_seqlens.int(), **{given: known[given]})
    assert_close("X", X, inverses(A.detach(), LENGTHS), 5e-6)
    X.sum().backward()
    assert A.grad.isfinite().all()
