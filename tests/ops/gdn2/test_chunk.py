"""chunk_gdn2 and fused_recurrent_gdn2: the rule, what they contain, keys alike, strong gates.

What every operator over sequences keeps is asked in test_contract*.py.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from gdn_checks import DTYPES, cotangents, exact, gated, run, same_bits
from grids import parametrize
from kda_checks import check, inputs, tolerance

from linattn_edu import chunk_gdn2, chunk_kda, fused_recurrent_gdn2, fused_recurrent_kda, route
from linattn_edu.testing import assert_close, relative_rms

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

IMPLS = ("reference", "triton")
C16 = {"chunk_size": 16}
in_16 = partial(chunk_gdn2, **C16)
impls = pytest.mark.parametrize("impl", IMPLS)
forms = pytest.mark.parametrize("f", (in_16, fused_recurrent_gdn2), ids=["in chunks", "by token"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def small(dtype, device, most=1.0, **kinds):
    """Two chunks of 16, two value heads on a key head."""
    return gated(inputs(1, 20, 1, 2, 12, 8, dtype, device, **kinds), most=most)


def rule(q, k, v, g, b, w, initial_state):
    """The rule as it is written: S <- (I - k^T (b * k)) diag(e^g) S + k^T (w * v)."""
    S, o = initial_state, []
    q, k = (x.expand(-1, -1, v.shape[2], -1) for x in (q, k))
    for t in range(v.shape[1]):
        row, erased = k[:, t, :, None], (b * k)[:, t, :, None]
        S = g[:, t].exp()[..., None] * S
        S = S - row.mT @ (erased @ S) + row.mT @ (w * v)[:, t, :, None]
        o.append(q.shape[-1] ** -0.5 * (q[:, t, :, None] @ S))
    return torch.stack(o, 1).squeeze(-2), S


@impls
@forms
def test_it_is_the_rule(f, impl, device):
    """Outputs and all gradients, by autograd of the rule in float64."""
    x = small(torch.float32, device)
    do, dht = cotangents(x)
    got = run(x, do, dht, f, output_final_state=True, impl=impl)
    want = run({n: t.double() for n, t in x.items()}, do.double(), dht.double(), rule)
    check(got, want, torch.float32)


@impls
@dtypes
@forms
def test_equal_gates_are_kimi_delta_attention(f, dtype, impl, device):
    """b = w = beta in all channels; the sums of their gradients over the channels are beta's."""
    x = inputs(1, 20, 1, 2, 12, 8, dtype, device)
    do, dht = cotangents(x)
    kda = partial(chunk_kda, **C16) if f is in_16 else fused_recurrent_kda
    options = {"output_final_state": True, "impl": impl}
    wide, f64 = {n: t.double() for n, t in x.items()}, (do.double(), dht.double())
    want = run(wide, *f64, kda, **options | {"impl": "reference"})
    beta = x.pop("beta")[..., None]
    x |= {"b": beta.expand(-1, -1, -1, 12).contiguous(), "w": beta.expand_as(x["v"]).contiguous()}
    got = run(x, do, dht, f, **options)
    db, dw = got.pop("db").double(), got.pop("dw").double()
    got["dbeta"] = db.sum(-1) + dw.sum(-1)
    # the two parts cancel, and each has an error of its own
    size = max(part.sum(-1).square().mean().sqrt() for part in (db, dw))
    at_least = tolerance("dbeta", dtype) * (size / want["dbeta"].square().mean().sqrt()).item()
    check(got, want, dtype, dbeta=at_least)


@parametrize(dtype=DTYPES, keys=("apart", "alike", "one"), gate=(0.0, -0.01, -1.0, "shut"))
def test_keys_alike_and_gates_strong_or_weak(dtype, keys, gate, device):
    """Fresh keys, of cosine .97, and one key for all; erase gates up to 2, of which 16 bit is
    told.
    """
    x = small(torch.float32, device, most=2.0)
    one = x["k"][:, :1]
    k = {"apart": x["k"], "alike": 5 * one + 1.3 * x["k"], "one": one.expand_as(x["k"])}[keys]
    x["k"] = F.normalize(k, dim=-1).contiguous()
    x["g"] = torch.full_like(x["g"], 0.0 if gate == "shut" else gate)
    if gate == "shut":
        x["g"][:, 3::5, :, ::3] = -1000.0
    x |= {n: x[n].to(dtype) for n in ("q", "k", "v")}
    do, dht = cotangents(x)
    options = {"output_final_state": True, "impl": "triton", "allow_neg_eigval": True}
    got = run(x, do, dht, in_16, **options)
    check(got, exact(x, do, dht), dtype, every=3e-5 if dtype == torch.float32 else 0)


def test_a_chunk_as_long_as_it_can_be(device):
    """Two chunks of 64 and heads of odd size, with the channels of each 64 near and far."""
    for dtype in DTYPES[::2]:
        x = gated(inputs(1, 80, 1, 1, 72, 20, dtype, device, shut=0.02))
        do, dht = cotangents(x)
        got = run(x, do, dht, chunk_gdn2, output_final_state=True, impl="triton")
        check(got, exact(x, do, dht), dtype)


@impls
@forms
def test_gates_that_are_shut(f, impl, device):
    """Without erasing it is a sum of writes, without writing of value nothing is added."""
    x = small(torch.float32, device)
    x["g"].zero_()
    x["b"].zero_()
    _, S = f(**x, output_final_state=True, impl=impl)
    k, v = x["k"].double().expand(-1, -1, 2, -1), (x["w"] * x["v"]).double()
    written = torch.einsum("bthk,bthv->bhkv", k, v)
    assert_close("S", S, x["initial_state"].double() + written, 2e-6)
    x = small(torch.float32, device)
    x["w"].zero_()
    x["initial_state"].zero_()
    o, S = f(**x, output_final_state=True, impl=impl)
    assert not o.any() and not S.any()


@impls
@pytest.mark.parametrize("dtype", DTYPES[::2], ids=str)
def test_what_is_kept_changes_no_bit(dtype, impl, device, force):
    """Of the stages one by one."""
    force(kda_forward_stages="staged", kda_backward_stages="staged")
    x = small(dtype, device)
    do, dht = cotangents(x)
    got, want = (
        run(x, do, dht, in_16, output_final_state=True, impl=impl, disable_recompute=keep)
        for keep in (True, False)
    )
    same_bits(got, want, "o")  # which another stage makes
    assert_close("o", got["o"], want["o"].double(), tolerance("o", dtype))


@impls
def test_states_of_the_chunks(impl, device):
    x = small(torch.float32, device)
    o, _, h = in_16(**x, return_intermediate_states=True, impl=impl)
    first = {n: t if n == "initial_state" else t[:, :16] for n, t in x.items()}
    _, S = fused_recurrent_gdn2(**first, output_final_state=True, impl="reference")
    assert h.shape == (1, 2, 2, 12, 8)
    assert_close("h 0", h[:, 0], x["initial_state"], tolerance("h", torch.float32))
    assert_close("h 1", h[:, 1], S, tolerance("h", torch.float32))
    assert_close("o", in_16(**x, impl=impl)[0], o, tolerance("o", torch.float32))


@dtypes
def test_what_may_be_beyond_one_is_told(dtype, device):
    """In 16 bit it is computed in float32, and as right as its inputs: in bfloat16 on Hopper where
    numbers cancel, and of all heads where a part must decide as the whole.
    """
    x = small(dtype, device, most=2.0)
    told = {"allow_neg_eigval": True, "output_final_state": True, "batch_invariant": True}
    o, S = in_16(**x, **told, impl="triton")
    do, dht = cotangents(x)
    want = exact(x, do, dht)
    assert o.dtype == dtype
    assert relative_rms(S, want["ht"]) < 1e-5
    assert relative_rms(o, want["o"]) < max(1e-5, torch.finfo(dtype).eps)


@pytest.mark.parametrize("gates", [torch.bfloat16, torch.float32], ids=str)
def test_stages_on_a_gpu(gates):
    """The kernels in Gluon take gates of q's dtype."""
    x = dict.fromkeys("qkvgbw", torch.empty(8, 4096, 16, 128, device="meta", dtype=torch.bfloat16))
    x |= {n: x[n].to(gates) for n in ("b", "w")}
    found = route(chunk_gdn2, **x, gpu="h100")
    fused = "fused stages: Hopper, bfloat16, K=128, V=128"
    other = "stage by stage: a gate of float32: Gluon kernels want bfloat16"
    alike = gates == torch.bfloat16
    assert found.stages == {"forward": fused, "backward": fused if alike else other}
    assert any("kda_scan_gluon" in s.kernel for s in found.forward) == alike


def refuse(change, message, error=ValueError):
    x = small(torch.float32, "cpu")
    for f in (chunk_gdn2, fused_recurrent_gdn2):
        with pytest.raises(error, match=message):
            f(**x | change(x))


def test_gates_of_other_shapes_are_refused():
    """A beta a head is none, and neither are the gates of the q/k heads."""
    shape = r"must have shape \[B=1, T=20, HV=2, {}\], got"
    refuse(lambda x: {"b": x["b"][:, :, :1]}, "b " + shape.format("K=12"))
    refuse(lambda x: {"b": x["w"]}, "b " + shape.format("K=12"))
    refuse(lambda x: {"w": x["b"]}, "w " + shape.format("V=8"))
    refuse(lambda x: {"w": x["w"][..., 0]}, r"w must have 4 dimensions \[B, T, HV, V\]")
    refuse(lambda x: {"beta": x["w"][..., 0]}, "unexpected keyword argument 'beta'", TypeError)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'w'"):
        chunk_gdn2(**{n: t for n, t in small(torch.float32, "cpu").items() if n != "w"})
