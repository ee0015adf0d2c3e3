"""Arguments that are slices of a projection's rows: read where they lie, with the same bits."""

import math

import pytest
import torch
from apart import apart
from gdn_checks import launches, without_gluon

from linattn_edu import causal_conv1d, causal_conv1d_fn, mamba_chunk_scan_combined, rms_norm_gated
from linattn_edu.ops import tensors
from linattn_edu.testing import ssd_inputs

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("row", [(6,), (4, 6)], ids=str)
def test_what_is_copied(row):
    """Rows with gaps in them, or at several distances; all others stay where they are."""
    x, axes = torch.arange(2.0 * 5 * 24).view(2, 5, -1)[..., : math.prod(row)], len(row)
    x = x.reshape(2, 5, *row)
    far = apart(x, axes)
    stays = x, far, far[:, :1], far[1:], x[:0], x[:, 2:3], far[..., :1].narrow(-2, 0, 1)
    for y in stays:
        assert tensors.contiguous_rows(y, axes) is y
    repeated = (x[:1, :1].expand(2, 5, *row), x[:, :1].expand(-1, 5, *row))
    copies = x[..., ::2], far.mT, far[:, :2], far[:, ::2], *repeated
    for y in copies:
        copy = tensors.contiguous_rows(y, axes)
        assert copy.is_contiguous() and torch.equal(copy, y)
    assert tensors.contiguous_rows(None, axes) is None


@pytest.fixture
def copied(monkeypatch):
    """The shapes of what is copied because it has gaps."""
    shapes, original = [], torch.Tensor.contiguous

    def contiguous(x, **options):
        if not x.is_contiguous():
            shapes.append(tuple(x.shape))
        return original(x, **options)

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    return shapes


def both_passes(f, x: dict, name: str, far: bool, axes: int):
    """y and all gradients; far: with x[name] apart."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    given = dict(leaves)
    if far:
        given[name] = Apart.apply(leaves[name], axes)
    y = f(**given)
    generator = torch.Generator().manual_seed(2)
    dy = torch.randn(y.shape, generator=generator).to(y)
    return (y.detach(), *torch.autograd.grad(y, leaves.values(), dy))


class Apart(torch.autograd.Function):
    """apart, whose gradient is that of what it holds: the NaN around it have none."""

    @staticmethod
    def forward(ctx, x, axes):
        return apart(x, axes)

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def same(f, x, name, axes=1):
    for got, want in zip(
        both_passes(f, x, name, True, axes), both_passes(f, x, name, False, axes), strict=True
    ):
        assert torch.equal(got, want)


def randn(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 70])
def test_convolution(T, dtype, copied, device):
    x = {"x": randn(2, T, 40, dtype=dtype, device=device), "weight": randn(40, 4, device=device)}
    same(lambda **x: causal_conv1d(**x, activation="silu", impl="triton")[0], x, "x")
    channels = lambda x, weight: causal_conv1d_fn(x.mT, weight, impl="triton").mT
    same(channels, x, "x")
    assert not copied


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 48), (48,), (1, 1, 48)], ids=str)
def test_gated_norm(shape, before, copied, device):
    """Of the gate, in groups: those of a row follow each other."""
    x = {"x": randn(*shape, device=device), "z": randn(*shape, device=device, seed=1)}
    f = lambda x, z: rms_norm_gated(x, z=z, group_size=24, norm_before_gate=before, impl="triton")
    same(f, x, "z")
    assert not copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mamba_2(dtype, copied, device):
    """Stage by stage, and fused in plain Triton, which read a copy."""
    x = ssd_inputs(2, 70, 4, 2, 16, 32, dtype=dtype, device=device)
    x = {n: getattr(x, n) for n in ("x", "dt", "A", "B", "C")}
    f = lambda **x: mamba_chunk_scan_combined(**x, chunk_size=64, dt_softplus=True, impl="triton")
    same(f, x, "x", 2)
    assert copied


@pytest.mark.gpu
def test_mamba_2_in_gluon(copied, device):
    """Both passes read x where it lies."""
    if why := without_gluon(device):
        pytest.skip(why)
    x = ssd_inputs(2, 4096, 8, 1, 64, 128, dtype=torch.bfloat16, device=device)
    x = {n: getattr(x, n) for n in ("x", "dt", "A", "B", "C")}
    f = lambda **x: mamba_chunk_scan_combined(**x, chunk_size=128, dt_softplus=True)
    with launches() as ran:
        same(f, x, "x", 2)
    assert {"ssd_fwd_gluon_kernel", "ssd_states_gluon_kernel", "ssd_bwd_dx_gluon_kernel"} <= {
        k.__name__ for k in ran
    }
    assert not copied
