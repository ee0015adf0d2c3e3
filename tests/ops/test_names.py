"""fla-core's other names: each against its formula in float64, its gradients against autograd."""

import inspect

import pytest
import torch
import torch.nn.functional as F
from gdn_checks import launches
from grids import parametrize
from recurrent_cases import case, check_all, cotangents, double, oracle, run
from refusals import refuses

import linattn_edu
from linattn_edu import (
    L2Norm,
    chunk_delta_rule,
    chunk_kda,
    fused_gdn_gate,
    fused_kda_gate,
    fused_recurrent_delta_rule,
    kda,
    kernel_delta_attention,
    l2norm,
    naive_kda_gate,
    naive_recurrent_gated_delta_rule,
    naive_recurrent_kda,
    prepare_chunk_indices,
)
from linattn_edu.cp.context import get_cp_cu_seqlens
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
DTYPES = (torch.float32, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def test_names_of_one_function():
    assert linattn_edu.chunk_gdn is linattn_edu.chunk_gated_delta_rule
    assert linattn_edu.fused_recurrent_gdn is linattn_edu.fused_recurrent_gated_delta_rule
    assert linattn_edu.l2_norm is l2norm


@impls
@dtypes
@pytest.mark.parametrize("f", [chunk_delta_rule, fused_recurrent_delta_rule])
def test_the_delta_rule_without_a_decay(f, dtype, impl, device):
    """Outputs and gradients of the recurrence without a gate, of packed sequences too."""
    x = case(40, (1, 2), 12, 8, N=2, gates="", dtype=dtype, device=device)
    x = {n: t for n, t in x.items() if t is not None}
    cu_seqlens = torch.tensor([0, 17, 40], device=device)
    want = run(oracle, double(x), cu_seqlens=cu_seqlens)
    given = {"cu_seqlens": cu_seqlens, "output_final_state": True, "impl": impl}
    got = run(f, x, cotangents(want[0]), **given)
    check_all(got, want, dtype)


def test_the_delta_rule_needs_its_beta():
    x = gdn_inputs(1, 4, 1, 1, 8, 8)
    with launches() as ran, pytest.raises(TypeError, match="beta must be a torch"):
        chunk_delta_rule(x.q, x.k, x.v, None)
    assert not ran
    # token by token it is 1 where it is not given, as in fla
    got, want = (fused_recurrent_delta_rule(x.q, x.k, x.v, b)[0] for b in (None, x.beta * 0 + 1))
    assert torch.equal(got, want)


def test_kda_is_kimi_delta_attention(device):
    x = kda_inputs(1, 20, 1, 2, 8, 6, device=device)
    want = chunk_kda(**x.asdict(), scale=0.5, output_final_state=True)
    got = kda(x.q, x.k, x.v, x.g, x.beta, 0.5, x.initial_state, True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert inspect.signature(kda) == inspect.signature(chunk_kda)


@pytest.mark.parametrize("names", [["beta"], ["beta", "decay"]])
def test_kda_refuses_the_arguments_that_it_once_had(names):
    """Of ejkernel, in their order and by name: nothing else is computed."""
    x = gdn_inputs(1, 4, 2, 2, 8, 8)
    rest = [{"beta": x.beta, "decay": x.g}[n] for n in names]
    theirs = {"query": x.q, "key": x.k, "value": x.v, **dict(zip(names, rest, strict=True))}
    kernel_delta_attention(**theirs)
    for call in (
        lambda: kda(x.q, x.k, x.v, *rest),
        lambda: kda(**theirs),
        lambda: kda(x.q, x.k, x.v, beta=x.beta, decay=None),
        lambda: kda(x.q, x.k, x.v, x.beta, softmax_scale=0.5, use_chunked=False),
    ):
        with pytest.raises(TypeError, match="kernel_delta_attention"):
            call()


RECURRENCE = "scale initial_state output_final_state"
FLAGS = "use_beta_sigmoid_in_kernel allow_neg_eigval"
# the arguments as fla-core, mamba_ssm and causal_conv1d have them, the first ones of ours
ORDER = {
    naive_recurrent_gated_delta_rule: f"q k v beta g {RECURRENCE}",
    naive_recurrent_kda: f"q k v g beta {RECURRENCE}",
    naive_kda_gate: "g A_log dt_bias output_dtype",
    fused_gdn_gate: "g A_log dt_bias output_dtype",
    fused_kda_gate: "g A_log dt_bias lower_bound output_dtype",
    prepare_chunk_indices: "cu_seqlens chunk_size cu_seqlens_cpu",
    L2Norm: "eps output_dtype",
    linattn_edu.chunk_gated_delta_rule: f"q k v g beta {RECURRENCE} use_qk_l2norm_in_kernel {FLAGS}"
    " state_v_first cu_seqlens cu_seqlens_cpu chunk_indices",
    linattn_edu.chunk_kda: f"q k v g beta {RECURRENCE} use_qk_l2norm_in_kernel use_gate_in_kernel"
    f" {FLAGS} safe_gate lower_bound disable_recompute return_intermediate_states state_v_first"
    " cu_seqlens cu_seqlens_cpu",
    linattn_edu.fused_recurrent_gated_delta_rule: f"q k v g gk gv beta {RECURRENCE}"
    f" use_qk_l2norm_in_kernel use_gate_in_kernel A_log dt_bias {FLAGS} state_v_first cu_seqlens",
    linattn_edu.fused_recurrent_kda: f"q k v g beta A_log dt_bias {RECURRENCE}"
    f" use_qk_l2norm_in_kernel use_gate_in_kernel {FLAGS} lower_bound state_v_first cu_seqlens",
    linattn_edu.fused_recurrent_dplr_delta_rule: f"q k v a b gk {RECURRENCE} reverse cu_seqlens",
    linattn_edu.chunk_dplr_delta_rule: f"q k v a b gk {RECURRENCE} cu_seqlens cu_seqlens_cpu"
    " safe_gate chunk_size disable_recompute cp_context lower_bound",
    linattn_edu.chunk_rwkv7: f"r w k v a b {RECURRENCE} cu_seqlens cu_seqlens_cpu safe_gate"
    " chunk_size disable_recompute cp_context lower_bound",
    linattn_edu.fused_recurrent_rwkv7: f"r w k v a b {RECURRENCE} cu_seqlens head_first",
    linattn_edu.fused_mul_recurrent_rwkv7: f"r w k v kk a {RECURRENCE} reverse cu_seqlens"
    " head_first",
    linattn_edu.chunk_gated_delta_product: f"q k v g beta num_householder {RECURRENCE}"
    " use_qk_l2norm_in_kernel cu_seqlens cu_seqlens_cpu",
    linattn_edu.chunk_simple_gla: f"q k v g g_gamma {RECURRENCE} state_v_first cu_seqlens"
    " cu_seqlens_cpu",
    linattn_edu.fused_recurrent_simple_gla: f"q k v g g_gamma {RECURRENCE} reverse state_v_first"
    " cu_seqlens",
    linattn_edu.chunk_lightning_attn: f"q k v layer_idx num_layers {RECURRENCE} cu_seqlens"
    " head_first",
    linattn_edu.fused_recurrent_lightning_attn: f"q k v layer_idx num_layers {RECURRENCE} reverse"
    " cu_seqlens head_first",
    linattn_edu.build_cp_context: "cu_seqlens group conv1d_kernel_size cu_seqlens_cpu"
    " use_tf32x3_affine_chain layout",
    get_cp_cu_seqlens: "cu_seqlens cu_seqlens_cpu world_size rank group conv1d_kernel_size"
    " use_tf32x3_affine_chain layout",
    linattn_edu.causal_conv1d: "x weight bias residual initial_state output_final_state activation"
    " backend cu_seqlens cu_seqlens_cpu chunk_indices cp_context",
    linattn_edu.causal_conv1d_fn: "x weight bias seq_idx initial_states return_final_states"
    " final_states_out activation",
    linattn_edu.causal_conv1d_update: "x conv_state weight bias activation cache_seqlens"
    " conv_state_indices",
    linattn_edu.rms_norm_gated: "x weight bias z eps group_size norm_before_gate",
    linattn_edu.mamba_split_conv1d_scan_combined: "zxbcdt conv1d_weight conv1d_bias dt_bias A D"
    " chunk_size initial_states seq_idx dt_limit return_final_states activation rmsnorm_weight"
    " rmsnorm_eps outproj_weight outproj_bias headdim ngroups norm_before_gate",
}


@pytest.mark.parametrize("f", ORDER, ids=lambda f: f.__name__)
def test_arguments_stand_where_their_packages_have_them(f):
    names = ORDER[f].split()
    assert list(inspect.signature(f).parameters)[: len(names)] == names


@pytest.mark.parametrize("channels", [False, True])
def test_naive_recurrences(channels, device):
    """Of tensors in the order that fla has, without a kernel."""
    gates = "gk" if channels else "g"
    x = {n: t for n, t in case(6, B=2, device=device, gates=gates).items() if t is not None}
    want = run(oracle, double(x), scale=0.5)
    if channels:
        x["g"] = x.pop("gk")
        want[1]["g"] = want[1].pop("gk")
    order = ("q", "k", "v", "g", "beta") if channels else ("q", "k", "v", "beta", "g")
    naive = naive_recurrent_kda if channels else naive_recurrent_gated_delta_rule

    def f(initial_state, **tensors):
        return naive(*(tensors[n] for n in order), 0.5, initial_state, True)

    with launches() as ran:
        got = run(f, x, cotangents(want[0]))
    assert not ran
    for name, a, b in zip(("o", "S"), got[0], want[0], strict=True):
        assert_close(name, a, b, 1e-5)
    for name, dx in got[1].items():
        assert_close(f"d{name}", dx, want[1][name], 3e-5)
    o, S = naive(*(x[n] for n in order))
    assert S is None and o.dtype == x["v"].dtype


def gate_inputs(shape, parameters, dtype, device):
    """A raw gate of this shape, A_log and a bias, of which the gate has this dtype."""
    generator = torch.Generator(device=device).manual_seed(0)
    new = lambda *s: torch.randn(s, generator=generator, device=device)
    HV = parameters[0]
    return {"g": 4 * new(*shape).to(dtype), "A_log": new(HV), "dt_bias": new(*parameters)}


def gate_formula(lower_bound=None, channels=False):
    """The gates of fla-core 0.6.0."""

    def f(g, A_log=None, dt_bias=None):
        rate = torch.ones((), dtype=g.dtype) if A_log is None else A_log.exp()
        rate = rate[..., None] if channels and A_log is not None else rate
        a = g if dt_bias is None else g + dt_bias
        return (-rate * F.softplus(a) if lower_bound is None else
                lower_bound * torch.sigmoid(rate * a),)  # fmt: skip

    return f


def check_gate(f, formula, x, dtype, **options):
    """The value, and the gradients of x."""
    want = run(formula, double(x))
    got = run(lambda **a: (f(**a, **options),), x, cotangents(want[0]))
    assert got[0][0].dtype == torch.float32
    assert_close("y", got[0][0], want[0][0], 1e-6)
    for name, dx in got[1].items():
        assert dx.dtype == x[name].dtype
        assert_close(f"d{name}", dx, want[1][name], 5e-3 if dx.dtype == torch.bfloat16 else 1e-5)


@parametrize(shape=((2, 7, 3), (3,), (2, 2, 3, 3)), bias=(True, False), dtype=DTYPES, impl=IMPLS)
def test_fused_gdn_gate(shape, bias, dtype, impl, device):
    x = gate_inputs(shape, (3,), dtype, device)
    if not bias:
        del x["dt_bias"]
    check_gate(fused_gdn_gate, gate_formula(), x, dtype, impl=impl)


# what is given beside the raw gate, and the lower bound
KDA_GATES = (
    (("A_log", "dt_bias"), None), (("A_log",), None), (("A_log", "dt_bias"), -5.0),
    (("dt_bias",), -2.0), ((), -0.5),
)  # fmt: skip


@parametrize(shape=((2, 7, 3, 4), (3, 4)), gate=KDA_GATES, dtype=DTYPES, impl=IMPLS)
def test_fused_kda_gate(shape, gate, dtype, impl, device):
    given, bound = gate
    x = gate_inputs(shape, (3, 4), dtype, device)
    x = {n: t for n, t in x.items() if n == "g" or n in given}
    formula = gate_formula(bound, channels=True)
    check_gate(fused_kda_gate, formula, x, dtype, lower_bound=bound, impl=impl)


@parametrize(bias=(True, False), dtype=DTYPES, impl=IMPLS)
def test_fused_kda_gate_as_it_was_called(bias, dtype, impl, device):
    """Before fla-core 0.5: heads and channels in one axis, head_k_dim third, the sigmoid of b."""
    x = gate_inputs((2, 7, 12), (12,), dtype, device)
    x["A_log"] = x["A_log"][:3].reshape(1, 1, 3, 1)
    b = torch.randn(2, 7, 3, device=device).to(dtype)
    if not bias:
        del x["dt_bias"]
    x["b"] = b

    def old(g, A_log, b, dt_bias=None):
        return fused_kda_gate(g, A_log, 4, g_bias=dt_bias, b=b, impl=impl)

    def formula(g, A_log, b, dt_bias=None):
        a = (g if dt_bias is None else g + dt_bias).unflatten(-1, (3, 4))
        return -A_log.exp() * F.softplus(a), b.sigmoid()

    want = run(formula, double(x))
    got = run(old, x, cotangents(want[0]))
    for name, a, y in zip(("y", "beta"), got[0], want[0], strict=True):
        assert a.dtype == torch.float32
        assert_close(name, a, y, 1e-6)
    for name, dx in got[1].items():
        assert_close(f"d{name}", dx, want[1][name], 5e-3 if dx.dtype == torch.bfloat16 else 1e-5)
    alone = fused_kda_gate(x["g"], x["A_log"], 4, g_bias=x.get("dt_bias"), impl=impl)
    by_name = fused_kda_gate(
        x["g"], x["A_log"], g_bias=x.get("dt_bias"), head_k_dim=4, beta=1.0, threshold=20.0,
        impl=impl,
    )  # fmt: skip
    assert torch.equal(alone, got[0][0]) and torch.equal(by_name, alone)


@impls
def test_gates_in_the_dtype_that_is_asked_for(impl, device):
    g, A_log = torch.randn(2, 3, 4, device=device), torch.randn(4, device=device)
    y = fused_gdn_gate(g, A_log, output_dtype=torch.float16, impl=impl)
    assert torch.equal(y, fused_gdn_gate(g, A_log, impl=impl).half())
    y = fused_kda_gate(g, A_log[:3], output_dtype=torch.bfloat16, impl=impl)
    assert torch.equal(y, fused_kda_gate(g, A_log[:3], impl=impl).bfloat16())


def test_gates_in_float64():
    x = gate_inputs((2, 3, 4), (3, 4), torch.float64, "cpu")
    x = double(x)
    y = fused_kda_gate(**x, output_dtype=torch.float64)
    assert_close("y", y, gate_formula(channels=True)(**x)[0], 1e-14)


def test_naive_kda_gate(device):
    x = gate_inputs((2, 7, 3, 4), (3, 4), torch.float32, device)
    check_gate(naive_kda_gate, gate_formula(channels=True), x, torch.float32)
    with launches() as ran:
        naive_kda_gate(**x)
    assert not ran


def new(*shape, device=DEVICE):
    return torch.zeros(*shape, device=device)


KDA_GATE = {
    "beta of several": (
        {"A_log": new(2), "beta": torch.ones(2)}, TypeError, "beta must be a number or None, got T"
    ),
    "threshold of several": (
        {"A_log": new(2), "threshold": [20.0]}, TypeError, "threshold must be a number or None"
    ),
    "K True": (
        {"A_log": new(2), "head_k_dim": True}, TypeError, "head_k_dim must be an integer, got True"
    ),
    "K in the third place": (
        {"A_log": new(2), "dt_bias": True}, TypeError, "head_k_dim must be an integer, got True"
    ),
    "K in words": (
        {"A_log": new(2), "head_k_dim": "4"}, TypeError, "head_k_dim must be an integer, got '4'"
    ),
    "b": (
        {"A_log": new(2), "b": new(5, 3)}, r"b must have shape \[..., HV\] = \(5, 2\), got \(5, 3\)"
    ),
    "b elsewhere": (
        {"A_log": new(2), "b": new(5, 2, device="meta")}, "b must be on .* like g, got"
    ),
    "g alone": ({}, "A_log or lower_bound must be given"),
    "bound": ({"lower_bound": 0.0}, "lower_bound must be < 0"),
    "bound type": ({"lower_bound": "x"}, TypeError, "lower_bound must be a number"),
    "A_log": (
        {"A_log": new(3)},
        r"A_log must have the elements of \[HV=2\], in any shape, got \(3,\)"
    ),
    "dt_bias": (
        {"A_log": new(2), "dt_bias": new(2)},
        r"dt_bias must have the elements of \[HV=2, K=4\], in any shape, got \(2,\)"
    ),
    "device": (
        {"A_log": new(2, device="meta")}, "A_log must be on .* like g, got meta"
    ),
    "head_k_dim": (
        {"A_log": new(2), "head_k_dim": 3},
        r"g must have shape \[..., HV \* K\] with K = head_k_dim = 3, got \(5, 2, 4\)"
    ),
    "head_k_dim twice": (
        {"A_log": new(2), "dt_bias": 4, "head_k_dim": 4}, "head_k_dim is given twice"
    ),
    "two biases": (
        {"A_log": new(2), "dt_bias": new(8), "g_bias": new(8)},
        "dt_bias and g_bias are one argument"
    ),
    "beta": (
        {"A_log": new(2), "head_k_dim": 4, "beta": 2.0}, "beta must be 1.0, got 2.0"
    ),
    "threshold": (
        {"A_log": new(2), "head_k_dim": 4, "threshold": 10.0},
        "threshold must be 20.0, got 10.0"
    ),
    "output_dtype": (
        {"A_log": new(2), "output_dtype": torch.int8},
        TypeError,
        "output_dtype must be a floating-point dtype",
    ),
}  # fmt: skip
GDN_GATE = {
    "a number": (
        {"g": new(1)[0], "A_log": new(1)}, r"g must have shape \[..., HV\]"
    ),
    "no A_log": ({"A_log": None}, TypeError, "A_log must be a torch.Tensor .*None"),
    "A_log": ({"A_log": new(3)}, r"A_log must have the elements of \[HV=4\]"),
    "dtype": ({"g": new(2).int(), "A_log": None}, TypeError, "g must be f"),
    "float64": (
        {"A_log": new(4).double(), "impl": "triton"}, "float64 was given"
    ),
    "impl": ({"A_log": new(4), "impl": "x"}, "impl must be o"),
}  # fmt: skip
test_kda_gate_refuses = refuses(fused_kda_gate, lambda: {"g": new(5, 2, 4)}, KDA_GATE)
test_gdn_gate_refuses = refuses(fused_gdn_gate, lambda: {"g": new(5, 2, 4)}, GDN_GATE)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@parametrize(1, dynamic=(None, True), dtype=(torch.int32, torch.int64))
def test_chunk_indices_in_a_graph_that_serves_all(dtype, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda b: prepare_chunk_indices(b, 16), fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for bounds in ([0, 5, 70], [0, 64, 64, 200], [0, 0, 0, 16], [0, 7]):
        b = torch.tensor(bounds, dtype=dtype)
        rows, want = compiled(b), prepare_chunk_indices(b, 16)
        assert torch.equal(rows, want) and rows.dtype == want.dtype


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_prepare_chunk_indices(dtype):
    """Sequence and number of every chunk, of sequences of 5, 0 and 15 tokens."""
    cu_seqlens = torch.tensor([0, 5, 5, 20], dtype=dtype)
    want = [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [2, 3]]
    for known in ((), (cu_seqlens,)):
        rows = prepare_chunk_indices(cu_seqlens, 4, *known)
        assert rows.tolist() == want and rows.dtype == dtype
    x = {n: t for n, t in case(20, N=3).items() if n not in ("gk", "gv")}
    rows = prepare_chunk_indices(cu_seqlens, 16)
    packed = {"cu_seqlens": cu_seqlens, "chunk_indices": rows, "chunk_size": 16}
    o, _ = linattn_edu.chunk_gated_delta_rule(**x, **packed, impl="reference")
    del packed["chunk_indices"]
    want, _ = linattn_edu.chunk_gated_delta_rule(**x, **packed, impl="reference")
    assert torch.equal(o, want)
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="chunk_size must be an integer >= 1"):
            prepare_chunk_indices(cu_seqlens, wrong)
    with pytest.raises(ValueError, match="cu_seqlens must not decrease"):
        prepare_chunk_indices(torch.tensor([0, 5, 4]), 4)
    with pytest.raises(TypeError, match="cu_seqlens must be int32 or int64"):
        prepare_chunk_indices(torch.zeros(2), 4)


@dtypes
def test_l2norm_as_a_module(dtype, device):
    x = torch.randn(2, 3, 8, device=device).to(dtype)
    module = L2Norm(eps=1e-3, output_dtype=torch.float32)
    assert not list(module.parameters()) and module(x).dtype == torch.float32
    formula = lambda x: (x / (x.square().sum(-1, keepdim=True) + 1e-3).sqrt(),)
    want = run(formula, {"x": x.double()})
    got = run(lambda x: (module(x),), {"x": x}, cotangents(want[0]))
    assert_close("y", got[0][0], want[0][0], 1e-6)
    tol = 5e-3 if dtype == torch.bfloat16 else 1e-5
    assert_close("dx", got[1]["x"], want[1]["x"], tol)
    assert torch.equal(L2Norm()(x), l2norm(x))
