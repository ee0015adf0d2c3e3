"""A composition that is written down: the same bits as composed, and what is never written down."""

import threading
from types import SimpleNamespace

import gdn_checks
import pytest
import torch
import triton
import triton.language as tl
from gdn_checks import PAYS, same_bits, without_gluon

from linattn_edu import (
    causal_conv1d,
    chunk_gated_delta_rule,
    chunk_kda,
    ema_scan,
    fused_recurrent_gated_delta_rule,
    l2norm,
    mamba_chunk_scan_combined,
    rms_norm_gated,
)
from linattn_edu.kernels.host import bounded, launchers, plan, tape
from linattn_edu.testing import gdn_inputs, kda_inputs, ssd_inputs

K = 16


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Calls in the interpreter are written down too."""
    monkeypatch.setattr(plan, "DEVICES", {"cuda", "cpu"})


def programs() -> list:
    return [p for each in plan._all for p in each.values()]


def drawn(make, *shape, seed, device, **options):
    inputs = make(*shape, seed=seed, device=device, **options).asdict()
    return {n: x for n, x in inputs.items() if x is not None and x.is_floating_point()}


def delta(f, make):
    def draw(seed, device):
        x = drawn(make, 1, 20, 1, 2, K, K, seed=seed, device=device, initial_state=True)
        return x, lambda **x: f(**x, output_final_state=True, chunk_size=16)

    return draw


def cut(seed, device):
    x = drawn(gdn_inputs, 1, 64, 1, 1, K, K, seed=seed, device=device, dtype=torch.bfloat16)
    return x, lambda **x: chunk_gated_delta_rule(**x, chunk_size=16)


def ssd(seed, device):
    x = drawn(ssd_inputs, 1, 40, 2, 1, K, K, seed=seed, device=device)
    return x, lambda **x: (mamba_chunk_scan_combined(**x, chunk_size=16),)


def fused_ssd(seed, device):
    x = drawn(ssd_inputs, 1, 80, 2, 1, 64, 64, seed=seed, device=device, dtype=torch.bfloat16)
    return x, lambda **x: (mamba_chunk_scan_combined(**x, chunk_size=64),)


def average(seed, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(2, 40, 5, generator=generator, device=device)
    g = -torch.rand(2, 40, generator=generator, device=device)
    return {"x": x, "g": g}, lambda **x: ema_scan(**x, output_final_state=True)


def conv(seed, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(2, 20, 8, generator=generator, device=device)
    return {"x": x, "weight": x[0, :8, :4].contiguous()}, lambda **x: causal_conv1d(
        **x, activation="silu", output_final_state=True
    )


def norms(seed, device):
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(3, 4, K, generator=generator, device=device)
    z, weight = x.flip(0), x[0, 0].clone()
    return {"x": x, "z": z, "weight": weight}, lambda x, z, weight: (
        l2norm(x), rms_norm_gated(x, weight, z=z),
    )  # fmt: skip


CASES = {
    "gdn": delta(chunk_gated_delta_rule, gdn_inputs),
    "kda": delta(chunk_kda, kda_inputs),
    "in pieces": cut,
    "ssd": ssd,
    "fused ssd": fused_ssd,
    "ema": average,
    "conv": conv,
    "norms": norms,
}


def passes(x, f):
    """Outputs and gradients, by name."""
    leaves = {n: t.detach().requires_grad_() for n, t in x.items()}
    outputs = [y for y in f(**leaves) if y is not None]
    given = [torch.ones_like(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), given)
    return {**dict(enumerate(outputs)), **dict(zip(leaves, gradients, strict=True))}


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_the_bits_of_the_composition(name, device, poison, force):
    if name == "in pieces":
        force(LENGTH=32, LEAST=2, MULTIPROCESSORS=1)
    for seed in range(3):
        x, f = CASES[name](seed, device)
        got = passes(x, f)
        with plan.off():
            same_bits(got, passes(x, f))
        assert not {tape.NEVER} & {*programs()}
    assert len(programs()) >= 2 and all(map(callable, programs())), "both passes"


def test_a_program_launches_what_the_composition_launches(device, monkeypatch):
    """Not by composing again."""
    x, f = CASES["gdn"](0, device)
    for _ in range(3):
        f(**x)
    monkeypatch.setattr(
        "linattn_edu.ops.operator.Operator._compose", lambda *_: pytest.fail("composed")
    )
    f(**x)


def test_kinds_of_calls_have_programs_of_their_own(device):
    x, _ = CASES["gdn"](0, device)
    other, _ = CASES["gdn"](1, device)
    for scale, chunk_size, state in ((0.5, 16, True), (2.0, 16, False), (2.0, 32, False)):
        options = {"scale": scale, "chunk_size": chunk_size, "output_final_state": state}
        for y in (x, other, x):
            got = chunk_gated_delta_rule(**y, **options)
        with plan.off():
            for a, b in zip(got, chunk_gated_delta_rule(**x, **options), strict=True):
                assert a is b is None or torch.equal(a, b)
    assert sum(map(callable, programs())) == 3


def test_in_place(device):
    """A state that is written where it lies, in a program too."""
    for step in range(4):
        x = drawn(gdn_inputs, 2, 1, 1, 2, K, K, seed=step, device=device, initial_state=True)
        again = x | {"initial_state": x["initial_state"].clone()}
        options = {"output_final_state": True, "inplace_final_state": True}
        o, state = fused_recurrent_gated_delta_rule(**x, **options)
        assert state.data_ptr() == x["initial_state"].data_ptr()
        with plan.off():
            expected, _ = fused_recurrent_gated_delta_rule(**again, **options)
        assert torch.equal(o, expected)
        assert torch.equal(x["initial_state"], again["initial_state"])
    assert any(map(callable, programs()))


def test_a_state_that_begins_anywhere_has_a_program_of_its_own(device):
    """The kernel of aligned addresses must not be given another."""
    for step in range(8):
        x = drawn(gdn_inputs, 2, 1, 1, 2, K, K, seed=step, device=device, initial_state=True)
        state, off = x["initial_state"], step // 3 % 2
        pool = torch.zeros(state.numel() + 1, device=device)
        x["initial_state"] = pool[off : off + state.numel()].view(state.shape).copy_(state)
        options = {"output_final_state": True, "inplace_final_state": True}
        o, _ = fused_recurrent_gated_delta_rule(**x, **options)
        with plan.off():
            expected, _ = fused_recurrent_gated_delta_rule(
                **x | {"initial_state": state}, **options
            )
        assert torch.equal(o, expected) and torch.equal(x["initial_state"], state)
    assert sum(map(callable, programs())) == 2


def test_autocast_changes_no_program(device):
    """What autocast would compute in 16 bits is composed; what only moves numbers is not."""
    x = torch.ones(2, 2, device=device) / 3

    def product(x):
        return ((x.to(torch.float64) @ x.to(torch.float64)).to(torch.float32),)

    program, _ = runs(product, x)
    assert callable(program) and program.computes
    program, _ = runs(lambda x: (x.to(torch.float64).clone(),), x)
    assert not program.computes
    place, composed = plan.plans(), []
    for _ in range(4):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            plan.run(place, (), [x], lambda: composed.append(1) or product(x))
    assert len(composed) == 1 + 4, "once for its kernels alone"


def test_one_tensor_twice(device):
    """q and k the same tensor, and then not."""
    for step in range(6):
        x = drawn(gdn_inputs, 1, 20, 1, 1, K, K, seed=step, device=device)
        if step in (0, 1, 4):
            x["q"] = x["k"]
        o, _ = chunk_gated_delta_rule(**x)
        with plan.off():
            assert torch.equal(o, chunk_gated_delta_rule(**x)[0])


@triton.jit
def add_kernel(x_ptr, y_ptr, z_ptr, n: tl.constexpr):
    o = tl.arange(0, n)
    tl.store(z_ptr + o, tl.load(x_ptr + o) + tl.load(y_ptr + o))


def runs(compose, *inputs, times=4, key=()):
    """compose(*inputs) so many times through one place for programs; the place, and the results."""
    place = plan.plans()
    results = [plan.run(place, key, inputs, lambda: compose(*inputs)) for _ in range(times)]
    return next(iter(place.values())), results


def test_launches_and_operations_of_any_kind(device):
    """A kernel of nobody's, views, operations that write, a tensor of several lives."""

    def compose(x, y):
        z = x.new_zeros(2, 16)
        for half in (z[0], z.view(32)[16:]):
            add_kernel[lambda meta: (16 // meta["n"],)](x, y, half, n=16)
        z[1].mul_(2)
        del half
        w = torch.cat([z, z.clone()[:, :8].repeat(1, 2)])
        return w, None, w[1], x

    x, y = (torch.arange(16.0, device=device) + i for i in range(2))
    program, results = runs(compose, x, y)
    assert callable(program)
    w, none, row, same = results[-1]
    assert torch.equal(row, 2 * (x + y)) and none is None and same is x
    assert torch.equal(w, results[0][0]) and w.data_ptr() != results[-2][0].data_ptr()


@pytest.mark.parametrize(
    "compose",
    [
        lambda x: (x * x.sum().item(),),
        lambda x: (x + OUTSIDE.to(x.device),),
        lambda x: (torch.stack(x.sort())[0],),
    ],
    ids=["a number that the host reads", "a tensor from outside", "an operation of two results"],
)
def test_what_is_never_replayed(compose, device):
    x = torch.arange(1.0, 5.0, device=device)
    program, results = runs(compose, x)
    assert program == tape.NEVER and len({tuple(r[0].tolist()) for r in results}) == 1


OUTSIDE = torch.ones(4)


def test_a_call_that_fails_leaves_nothing_behind(device):
    x = torch.ones(4, device=device)
    place, run = plan.plans(), gdn_checks.JITFunction.run

    def compose():
        if len(calls) == 2:
            raise RuntimeError("once")
        return (x + 1,)

    calls = []
    for _ in range(4):
        calls.append(None)
        if len(calls) == 2:
            with pytest.raises(RuntimeError, match="once"):
                plan.run(place, (), [x], compose)
        else:
            plan.run(place, (), [x], compose)
    assert gdn_checks.JITFunction.run is run and callable(next(iter(place.values())))


def test_the_launches_of_another_thread_are_its_own(device):
    x, y = (torch.ones(16, device=device) for _ in range(2))
    other = threading.Thread(target=lambda: add_kernel[(1,)](x, y, y.clone(), n=16))

    def compose(x):
        if other.ident is None and len(results) == 1:
            other.start()
            other.join()
        return (x + 1,)

    place, results = plan.plans(), []
    for _ in range(3):
        results.append(plan.run(place, (), [x], lambda: compose(x)))
    program = next(iter(place.values()))
    assert other.ident is not None and "grid" not in program.source
    assert program.source.count("\n") == 2


def test_a_profiler_sees_every_launch(device, monkeypatch):
    x, f = CASES["gdn"](0, device)
    for _ in range(3):
        f(**x)
    hook = triton.knobs.runtime.launch_enter_hook
    if not hasattr(hook, "calls"):
        pytest.skip("this Triton keeps its hooks otherwise")
    monkeypatch.setattr(hook, "calls", [lambda metadata: None])
    composed = []
    monkeypatch.setattr(
        "linattn_edu.ops.operator.Operator._compose",
        lambda *_: composed.append(1) or (x["v"],) * 7,
    )
    f(**x)
    assert composed


KNOBS = {
    "debug": lambda: (triton.knobs.runtime, True),
    "add_stages_inspection_hook": lambda: (triton.knobs.runtime, lambda *_: ("key", "hash")),
    "instrumentation_mode": lambda: (triton.knobs.compilation, "fpsan"),
}


@pytest.mark.parametrize("name", KNOBS)
def test_a_knob_for_other_kernels_is_seen(name, device, monkeypatch):
    """While it is set Triton would launch others: no program runs, and none is made."""
    x, f = CASES["gdn"](0, device)
    for _ in range(3):
        f(**x)
    composed, kept = [], [*programs()]
    with monkeypatch.context() as patch:
        where, value = KNOBS[name]()
        patch.setattr(where, name, value)
        patch.setattr(
            "linattn_edu.ops.operator.Operator._compose",
            lambda *_: composed.append(1) or (x["v"],) * 7,
        )
        f(**x)
        assert composed == [1] and [*programs()] == kept
    monkeypatch.setattr(
        "linattn_edu.ops.operator.Operator._compose", lambda *_: pytest.fail("composed")
    )
    f(**x)


def test_programs_are_bounded(device, monkeypatch):
    """And a few more kinds of calls in turn than there is place for are mostly found."""
    monkeypatch.setattr(plan, "LIMIT", 16)
    place, composed = plan.plans(), []
    inputs = [torch.ones(n, device=device) for n in range(1, 18)]
    for n in range(2 * len(inputs), 22 * len(inputs)):
        if n == 12 * len(inputs):
            composed.clear()
        x = inputs[n % len(inputs)]
        (y,) = plan.run(place, (), [x], lambda x=x: composed.append(1) or (x + 1,))
        assert torch.equal(y, x + 1) and len(place) <= 16
    assert len(composed) < 10 * len(inputs) / 2, "by programs, most of them"
    plan.clear()
    assert not place


def test_what_is_compiled_is_bounded(device, monkeypatch):
    monkeypatch.setattr(plan, "LIMIT", 16)
    gone_through = []
    monkeypatch.setattr(plan, "precompile", lambda compose: gone_through.append(1) and 0)
    place = plan.plans()
    for n in range(20 * 17):
        x = torch.ones(2, 2, 1 + n % 17, device=device)
        plan._precompile(place, (), [x], lambda: None)
    assert 17 <= len(gone_through) < 20 * 17 / 2 and len(plan._compiled) == 16


def test_a_bounded_dict():
    kept, limit, missed = bounded.Bounded(lambda: limit), 64, 0
    for n in range(100 * (limit + 1)):
        key = n % (limit + 1)
        if kept.get(key) is None:
            missed += 1
            kept.put(key, n + 1)
        assert len(kept) <= limit
    assert missed < 100 * 4
    limit = 8
    kept.put("other", 1)
    kept.put("other", 2)
    assert len(kept) == 8 and kept["other"] == 2
    kept.clear()
    kept.put("again", 1)
    assert [*kept] == ["again"]


def test_off_is_of_a_thread(device):
    """The programs of the others stay, and those of gradients that it asks for are off too."""
    x = torch.ones(4, device=device)
    place, composed = plan.plans(), []
    one = lambda: plan.run(place, (), [x], lambda: composed.append(threading.get_ident()) or (x,))
    for _ in range(3):
        one()
    composed.clear()
    inside, done = threading.Event(), threading.Event()

    def work():
        with plan.off():
            with plan.off():
                one()
            inside.set()
            done.wait(10)
            one()
        one()

    other = threading.Thread(target=work)
    other.start()
    assert inside.wait(10)
    one()
    done.set()
    other.join()
    assert composed == 2 * [other.ident]
    with pytest.raises(RuntimeError, match="inside"), plan.off():
        raise RuntimeError("inside")
    one()
    assert len(composed) == 2 and not plan._offs


class Deep(torch.autograd.Function):
    """A gradient within a gradient, so often that PyTorch takes another thread for it."""

    @staticmethod
    def forward(ctx, x, depth, inside):
        ctx.about = depth, inside
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        depth, inside = ctx.about
        if not depth:
            inside()
        else:
            with torch.enable_grad():
                Deep.apply(torch.ones(1, requires_grad=True), depth - 1, inside).backward()
        return dy, None, None


def test_off_in_a_gradient_of_another_thread():
    seen = []
    see = lambda: seen.append((threading.get_ident(), plan._is_off()))
    y = Deep.apply(torch.ones(1, requires_grad=True), 100, see)
    with plan.off():
        y.backward()
    Deep.apply(torch.ones(1, requires_grad=True), 100, see).backward()
    assert all(thread != threading.get_ident() for thread, _ in seen)
    assert [off for _, off in seen] == [True, False]


@pytest.mark.parametrize("known", [2, 0.5, "ieee", torch.float32, tl.float32, (1, None)])
def test_an_argument_that_is_told(known, monkeypatch):
    assert callable(of_launch(known, monkeypatch))


@pytest.mark.parametrize("unknown", [object(), [object()], {}, SimpleNamespace(base=1), print])
def test_an_argument_that_is_not_told(unknown, monkeypatch):
    """What it holds may be another in the next call."""
    with pytest.raises(tape.Untold):
        of_launch(unknown, monkeypatch)


def of_launch(argument, monkeypatch):
    """The program of a launch with this argument."""
    current = SimpleNamespace(get_current_stream=lambda _: 7)
    monkeypatch.setattr(tape, "driver", SimpleNamespace(active=current))

    class Kernel:
        @staticmethod
        def fn(x_ptr, argument):
            """Its names are read."""

    x, compiled = torch.ones(4), SimpleNamespace(function=1, packed_metadata=(), run=print)
    written = tape._Tape([x])
    written.launch(Kernel, compiled, (1,), (x, argument), {})
    return written.program([x])


@pytest.fixture
def in_gluon(device, force):
    """seed -> inputs that the kernels in Gluon take, and the call; no two share an address."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    kept = []

    def draw(seed):
        kept.append(
            drawn(
                gdn_inputs, 1, 256, 2, 2, 128, 128, seed=seed, device=device, dtype=torch.bfloat16
            )
        )
        return kept[-1], lambda **x: chunk_gated_delta_rule(**x)[:1]

    return draw


def composed(x, f):
    with plan.off():
        return passes(x, f)


@pytest.mark.gpu
def test_tensor_maps_of_ever_new_tensors(in_gluon):
    for seed in range(8):
        x, f = in_gluon(seed)
        got = passes(x, f)
        same_bits(got, composed(x, f))
    sources = [p.source.count("maps[") for p in programs()]
    assert sorted(sources) == [6, 11 + 10], "both passes"


@pytest.mark.gpu
def test_tensor_maps_in_a_cuda_graph(in_gluon):
    x, f = in_gluon(0)
    for _ in range(3):
        passes(x, f)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = passes(x, f)
    for seed in range(1, 4):
        other, _ = in_gluon(seed)
        for n, t in other.items():
            x[n].copy_(t)
        graph.replay()
        same_bits(got, composed(other, f))


@pytest.mark.gpu
def test_tensor_maps_of_two_threads(in_gluon, monkeypatch):
    """Who finds the cache full forgets all, while the other takes and adds."""
    monkeypatch.setattr(launchers, "MAPS", 40)
    draws = [[in_gluon(10 * i + seed) for seed in range(10)] for i in range(2)]
    for _ in range(3):
        passes(*draws[0][0])
    got = [[], []]

    def work(i):
        for _ in range(5):
            got[i] += [passes(*draw) for draw in draws[i]]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(2):
        assert len(got[i]) == 50
        for n, outputs in enumerate(got[i]):
            same_bits(outputs, composed(*draws[i][n % 10]))
