"""causal_conv1d_fn: both passes against PyTorch's convolution of each sequence, forms, refusals."""

from itertools import pairwise

import gdn_checks
import pytest
import torch
import torch.nn.functional as F
from gdn_checks import DTYPES, same_bits
from grids import parametrize
from refusals import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn_edu import causal_conv1d, causal_conv1d_fn
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 5e-3}
B, D, W = 2, 6, 4
ROWS = ((3, 1, 5, 8), (-2, 4, 9, -2))  # tokens of each sequence; negative: of padding


def tensors(T=17, dtype=torch.float32, device="cpu", without=()):
    """The arguments by name, x as layers have it, and the cotangents of y and the final states."""
    generator = torch.Generator().manual_seed(T)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = {"x": randn(B, T, D).mT, "weight": randn(D, W, dtype=torch.float32)}
    x |= {"bias": randn(D, dtype=torch.float32), "initial_states": randn(B, D, W - 1)}
    cotangents = randn(B, T, D).mT, randn(B, D, W - 1)
    return {n: t for n, t in x.items() if n not in without}, cotangents


def sequences(device="cpu"):
    rows = []
    for row in ROWS:
        parts = [torch.full((abs(n),), i if n > 0 else -1) for i, n in enumerate(row)]
        rows.append(torch.cat(parts))
    return torch.stack(rows).to(device, torch.int32)


def plain(x, weight, bias=None, initial_states=None, activation=None, rows=None):
    """y and the final states, by PyTorch's convolution of one sequence after the other."""
    T = x.shape[2]
    ys, finals = [], []
    for n in range(B):
        state = x.new_zeros(D, W - 1) if initial_states is None else initial_states[n]
        begin, parts = 0, []
        for length in (T,) if rows is None else rows[n]:
            one = x[n, :, begin : begin + abs(length)]
            state = state if begin == 0 else torch.zeros_like(state)
            u = torch.cat([state, one], 1)
            y = F.conv1d(u, weight[:, None], bias, groups=D)
            y = F.silu(y) if activation else y
            parts.append(y if length > 0 else 0 * one)
            last = u[:, u.shape[1] - W + 1 :] if length > 0 else 0 * u[:, : W - 1]
            begin += abs(length)
        ys.append(torch.cat(parts, 1))
        finals.append(last)
    return torch.stack(ys), torch.stack(finals)


def run(x, dy, dht, f=causal_conv1d_fn, **options):
    return gdn_checks.run(x, dy, dht, f, **options)


@parametrize(
    T=(1, 2, 17, 65), without=((), ("bias",), ("initial_states",), ("bias", "initial_states")),
    packed=(False, True), activation=(None, "silu", "swish"), dtype=DTYPES, impl=IMPLS,
)  # fmt: skip
def test_both_passes(T, without, packed, activation, dtype, impl, device):
    T, rows = (17, ROWS) if packed else (T, None)
    x, cotangents = tensors(T, dtype, device, without)
    options = {"seq_idx": sequences(device)} if packed else {}
    got = run(x, *cotangents, return_final_states=True, activation=activation, impl=impl, **options)
    assert got["o"].shape == x["x"].shape and got["ht"].shape == (B, D, W - 1)
    assert got["o"].dtype == got["ht"].dtype == dtype
    assert {n: got[f"d{n}"].dtype for n in x} == {n: t.dtype for n, t in x.items()}
    wide = {n: t.double() for n, t in x.items()}
    dy, dht = (t.double() for t in cotangents)
    want = run(wide, dy, dht, plain, activation=activation, rows=rows)
    got = {n: t.double() for n, t in got.items()}
    gdn_checks.check(got, want, dtype, tolerance=lambda n, dtype: TOLERANCES[dtype])


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_in_float64(packed):
    x, _ = tensors()
    x = {n: t.double().requires_grad_() for n, t in x.items()}
    seq_idx = sequences().long() if packed else None

    def f(x, weight, bias, state):
        return causal_conv1d_fn(x, weight, bias, seq_idx, state, True, None, "silu")

    assert torch.autograd.gradcheck(f, tuple(x.values()), fast_mode=True)


@impls
def test_is_causal_conv1d_with_the_axes_in_another_order(impl, device):
    x, _ = tensors(device=device)
    y, last = causal_conv1d_fn(**x, return_final_states=True, activation="silu", impl=impl)
    state = F.pad(x["initial_states"], (1, 0), value=torch.nan)  # the oldest is in no sum
    want, state = causal_conv1d(
        x["x"].mT, x["weight"], x["bias"], None, state, True, "silu", impl=impl
    )
    assert torch.equal(y, want.mT) and torch.equal(last, state[..., 1:])
    assert y.stride() == x["x"].stride()
    assert torch.equal(causal_conv1d_fn(**x, activation="silu", impl=impl), y)
    copied = x | {"x": x["x"].contiguous()}
    assert torch.equal(causal_conv1d_fn(**copied, activation="silu", impl=impl), y)


@impls
def test_sequences_have_the_bits_of_calls_of_their_own(impl, device):
    x, _ = tensors(device=device, without=("initial_states",))
    options = {"activation": "silu", "impl": impl}
    y = causal_conv1d_fn(**x, seq_idx=sequences(device), **options)
    for n, row in enumerate(ROWS):
        bounds = [sum(map(abs, row[:i])) for i in range(len(row) + 1)]
        for length, (a, b) in zip(row, pairwise(bounds), strict=True):
            alone = causal_conv1d_fn(**x | {"x": x["x"][n : n + 1, :, a:b]}, **options)
            got = y[n : n + 1, :, a:b]
            if length < 0:
                assert not got.any()
            elif impl == "triton":
                assert torch.equal(got, alone)
            else:  # PyTorch's own sigmoid depends on where a number stands
                assert_close("y", got, alone, 1e-6)


@impls
def test_final_states_out(impl, device):
    """It is what is returned, also where a gradient goes through it."""
    x, cotangents = tensors(device=device)
    out = torch.full((B, W - 1, D), torch.nan, dtype=torch.float64, device=device).mT
    want = run(x, *cotangents, return_final_states=True, impl=impl)
    got = run(x, *cotangents, return_final_states=True, final_states_out=out, impl=impl)
    assert torch.equal(out.float(), want["ht"])
    same_bits(got, want, "ht")  # which is wider here
    with torch.no_grad():
        _, last = causal_conv1d_fn(
            **x, return_final_states=True, final_states_out=out.zero_(), impl=impl
        )
    assert last is out and torch.equal(out.float(), want["ht"])


@impls
def test_no_tokens(impl, device):
    x, cotangents = tensors(0, device=device)
    options = {"seq_idx": torch.empty(B, 0, dtype=torch.int32, device=device), "impl": impl}
    got = run(x, *cotangents, return_final_states=True, **options)
    assert got["o"].shape == (B, D, 0) and torch.equal(got["ht"], x["initial_states"])
    assert torch.equal(got["dinitial_states"], cotangents[1]) and not got["dweight"].any()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_fullgraph(backend, device):
    x, cotangents = tensors(device=device)
    options = {"seq_idx": sequences(device), "activation": "silu", "return_final_states": True}

    def f(**given):
        return causal_conv1d_fn(**given, **options)

    torch._dynamo.reset()
    got = run(x, *cotangents, torch.compile(f, fullgraph=True, backend=backend))
    same_bits(got, run(x, *cotangents, f))


def test_shapes_without_numbers():
    with FakeTensorMode():
        x, _ = torch.empty(B, 9, D, dtype=torch.bfloat16).mT, None
        seq_idx = torch.empty(B, 9, dtype=torch.int32)
        y, last = causal_conv1d_fn(x, torch.empty(D, W), None, seq_idx, None, True)
    assert (y.shape, last.shape) == ((B, D, 9), (B, D, W - 1))
    assert y.stride() == x.stride() and y.dtype == last.dtype == torch.bfloat16


new = torch.zeros
REFUSED = {
    "no tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor .*got list"),
    "x rank": ({"x": new(2, 6)}, r"x must have 3 dimensions \[B, D, T\], got 2"),
    "no channel": ({"x": new(2, 0, 3)}, "x must have D >= 1, got D=0"),
    "weight": ({"weight": new(4, 6)}, r"weight must have shape \[D=6, W\], got \(4, 6"),
    "wide": ({"weight": new(6, 9)}, "weight must have W from 1 to 8, got W=9"),
    "bias": ({"bias": new(4)}, r"bias must have shape \[D=6\], got \(4,\)"),
    "state": (
        {"initial_states": new(2, 6, 4)},
        r"initial_states must have shape \[B=2, D=6, W - 1=3\], got \(2, 6, 4\)"
    ),
    "out": (
        {"final_states_out": new(2, 6, 4), "return_final_states": True},
        r"final_states_out must have shape \[B=2, D=6, W - 1=3\], got \(2, 6, 4\)"
    ),
    "out for nothing": (
        {"final_states_out": new(2, 6, 3)}, "final_states_out needs return_final_states"
    ),
    "out expanded": (
        {"final_states_out": new(2, 6, 1).expand(2, 6, 3), "return_final_states": True},
        r"final_states_out must not be expanded, got strides \(6, 1, 0\)"
    ),
    "out of a gradient": (
        {"final_states_out": new(2, 6, 3, requires_grad=True), "return_final_states": True},
        "final_states_out must not need a gradient"
    ),
    "out in x": (
        (lambda x: {"x": x, "final_states_out": x[..., :3], "return_final_states": True})(
            new(2, 6, 9)
        ),
        "final_states_out must not share memory with another argument"
    ),
    "seq_idx dtype": (
        {"seq_idx": new(2, 9)}, TypeError, "seq_idx must be a tensor of int32 or int64, got .*float"
    ),
    "seq_idx shape": (
        {"seq_idx": new(1, 9).int()}, r"seq_idx must have shape \[B, T\] = \(2, 9\), g"
    ),
    "device": ({"bias": new(6, device="meta")}, "bias must be on cpu like x, got meta"),
    "flag": ({"return_final_states": 2}, TypeError, "return_final_states must be True or False"),
    "activation": ({"activation": "relu"}, "activation must be None, .*got 'relu'"),
    "impl": ({"impl": "cuda"}, "impl must be one of 'auto', 'triton', 'reference'"),
    "unknown": ({"cu_seqlens": None}, TypeError, "unexpected keyword argument 'cu_seqlens'"),
}  # fmt: skip


test_refused_before_any_kernel = refuses(causal_conv1d_fn, lambda: tensors(9)[0], REFUSED)
