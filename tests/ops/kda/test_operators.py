"""chunk_kda in torch.compile's one graph: both passes, packed, states of chunks, autocast."""

from functools import partial

import pytest
import torch
from gdn_checks import cotangents, log_decay
from kda_checks import GRADIENTS_OF_GATE, inputs, run, spacing
from ops.test_compile import compiled

from linattn_edu import chunk_kda, l2norm
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

CUDA = torch.cuda.is_available()
IMPLS = ("triton", "reference")
NAMES = ("qk_l2norm", "beta_sigmoid", "gate")
ALL = {f"use_{n}_in_kernel": True for n in NAMES} | {
    "allow_neg_eigval": True, "lower_bound": -5.0, "safe_gate": True, "disable_recompute": True,
    "state_v_first": True,
}  # fmt: skip
RAW = dict.fromkeys(("raw_qk", "raw_beta", "raw_gate"), True)


def chunk(**arguments):
    return chunk_kda(**arguments, chunk_size=16)


def flags(**arguments):
    return chunk(**arguments, **ALL)


def packed(q, **arguments):
    """The first tokens as a sequence of their own, and one without tokens."""
    bounds = [0, 3, 3, q.shape[1]]
    known = {"cu_seqlens_cpu": torch.tensor(bounds)}
    return chunk(q=q, **arguments, cu_seqlens=torch.tensor(bounds, device=q.device), **known)


# function, the kinds of its inputs, number of states
FUNCTIONS = {
    "plain": (chunk, {}, 1), "flags": (flags, RAW, 1), "packed": (packed, {}, 3)
}  # fmt: skip
LENGTHS = (17, 20)


def arguments(name, T, device, dtype=torch.float32):
    _, kinds, N = FUNCTIONS[name]
    x = inputs(1, T, 1, 2, 8, 16, dtype, device, N=N, **kinds)
    do, dht = cotangents(x, N)
    if name == "flags":
        x["initial_state"], dht = x["initial_state"].mT.contiguous(), dht.mT.contiguous()
    return x, do, dht


def same(got, want, tol):
    assert got.keys() == want.keys()
    for name, a in got.items():
        assert a.dtype == want[name].dtype
        assert_close(name, a, want[name], tol(name))


def limit(name, rounded):
    """How far two float32 results may differ whose decays differ by `rounded`."""
    return 3e-5 if rounded and name in GRADIENTS_OF_GATE else max(1e-6, rounded)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_fullgraph_forward_and_backward(name, backend, device):
    """One graph for two lengths, and the values of eager mode."""
    f = FUNCTIONS[name][0]
    g = compiled(f, backend)
    for T in LENGTHS:
        x, *given = arguments(name, T, device)
        with torch._dynamo.config.patch(error_on_recompile=LENGTHS[0] != T):
            got = run(x, *given, f=g, output_final_state=True)
        want = run(x, *given, f=f, output_final_state=True)
        rounded = 0.0
        if backend == "inductor" and name == "flags":  # its own sigmoid rounds the gates otherwise
            rounded = spacing(log_decay(x, ALL["lower_bound"]), 16)
        same(got, want, partial(limit, rounded=rounded))


@pytest.mark.parametrize(
    ("name", "keep"), [(n, k) for n in ("packed", "plain")[: 1 + CUDA] for k in (False, True)]
)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_fullgraph_with_states_of_chunks(backend, name, keep, device):
    """How many chunks packed sequences have is not known while the graph is traced."""
    f = FUNCTIONS[name][0]

    def states(**leaves):
        o, ht, h = f(
            **leaves, output_final_state=True, return_intermediate_states=True,
            disable_recompute=keep,
        )  # fmt: skip
        return o, ht, 2 * h.float()

    g = compiled(states, backend)
    for T in LENGTHS:
        x, do, _ = arguments(name, T, device)
        with torch.no_grad():
            got, want = g(**x), states(**x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    results = []
    for function in (g, states):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, _, h = function(**leaves)
        results.append([o, h, *torch.autograd.grad(o, list(leaves.values()), do)])
    for a, b in zip(*results, strict=True):
        assert_close("value", a, b, 1e-6)


@pytest.mark.parametrize("name", ["flags", "packed"])
def test_fullgraph_in_float64(name, device):
    """The implementation is chosen while the graph is traced: float64 is the reference's."""
    f = FUNCTIONS[name][0]
    x, *given = arguments(name, 17, device, torch.float64)
    got = run(x, *given, f=compiled(f, "aot_eager"), output_final_state=True)
    same(got, run(x, *given, f=f, output_final_state=True), lambda _: 1e-14)


def test_fullgraph_of_a_layer(device):
    """Between other operations, with lengths that the graph first takes to be fixed."""

    def layer(x, weight):
        q, k, v, g = (x @ weight).unflatten(-1, (4, 2, 16)).unbind(-3)
        o, _ = chunk_kda(
            q, k, v, g, x[..., :2], use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=-5.0, safe_gate=True, chunk_size=16,
        )  # fmt: skip
        return (x + l2norm(o.flatten(-2)),)

    torch._dynamo.reset()
    g = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for T in (17, 20, 33) if CUDA else (4, 5, 6):
        x = {
            "x": torch.randn(1, T, 32, device=device),
            "weight": torch.randn(32, 128, device=device),
        }
        results = []
        for f in (g, layer):
            leaves = [t.clone().requires_grad_() for t in x.values()]
            with torch._dynamo.config.patch(error_on_recompile=f is g and T == 33):
                (y,) = f(*leaves)
            results.append([y, *torch.autograd.grad(y.sum(), leaves)])
        for a, b in zip(*results, strict=True):
            assert_close("value", a, b, 1e-6)


@pytest.mark.parametrize("keep", [False, True])
def test_memory_between_the_passes(keep, device):
    """What autograd holds: the inputs, P and A; with disable_recompute the rest too."""
    x, _, _ = arguments("plain", 20, device)
    held = []

    def pack(t):
        held.append(t)
        return t

    leaves = {n: t.requires_grad_() for n, t in x.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        chunk(**leaves, disable_recompute=keep)
    numbers = sum(t.numel() for t in held if t is not None)
    given = sum(t.numel() for t in x.values())
    pairs = 2 * 20 * 2 * 16
    # gc, w, kg, qg: K a token; h: K V a chunk; v_new: V a token
    rest = 20 * 2 * (4 * 8 + 16) + 2 * 2 * 8 * 16
    assert numbers == given + pairs + keep * rest
