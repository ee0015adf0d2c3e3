"""linattn_edu.onnx: graphs of opset 27, run by onnx's reference evaluator beside the modules."""

import functools
import runpy
import sys

import onnx
import pytest
import torch
from grids import few
from layers.layer_checks import HIDDEN, KINDS
from onnx.reference import ReferenceEvaluator
from torch import nn

import linattn_edu
from linattn_edu import onnx as door
from linattn_edu.layers import ShortConvolution
from linattn_edu.models import Config, LanguageModel
from linattn_edu.testing import assert_close

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXPORTED = {
    "gdn": torch.float32,
    "gdn_bare": torch.float32,
    "gdn_bias": torch.bfloat16,
    "kda": torch.float32,
    "kda_bound": torch.float16,
}
MODEL = Config(("gdn", "kda"), 31, 24, 2, 8, 12, 16)


@pytest.fixture(autouse=True, scope="module")
def functions_of_onnxscript():
    """They are read once; PyTorch reads their sources again for each graph."""
    from torch.onnx._internal.exporter import _registration

    with pytest.MonkeyPatch.context() as patch:
        for library in filter(None, [getattr(_registration, "onnxscript_apis", None)]):
            patch.setattr(library, "get_torchlib_ops", functools.cache(library.get_torchlib_ops))
        yield


def layer(kind, dtype=torch.float32):
    torch.manual_seed(0)
    made, options = KINDS[kind]
    return made(**options).to(dtype).eval()


def drawn(module, B, T, dtype=torch.float32):
    if isinstance(module, LanguageModel):
        return torch.randint(module.config.vocabulary, (B, T))
    return torch.randn(B, T, HIDDEN).to(dtype)


def array(x):
    """x as NumPy has it; bfloat16 as onnx does."""
    if x.dtype != torch.bfloat16:
        return x.detach().numpy()
    return x.detach().view(torch.int16).numpy().view(onnx.helper.tensor_dtype_to_np_dtype(16))


def tensor(x):
    return torch.from_numpy(x.astype("float32"))


class Run:
    """A graph that onnx has checked, call by call."""

    def __init__(self, program):
        proto = program.model_proto
        onnx.checker.check_model(proto, full_check=True)
        assert [(x.domain, x.version) for x in proto.opset_import] == [("", 27)]
        self.nodes = [node.op_type for node in proto.graph.node]
        self.inputs = [x.name for x in proto.graph.input]
        self.outputs = [x.name for x in proto.graph.output]
        shapes = [[d.dim_param for d in x.type.tensor_type.shape.dim] for x in proto.graph.input]
        assert shapes[0][:2] == ["batch", "tokens"] and {x[0] for x in shapes} == {"batch"}
        self.evaluator = ReferenceEvaluator(proto)

    def __call__(self, *tensors):
        given = dict(zip(self.inputs, map(array, tensors), strict=True))
        return self.evaluator.run(None, given)


def states_of(cache):
    caches = cache if isinstance(cache, list) else [cache]
    return [state for cache in caches for state in cache.states]


def compare(module, dtype=torch.float32, B=2):
    """A prompt, a token and a few more, by the graph and by the module."""
    run = Run(door.export(module, drawn(module, 1, 1, dtype)))
    cache = module.make_cache(B)
    past = states_of(cache)
    for T in (5, 1, 2):
        x = drawn(module, B, T, dtype)
        y, *past = map(torch.from_numpy, map(_plain, run(x, *past)))
        with torch.no_grad():
            want = module(x, cache=cache)
        for name, a, b in zip(run.outputs, (y, *past), (want, *states_of(cache)), strict=True):
            assert_close(name, a.float(), b.float(), TOLERANCE[dtype])
        past = [a.to(b.dtype) for a, b in zip(past, states_of(cache), strict=True)]
    return run


def _plain(x):
    return x if x.dtype in ("float32", "float16") else x.astype("float32")


@pytest.mark.long
@pytest.mark.parametrize("kind", few(*(n for n in EXPORTED if n != "kda"), more=("kda",)))
def test_a_layer_and_its_states(kind):
    module = layer(kind, EXPORTED[kind])
    run = compare(module, EXPORTED[kind])
    convolutions = len(module.conv_shapes)
    assert run.nodes.count("LinearAttention") == 1
    assert run.nodes.count("CausalConvWithState") == convolutions
    names = [*(f"0_conv_{i}" for i in range(convolutions)), "0_recurrent"]
    assert run.inputs == ["x", *(f"past_{name}" for name in names)]
    assert run.outputs == ["y", *(f"present_{name}" for name in names)]


@pytest.mark.long
def test_a_model_and_its_states():
    torch.manual_seed(0)
    run = compare(LanguageModel(MODEL).eval())
    assert run.nodes.count("LinearAttention") == 2
    assert run.inputs[-1] == "past_1_recurrent"


class Functions(nn.Module):
    """What the layers above do not ask of the operators."""

    def __init__(self, impl):
        super().__init__()
        self.impl = {"impl": impl}
        self.conv = ShortConvolution(HIDDEN, 4, activation=None, bias=True, **self.impl)
        self.rate, self.bias = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x):
        y, last = self.conv(x, output_final_state=True)
        q, k, v = (t.unflatten(-1, (2, 4)) for t in x.split(8, -1))
        g, beta = -v.abs(), q[..., 0].sigmoid()
        unit = linattn_edu.l2norm(k, **self.impl)
        gate = linattn_edu.fused_gdn_gate(beta, self.rate, **self.impl)
        bounded = {"lower_bound": -3.0, "use_gate_in_kernel": True}
        outputs = [
            linattn_edu.chunk_delta_rule(q, unit, v, beta, scale=0.3, **self.impl)[0],
            linattn_edu.fused_recurrent_delta_rule(q, unit, v, beta, **self.impl)[0],
            linattn_edu.fused_recurrent_gated_delta_rule(q, unit, v, gk=g, **self.impl)[0],
            linattn_edu.fused_recurrent_gated_delta_rule(
                q,
                k,
                v,
                gate,
                beta=v[..., 0],
                use_qk_l2norm_in_kernel=True,
                allow_neg_eigval=True,
                use_beta_sigmoid_in_kernel=True,
                **self.impl,
            )[0],
            linattn_edu.fused_recurrent_kda(
                q, unit, v, g, beta, A_log=self.rate, dt_bias=self.bias, **bounded, **self.impl
            )[0],
            linattn_edu.fused_recurrent_kda(q, unit, v, g, beta, **bounded, **self.impl)[0],
            linattn_edu.rms_norm_gated(
                q, v[0, 0, 0], k[0, 0, 0], v, norm_before_gate=False, **self.impl
            ),
            linattn_edu.rms_norm_gated(q, z=v, activation="sigmoid", group_size=2, **self.impl),
        ]
        ends = last.mT.sum(1, keepdim=True).expand(y.shape)
        return torch.cat([y, ends, *(o.flatten(2) for o in outputs)], -1)


@pytest.mark.parametrize("impl", few("triton", more=("reference",)))
def test_functions_inside_a_module(impl, device):
    torch.manual_seed(0)
    module = Functions(impl).to(device)
    run = Run(door.export(module, torch.zeros(2, 2, HIDDEN, device=device), states=False))
    assert (run.inputs, run.outputs) == (["x"], ["y"])
    assert run.nodes.count("LinearAttention") == 6
    for T in (1, 6):
        x = torch.randn(2, T, HIDDEN)
        (y,) = run(x)
        with torch.no_grad():
            want = module(x.to(device)).cpu()
        assert_close("y", torch.from_numpy(y), want, TOLERANCE[torch.float32])


def test_a_program_is_saved(tmp_path):
    module = ShortConvolution(HIDDEN, 1).eval()
    door.export(module, torch.zeros(1, 1, HIDDEN), states=False).save(tmp_path / "conv.onnx")
    x = torch.randn(2, 5, HIDDEN)
    (y,) = ReferenceEvaluator(str(tmp_path / "conv.onnx")).run(None, {"x": x.numpy()})
    assert_close("y", torch.from_numpy(y), module(x)[0].detach(), TOLERANCE[torch.float32])


class Calls(nn.Module):
    """One function of q, k, v [B, T, 2, 8] and more."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 4)) for t in x.split(8, -1))
        return self.f(q, k, v)


def recurrent(**more):
    gates = {"gk", "gv"} & {*more}
    return lambda q, k, v: linattn_edu.fused_recurrent_gated_delta_rule(
        q, k, v, -q[..., 0].abs(), **more | {name: -v.abs() for name in gates}
    )[0]


X = torch.zeros(2, 3, HIDDEN)
ENDS = torch.tensor([0, 6])
REFUSED = {
    "Mamba-2": (lambda: (layer("mamba2"), X), "mamba_.* cannot be exported to .*: it has no steps"),
    "GDN-2": (lambda: (layer("gdn2"), X), "chunk_gdn2 cannot be exported.*no gates of channels"),
    "EMA": (lambda: (layer("ema"), X), "ema_scan cannot be exported.*a matrix for each head"),
    "RWKV-7": (lambda: (layer("rwkv7"), X), "dplr.* cannot be exported.*not a and b"),
    "attention": (
        lambda: (LanguageModel(Config(("attention",), 31, 24, 2, 8, 12, 16)), X.long()),
        "states must be False for a model with KeyValueCache, which grows",
    ),
    "no cache": (lambda: (nn.Linear(3, 3), X), "states must be False for Linear, which has no"),
    "float64": (lambda: (layer("gdn", torch.float64), X.double()), "exported in torch.float64"),
    "one axis": (lambda: (layer("gdn"), X[0, 0]), r"x must have shape \[B, T, ...\], got \(24,\)"),
    "gv": (lambda: Calls(recurrent(gv=1)), "with gv, which ONNX has not"),
    "two gates": (lambda: Calls(recurrent(gk=1)), "with both g and gk: ONNX has one decay"),
    "scale": (lambda: Calls(recurrent(scale=0)), r"with scale=0, which means K \*\* -0.5"),
    "in place": (
        lambda: Calls(
            lambda q, k, v: linattn_edu.causal_conv1d_update(
                q.flatten(2).mT, q.new_zeros(q.shape[0], 8, 4), q.new_zeros(8, 4)
            ).mT
        ),
        "causal_conv1d_update cannot be exported.*writes in place",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_standard_has_not(name):
    make, message = REFUSED[name]
    given = make()
    with pytest.raises(ValueError, match=message):
        if isinstance(given, Calls):
            door.export(given, X, states=False)
        else:
            door.export(*given)


def test_arguments_of_other_types():
    with pytest.raises(TypeError, match="x must be a torch"):
        door.export(layer("gdn"), [1])
    with pytest.raises(TypeError, match="states"):
        door.export(layer("gdn"), X, states="no")


def test_without_onnx(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx_ir", None)
    with pytest.raises(ImportError, match=r"needs onnx: pip install 'linattn_edu\[onnx\]'"):
        runpy.run_module("linattn_edu.onnx")
