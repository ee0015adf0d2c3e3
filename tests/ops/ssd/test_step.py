"""selective_state_update: one token of Mamba-2, the state in place, as its callers call it."""

import pytest
import torch
from gdn_checks import launches, no_wait
from grids import few, parametrize
from refusals import refuses
from torch._subclasses.fake_tensor import FakeTensorMode

from linattn_edu import selective_state_update
from linattn_edu.ops.ssd import step
from linattn_edu.testing import assert_close, poison

IMPLS = ("triton", "reference")
REFERENCE_ON_CPU = True  # on a GPU the bits of its products depend on the batch
HALF = 5e-3
BATCH = 3
# heads (a few of those there are), rows and columns of a state, groups, whether the layer gives z:
# as the defaults of transformers' configurations have them, and two models of other sizes
CALLERS = {
    "mamba2": (16, 64, 128, 8, False),
    "mamba2-2.7b": (4, 64, 128, 1, False),
    "bamba": (4, 64, 256, 1, False),
    "falcon_h1": (6, 8, 256, 1, True),
    "falcon_h1-1.5b": (4, 64, 256, 1, True),
    "granitemoehybrid": (4, 64, 256, 1, False),
    "nemotron_h": (16, 64, 128, 8, False),
    "zamba2": (2, 640, 64, 1, False),
}


def generator(device, seed=0):
    return torch.Generator(device=device).manual_seed(seed)


def layer(H, P, N, G, gated, *, B=BATCH, dtype=torch.float32, device="cpu", seed=0):
    """Arguments as a layer of transformers makes them, without the state.

    x, B and C are slices of what the convolution returns, dt and z of the projection; one number a
    head is expanded.
    """
    draw = generator(device, seed)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, device=device).to(dtype)

    conv, projection = randn(B, H * P + 2 * G * N), randn(B, 2 * H * P + 2 * G * N + H)
    x, b, c = conv.split([H * P, G * N, G * N], 1)
    z, dt = projection[:, : H * P], projection[:, -H:]
    A = -torch.exp(2 * torch.rand(H, generator=draw, device=device))
    dt_bias, D = randn(H) / 10 - 2, randn(H)
    return {
        "x": x.view(B, H, P),
        "dt": dt[:, :, None].expand(-1, -1, P),
        "A": A[:, None, ...][:, :, None].expand(-1, P, N).to(dtype=torch.float32),
        "B": b.view(B, G, N),
        "C": c.view(B, G, N),
        "D": D[:, None, ...].expand(-1, P),
        "z": z.view(B, H, P) if gated else None,
        "dt_bias": dt_bias[:, None, ...].expand(-1, P),
        "dt_softplus": True,
    }


def case(H=4, P=20, N=24, G=2, *, slots=BATCH, state=torch.float32, gated=True, **options):
    """(state, the other arguments) of a layer."""
    x = layer(H, P, N, G, gated, **options)
    draw = generator(x["x"].device, 1)
    S = torch.randn(slots, H, P, N, generator=draw, device=x["x"].device).to(state)
    return S, x


def copy(x):
    """Contiguous copies of the tensors: nothing is expanded, nothing lies apart."""
    return {n: y.clone(memory_format=torch.contiguous_format) if tensor(y) else y
            for n, y in x.items()}  # fmt: skip


def tensor(y):
    return isinstance(y, torch.Tensor)


def oracle(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    """(out, state) in float64, a sequence and a head after the other."""
    S, x, dt, A, B, C = (y.double().cpu().clone() for y in (state, x, dt, A, B, C))
    D, z, dt_bias = (y if y is None else y.double().cpu() for y in (D, z, dt_bias))
    out = torch.zeros_like(x)
    sequences, H, _ = x.shape
    for b in range(sequences):
        for h in range(H):
            g = h // (H // B.shape[1])
            delta = dt[b, h] if dt_bias is None else dt[b, h] + dt_bias[h]
            if dt_softplus:
                delta = torch.log1p(torch.exp(-delta.abs())) + delta.clamp(min=0)
            write = (delta * x[b, h])[:, None] * B[b, g]
            S[b, h] = torch.exp(delta[:, None] * A[h]) * S[b, h] + write
            y = S[b, h] @ C[b, g] + (0.0 if D is None else D[h] * x[b, h])
            out[b, h] = y if z is None else y * z[b, h] / (1 + torch.exp(-z[b, h]))
    return out, S


def update(state, x, impl, **options):
    """out; what the kernel leaves unwritten is NaN."""
    with poison(), torch.no_grad():
        return selective_state_update(state, **x, impl=impl, **options)


def check(state, x, impl, want=None):
    """Against the oracle; the state is written where it is."""
    out, S = want or oracle(state, **x)
    bits = state.element_size() == 2, x["x"].element_size() == 2
    got, place = update(state, x, impl), state.data_ptr()
    assert got.dtype == x["x"].dtype and got.shape == x["x"].shape and got.is_contiguous()
    assert_close("out", got, out, HALF if bits[1] else 1e-6)
    assert_close("state", state, S, HALF if bits[0] else 1e-6)
    assert state.data_ptr() == place


# -- the callers


KINDS = (
    (torch.float32,) * 2,
    (torch.bfloat16,) * 2,
    (torch.bfloat16, torch.float32),
    (torch.float16,) * 2,
)


@parametrize(name=CALLERS, kinds=KINDS, impl=IMPLS)
def test_calls_of_transformers(name, kinds, impl, device):
    """By position as there, with what is expanded, sliced, and in the dtypes of model and cache."""
    dtype, cache = kinds
    state, x = case(*CALLERS[name][:4], gated=CALLERS[name][4], dtype=dtype, state=cache, B=2,
                    slots=2, device=device)  # fmt: skip
    want, last = oracle(state, **x)
    first = [x[n] for n in ("x", "dt", "A", "B", "C", "D")]
    rest = {n: x[n] for n in ("z", "dt_bias", "dt_softplus")}
    with poison(), torch.no_grad():
        out = selective_state_update(state, *first, **rest, impl=impl)
    assert out.dtype == dtype and out.shape == x["x"].shape
    assert_close("out", out, want, 1e-6 if dtype == torch.float32 else HALF)
    assert_close("state", state, last, 1e-6 if cache == torch.float32 else HALF)


@pytest.mark.parametrize("impl", IMPLS)
def test_calls_of_mamba_1(impl, device):
    """No heads, a rate for each entry of the state, tokens as columns, as vLLM has them."""
    D, N = 96, 16
    draw = generator(device)
    randn = lambda *shape: torch.randn(*shape, generator=draw, device=device)
    state, A = randn(BATCH, D, N), -randn(D, N).exp()
    x, dt, z = (randn(D, BATCH).T for _ in range(3))
    B, C = randn(BATCH, 2 * N + 5)[:, 5:].split(N, 1)
    given = {"x": x, "dt": dt, "A": A, "B": B, "C": C, "D": randn(D), "z": z, "dt_bias": randn(D)}
    axis = {"A": 0, "D": 0, "dt_bias": 0}
    wide = {n: y.unsqueeze(axis.get(n, 1)) for n, y in given.items()}
    want, last = oracle(state[:, None], **wide, dt_softplus=True)
    out = update(state, given, impl, dt_softplus=True)
    assert out.shape == (BATCH, D)
    assert_close("out", out, want[:, 0], 1e-6)
    assert_close("state", state, last[:, 0], 1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("without", ["B C", "x dt z", "A D dt_bias", "x dt A B C D z dt_bias"])
def test_an_axis_of_one_may_be_left_out(without, impl, device):
    state, x = case(1, G=1, device=device)
    want = oracle(state, **x)
    for n in without.split():
        x[n] = x[n][0] if n in ("A", "D", "dt_bias") else x[n][:, 0]
    out = update(state, x, impl)
    assert out.shape == x["x"].shape
    assert_close("out", out.view(want[0].shape), want[0], 1e-6)
    assert_close("state", state, want[1], 1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", [{}, {"D": None}, {"z": None}, {"dt_bias": None}], ids=str)
@pytest.mark.parametrize("softplus", [True, False])
def test_what_may_be_left_out(softplus, options, impl, device):
    state, x = case(device=device)
    x |= options | {"dt_softplus": softplus}
    if not softplus:
        x["dt"], x["dt_bias"] = (y if y is None else y.abs() for y in (x["dt"], x["dt_bias"]))
    check(state, x, impl)


@pytest.mark.parametrize("flag", [(True, 1), (False, None, 0)], ids=str)
def test_ways_to_write_the_flag(flag, device):
    state, x = case(device=device)
    outs = [update(state.clone(), x | {"dt_softplus": f}, "reference") for f in flag]
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("impl", IMPLS)
def test_every_argument_has_its_own_dtype(impl, device):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    state, x = case(device=device)
    for shift in range(3):
        given = {n: y.to(dtypes[(i + shift) % 3]) if tensor(y) else y
                 for i, (n, y) in enumerate(x.items())}  # fmt: skip
        check(state.to(dtypes[shift]), given, impl)


def test_float64_runs_in_the_reference(device):
    state, x = case(dtype=torch.float64, state=torch.float64, device=device)
    want, last = oracle(state, **x)
    out = update(state, x, "auto")
    assert out.dtype == torch.float64
    assert_close("out", out, want, 1e-13)
    assert_close("state", state, last, 1e-13)
    with launches() as ran:
        update(case(device=device)[0], x, "auto")  # of a state in float32 too
    assert not ran


# -- nothing is expanded, nothing copied


@pytest.fixture
def seen(monkeypatch):
    """What the stage is given, by name."""
    given = {}

    def stage(state, x, dt, A, B, C, D, z, dt_bias, indices, softplus):
        given.update(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
        return torch.zeros_like(x)

    monkeypatch.setattr(step.update, "forward_stages", lambda impl: step.Stages(stage))
    return given


NUMBERS = {"dt": BATCH * 8, "A": 8, "D": 8, "dt_bias": 8}


def test_what_is_expanded_is_not_copied(seen, device):
    """One number a head reaches the kernel, and all that lies apart where it lies."""
    state, x = case(8, 16, 16, device=device)
    update(state, x, "reference")
    for n, y in seen.items():
        assert y.data_ptr() == (state if n == "state" else x[n]).data_ptr(), n
    assert {n: seen[n].numel() for n in NUMBERS} == NUMBERS


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_not_expanded_stays_whole(name, seen, device):
    state, x = case(8, 16, 16, device=device)
    update(state, x | {name: x[name].contiguous()}, "reference")
    assert seen[name].shape == x[name].shape
    assert {n: seen[n].numel() for n in NUMBERS if n != name} == {
        n: count for n, count in NUMBERS.items() if n != name
    }


def test_rows_with_gaps_are_copied(seen, device):
    """Of these alone: the kernel takes rows without gaps."""
    state, x = case(device=device)
    x["x"] = torch.stack([x["x"], x["x"]], -1)[..., 0]
    update(state, x, "reference")
    assert seen["x"].is_contiguous() and torch.equal(seen["x"], x["x"])
    assert seen["B"].data_ptr() == x["B"].data_ptr()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("whole", [*NUMBERS, "rows", "all"])
def test_expanded_or_not_makes_no_difference(whole, impl, device):
    state, x = case(device=device)
    names = {"rows": ("x", "B", "C", "z"), "all": tuple(x)}.get(whole, (whole,))
    same, other = state.clone(), state.clone()
    out = update(same, x, impl)
    got = update(other, x | {n: y for n, y in copy(x).items() if n in names}, impl)
    assert_close("out", got, out, 1e-6)
    assert_close("state", other, same, 1e-6)


@pytest.mark.gpu
def test_memory():
    """A token takes no more than its output."""
    state, x = case(80, 64, 128, 1, B=64, slots=64, dtype=torch.bfloat16, device="cuda")
    update(state, x, "triton")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = selective_state_update(state, **x)
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.numel() * out.element_size()


# -- in place


def test_autocast_changes_nothing(device):
    state, x = case(device=device)
    want, S = update(kept := state.clone(), x, "reference"), kept
    with torch.autocast(device.type, torch.bfloat16):
        out = update(state, x, "reference")
    assert out.dtype == torch.float32 and torch.equal(out, want) and torch.equal(state, S)


# -- a pool


def slots_of(rows, device, dtype=torch.int32):
    return torch.tensor(rows, dtype=dtype, device=device)


def test_a_pool_without_heads(device):
    pool, x = case(1, G=1, slots=5, device=device)
    want, S = update(kept := pool.clone(), x, "triton", state_batch_indices=(
        rows := slots_of([4, 2, 0], device))), kept  # fmt: skip
    flat = {n: y if not tensor(y) else y[0] if n in ("A", "D", "dt_bias") else y[:, 0]
            for n, y in x.items()}  # fmt: skip
    out = update(pool[:, 0], flat, "triton", state_batch_indices=rows)
    assert torch.equal(out, want[:, 0]) and torch.equal(pool, S)


@pytest.mark.gpu
def test_slots_that_are_not_there_on_a_gpu():
    """They are not read by the host, and count as none."""
    pool, x = case(slots=BATCH, device="cuda")
    before = pool.clone()
    rows = slots_of([3, 2**30, 1], "cuda")
    with no_wait():
        out = update(pool, x, "triton", state_batch_indices=rows)
    assert not out[:2].any() and out[2].any()
    assert torch.equal(pool[[0, 2]], before[[0, 2]])


# -- compiled, traced, recorded


@pytest.mark.parametrize("backend", few("inductor", more=("aot_eager",)))
@pytest.mark.parametrize(
    ("pool", "impl"),
    few((True, "triton"), more=[(pool, i) for i in IMPLS for pool in (False, True)][:3]),
)
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
def test_fullgraph(pool, backend, impl, device):
    """A step of a layer, from the parameters to the output; the state is written by the graph.

    test_contract_in_place has the graph that is not compiled further.
    """
    state, x = case(slots=5 if pool else BATCH, device=device)
    rows = slots_of([3, -1, 0], device) if pool else None
    A_log, D, bias = (x[n].flatten(1)[:, 0].clone() for n in ("A", "D", "dt_bias"))
    dt = x["dt"][..., 0]

    def f(state, x, dt, B, C, z):
        P, N = state.shape[2:]
        return 2 * selective_state_update(
            state, x, dt[:, :, None].expand(-1, -1, P), A_log[:, None, None].expand(-1, P, N),
            B, C, D[:, None].expand(-1, P), z=z, dt_bias=bias[:, None].expand(-1, P),
            dt_softplus=True, state_batch_indices=rows, impl=impl,
        )  # fmt: skip

    torch._dynamo.reset()
    g = torch.compile(f, fullgraph=True, backend=backend)
    states = [state, state.clone()]
    for t in range(3):
        _, x = case(seed=t, device=device)
        x = [x["x"], dt, *(x[n] for n in ("B", "C", "z"))]
        with torch.no_grad():
            got, want = g(states[0], *x), f(states[1], *x)
        assert_close("out", got, want, 1e-6)
        assert_close("state", *states, 1e-6)


def test_fake_tensors_have_no_numbers_to_check():
    with FakeTensorMode():
        state, x = torch.empty(2, 4, 16, 16), torch.empty(2, 4, 16, dtype=torch.bfloat16)
        A, B = torch.empty(4, 1, 1).expand(4, 16, 16), torch.empty(2, 1, 16)
        rows = torch.empty(2, dtype=torch.int64)
        out = selective_state_update(state, x, x, A, B, B, state_batch_indices=rows)
    assert out.shape == x.shape and out.dtype == x.dtype


@pytest.mark.gpu
def test_replay_of_a_recorded_step():
    """It advances the states in the slots that it finds, as many times as it is replayed."""
    from ops.test_cuda_graphs import record

    pool, x = case(8, 64, 128, slots=9, dtype=torch.bfloat16, device="cuda")
    rows = slots_of([3, 1, 8], "cuda")
    f = lambda: selective_state_update(pool, **x, state_batch_indices=rows)
    with torch.no_grad():
        graph, out = record(f)
        start = pool.clone()
        replayed = []
        for i in range(5):
            rows.copy_(slots_of([i, i + 2, -1 if i % 2 else i + 4], "cuda"))
            graph.replay()
            replayed.append(out.clone())
        last = pool.clone()
        pool.copy_(start)
        for i, y in enumerate(replayed):
            rows.copy_(slots_of([i, i + 2, -1 if i % 2 else i + 4], "cuda"))
            assert torch.equal(f(), y)
        assert torch.equal(pool, last)


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu():
    state, x = case(device="cuda")
    update(state, x, "triton")
    with no_wait():
        update(state, x, "triton")


# -- refusals


new = torch.zeros
H, P, N, G = 4, 20, 24, 2
I64 = {"dtype": torch.int64}
# beside what test_contract_in_place has of all steps
REFUSED = {
    "no tensor": ({"state": None}, TypeError, "state must be a torch.Tensor of shape"),
    "integers": ({"x": new(3, H, P, **I64)}, TypeError, "x must be float64, float32, float16 or"),
    "complex": ({"A": new(H, P, N).cfloat()}, TypeError, "A must be float64, .* got torch.c"),
    "x is missing": ({"x": None}, TypeError, "x must be a torch.Tensor"),
    "rank": ({"dt": new(3, H)}, r"dt must have 3 dimensions \[B, H, P\], got 2: \("),
    "state": ({"state": new(3, H, P)}, r"x must have shape \[B=3, H=1, P=4\]"),
    "batch": ({"x": new(2, H, P)}, r"x must have shape \[B=3, H=4, P=20\], got \(2, 4"),
    "heads": ({"dt": new(3, 5, P)}, r"dt must have shape \[B=3, H=4, P=20\]"),
    "rows": ({"z": new(3, H, 21)}, r"z must have shape \[B=3, H=4, P=20\]"),
    "columns": ({"C": new(3, G, 23)}, r"C must have shape \[B=3, G=2, N=24\]"),
    "rate": ({"A": new(H)}, r"A must have 3 dimensions \[H, P, N\], got 1"),
    "weight": ({"D": new(H)}, r"D must have 2 dimensions \[H, P\], got 1"),
    "bias": ({"dt_bias": new(P, H)}, r"dt_bias must have shape \[H=4, P=20\]"),
    "groups": (
        {"B": new(3, 3, N), "C": new(3, 3, N)},
        "B must have a number of groups G that divides H=4, got G=3"
    ),
    "unlike groups": ({"C": new(3, 4, N)}, r"C must have shape \[B=3, G=2, N=24\]"),
    "no sequence": (
        {n: new(0, *s) for n, s in {"state": (H, P, N), "x": (H, P), "dt": (H, P), "B": (G, N),
                                    "C": (G, N), "z": (H, P)}.items()},
        "x must have B >= 1, got B=0"
    ),
    "wide": (
        {"state": new(3, H, P, 257), "A": new(H, P, 257), "B": new(3, G, 257),
         "C": new(3, G, 257)},
        "state must have N <= 256, got N=257"
    ),
    "device": ({"D": new(H, P, device="meta")}, "D must be on cpu like state, got"),
    "gaps": (
        {"state": new(3, H, N, P).mT},
        r"state must be contiguous in every sequence or slot, .* got strides \(1920, 480, 1, 20\)"
    ),
    "one state for all": (
        {"state": new(1, H, P, N).expand(3, H, P, N)},
        "they must not overlap, got strides"
    ),
    "flag": ({"dt_softplus": "yes"}, TypeError, "dt_softplus must be True or False, got 'yes'"),
    "impl": ({"impl": "cuda"}, "impl must be one of"),
    "float64": (
        {"x": new(3, H, P).double(), "impl": "triton"},
        "impl='triton' cannot run here"
    ),
    "no slots": (
        {"state": new(0, H, P, N), "state_batch_indices": new(3, **I64)},
        "state must have slots >= 1, got slots=0"
    ),
    "unknown": ({"out": new(3, H, P)}, TypeError, "unexpected keyword argument 'out'"),
}  # fmt: skip


def valid():
    state, x = case()
    return {"state": state, **x}


test_refused_before_any_kernel = refuses(selective_state_update, valid, REFUSED)
