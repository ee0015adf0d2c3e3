"""causal_conv1d: both passes against PyTorch's convolution in float64, every form, refusals."""

import inspect
from itertools import pairwise

import gdn_checks
import pytest
import torch
import torch.nn.functional as F
from gdn_checks import DTYPES, launches, same_bits
from grids import few, parametrize
from torch.utils.checkpoint import checkpoint

from linattn_edu import causal_conv1d
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
# relative RMS against float64 of y and the final state, and of the gradients
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float64: 1e-12}
LENGTHS = (2, 0, 64, 1, 70, 0)
OPTIONAL = ("bias", "residual", "initial_state")


def tensors(T, D=20, W=4, dtype=torch.float32, device="cpu", B=2, N=None, without=()):
    """The arguments by name; the layer's have float32 beside 16 bits."""
    generator = torch.Generator(device).manual_seed(T + W)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, device=device, dtype=wide).to(dtype)

    x = {"x": randn(B, T, D), "weight": randn(D, W, dtype=wide), "bias": randn(D, dtype=wide)}
    x |= {"residual": randn(B, T, D), "initial_state": randn(N or B, D, W)}
    return {n: t for n, t in x.items() if n not in without}


def cotangents(x, N=None):
    y, weight = x["x"], x["weight"]
    generator = torch.Generator(y.device).manual_seed(1)
    shapes = y.shape, (N or len(y), *weight.shape)
    drawn = (torch.randn(s, generator=generator, device=y.device) for s in shapes)
    return tuple(t.to(y.dtype) for t in drawn)


def plain(x, weight, bias=None, residual=None, initial_state=None, activation=None):
    """y and the final state, by PyTorch's convolution."""
    state = x.new_zeros(len(x), *weight.shape) if initial_state is None else initial_state
    u = torch.cat([state.mT, x], 1)
    y = F.conv1d(u[:, 1:].mT, weight[:, None], bias, groups=len(weight)).mT
    y = F.silu(y) if activation else y
    return y if residual is None else y + residual, u[:, x.shape[1] :].mT


def run(x, dy, dht, f=causal_conv1d, **options):
    return gdn_checks.run(x, dy, dht, f, **options)


def exact(x, dy, dht, activation=None):
    """What `run` should give: autograd of the convolution in float64."""
    wide = {n: t.double() for n, t in x.items()}
    dy, dht = (dt if dt is None else dt.double() for dt in (dy, dht))
    return run(wide, dy, dht, plain, activation=activation)


def check(got, want, dtype):
    got = {n: t.double() for n, t in got.items()}
    gdn_checks.check(got, want, dtype, tolerance=lambda n, dtype: TOLERANCES[dtype])


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


def part(x, n, tokens):
    """Sequence n of packed tensors."""
    states, whole = ("ht", "initial_state", "dinitial_state"), ("weight", "bias")
    return {
        m: t[n : n + 1] if m in states else t if m in whole else t[:, tokens] for m, t in x.items()
    }


@impls
@pytest.mark.parametrize(
    ("without", "dtype"),
    few(
        ((), torch.bfloat16),
        (OPTIONAL, torch.float32),
        more=(((), torch.float32), (OPTIONAL, torch.bfloat16)),
    ),
    ids=str,
)
def test_packed_sequences_are_each_by_itself(without, dtype, impl, device):
    """To the bit; the gradients of weight and bias are sums over all of them."""
    N, options = len(LENGTHS), {"output_final_state": True, "impl": impl, "activation": "silu"}
    x = tensors(sum(LENGTHS), 20, 4, dtype, device, B=1, N=N, without=without)
    dy, dht = cotangents(x, N)
    bounds = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    got = run(x, dy, dht, cu_seqlens=bounds, **options)
    if without:  # however the boundaries are given
        rows = [(n, c) for n, T in enumerate(LENGTHS) for c in range(-(-T // 64))]
        known = {"cu_seqlens_cpu": bounds.cpu(), "chunk_indices": torch.tensor(rows).to(device)}
        same_bits(run(x, dy, dht, cu_seqlens=bounds.int(), **known, **options), got)
    sums = {n: 0 for n in ("dweight", "dbias") if n in got}
    for n, (a, b) in enumerate(pairwise(bounds.tolist())):
        t = slice(a, b)
        want = run(part(x, n, t), dy[:, t], dht[n : n + 1], **options)
        alone = {m: dt for m, dt in want.items() if m not in sums}
        same_bits(part({m: got[m] for m in alone}, n, t), alone)
        sums = {m: dt + want[m].double() for m, dt in sums.items()}
    for m, dt in sums.items():
        assert_close(m, got[m], dt, 5e-6)


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
@pytest.mark.parametrize("without", [(), OPTIONAL], ids=["all", "nothing"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_tokens(packed, without, impl, device):
    """The state goes through, and so does its gradient."""
    N = 3 if packed else 2
    x = tensors(0, 5, 4, device=device, B=1 if packed else 2, N=N, without=without)
    dy, dht = cotangents(x, N)
    options = {"output_final_state": True, "impl": impl}
    if packed:
        options["cu_seqlens"] = torch.zeros(4, dtype=torch.int64, device=device)
    got = run(x, dy, dht, **options)
    assert got["o"].shape == got["dx"].shape == x["x"].shape and not got["dweight"].any()
    if without:
        assert not got["ht"].any() and got["ht"].shape == dht.shape
    else:
        assert torch.equal(got["ht"], x["initial_state"])
        assert torch.equal(got["dinitial_state"], dht)


@impls
@pytest.mark.parametrize("cut", few(2, more=(1, 40)))
def test_splitting_a_sequence_equals_one_call(cut, impl, device):
    """The gradients too, through the state between the parts."""
    x = tensors(70, device=device, B=1)
    dy, dht = cotangents(x)
    options = {"activation": "silu", "output_final_state": True, "impl": impl}

    def split(x, residual, initial_state, **given):
        parts, state = [], initial_state
        for t in (slice(cut), slice(cut, None)):
            given |= {"residual": residual[:, t], "initial_state": state}
            y, state = causal_conv1d(x[:, t], **given)
            parts.append(y)
        return torch.cat(parts, 1), state

    got, want = run(x, dy, dht, split, **options), run(x, dy, dht, **options)
    if impl == "triton":  # PyTorch's own sigmoid depends on where a number stands
        same_bits(got, {n: want[n] for n in ("o", "ht")})
    for n in want:
        assert_close(n, got[n], want[n], 2e-6)


@impls
@pytest.mark.parametrize("used", ["o", "ht"])
def test_only_one_output_is_used(used, impl, device):
    x = tensors(9, device=device, without=("residual",))
    dy, dht = cotangents(x)
    given = (dy, None) if used == "o" else (None, dht)
    zeros = (dy, 0 * dht) if used == "o" else (0 * dy, dht)
    got = run(x, *given, output_final_state=True, impl=impl)
    check(got, exact(x, *zeros), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cut", [1, 63, 66])
def test_causal_to_the_bit(cut, dtype, device):
    """Other tokens after the cut, or none at all; what is not a number among them."""
    x = tensors(70, 20, dtype=dtype, device=device, B=1, without=("residual",))
    options = {"activation": "silu", "impl": "triton"}
    want, _ = causal_conv1d(**x, **options)
    other = x["x"].clone()
    other[:, cut:] = torch.nan
    for tokens in (other, x["x"][:, :cut]):
        got, _ = causal_conv1d(**x | {"x": tokens}, **options)
        assert torch.equal(got[:, :cut], want[:, :cut])


@impls
def test_same_bits_in_any_batch(impl, device):
    x = tensors(20, device=device, B=3)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl, "activation": "silu"}
    got = run(x, dy, dht, **options)
    same_bits(run(x, dy, dht, **options), got)
    whole = ("weight", "bias")
    one = {n: t if n in whole else t[1:2] for n, t in x.items()}
    alone = run(one, dy[1:2], dht[1:2], **options)
    alone = {n: t for n, t in alone.items() if n not in ("dweight", "dbias")}
    same_bits({n: got[n][1:2] for n in alone}, alone)


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


@impls
def test_strides_and_what_is_left_alone(impl, device):
    """Non-contiguous tensors and gradients, x [B, D, T] transposed; neither is changed."""
    x = tensors(40, device=device)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl}
    want = run(x, dy, dht, **options)
    odd = {n: t if t.ndim == 1 else t.mT.contiguous().mT for n, t in x.items()}
    kept = {n: t.clone() for n, t in odd.items()}
    same_bits(run(odd, dy.mT.contiguous().mT, dht.mT.contiguous().mT, **options), want)
    same_bits(odd, kept)


@impls
def test_checkpointing_autocast_and_a_changed_output(impl, device):
    x = tensors(20, device=device, B=1)
    dy, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl, "activation": "silu"}
    want = run(x, dy, dht, **options)

    def again(**arguments):
        return checkpoint(causal_conv1d, **arguments, use_reentrant=False)

    same_bits(run(x, dy, dht, again, **options), want)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        same_bits(run(x, dy, dht, **options), want)

    def changed(**arguments):
        y, ht = causal_conv1d(**arguments)
        return y.mul_(2), ht.add_(1)

    same_bits(run(x, dy / 2, dht, changed, **options), want, "o", "ht")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("packed", few(True, more=(False,)))
def test_fullgraph(packed, backend, device):
    """One graph for two lengths, and the bits of eager mode."""

    def f(x, **given):
        bounds = {}
        if packed:
            T = x.shape[1]
            bounds["cu_seqlens"] = torch.tensor([0, 3, 3, T], device=x.device)
            bounds["cu_seqlens_cpu"] = torch.tensor([0, 3, 3, T])
        return causal_conv1d(x, **given, **bounds, output_final_state=True, activation="silu")

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    for T in (17, 33):
        x = tensors(T, 6, device=device, B=1, N=3 if packed else 1)
        dy, dht = cotangents(x, 3 if packed else 1)
        with torch._dynamo.config.patch(error_on_recompile=T == 33):
            got = run(x, dy, dht, g)
        same_bits(got, run(x, dy, dht, f))


def test_arguments_stand_where_fla_has_them():
    names = [
        "x", "weight", "bias", "residual", "initial_state", "output_final_state", "activation",
        "backend", "cu_seqlens", "cu_seqlens_cpu", "chunk_indices", "cp_context",
    ]  # fmt: skip
    assert [*inspect.signature(causal_conv1d).parameters][: len(names)] == names


def test_arguments_of_fla_that_change_nothing(device):
    x = tensors(5, device=device)
    want, state = causal_conv1d(**x)
    got, _ = causal_conv1d(**x, backend="triton", cp_context=None, output_final_state=None)
    assert state is None and torch.equal(got, want)


def new(*shape, **kwargs):
    return torch.zeros(*shape, **kwargs)


ONE = {"x": new(1, 9, 5), "residual": None, "initial_state": None}
REFUSED = {
    "x no tensor": ({"x": [1.0]}, TypeError, "x must be a torch.Tensor .*got list"),
    "x rank": ({"x": new(2, 9, 1, 5)}, ValueError, r"x must have 3 dimensions \[B, T, D\], got 4"),
    "x dtype": ({"x": new(2, 9, 5).int()}, TypeError, "x must be float.*int32"),
    "no channel": ({"x": new(2, 9, 0)}, ValueError, "x must have D >= 1, got D=0"),
    "no row": ({"x": new(0, 9, 5)}, ValueError, "x must have B >= 1, got B=0"),
    "no weight": ({"weight": None}, TypeError, "weight must be a torch.Tensor .*got NoneType"),
    "weight shape": ({"weight": new(4, 5)}, ValueError, r"weight must have shape \[D=5, W\]"),
    "weight rank": ({"weight": new(5, 1, 4)}, ValueError, r"weight must have 2 dimensions \[D, W"),
    "wide": ({"weight": new(5, 9)}, ValueError, "weight must have W from 1 to 8, got W=9"),
    "of nothing": ({"weight": new(5, 0)}, ValueError, "weight must have W from 1 to 8, got W=0"),
    "bias": ({"bias": new(4)}, ValueError, r"bias must have shape \[D=5\], got \(4,\)"),
    "residual": ({"residual": new(2, 8, 5)}, ValueError, r"residual must have shape \[B=2, T=9"),
    "state": (
        {"initial_state": new(2, 5, 3)},
        ValueError,
        r"initial_state must have shape \[N=2, D=5, W=4\], got \(2, 5, 3\)",
    ),
    "device": ({"bias": new(5, device="meta")}, ValueError, "bias must be on cpu like x, got meta"),
    "flag": ({"output_final_state": "yes"}, TypeError, "output_final_state must be True or False"),
    "activation": ({"activation": "relu"}, ValueError, "activation must be None, .*got 'relu'"),
    "no name": ({"activation": True}, ValueError, "activation must be None, .*got True"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be None or 'triton', got 'cuda'"),
    "cp_context": ({"cp_context": 1}, TypeError, "must come from build_cp_context, got int"),
    "impl": ({"impl": "cuda"}, ValueError, "impl must be one of 'auto', 'triton', 'reference'"),
    "float64": (
        {"bias": new(5).double(), "impl": "triton"},
        ValueError,
        "impl='triton' cannot run here",
    ),
    "packed batch": (
        {"cu_seqlens": torch.tensor([0, 9])}, ValueError, "x must have B = 1 with cu_seqlens"
    ),
    "bounds": (
        ONE | {"cu_seqlens": torch.tensor([0, 8])}, ValueError, "cu_seqlens must end at T=9, got 8"
    ),
    "rows": (
        ONE | {"cu_seqlens": torch.tensor([0, 9]), "chunk_indices": new(2, 2).int()},
        ValueError,
        "chunk_indices must have 1 rows, one for each chunk of 64 tokens, got 2",
    ),
    "no bounds": ({"chunk_indices": new(1, 2).int()}, ValueError, "chunk_indices belongs to"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_kernel(name):
    change, error, message = REFUSED[name]
    x = tensors(9, 5) | change
    with launches() as ran, pytest.raises(error, match=message):
        causal_conv1d(**x)
    assert not ran


def test_impl_and_unknown_arguments(device):
    x = tensors(9, 5, device=device)
    with launches() as ran:
        causal_conv1d(**x, impl="reference")
        causal_conv1d(**{n: t.double() for n, t in x.items()})
    assert not ran
    with launches() as ran:
        causal_conv1d(**x)
    assert [f.fn.__name__ for f in ran] == ["causal_conv1d_kernel"]
    with pytest.raises(TypeError, match="unexpected keyword"):
        causal_conv1d(**x, seq_idx=None)
