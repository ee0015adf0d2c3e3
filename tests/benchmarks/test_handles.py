"""Launches past Triton's front: the same kernels, handed the same, as by Triton."""

import inspect
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from benchmarks import driverless, handles
from linattn_edu.kernels.host import launchers, plan

CPU = torch.device("cpu")


def body(x_ptr, y_ptr, n, m, flag, scale, B: tl.constexpr, name: tl.constexpr = "ieee"):
    pass


@pytest.fixture
def launched(monkeypatch):
    """What the function in C was handed, addresses in the place of tensors."""
    given = []

    def plain(x):
        if isinstance(x, (list, tuple)):
            return [plain(y) for y in x]
        if hasattr(x, "data_ptr"):
            return x.data_ptr()
        return None if hasattr(x, "calls") else x  # no hooks

    def record(*args):
        given.append(plain(args))

    monkeypatch.setattr(driverless.Driver.utils, "launch", record)
    known = SimpleNamespace(isbuiltin=lambda f: f is record, signature=inspect.signature)
    monkeypatch.setattr(launchers, "inspect", known)
    for where in driverless.replaced():
        monkeypatch.setattr(*where, raising=False)
    handles.clear()
    yield given
    handles.clear()


@pytest.fixture
def fronts(monkeypatch):
    """Launches that went through Triton's front."""
    seen, run = [], handles._triton_run
    monkeypatch.setattr(handles, "_triton_run", lambda *a, **k: seen.append(1) or run(*a, **k))
    return seen


def new(dtype=torch.float32, off=0):
    return torch.zeros(64, dtype=dtype)[off:]


def variants():
    """Grids, arguments and options, each of another kind than the first."""
    x, y, h = new(), new(), new(torch.float16)
    same = (x, y, 3, 5, True, 0.5)
    yield (4,), same, {"B": 16}
    yield (4, 2), same, {"B": 16}
    yield [4, 2, 3], same, {"B": 16}
    for changed in (
        (h, y), (x, h), (h, h), (new(off=1), y), (x, new(off=1)), (None, y), (x, None), (None, None)
    ):  # fmt: skip
        yield (4,), (*changed, *same[2:]), {"B": 16}
    for n in (1, 16, 17, -1, 2**31 - 1, 2**31, 2**40, 2**63, True, None, 0.5):
        yield (4,), (x, y, n, *same[3:]), {"B": 16}
        yield (4,), (x, y, 3, n, *same[4:]), {"B": 16}
    yield (4,), (*same[:4], False, 0.5), {"B": 16}
    yield (4,), (*same[:4], 1, 0.5), {"B": 16}
    yield (4,), (*same[:5], 1), {"B": 16}
    for options in (
        {"B": 32}, {"B": 16, "name": "tf32"}, {"B": 16, "num_warps": 8}, {"B": None},
        {"num_warps": 2, "B": 16}, {"B": (1, 2)}, {"B": int},
    ):  # fmt: skip
        yield (4,), same, options
    yield (4,), (*same, 16), {}
    yield (4,), (x, y), {"B": 16, "scale": 2.0, "flag": False, "m": 1, "n": 2}
    yield (4,), (torch.nn.Parameter(x), y, *same[2:]), {"B": 16}


def signature(kernel):
    """Of what is compiled."""
    src = kernel.src
    return [str(x) for x in (src.signature, src.constants, src.attrs)]


@pytest.mark.parametrize("apart", [None, ["n"], ["m", "x_ptr"]])
def test_what_is_launched_is_what_triton_launches(apart, launched, fronts):
    """For every kind of arguments, in any order, with other numbers and tensors of the kind."""
    ours, tritons = (JITFunction(body, do_not_specialize=apart) for _ in range(2))
    calls = [*variants(), *reversed([*variants()])]
    for grid, args, kwargs in calls * 2:
        expected = tritons[grid](*args, **kwargs)
        got = handles.fast(CPU, partial(ours[grid], *args, **kwargs))
        assert signature(got) == signature(expected)
        assert launched[-1] == launched[-2]
    assert len(calls) * 2 < len(fronts) < len(calls) * 2 + len(calls)


def test_other_addresses_of_the_same_kind(launched, fronts):
    kernel, kept = JITFunction(body), [new() for _ in range(8)]
    for x in kept:
        handles.fast(CPU, lambda x=x: kernel[(1,)](x, kept[0], 3, 5, True, 0.5, B=16))
        assert launched[-1][-1][0] == x.data_ptr() or x.data_ptr() in launched[-1]
    assert len(fronts) == 1


@pytest.mark.parametrize("why", ["outside", "grid", "hook", "kind", "scratch", "warmup"])
def test_triton_launches_itself(why, launched, fronts, monkeypatch):
    kernel, grid, x = JITFunction(body), (4,), new()
    if why == "grid":
        grid = lambda meta: (meta["B"] // 4,)
    if why == "hook":
        kernel.add_pre_run_hook(lambda *args, **kwargs: None)
    if why == "kind":
        x = triton.runtime.jit.TensorWrapper(x, tl.float32)
    if why == "scratch":
        monkeypatch.setattr(driverless, "SCRATCH", 8)
        triton.set_allocator(lambda size, align, stream: new())
    here = (lambda f: f()) if why == "outside" else (lambda f: handles.fast(CPU, f))
    for _ in range(3):
        if why == "warmup":
            here(lambda: kernel.warmup(x, x, 3, 5, True, 0.5, B=16, grid=grid))
        else:
            here(lambda: kernel[grid](x, x, 3, 5, True, 0.5, B=16))
            assert launched[-1][0] == 4
    assert len(fronts) == 3 and len(launched) == (0 if why == "warmup" else 3)


def test_devices_and_streams(launched, fronts, monkeypatch):
    """A device has kernels of its own; the stream is the current one of each launch."""
    kernel, x, streams = JITFunction(body), new(), iter(range(10, 99))
    current = lambda device: 1000 * device + next(streams)
    monkeypatch.setattr(driverless.Driver, "get_current_stream", staticmethod(current))
    here = lambda: kernel[(1,)](x, x, 3, 5, True, 0.5, B=16)
    for index in (0, 1, 0, 1):
        monkeypatch.setattr(driverless.Driver, "get_current_device", lambda self, i=index: i)
        handles.fast(SimpleNamespace(index=index), here)
    assert [given[3] for given in launched] == [10, 1011, 12, 1013] and len(fronts) == 2


def test_of_one_thread(launched, fronts):
    kernel, x = JITFunction(body), new()
    here = lambda: kernel[(1,)](x, x, 3, 5, True, 0.5, B=16)

    def compose():
        here()
        other = threading.Thread(target=here)
        other.start()
        other.join()
        here()

    handles.fast(CPU, compose)
    assert len(fronts) == 2 and len(launched) == 3
    with pytest.raises(RuntimeError, match="once"):
        handles.fast(CPU, lambda: (_ for _ in ()).throw(RuntimeError("once")))
    here()
    assert len(fronts) == 3, "nothing is left behind"


def test_descriptors(launched, fronts):
    """Their maps are found by address, shape and strides; another kind has another kernel."""
    gluon = pytest.importorskip("triton.experimental.gluon")
    hopper = pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    layouts = [gluon.language.NVMMASharedLayout(swizzle, 16) for swizzle in (128, 64)]

    def described(x_desc, y_ptr, n):
        pass

    from triton.experimental.gluon._runtime import GluonJITFunction

    ours, tritons = GluonJITFunction(described), GluonJITFunction(described)
    x, y = (torch.zeros(4, 64, 64, dtype=torch.bfloat16) for _ in "xy")
    views = [x.view(-1, 64), y.view(-1, 64), x.view(-1, 128), x[1:].view(-1, 64), x.view(-1, 64)]
    for _ in range(2):
        for layout in layouts:
            for view in views:
                make = lambda v=view, i=layout: hopper.TensorDescriptor.from_tensor(v, [64, 64], i)
                expected = tritons[(2,)](make(), y, 3)
                got = handles.fast(CPU, lambda make=make: ours[(2,)](make(), y, 3))
                assert signature(got) == signature(expected)
                assert launched[-1] == launched[-2]
    assert len(fronts) == 20 + 2
    assert len(launchers.maps) == 2 * 4


def test_in_the_place_of_the_tape(launched, fronts, monkeypatch):
    """Every pass that would be written down is composed, and launched so."""
    kernel, x, composed = JITFunction(body), new(), []
    monkeypatch.setattr(plan, "DEVICES", {"cpu"})
    monkeypatch.setattr(plan, "precompile", lambda compose: 0)

    def compose():
        composed.append(1)
        kernel[(1,)](x, x, 3, 5, True, 0.5, B=16)
        return (x,)

    place = plan.plans()
    run = lambda: plan.run(place, (), [x], compose)
    with handles.instead():
        for _ in range(4):
            run()
    assert (len(fronts), len(launched), len(composed)) == (1, 4, 4) and not place
    for _ in range(4):
        run()
    assert (len(fronts), len(launched), len(composed)) == (3, 8, 6)
