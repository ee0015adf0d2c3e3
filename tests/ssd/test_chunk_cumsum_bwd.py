"""Stage chunk_cumsum_bwd: kernel against reference, reference against autograd."""

import math

import pytest
import torch
from grids import parametrize
from ssd import ssd_checks

from linattn_edu.kernels.ssd.chunk_cumsum_bwd import chunk_cumsum_bwd as kernel
from linattn_edu.reference.ssd.chunk_cumsum import chunk_cumsum
from linattn_edu.reference.ssd.chunk_cumsum_bwd import chunk_cumsum_bwd as reference
from linattn_edu.testing import assert_close, ssd_inputs

pytestmark = pytest.mark.usefixtures("poison")


def gradients(x, C):
    """dgc and dstep [B, T, H], dlast [B, NT, H], in float32 or wider.

    The same in every run: of one head dA is one number, which may cancel.
    """
    B, T, H = x.dt.shape
    generator = torch.Generator(x.A.device).manual_seed(T)
    options = {"dtype": x.A.dtype, "device": x.A.device, "generator": generator}
    dgc, dstep = (torch.randn(B, T, H, **options) for _ in range(2))
    return dgc, torch.randn(B, -(-T // C), H, **options), dstep


@parametrize(
    T=ssd_checks.TOKENS,
    H=(1, 5, 16, 33),
    C=ssd_checks.CHUNKS,
    softplus=(True, False),
    limit=((0.0, float("inf")), (0.05, 0.3)),
    decay=("trained", "none", "reset", "closed"),
    dtype=ssd_checks.DTYPES,
)
def test_kernel(T, H, C, softplus, limit, decay, dtype, device):
    x = ssd_inputs(2, T, H, 1, 16, 16, dtype=dtype, device=device, decay=decay, seed=T)
    given = gradients(x, C)
    bias = x.dt_bias if T % 2 else None
    options = {"softplus": softplus, "limit": limit, "chunk_size": C}
    got = kernel(*given, x.dt, x.A, bias, **options)
    want = reference(*given, x.dt.float(), x.A, bias, **options)
    for name, y, ref in zip(("ddt", "dA", "ddt_bias"), got, want, strict=True):
        assert (y is None) == (ref is None)
        if y is not None:
            kind = dtype if name == "ddt" else torch.float32
            assert y.dtype == kind and y.shape == ref.shape
            # a sum of terms of either sign has the rounding of its terms
            tol = 5e-6 if name == "ddt" else 3e-5
            # of ddt that is float16 exactly what it cannot hold is infinite, in both rooms
            over = ref.to(kind).isinf()
            assert torch.equal(y.isinf(), over) and (kind == torch.float16 or not over.any())
            y, ref = (z.masked_fill(over, 0) for z in (y, ref))
            assert_close(name, y, ref, max(tol, torch.finfo(y.dtype).eps / 2))


@pytest.mark.parametrize("softplus", [True, False])
def test_reference_is_the_gradient_of_chunk_cumsum(softplus):
    """With steps below, inside and above their limits; none at the floor."""
    x = ssd_inputs(2, 50, 3, 1, 16, 16, dtype=torch.float64)
    leaves = [x.dt + 2, x.A, x.dt_bias]
    leaves = [y.requires_grad_() for y in leaves]
    options = {"softplus": softplus, "limit": (0.3, 1.5), "chunk_size": 16}
    step, gc = chunk_cumsum(*leaves, **options)
    assert ((step == 0.3).any(), (step == 1.5).any()) == (True, True)
    dgc, dlast, dstep = gradients(x, 16)
    # natural units: by ln(2) gc; the last entry of each chunk has two uses
    ends = gc[:, [15, 31, 47, 49]]
    loss = math.log(2) * ((gc * dgc).sum() + (ends * dlast).sum()) + (step * dstep).sum()
    want = torch.autograd.grad(loss, leaves)
    with torch.no_grad():
        got = reference(dgc, dlast, dstep, *leaves, **options)
    for name, y, ref in zip(("ddt", "dA", "ddt_bias"), got, want, strict=True):
        assert_close(name, y, ref, 1e-12)


def test_limits_and_the_floor_stop_the_gradient(device):
    """A step at a limit moves on neither side of it; one at the floor moves x alone."""
    dt = torch.tensor([0.05, 0.1, 0.2, 0.5, 0.6, 0.3], device=device).view(1, 6, 1)
    A, one = torch.tensor([-0.5], device=device), torch.ones(1, 6, 1, device=device)
    for stage in (kernel, reference):
        ddt, dA, _ = stage(0 * one, one[:, :1], 0 * one, dt, A, limit=(0.1, 0.5), chunk_size=16)
        assert (ddt.flatten() != 0).tolist() == [False, True, True, True, False, True]
        assert dA.item() == pytest.approx(0.1 + 0.1 + 0.2 + 0.5 + 0.5 + 0.3)
        ddt, dA, _ = stage(one, one[:, :1], one, dt, 1e4 * A, chunk_size=16)
        assert ddt.flatten().tolist() == [1.0] * 6 and dA.item() == 0


def test_the_sums_over_chunks_are_the_same_bits_twice(device):
    x = ssd_inputs(2, 300, 5, 1, 16, 16, device=device)
    args = (*gradients(x, 32), x.dt, x.A, x.dt_bias)
    first, again = (kernel(*args, softplus=True, chunk_size=32) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(first, again, strict=True))
