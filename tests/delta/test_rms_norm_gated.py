"""The gated norm: kernels against references, the formula and its gradients by autograd."""

import pytest
import torch
import torch.nn.functional as F
from delta.stage_checks import DTYPES, check_stage
from grids import parametrize

from linattn_edu.kernels.delta import rms_norm_gated as kernels
from linattn_edu.reference.delta import rms_norm_gated as references
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

ROOMS = pytest.mark.parametrize("room", [kernels, references], ids=["kernel", "reference"])
GIVEN = ("nothing", "weight", "weight and bias", "z", "weight and z", "everything")
# rows that do not fill a program, more than one takes, odd and wide ones; one and several groups
SHAPES = ((1, 2), (2, 3, 1, 33), (70, 1, 128), (5, 3, 20), (150, 2, 64), (2, 1, 3000))
LARGE = ((70001, 1, 128), (4099, 2, 4096), (5, 1, 30000))


def draw(shape, given="everything", dtype=torch.float32, device="cpu", wide=torch.float32):
    """x, weight, bias and z or None, and dy: rows of sizes from 1e-2 to 1e2."""
    generator = torch.Generator().manual_seed(sum(shape))

    def randn(*shape, dtype=dtype):
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return torch.randn(*shape, generator=generator, dtype=exact).to(device, dtype)

    shape = shape if len(shape) > 2 else (1, *shape)
    x, z, dy = (randn(*shape) for _ in range(3))
    x = x * 10 ** (4 * torch.rand(*shape[:-1], 1, generator=generator) - 2).to(x)
    weight, bias = (randn(*shape[-2:], dtype=wide) for _ in range(2))
    weight = weight if "weight" in given or given == "everything" else None
    bias = bias if "bias" in given or given == "everything" else None
    return (x, weight, bias, z if "z" in given or given == "everything" else None), dy


@parametrize(
    shape=SHAPES + LARGE * torch.cuda.is_available(), given=GIVEN, dtype=DTYPES,
    norm_before_gate=(True, False), activation=("silu", "sigmoid"),
)  # fmt: skip
def test_kernels_match_references(shape, given, dtype, norm_before_gate, activation, device):
    x, dy = draw(shape, given, dtype, device)
    options = {"norm_before_gate": norm_before_gate, "activation": activation}
    check_stage(kernels.rms_norm_gated, references.rms_norm_gated, x, **options, eps=1e-5)
    _, rstd = references.rms_norm_gated(*x, **options)
    stages = kernels.rms_norm_gated_bwd, references.rms_norm_gated_bwd
    check_stage(*stages, (*x, rstd, dy), **options)


@parametrize(given=GIVEN, norm_before_gate=(True, False), activation=("silu", "sigmoid"))
def test_reference_is_the_formula(given, norm_before_gate, activation):
    """Outputs, and gradients by autograd, in float64."""
    (x, weight, bias, z), dy = draw((4, 3, 2, 7), given, torch.float64, wide=torch.float64)
    tensors = x, weight, bias, z
    leaves = [None if t is None else t.clone().requires_grad_() for t in tensors]
    v, w, b, g = leaves
    gate = 1 if g is None else F.silu(g) if activation == "silu" else g.sigmoid()
    v = v if norm_before_gate else v * gate
    y = v / (v.square().mean(-1, keepdim=True) + 0.1).sqrt()
    y = y * (1 if w is None else w) + (0 if b is None else b)
    y = y * gate if norm_before_gate else y
    options = {"norm_before_gate": norm_before_gate, "activation": activation}
    got, rstd = references.rms_norm_gated(*tensors, eps=0.1, **options)
    assert_close("y", got, y, 1e-12)
    given_leaves = [t for t in leaves if t is not None]
    want = torch.autograd.grad(y, given_leaves, dy)
    got = references.rms_norm_gated_bwd(*tensors, rstd, dy, **options)
    assert [dt is None for dt in got] == [t is None for t in tensors]
    for t, a, c in zip(given_leaves, (dt for dt in got if dt is not None), want, strict=True):
        assert_close(f"gradient of {tuple(t.shape)}", a, c, 1e-12)


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_many_parts(norm_before_gate, monkeypatch, device):
    """A program takes several tiles; the last has fewer, or rows past the end."""
    x, dy = draw((301, 2, 33), device=device)
    options = {"norm_before_gate": norm_before_gate}
    _, rstd = references.rms_norm_gated(*x, **options)
    stages = kernels.rms_norm_gated_bwd, references.rms_norm_gated_bwd
    rows = []
    for parts in (1024, 3, 1):
        monkeypatch.setattr(kernels, "PARTS", parts)
        check_stage(*stages, (*x, rstd, dy), **options)
        dx, _, _, dz = kernels.rms_norm_gated_bwd(*x, rstd, dy, **options)
        rows.append((dx, dz))
    for dx, dz in rows[1:]:
        assert torch.equal(dx, rows[0][0]) and torch.equal(dz, rows[0][1])


def test_same_bits_wherever_a_row_stands(device):
    (x, weight, bias, z), dy = draw((90, 2, 20), device=device)
    y, rstd = kernels.rms_norm_gated(x, weight, bias, z)
    dx, _, _, dz = kernels.rms_norm_gated_bwd(x, weight, bias, z, rstd, dy)
    rows = slice(53, 62)
    own, z_own, dy_own = (t[rows].clone() for t in (x, z, dy))
    got, rstd = kernels.rms_norm_gated(own, weight, bias, z_own)
    assert torch.equal(got, y[rows])
    dx_own, _, _, dz_own = kernels.rms_norm_gated_bwd(own, weight, bias, z_own, rstd, dy_own)
    assert torch.equal(dx_own, dx[rows]) and torch.equal(dz_own, dz[rows])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows past the end, which are not stored
@ROOMS
@pytest.mark.parametrize("eps", [1e-6, 0.0, 1e-30])
def test_rows_whose_squares_leave_float32(room, eps, device):
    """Row by row, relative to its own length."""
    generator = torch.Generator().manual_seed(5)
    sizes = torch.tensor([1e36, 1e30, 1e19, 1.0, 1e-10, 1e-18, 1e-30], dtype=torch.float64)
    x = torch.randn(7, 1, 24, dtype=torch.float64, generator=generator) * sizes[:, None, None]
    x, dy = x.float().to(device), torch.randn(7, 1, 24, generator=generator).to(device)
    y, rstd = room.rms_norm_gated(x, eps=eps)
    dx, *_ = room.rms_norm_gated_bwd(x, None, None, None, rstd, dy)
    x64 = x.double().requires_grad_()
    want = x64 / (x64.square().mean(-1, keepdim=True) + eps).sqrt()
    (dwant,) = torch.autograd.grad(want, x64, dy.double())
    for i in range(len(x)):
        assert_close(f"y of row {i}", y[i], want[i], 1e-6)
        assert_close(f"dx of row {i}", dx[i] / rstd[i, 0], dwant[i] / rstd[i, 0], 4e-6)


@ROOMS
def test_a_row_of_zeros_stays_one(room, device):
    (x, weight, _, z), dy = draw((5, 1, 12), device=device)
    x[2] = 0
    y, rstd = room.rms_norm_gated(x, weight, None, z)
    dx, dw, _, dz = room.rms_norm_gated_bwd(x, weight, None, z, rstd, dy)
    assert not y[2].any() and not dz[2].any()
    assert all(t.isfinite().all() for t in (y, dx, dw, dz))
    assert_close("dx of zeros", dx[2], 1e3 * dy[2] * weight * F.silu(z[2]), 1e-6)  # eps^-1/2
