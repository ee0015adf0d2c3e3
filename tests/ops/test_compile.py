"""torch.compile in one graph, checkpoints, shared tensors, autocast, second derivatives."""

from functools import partial

import pytest
import torch
from grids import few, name
from ops import contract
from recurrent_cases import case, check_all, cotangents, double, options, oracle, run
from torch.utils.checkpoint import checkpoint

from linattn_edu import (
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_local_cumsum,
    fused_recurrent_gated_delta_rule,
    l2norm,
    solve_tril,
)
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")

CUDA = torch.cuda.is_available()
ALL = ("norm", "gate", "sigmoid", "neg", "v_first")
BOUND = -5.0
IMPLS = ("triton", "reference")


def chunk(**arguments):
    return chunk_gated_delta_rule(**arguments, chunk_size=16, output_final_state=True)


def recurrent(flags=(), **arguments):
    return fused_recurrent_gated_delta_rule(**arguments, **options(flags))


def helpers(g, v, q, **_):
    A = v[..., :16] / 4
    return (
        chunk_local_cumsum(g, 16, reverse=True, scale=2.0),
        chunk_local_cumsum(v, 32),
        solve_tril(A, output_dtype=torch.float32),
        l2norm(q, 1e-5, output_dtype=torch.float32),
    )


def arguments(f, T, device, flags=()):
    """What the function reads, so that everything has a gradient."""
    gates = "g gk gv" if f is recurrent else "g"
    x = case(T, (1, 2), 8, 16, flags=flags, gates=gates, device=device)
    names = ("g", "v", "q") if f is helpers else x
    return {n: x[n] for n in names if x[n] is not None}


def same(got, want, tol):
    for a, b in zip(flat(got), flat(want), strict=True):
        assert a.dtype == b.dtype
        assert_close("value", a, b, tol)


def flat(result):
    outputs, gradients = result
    return [*outputs, *gradients.values()]


def compiled(f, backend):
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, dynamic=True, backend=backend)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_helpers_in_one_graph(backend, device):
    """What test_contract has of the operators over sequences."""
    g = compiled(helpers, backend)
    for T in (17, 33):
        x = arguments(helpers, T, device)
        with torch._dynamo.config.patch(error_on_recompile=T == 33):
            same(run(g, x), run(helpers, x), 1e-6)
        with torch.no_grad():
            assert all(map(torch.equal, g(**x), helpers(**x)))


@pytest.mark.long
def test_inductor(device):
    """On the CPU too: what surrounds the operators is fused there as well."""
    f = partial(recurrent, ALL)
    x = arguments(recurrent, 4, device, ALL)
    same(run(compiled(f, "inductor"), x), run(f, x), 2e-6)


def test_fullgraph_in_float64(device):
    """The implementation is chosen while the graph is traced: float64 is the reference's."""
    x = double(arguments(chunk, 17, device))
    g = compiled(chunk, "aot_eager")
    same(run(g, x), run(chunk, x), 1e-14)
    with torch.no_grad():  # another graph
        assert all(map(torch.equal, g(**x), chunk(**x)))


FLAGS = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}


def gdn_layer(q, k, v, x):
    g = -torch.nn.functional.softplus(x[..., :2])
    return chunk_gated_delta_rule(q, k, v, g, x[..., 2:4], **FLAGS)[0]


def kda_layer(q, k, v, g, x):
    gate = {"use_gate_in_kernel": True, "lower_bound": BOUND, "safe_gate": True}
    return chunk_kda(q, k, v, g, x[..., :2], **FLAGS, **gate, chunk_size=16)[0]


@pytest.mark.parametrize(
    ("attention", "parts", "lengths"),
    few((kda_layer, 4, (17, 20, 33) if CUDA else (4, 5, 6)), more=[(gdn_layer, 3, (17, 20, 33))]),
    ids=name,
)
def test_fullgraph_of_a_layer(attention, parts, lengths, device):
    """Between other operations, with lengths that the graph first takes to be fixed."""

    def layer(x, weight):
        tensors = (x @ weight).unflatten(-1, (parts, 2, 16)).unbind(-3)
        return (x + l2norm(attention(*tensors, x).flatten(-2)),)

    torch._dynamo.reset()
    g = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for T in lengths:
        x = {
            "x": torch.randn(1, T, 32, device=device),
            "weight": torch.randn(32, 32 * parts, device=device),
        }
        with torch._dynamo.config.patch(error_on_recompile=lengths[-1] == T):
            got = run(g, x)
        same(got, run(layer, x), 1e-6)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("factor", [True, False])
def test_a_scale_that_changes(factor, backend, device):
    """A factor of o is a symbol of the graph; as an argument each value is a graph of its own.

    PyTorch keeps numbers apart only as factors of tensors: what an operator is given, it fixes.
    """
    x = arguments(chunk, 5, device)
    options = {"impl": "auto" if CUDA else "reference"}
    inner, graphs = torch._dynamo.lookup_backend(backend), []

    def counted(graph, inputs):
        graphs.append(graph)
        return inner(graph, inputs)

    def f(scale, **x):
        o, _ = chunk_gated_delta_rule(**x, scale=1.0 if factor else scale, **options)
        return (scale * o if factor else o,)

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, backend=counted)
    for n, scale in enumerate((0.5, 0.3, 0.7, 1.1)[: 4 if factor else 3]):
        with torch.no_grad():
            ((got,), (want,)) = (h(scale, **x) for h in (g, f))
        assert_close("o", got, want, 1e-6)
        assert len(graphs) == min(n + 1, 2) or not factor


both = pytest.mark.parametrize(("f", "T"), [(chunk, 17), (recurrent, 4)])


@both
def test_one_tensor_as_q_and_k(f, T, device):
    x = arguments(f, T, device)
    del x["q"]
    tied = lambda f: lambda k, **rest: f(q=k, k=k, **rest)
    want = run(tied(oracle), double(x))
    check_all(run(tied(f), x, cotangents(want[0])), want, torch.float32)


@both
def test_tensors_used_twice(f, T, device):
    """Two calls on the same tensors, the second reading what the first gave."""
    x = arguments(f, T, device)

    def twice(f):
        def g(v, initial_state, **rest):
            o, S = f(v=v, initial_state=initial_state, **rest)
            return f(v=v + o, initial_state=S, **rest)

        return g

    want = run(twice(oracle), double(x))
    check_all(run(twice(f), x, cotangents(want[0])), want, torch.float32)


@pytest.mark.parametrize("impl", IMPLS)
def test_helpers_in_checkpoints_and_under_autocast(impl, device):
    """What test_contract has of the operators over sequences."""

    def f(g, v, q):
        sums, inverse = chunk_local_cumsum(g, 16, impl=impl), solve_tril(v, impl=impl)
        return sums, inverse, l2norm(q, impl=impl)

    x = arguments(helpers, 17, device)
    want = run(f, x)
    got = run(lambda **leaves: checkpoint(lambda: f(**leaves), use_reentrant=False), x)
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = run(f, x)
    same(got, want, 1e-6)


@pytest.mark.parametrize("f", [l2norm, solve_tril])
def test_gradient_of_a_gradient_is_refused(f, device):
    """What test_contract has of the operators over sequences."""
    x = (torch.randn(1, 3, 1, 16, device=device) / 4).requires_grad_()
    (dx,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


def test_cumulative_sum_has_a_second_gradient(device):
    x = torch.randn(1, 3, 2, device=device, requires_grad=True)
    y = lambda: chunk_local_cumsum(x, 16).square().sum()
    (dx,) = torch.autograd.grad(y(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    L = torch.ones(3, 3, device=device).tril()
    assert_close("ddx", ddx, (2 * L.mT @ L).sum(0)[None, :, None].expand_as(x), 1e-6)


EXPORTED = ("gdn", "kda", "recurrent_gdn", "ema", "conv")


@pytest.mark.parametrize("form", [*(getattr(contract, n) for n in EXPORTED), contract.ssd[-1]])
def test_export_for_any_length(form):
    """Where a gradient is recorded too: what is kept for it has a row a chunk, and may have one."""
    options = {}

    class Call(torch.nn.Module):
        def forward(self, x):
            return form(x, **options, impl="reference")[0]

    def drawn(T):
        x, given = form.draw(1, T, torch.float32, "cpu")
        options.update(given)
        return {n: t.requires_grad_(t.is_floating_point()) for n, t in x.items()}

    x, T = drawn(40), torch.export.Dim("T", min=2, max=4096)
    shapes = {n: {1: T} if n in form.tokens else None for n in x}
    program = torch.export.export(Call(), (x,), dynamic_shapes={"x": shapes}).module()
    for length in (5, 64, 65, 130):
        x = drawn(length)
        assert torch.equal(program(x), form(x, **options, impl="reference")[0])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", [*(getattr(contract, n) for n in EXPORTED), contract.ssd[-1]])
def test_a_trace_of_jit_is_refused(form, impl):
    """It would hold what kernels gave as constants, and sizes as numbers."""
    x, options = form.draw(2, 5, torch.float32, "cpu")

    def f(*tensors):
        return form(dict(zip(x, tensors, strict=True)), **options, impl=impl)[0]

    with pytest.raises(RuntimeError, match=r"cannot be recorded by torch.jit.trace.*torch.export"):
        torch.jit.trace(f, tuple(x.values()), check_trace=False)
