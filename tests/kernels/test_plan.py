"""A composition that is written down: the same bits as composed, and what is never written down."""

import dataclasses
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
from linattn_edu.kernels.host import plan
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
        assert not {plan.NEVER} & {*programs()}
    assert len(programs()) >= 2 and all(map(callable, programs())), "both passes"


def test_a_program_launches_what_the_composition_launches(device, monkeypatch):
    """Not by composing again."""
    x, f = CASES["gdn"](0, device)
    for _ in range(2):
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
    assert program == plan.NEVER and len({tuple(r[0].tolist()) for r in results}) == 1


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


def test_programs_are_bounded(device, monkeypatch):
    monkeypatch.setattr(plan, "LIMIT", 3)
    place = plan.plans()
    for n in range(1, 9):
        x = torch.ones(n, device=device)
        for _ in range(3):
            plan.run(place, (), [x], lambda x=x: (x + 1,))
    assert len(place) == 3
    plan.clear()
    assert not place


class Launcher:
    """As Triton's: it hands its arguments to a function in C, here one that keeps them."""

    def __init__(self, scratch=0):
        self.given, self.scratch = {}, scratch
        self.launch = self.given.setdefault

    def __call__(self, x, y, z, stream, *args):
        memory = x * y * z * self.scratch if self.scratch else None
        self.launch(stream, (x, y, z, memory, args))


def test_what_a_launcher_hands_on():
    """A program calls the function in C, unless the launcher has more to do."""
    launcher, packed = Launcher(), object()
    arguments = (*map(plan._Text, ("4", "1", "1", "stream", "pi0")), packed, None)
    call, given = plan._handed(launcher, arguments)
    assert call == launcher.launch and not launcher.given
    assert given == ("stream", ("4", "1", "1", None, ("pi0", packed, None)))
    for other in (Launcher(scratch=8), print):
        assert plan._handed(other, arguments) == (other, arguments)


class Compiled:
    """What a launch of a compiled kernel gives, with the arguments that its launcher was handed."""

    function, packed_metadata = 1, ()

    def __init__(self):
        self.handed = []

    def run(self, *args):
        self.handed.append(args)


@pytest.fixture
def described(device, monkeypatch):
    """(Compiled, tensor) -> the program of a launch on the tensor's descriptor and itself; and the
    descriptor.
    """
    gluon = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    language = pytest.importorskip("triton.experimental.gluon.language")
    layout = language.NVMMASharedLayout(128, 16)

    class Kernel:
        @staticmethod
        def fn(x_desc, y_ptr):
            """Its names are read."""

    current = SimpleNamespace(get_current_stream=lambda _: 7, utils=SimpleNamespace())
    monkeypatch.setattr(plan, "driver", SimpleNamespace(active=current))

    def program(compiled, made):
        tape, rows = plan._Tape([made]), made.view(128, 64)[16:]
        descriptor = gluon.TensorDescriptor.from_tensor(rows, [64, 64], layout)
        tape.launch(Kernel, compiled, (3,), (descriptor, made), {})
        return tape.program([made]), descriptor

    return program


def new(device, *, of=torch.zeros):
    return of(2, 64, 64, dtype=torch.bfloat16, device=device)


def test_a_descriptor_is_made_anew(described, device):
    """It holds an address: that of the first call's tensor would be read and written again."""
    compiled = Compiled()
    program, descriptor = described(compiled, new(device))
    others = [new(device, of=torch.ones) for _ in range(2)]
    for x in others:
        program(x)
    for x, handed in zip(others, compiled.handed, strict=True):
        assert handed[:4] == (3, 1, 1, 7)
        got, address = handed[-2:]
        assert (got.base.data_ptr(), address) == (x.data_ptr() + 16 * 64 * 2, x.data_ptr())
        assert dataclasses.replace(got, base=descriptor.base) == descriptor
        assert got.base.shape == (112, 64)
    held = [c.cell_contents for f in vars_of(program) for c in f.__closure__ or ()]
    assert not any(isinstance(x, torch.Tensor) for x in held)


class Wrapped(Compiled):
    """A compiled kernel with Triton's own launcher in Python and `launch` for its function in C."""

    def __init__(self, monkeypatch, launch, meta):
        nvidia = pytest.importorskip("triton.backends.nvidia.driver")
        signature = {0: "tensordesc<bf16[64, 64]>", 1: "*bf16"}
        self.run = object.__new__(nvidia.CudaLauncher)
        vars(self.run).update(
            num_ctas=1, launch_cooperative_grid=False, launch_pdl=False,
            global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
            profile_scratch_align=1, arg_annotations="O", kernel_signature=b"",
            launch=nvidia.wrap_handle_tensordesc(launch, signature, meta),
        )  # fmt: skip
        self.filled = []
        for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):
            monkeypatch.setattr(nvidia.triton.runtime, "driver", plan.driver)
            setattr(plan.driver.active.utils, name, self.fill)

    def fill(self, address, *numbers):
        self.filled.append((address, *numbers))
        return SimpleNamespace(address=address, numbers=numbers)


META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}


def flat(handed):
    return [y for x in handed for y in (flat(x) if isinstance(x, (tuple, list)) else [x])]


def test_a_tensor_map_is_filled_once_for_an_address(described, device, monkeypatch):
    """A program hands the function in C what Triton's wrapper hands it, maps from the cache."""
    compiled = Wrapped(monkeypatch, print, [META])
    program, descriptor = described(compiled, new(device))
    assert "maps[pi0 + 2048, c" in program.source
    in_c = next(n for n, x in vars_of_kind(program) if x is print)
    handed, compiled.filled = [], []
    program.__globals__[in_c] = lambda *x: handed.append(x)
    tensors = [new(device) for _ in range(2)]
    for x in (*tensors, *tensors):
        program(x)
    assert len(compiled.filled) == 2
    expected = []
    wrapped = Wrapped(monkeypatch, lambda *x: expected.append(x), [META])
    for x in tensors:
        rows = dataclasses.replace(descriptor, base=x.view(128, 64)[16:])
        wrapped.run(3, 1, 1, 7, wrapped.function, (), None, None, None, rows, x.data_ptr())
    assert wrapped.filled == compiled.filled
    assert [flat(x) for x in handed] == 2 * [flat(x) for x in expected]
    assert [type(x) for x in handed[0]] == [type(x) for x in expected[0]]


@pytest.mark.parametrize("why", ["no maps", "other numbers", "a failure", "no wrapper known"])
def test_a_wrapper_of_another_kind_is_called_itself(why, described, device, monkeypatch):
    meta = META.copy()
    if why == "a failure":
        del meta["swizzle"]
    if why == "other numbers":
        nvidia = pytest.importorskip("triton.backends.nvidia.driver")
        make = nvidia.make_tensordesc_arg
        more = lambda x, meta: [*make(x, meta), x.base.data_ptr()]
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", more)
    launch = (lambda *x: None) if why == "no wrapper known" else print
    compiled = Wrapped(monkeypatch, launch, None if why == "no maps" else [meta])
    program, _ = described(compiled, new(device))
    assert "maps[" not in program.source
    assert any(x is compiled.run for _, x in vars_of_kind(program))


def test_maps_are_bounded(monkeypatch):
    monkeypatch.setattr(plan, "MAPS", 3)
    maps, filled = plan._Maps(), []
    fill = lambda address: [filled.append(address) or -address]
    for address in (1, 2, 3, 2, 4, 4, 2):
        assert maps[address, fill] == -address
    assert filled == [1, 2, 3, 4, 2] and len(maps) == 2


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
    monkeypatch.setattr(plan, "MAPS", 40)
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


def vars_of_kind(program):
    return [(n, x) for n, x in program.__globals__.items() if n[0] == "c" and n[1:].isdigit()]


def vars_of(program):
    return [f for f in program.__globals__.values() if getattr(f, "__closure__", None)]
