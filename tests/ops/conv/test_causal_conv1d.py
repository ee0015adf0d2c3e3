"""causal_conv1d: both passes against PyTorch's convolution in float64, every form, refusals."""

import pytest
import torch
from gdn_checks import DTYPES
from grids import few, parametrize
from ops.conv.conv_cases import check, cotangents, exact, run, tensors
from refusals import refuses

from linattn_edu import causal_conv1d, causal_conv1d_fn
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
OPTIONAL = ("bias", "residual", "initial_state")


@parametrize(
    T=(1, 3, 65), W=few(1, 2, 3, 8, more=(4,)),
    without=((), OPTIONAL, ("bias",), ("initial_state",)),
    activation=(None, "silu", "swish"), dtype=DTYPES, impl=IMPLS,
)  # fmt: skip
def test_both_passes(T, W, without, activation, dtype, impl, device):
    x = tensors(T, 20, W, dtype, device, without=without)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "activation": activation}
    got = run(x, dy, dht, **options, impl=impl)
    assert got["o"].dtype == got["ht"].dtype == dtype
    assert {n: got[f"d{n}"].dtype for n in x} == {n: t.dtype for n, t in x.items()}
    check(got, exact(x, dy, dht, activation), dtype)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_gradient_in_float64(activation):
    x = tensors(3, 2, 4, torch.float64)
    leaves = [t.requires_grad_() for t in x.values()]

    def f(*tensors):
        return causal_conv1d(*tensors, output_final_state=True, activation=activation)

    assert torch.autograd.gradcheck(f, leaves)


@impls
def test_gradients_of_many_packed_sequences_are_added_up_in_float32(impl, device):
    """Those of weight and bias, in 16 bits."""
    x = tensors(80, 6, 4, device=device, B=1, without=("residual", "initial_state"))
    x = {n: t.bfloat16() for n, t in x.items()}
    ones, bounds = torch.ones_like(x["x"]), torch.arange(0, 81, 2, device=device)
    want = run({n: t.double() for n, t in x.items()}, ones.double(), None, cu_seqlens=bounds)
    got = run(x, ones, None, cu_seqlens=bounds, impl=impl)
    for n in ("dweight", "dbias"):
        assert_close(n, got[n], want[n], 6e-3)


@impls
def test_dtypes_may_differ(impl, device):
    """Each gradient has its tensor's; outputs have x's."""
    x = tensors(9, 6, 4, torch.bfloat16, device)
    x |= {"initial_state": x["initial_state"].float(), "residual": x["residual"].float()}
    x |= {"weight": x["weight"].half()}
    dy, dht = cotangents(x)
    got = run(x, dy, dht, output_final_state=True, impl=impl)
    assert got["o"].dtype == got["ht"].dtype == torch.bfloat16
    assert {n: got[f"d{n}"].dtype for n in x} == {n: t.dtype for n, t in x.items()}
    check(got, exact(x, dy, dht), torch.bfloat16)


def test_arguments_of_fla_that_change_nothing(device):
    x = tensors(5, device=device)
    want, state = causal_conv1d(**x)
    got, _ = causal_conv1d(**x, backend="triton", cp_context=None, output_final_state=None)
    assert state is None and torch.equal(got, want)


@pytest.mark.parametrize("impl", ("reference", "triton"))
def test_documents_by_the_number_of_each_token(impl, device):
    """As causal_conv1d_fn of the transpose, both passes, with states."""
    x = tensors(9, 5, device=device, without=("residual", "initial_state"))
    rows = [[0, 0, 1, 1, 1, 2, 2, 2, 2], [3] * 4 + [-1] * 2 + [4] * 3]
    seq_idx = torch.tensor(rows, device=device)
    options = {"activation": "silu", "seq_idx": seq_idx, "impl": impl}
    dy = torch.randn_like(x["x"])

    def passes(f, x):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
        y, state = f(**leaves)
        return y, state, *torch.autograd.grad(y, leaves.values(), dy)

    got = passes(lambda **x: causal_conv1d(**x, output_final_state=True, **options), x)
    y, last = causal_conv1d_fn(
        x["x"].mT, x["weight"], x["bias"], return_final_states=True, **options
    )
    want = passes(lambda x, **more: (causal_conv1d_fn(x.mT, **more, **options).mT, None), x)
    assert torch.equal(got[0], y.mT) and torch.equal(got[1][..., 1:], last)
    assert all(map(torch.equal, got[2:], want[2:]))


new = torch.zeros
REFUSED = {
    "no channel": ({"x": new(2, 9, 0)}, "x must have D >= 1, got D=0"),
    "no row": ({"x": new(0, 9, 5)}, "x must have B >= 1, got B=0"),
    "weight shape": ({"weight": new(4, 5)}, r"weight must have shape \[D=5, W\]"),
    "weight rank": ({"weight": new(5, 1, 4)}, r"weight must have 2 dimensions \[D, W"),
    "wide": ({"weight": new(5, 9)}, "weight must have W from 1 to 8, got W=9"),
    "of nothing": ({"weight": new(5, 0)}, "weight must have W from 1 to 8, got W=0"),
    "bias": ({"bias": new(4)}, r"bias must have shape \[D=5\], got \(4,\)"),
    "state": (
        {"initial_state": new(2, 5, 3)},
        r"initial_state must have shape \[N=2, D=5, W=4\], got \(2, 5, 3\)"
    ),
    "activation": ({"activation": "relu"}, "activation must be None, .*got 'relu'"),
    "no name": ({"activation": True}, "activation must be None, .*got True"),
    "backend": ({"backend": "cuda"}, "backend must be None or 'triton', got 'cuda'"),
    "seq_idx": ({"seq_idx": new(9)}, TypeError, "seq_idx must be a tensor of int32 or int64"),
    "seq_idx shape": (
        {"seq_idx": new(9, dtype=torch.int32)}, r"seq_idx must have shape \[B, T\]"
    ),
    "both": (
        {"x": new(1, 9, 5), "residual": None, "initial_state": None,
         "seq_idx": new(1, 9, dtype=torch.int32), "cu_seqlens": torch.tensor([0, 9])},
        "seq_idx must be None with cu_seqlens or cp_context"
    ),
    "cp_context": ({"cp_context": 1}, TypeError, "must come from build_cp_context, got int"),
}  # fmt: skip


test_refused_before_any_kernel = refuses(causal_conv1d, lambda: tensors(9, 5), REFUSED)
