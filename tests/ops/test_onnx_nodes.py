"""An oracle from outside: onnx's node tests and its NumPy reference of LinearAttention and
CausalConvWithState, run by the operators here, in chunks and token by token.
"""

import importlib

import numpy as np
import onnx
import torch
from grids import parametrize
from onnx.backend.test.case import node as onnx_cases
from onnx.reference.ops.op_linear_attention import LinearAttention

import linattn_edu as ours
from linattn_edu.testing import assert_close

# relative RMS; onnx rounds to float16 once, at the end, and the kernels products too
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1.5e-3}


def cases(module, op_type):
    """name -> (attributes, inputs by name, outputs) of onnx's tests of an operator, without those
    that spell it in other nodes.
    """
    importlib.import_module(f"{onnx_cases.__name__}.{module}")
    found = {}
    for case in onnx_cases._NodeTestCases:
        (node,), (data,) = case.model.graph.node[:1], case.data_sets
        if node.op_type != op_type:
            continue
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes = {n: a.decode() if isinstance(a, bytes) else a for n, a in attributes.items()}
        names = [n for n in node.input if n]
        inputs = dict(zip(names, map(torch.from_numpy, data[0]), strict=True))
        found[case.name] = attributes, inputs, [torch.from_numpy(y) for y in data[1]]
    return found


ATTENTION = cases("linear_attention", "LinearAttention")
CONVOLUTION = cases("causal_conv_with_state", "CausalConvWithState")
IMPLS, FORMS = ("reference", "triton"), ("chunk", "fused_recurrent")
CONVOLUTIONS = ("causal_conv1d", "causal_conv1d_fn", "causal_conv1d_update")


def test_no_case_is_missing():
    assert (len(ATTENTION), len(CONVOLUTION)) >= (14, 13)
    assert {x["update_rule"] for x, *_ in ATTENTION.values() if "update_rule" in x} == {
        "linear", "gated", "delta"
    }  # fmt: skip


def rule(form, name, channels, impl):
    """The operator of an update rule, decay of a head or of its channels: f(q, k, v, g, beta)."""
    family = {
        ("linear", False): "simple_gla", ("gated", False): "simple_gla", ("gated", True): "gdn2",
        ("delta", False): "delta_rule", ("gated_delta", False): "gated_delta_rule",
        ("gated_delta", True): "kda",
    }[name, channels]  # fmt: skip
    f = getattr(ours, f"{form}_{family}")
    more = {"impl": impl, "output_final_state": True}
    if form == "chunk":
        more["chunk_size"] = 16

    def run(q, k, v, g, beta, **options):
        given = {
            "simple_gla": (g,),
            "gdn2": (g, torch.zeros_like(k), torch.ones_like(v)),
            "delta_rule": (beta,),
        }.get(family, (g, beta))
        if family == "gated_delta_rule" and form == "fused_recurrent":
            return f(q, k, v, g, beta=beta, **options, **more)
        return f(q, k, v, *given, **options, **more)

    return run


def attention(form, impl, attributes, inputs, device):
    """LinearAttention by an operator here: every query head with keys, values and a state of its
    own.
    """
    inputs = {name: x.to(device) for name, x in inputs.items()}
    Hq, H = attributes["q_num_heads"], attributes["kv_num_heads"]
    group = Hq // H

    def heads(x, n):
        return x.unflatten(-1, (n, -1)).repeat_interleave(Hq // n, 2)

    q, k, v = heads(inputs["query"], Hq), heads(inputs["key"], H), heads(inputs["value"], H)
    g, beta, state = (inputs.get(name) for name in ("decay", "beta", "past_state"))
    channels = g is not None and g.shape[-1] > H
    if g is not None:
        g = heads(g, H) if channels else g.repeat_interleave(group, 2)
    if beta is not None:
        beta = beta.repeat_interleave(Hq // beta.shape[-1], 2)
    if state is not None:
        state = state.float().repeat_interleave(group, 1)
    name = attributes.get("update_rule", "gated_delta")
    o, final = rule(form, name, channels, impl)(
        q, k, v, g, beta, scale=attributes.get("scale"), initial_state=state
    )
    return o.flatten(2), final[:, ::group]


def compare(got, want):
    assert len(got) == len(want) == 2
    for name, x, y in zip(("output", "present_state"), got, want, strict=True):
        assert x.shape == y.shape
        if y.numel():
            assert_close(name, x.cpu().float(), y.float(), TOLERANCE[y.dtype])


@parametrize(name=ATTENTION, form=FORMS, impl=IMPLS)
def test_linear_attention(name, form, impl, device):
    attributes, inputs, want = ATTENTION[name]
    compare(attention(form, impl, attributes, inputs, device), want)


@parametrize(delta=(False, True), decay=(None, "head", "channel"), form=FORMS, impl=IMPLS)
def test_over_chunks_with_shared_heads(delta, decay, form, impl, device):
    """40 tokens with a state before them, keys alike, gates weak and shut, beside onnx's NumPy."""
    draw = np.random.default_rng(0)
    B, T, Hq, H, K, V = 2, 40, 4, 2, 8, 12
    q, key, v = (draw.standard_normal((B, T, n), "float32") for n in (Hq * K, H * K, H * V))
    key = (key.reshape(B, T, H, K) + 2).astype("float32")
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    inputs = {
        "query": q, "key": key.reshape(B, T, H * K), "value": v,
        "past_state": draw.standard_normal((B, H, K, V), "float32"),
    }  # fmt: skip
    if decay is not None:
        inputs["decay"] = -draw.exponential(0.1, (B, T, H * (K if decay == "channel" else 1)))
        inputs["decay"][:, ::9] = -8
    if delta:
        inputs["beta"] = draw.random((B, T, H))
    inputs = {n: x.astype("float32") for n, x in inputs.items()}
    names = {(False, False): "linear", (True, False): "gated", (False, True): "delta"}
    attributes = {
        "update_rule": names.get((decay is not None, delta), "gated_delta"),
        "q_num_heads": Hq, "kv_num_heads": H, "scale": 0.3,
    }  # fmt: skip
    given = [inputs.get(n) for n in ("query", "key", "value", "past_state", "decay", "beta")]
    want = LinearAttention._run(None, *given, **attributes)
    tensors = {n: torch.from_numpy(x) for n, x in inputs.items()}
    got = attention(form, impl, attributes, tensors, device)
    compare(got, list(map(torch.from_numpy, want)))


def convolved(form, impl, attributes, inputs, device):
    """CausalConvWithState; the states of two of the functions have a token more."""
    inputs = {name: x.to(device) for name, x in inputs.items()}
    x, weight, bias = inputs["input"], inputs["weight"][:, 0], inputs.get("bias")
    W, past = weight.shape[1], inputs.get("past_state")
    activation = {"none": None}.get(name := attributes.get("activation", "none"), name)
    wide = None if past is None else torch.nn.functional.pad(past, (1, 0))
    if form == "causal_conv1d":
        y, last = ours.causal_conv1d(x.mT, weight, bias, None, wide, True, activation, impl=impl)
        return y.mT, last[..., 1:]
    if form == "causal_conv1d_fn":
        return ours.causal_conv1d_fn(
            x, weight, bias, None, past, True, activation=activation, impl=impl
        )
    state = x.new_zeros(*x.shape[:2], W) if wide is None else wide
    y = ours.causal_conv1d_update(x, state, weight, bias, activation, impl=impl)
    return y, state[..., 1:]


@parametrize(name=CONVOLUTION, form=CONVOLUTIONS, impl=IMPLS)
def test_causal_conv(name, form, impl, device):
    attributes, inputs, want = CONVOLUTION[name]
    compare(convolved(form, impl, attributes, inputs, device), want)
