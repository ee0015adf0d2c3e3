"""What Triton's launcher hands on, tensor maps included: the same in every Triton from 3.6."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest
import torch

from linattn_edu.kernels.host import launchers, tape


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
    arguments = (*map(launchers.Text, ("4", "1", "1", "stream", "pi0")), packed, None)
    call, given = launchers.handed(launcher, arguments, None)
    assert call == launcher.launch and not launcher.given
    assert given == ("stream", ("4", "1", "1", None, ("pi0", packed, None)))
    for other in (Launcher(scratch=8), print):
        assert launchers.handed(other, arguments, None) == (other, arguments)


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
    monkeypatch.setattr(tape, "driver", SimpleNamespace(active=current))

    def program(compiled, made):
        told, rows = tape._Tape([made]), made.view(128, 64)[16:]
        descriptor = gluon.TensorDescriptor.from_tensor(rows, [64, 64], layout)
        told.launch(Kernel, compiled, (3,), (descriptor, made), {})
        return told.program([made]), descriptor

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
            profile_scratch_align=1, arg_annotations="O", kernel_signature=b"", gsan_enabled=False,
            launch=nvidia.wrap_handle_tensordesc(launch, signature, meta),
        )  # fmt: skip
        self.filled = []
        for name in ("fill_tma_descriptor", "fill_tma_descriptor_tiled"):
            monkeypatch.setattr(nvidia.triton.runtime, "driver", tape.driver)
            setattr(tape.driver.active.utils, name, self.fill)

    def fill(self, address, *numbers):
        self.filled.append((address, *([*n] if isinstance(n, tuple) else n for n in numbers)))
        return SimpleNamespace(of=self.filled[-1])


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
    assert [type(x) for x in handed[0]][:-1] == [type(x) for x in expected[0]][:-1]


@pytest.mark.parametrize("why", ["no maps", "other numbers", "a failure", "no wrapper known"])
def test_a_wrapper_of_another_kind_is_called_itself(why, described, device, monkeypatch):
    meta = META.copy()
    if why == "a failure":
        del meta["swizzle"]
    if why == "other numbers":
        nvidia = pytest.importorskip("triton.backends.nvidia.driver")
        make = nvidia.make_tensordesc_arg
        if len(inspect.signature(make).parameters) == 2:  # Triton 3.6 and 3.7
            more = lambda x, meta: [*make(x, meta), x.base.data_ptr()]
        else:
            more = lambda x, meta, base: [*make(x, meta, base), x.base.data_ptr()]
        monkeypatch.setattr(nvidia, "make_tensordesc_arg", more)
    launch = (lambda *x: None) if why == "no wrapper known" else print
    compiled = Wrapped(monkeypatch, launch, None if why == "no maps" else [meta])
    program, _ = described(compiled, new(device))
    assert "maps[" not in program.source
    assert any(x is compiled.run for _, x in vars_of_kind(program))


def test_maps_are_bounded():
    maps, filled = launchers.Maps(lambda: 32), []
    fill = type("Fill", (), {"all": lambda _, place: [filled.append(place) or -place[0]]})()
    for n in range(20 * 33):
        assert maps[(n % 33, 64, 1), fill] == -(n % 33)
    assert len(maps) == 32 and len(filled) < 20 * 33 / 2


def vars_of_kind(program):
    return [(n, x) for n, x in program.__globals__.items() if n[0] == "c" and n[1:].isdigit()]


def vars_of(program):
    return [f for f in program.__globals__.values() if getattr(f, "__closure__", None)]
