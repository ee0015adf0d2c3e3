"""rms_norm_gated: both passes against the formula by autograd in float64, forms, refusals."""

import pytest
import torch
import torch.nn.functional as F
from grids import parametrize
from refusals import refuses
from torch.utils.checkpoint import checkpoint

from linattn_edu import rms_norm_gated
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}
OPTIONAL = ("weight", "bias", "z")


def tensors(shape=(2, 5, 24), dtype=torch.float32, device="cpu", without=()):
    """The arguments by name, parameters in float32, and dy."""
    generator = torch.Generator().manual_seed(len(shape))

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = {"x": 3 * randn(*shape), "weight": randn(shape[-1], dtype=torch.float32)}
    x |= {"bias": randn(shape[-1], dtype=torch.float32), "z": randn(*shape)}
    return {n: t for n, t in x.items() if n not in without}, randn(*shape)


def plain(x, weight=None, bias=None, z=None, eps=1e-6, group_size=None, norm_before_gate=True,
          activation="silu"):  # fmt: skip
    gate = 1 if z is None else torch.sigmoid(z) if activation == "sigmoid" else F.silu(z)
    v = x if norm_before_gate else x * gate
    groups = v.unflatten(-1, (-1, group_size or v.shape[-1]))
    y = (groups / (groups.square().mean(-1, keepdim=True) + eps).sqrt()).flatten(-2)
    y = y * (1 if weight is None else weight) + (0 if bias is None else bias)
    return y * gate if norm_before_gate else y


def run(x, dy, f=rms_norm_gated, **options):
    """y, and the gradient of every tensor."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    y = f(**leaves, **options)
    gradients = torch.autograd.grad(y, leaves.values(), dy)
    return {"y": y.detach()} | {f"d{n}": t for n, t in zip(leaves, gradients, strict=True)}


@parametrize(
    shape=((2, 5, 24), (24,), (70, 24)), without=((), OPTIONAL, ("z",), ("bias",), ("weight",)),
    group_size=(None, 24, 8, 3), norm_before_gate=(True, False),
    activation=("silu", "swish", "sigmoid"), dtype=DTYPES, impl=IMPLS,
)  # fmt: skip
def test_both_passes(shape, without, group_size, norm_before_gate, activation, dtype, impl, device):
    x, dy = tensors(shape, dtype, device, without)
    options = {"group_size": group_size, "norm_before_gate": norm_before_gate, "eps": 1e-3}
    options["activation"] = activation
    got = run(x, dy, **options, impl=impl)
    want = run({n: t.double() for n, t in x.items()}, dy.double(), plain, **options)
    assert got["y"].dtype == dtype
    for n, t in want.items():
        assert got[n].dtype == (x[n[1:]].dtype if n != "y" else dtype)
        assert_close(n, got[n], t, TOLERANCES[dtype])


@parametrize(
    dtype=DTYPES, other=(None, *DTYPES), residual_in_fp32=(False, True),
    norm_before_gate=(True, False), impl=IMPLS,
)  # fmt: skip
def test_with_a_residual(dtype, other, residual_in_fp32, norm_before_gate, impl, device):
    """The sum is what is normed, and is returned; gradients come from both."""
    x, dy = tensors(dtype=dtype, device=device)
    summed = torch.float32 if residual_in_fp32 else dtype
    if other is not None:
        x["residual"], summed = torch.randn(x["x"].shape).to(device, other), other
    options = {"norm_before_gate": norm_before_gate, "group_size": 8}
    dsum = torch.randn_like(dy)

    def both(x, f):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
        y, total = f(**leaves)
        gradients = torch.autograd.grad((y, total), leaves.values(), (dy.to(y), dsum.to(total)))
        return {"y": y, "sum": total} | {f"d{n}": t for n, t in zip(leaves, gradients, strict=True)}

    def exact(x, residual=0, **more):
        return plain(x + residual, **more, **options), x + residual

    more = options | {"residual_in_fp32": residual_in_fp32, "impl": impl}
    got = both(x, lambda **x: rms_norm_gated(**x, **more, prenorm=True))
    want = both({n: t.double() for n, t in x.items()}, exact)
    assert got["y"].dtype == dtype and got["sum"].dtype == summed
    least = max((dtype, summed), key=TOLERANCES.get)
    for n, t in want.items():
        assert_close(n, got[n], t, 2 * TOLERANCES[least])
    assert torch.equal(rms_norm_gated(**x, **more), got["y"])


@pytest.mark.parametrize("norm_before_gate", [True, False])
def test_gradient_in_float64(norm_before_gate):
    x, _ = tensors((3, 8))
    leaves = [t.double().requires_grad_() for t in x.values()]

    def f(*tensors):
        return rms_norm_gated(*tensors, 0.1, 4, norm_before_gate)

    assert torch.autograd.gradcheck(f, leaves)


def test_rows_too_wide_for_the_kernel(device):
    x, dy = tensors((2, 2**15 + 1), device=device)
    want = run({n: t.double() for n, t in x.items()}, dy.double(), plain)
    for n, t in run(x, dy).items():
        assert_close(n, t, want[n], 1e-6)
    with pytest.raises(ValueError, match="impl='triton' takes rows up to 32768, got 32769"):
        rms_norm_gated(**x, impl="triton")
    assert_close("groups", rms_norm_gated(x["x"][:, 1:], group_size=2**14),
                 plain(x["x"][:, 1:], group_size=2**14), 1e-6)  # fmt: skip


@impls
def test_strides_views_and_what_is_left_alone(impl, device):
    """Slices of a projection; an output may be changed in place."""
    x, dy = tensors(device=device)
    want = run(x, dy, impl=impl)
    odd = {n: F.pad(t, (3, 5))[..., 3:-5] for n, t in x.items()}
    kept = {n: t.clone() for n, t in odd.items()}
    got = run(odd, 2 * dy, lambda **given: rms_norm_gated(**given, impl=impl).mul_(0.5))
    for n, t in want.items():
        assert torch.equal(got[n], t / 2 if n == "y" else t)
    assert all(torch.equal(odd[n], t) for n, t in kept.items())


@impls
def test_checkpointing_and_autocast(impl, device):
    x, dy = tensors(device=device)
    want = run(x, dy, impl=impl)

    def again(**given):
        return checkpoint(rms_norm_gated, **given, impl=impl, use_reentrant=False)

    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = run(x, dy, again)
    assert all(torch.equal(got[n], t) for n, t in want.items())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_fullgraph(backend, device):
    x, dy = tensors(device=device)
    options = {"group_size": 8, "norm_before_gate": False}

    def f(**given):
        return rms_norm_gated(**given, **options)

    torch._dynamo.reset()
    got = run(x, dy, torch.compile(f, fullgraph=True, backend=backend))
    assert all(torch.equal(got[n], t) for n, t in run(x, dy, f).items())


@impls
@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4)])
def test_no_rows(shape, impl, device):
    x, dy = tensors(shape, device=device)
    got = run(x, dy, impl=impl)
    assert got["y"].shape == shape and not got["dweight"].any() and not got["dbias"].any()


new = torch.zeros
REFUSED = {
    "x": ({"x": 1.0}, TypeError, "x must be a torch.Tensor of shape .*got float"),
    "no axis": ({"x": new(())}, r"x must have shape \[..., D\] with D >= 1, got \(\)"),
    "weight": ({"weight": new(23)}, r"weight must have shape \[D=24\], got \(23,\)"),
    "bias": ({"bias": new(1, 24)}, "bias must have 1 dimensions"),
    "z": ({"z": new(5, 24)}, r"z must have x's shape \(2, 5, 24\), got \(5, 24\)"),
    "z dtype": ({"z": new(2, 5, 24).int()}, TypeError, "z must be float64.*int32"),
    "residual": ({"residual": new(24)}, r"residual must have x's shape \(2, 5, 24\)"),
    "prenorm": ({"prenorm": 2}, TypeError, "prenorm must be True or False, got 2"),
    "eps": ({"eps": -1.0}, "eps must be >= 0, got -1.0"),
    "group": ({"group_size": 7}, "group_size must divide D=24, got 7"),
    "no group": ({"group_size": 0}, "group_size must divide D=24, got 0"),
    "groups": ({"group_size": 8.0}, TypeError, "group_size must be an integer or None, got 8.0"),
    "flag": ({"norm_before_gate": 3}, TypeError, "norm_before_gate must be True or False"),
    "activation": ({"activation": None}, "activation must be 'silu', .*got None"),
    "device": ({"z": new(2, 5, 24, device="meta")}, "z must be on cpu like x"),
    "impl": ({"impl": "cuda"}, "impl must be one of"),
    "unknown": ({"upcast": True}, TypeError, "unexpected keyword argument 'upcast'"),
}


test_refused_before_any_kernel = refuses(rms_norm_gated, lambda: tensors()[0], REFUSED)
