"""``python -m linattn_edu doctor``: what runs on this machine, and what stands in the way."""

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from linattn_edu.choices import generation as table_generation
from linattn_edu.ops.check import (
    has_triton,
    imported_for_compilation,
    interpreted,
    interpreter_wanted,
)

TRITON_MIN = (3, 6)
UNKNOWN = (0,)  # a version that nothing says
MIN_CAPABILITY = (7, 5)
WAYS = ("compiled", "interpreter", "reference")
WHAT = {
    "compiled": "the Triton kernels, compiled for the GPU: CUDA tensors",
    "interpreter": "the Triton kernels on the CPU, slow, one thread at a time: TRITON_INTERPRET=1",
    "reference": 'plain PyTorch: CPU tensors, or impl="reference"',
}
# relative RMS error against the float64 recurrence on the same rounded inputs
TOLERANCE = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}
TIMEOUT = 300


class Assembler(NamedTuple):
    """The ptxas that Triton calls for a GPU."""

    version: tuple[int, ...]
    path: str
    variable: str  # of the environment: where it names a file, that one is called


@dataclass
class Machine:
    """The facts that the notes are drawn from; versions as tuples, None where absent."""

    system: str = "Linux"
    torch: tuple[int, ...] = UNKNOWN
    triton: tuple[int, ...] | None = None
    numpy: tuple[int, ...] | None = None
    cuda_build: bool = False
    hip_build: bool = False
    nvidia_driver: bool = False
    gpu: str | None = None
    capability: tuple[int, int] | None = None
    ptxas: Assembler | None = None
    c_compiler: bool = True
    interpret: bool = False
    triton_problem: str | None = None  # what importing it fails with
    too_late: bool = False  # TRITON_INTERPRET was set after triton was imported
    gluon_problem: str | None = None  # of _gluon_problem


@dataclass(frozen=True)
class Note:
    """One thing to know: what it is, what to do, and the way that it may stop from running."""

    text: str
    advice: str
    way: str | None = None


def version(name: str) -> tuple[int, ...] | None:
    """The leading numbers of an installed distribution's version, without importing it."""
    try:
        text = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return numbers(text)


def numbers(text: str) -> tuple[int, ...]:
    """ "3.7.1+cpu" -> (3, 7, 1)"""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(n) for n in found.group().split(".")) if found else UNKNOWN


def dotted(numbers: tuple[int, ...]) -> str:
    """(3, 7, 1) -> "3.7.1" """
    return ".".join(map(str, numbers))


def examine() -> Machine:
    """Look at this machine."""
    usable = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if usable else None
    problem = _triton_problem() if has_triton() else None
    # elsewhere no kernel in Gluon runs with any Triton
    hopper = has_triton() and problem is None and capability == (9, 0)
    return Machine(
        system=platform.system(),
        torch=numbers(torch.__version__),
        # a module that is not found does not count, whatever is installed
        triton=version("triton") or UNKNOWN if has_triton() else None,
        numpy=version("numpy"),
        cuda_build=torch.version.cuda is not None,
        hip_build=torch.version.hip is not None,
        nvidia_driver=Path("/proc/driver/nvidia/version").exists()
        or bool(shutil.which("nvidia-smi")),
        gpu=torch.cuda.get_device_name() if usable else None,
        capability=capability,
        ptxas=_ptxas(capability) if usable and problem is None else None,
        c_compiler=bool(os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang", "cc")))),
        interpret=interpreted(),
        triton_problem=problem,
        too_late=interpreter_wanted() and imported_for_compilation(),
        gluon_problem=_gluon_problem() if hopper else None,
    )


def _triton_problem() -> str | None:
    """Why Triton cannot be imported, asked in a process of its own; None if it can.

    A broken one may end its process, and in this one it is too early to import it: whoever asks
    the doctor first may still set TRITON_INTERPRET.
    """
    code = "from linattn_edu.ops.check import triton_problem; print(triton_problem() or '')"
    done = _process(code)
    if done.returncode:
        return f"importing the package triton ends the process with code {done.returncode}"
    return textwrap.shorten(done.stdout, 300) or None


def _gluon_problem() -> str | None:
    """Why the kernels in Gluon are off with this Triton, or tried for the first time; None: they
    are on. Asked in a process of its own, since what launches them is imported.
    """
    done = _process(
        "from linattn_edu.kernels.fused import gdn_bwd, gdn_fwd, kda_bwd, kda_fwd\n"
        "from linattn_edu.kernels.gluon.support import available, tried\n"
        "print('' if tried() else available().reason)"
    )
    if done.returncode:
        return f"asking it ends the process with code {done.returncode}"
    return textwrap.shorten(done.stdout, 300) or None


def _process(code: str, **env: str) -> subprocess.CompletedProcess:
    """Run code in a fresh Python with this library, without TRITON_INTERPRET unless it is given."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | env
    root = str(Path(__file__).resolve().parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=TIMEOUT
    )


def _ptxas(capability: tuple[int, int]) -> Assembler | None:
    """The assembler that Triton calls for such a GPU, or None if it cannot say.

    It brings two, ptxas and ptxas-blackwell. Up to 3.8 the second is for 10.0 and later, in 3.9 for
    9.0 too. Asked in a process of its own, as in `_triton_problem`.
    """
    major, minor = capability
    done = _process(
        "import subprocess\n"
        "from triton import knobs\n"
        "from triton.backends.nvidia.compiler import get_ptxas\n"
        f"path = get_ptxas({10 * major + minor}).path\n"
        "second = path == knobs.nvidia.ptxas_blackwell.path != knobs.nvidia.ptxas.path\n"
        "print('TRITON_PTXAS_BLACKWELL_PATH' if second else 'TRITON_PTXAS_PATH', path, sep='\\n')\n"
        "print(subprocess.check_output([path, '--version'], text=True))"
    )
    found = re.search(r"V(\d+\.\d+\.\d+)", done.stdout)
    if done.returncode or not found:
        return None
    variable, path, *_ = done.stdout.splitlines()
    return Assembler(numbers(found.group(1)), path, variable)


def generation(capability: tuple[int, int]) -> str:
    """The name of a GPU generation, for a reader."""
    names = {
        (7, 5): "Turing",
        (8, 0): "Ampere",
        (8, 6): "Ampere",
        (8, 9): "Ada",
        (9, 0): "Hopper",
        (10, 0): "Blackwell",
        (10, 3): "Blackwell",
        (12, 0): "Blackwell",
        (12, 1): "Blackwell",
    }
    return names.get(capability, "before Turing" if capability < MIN_CAPABILITY else "unknown")


def notes(machine: Machine) -> list[Note]:
    """What is known about such a machine that can affect this library."""
    out: list[Note] = []
    m = machine
    if m.triton is None:
        advice = {
            "Linux": "pip install triton",
            "Windows": "run it in WSL, or read the book on Colab",
        }.get(m.system, "run the chapters on Linux or on Colab")
        out.append(
            Note(
                "Triton is not installed. The library works with its reference stages; the "
                "chapters, which build kernels, do not run.",
                advice,
            )
        )
    elif m.triton_problem is not None:
        out.append(
            Note(
                f"Triton cannot be used: {m.triton_problem}. The library works with its reference "
                "stages; the chapters, which build kernels, do not run.",
                "pip install --force-reinstall triton; if that does not help, look for a file or "
                "a folder called triton that is found before the package",
            )
        )
    elif UNKNOWN < m.triton < TRITON_MIN:
        out.append(
            Note(
                f"Triton {dotted(m.triton)} is older than {dotted(TRITON_MIN)}, the oldest version "
                "this library is written for. Older ones crash on matrix products for a T4.",
                "update torch, or pip install -U triton",
            )
        )
    elif m.numpy is None:
        out.append(
            Note(
                "NumPy is not installed, and Triton's interpreter needs it.",
                "pip install numpy",
                "interpreter",
            )
        )
    elif m.triton[:2] == (3, 6) and m.numpy >= (2, 4):
        out.append(
            Note(
                f"The interpreter of Triton {dotted(m.triton)} fails with NumPy {dotted(m.numpy)} "
                "on loops over a length known at run time; kernels that walk a sequence have one.",
                'pip install "numpy<2.4", or Triton 3.7 or newer',
                "interpreter",
            )
        )
    if m.hip_build:
        out.append(
            Note(
                "This torch is built for AMD GPUs. The library has not been tested on one.",
                'use impl="reference" to be sure of the result',
            )
        )
    elif m.gpu is None and m.nvidia_driver and not m.cuda_build:
        out.append(
            Note(
                "There is an NVIDIA driver, but this torch is built for the CPU only.",
                "install a CUDA build of torch: https://pytorch.org/get-started/locally",
            )
        )
    elif m.gpu is None and m.nvidia_driver:
        out.append(
            Note(
                "There is an NVIDIA driver and a CUDA build of torch, but torch sees no GPU.",
                "look at nvidia-smi; the driver may be older than the CUDA version of torch "
                f"({torch.version.cuda}), or CUDA_VISIBLE_DEVICES may hide the GPU",
            )
        )
    if m.capability is not None and not m.hip_build:
        out += _gpu_notes(m)
    if m.too_late:
        out.append(
            Note(
                "TRITON_INTERPRET=1 was set after Triton had been imported, too late for this "
                "process: its CPU tensors run the reference stages.",
                "restart Python, and set it before anything imports triton",
            )
        )
    if m.interpret and m.gpu is not None:
        out.append(
            Note(
                "TRITON_INTERPRET=1 is set, so even CUDA tensors go through the interpreter.",
                "unset TRITON_INTERPRET to use the GPU",
            )
        )
    return out


def _gpu_notes(m: Machine) -> list[Note]:
    out: list[Note] = []
    if m.capability < MIN_CAPABILITY:
        out.append(
            Note(
                f"The {m.gpu} has compute capability {dotted(m.capability)}; the kernels need "
                f"{dotted(MIN_CAPABILITY)} (Turing) or newer.",
                'keep the tensors on the CPU, or pass impl="reference"',
                "compiled",
            )
        )
    elif m.capability < (8, 0):
        out.append(
            Note(
                "On Turing GPUs (a T4, for one) Triton does not use the tensor cores: results are "
                "right, timings say nothing about newer GPUs.",
                "nothing to do for learning; measure speed on Ampere or newer",
            )
        )
    known = (12, 8), (12, 9), (13, 0)
    if m.capability == (9, 0) and m.ptxas is not None and m.ptxas.version[:2] in known:
        out.append(
            Note(
                f"Triton uses ptxas {dotted(m.ptxas.version)} here. The versions 12.8, 12.9 and "
                "13.0 are known to miscompile some kernels for Hopper. The GPU tests compare every "
                "configuration that this library launches with float64; kernels of your own may be "
                "hit.",
                "if a kernel is wrong on this GPU and right in the interpreter, set "
                f"{m.ptxas.variable} to a ptxas 13.1 or newer",
            )
        )
    if not m.c_compiler:
        out.append(
            Note(
                "No C compiler was found. Triton needs one to build the launcher of a kernel.",
                "install gcc, or set CC",
                "compiled",
            )
        )
    return out


def unavailable(way: str, machine: Machine) -> str | None:
    """Why a way is not there on this machine at all; None if it ought to run."""
    if way == "reference":
        return None
    if machine.triton is None:
        return "Triton is not installed"
    if machine.triton_problem is not None:
        return "Triton cannot be imported (see below)"
    if way == "compiled" and machine.gpu is None:
        return "no CUDA GPU"
    if way == "compiled" and machine.capability < MIN_CAPABILITY:
        return f"the GPU is older than compute capability {dotted(MIN_CAPABILITY)}"
    return None


def sets(machine: Machine) -> dict[str, tuple[bool, str]]:
    """Set of kernels -> whether a call may run it here, and for what, or why not."""
    why, interpreter = unavailable("compiled", machine), unavailable("interpreter", machine)
    if why is not None and interpreter is not None:
        return dict.fromkeys(("staged", "fused", "Gluon"), (False, why))
    if why is not None:
        text = f"in the interpreter alone: {why}"
        return {"staged": (True, text), "fused": (True, text), "Gluon": (False, why)}
    name = table_generation(machine.capability)
    later, gpu = name in ("hopper", "blackwell"), f"the {machine.gpu} is none"
    held = "float16 and bfloat16, heads of up to 128"
    out = {
        "staged": (True, "every dtype and head size"),
        "fused": (later, held if later else f"for Hopper and later: {gpu}"),
    }
    if name != "hopper":
        return out | {"Gluon": (False, f"for Hopper: {gpu}")}
    on = "float16 and bfloat16, heads of 128, some of 64; whole chunks of 64"
    why = machine.gluon_problem or ""
    return out | {"Gluon": (not why.startswith("off, "), why.removeprefix("off, ") or on)}


def check(way: str) -> str:
    """Run a small chunk_gated_delta_rule in one way and compare it with the recurrence.

    Args:
        way: "compiled", "interpreter" (TRITON_INTERPRET=1 must be set) or "reference".
    Returns:
        The dtypes that agree, as text.
    Raises:
        AssertionError: a result is wrong.  Anything else: it does not run.
    """
    from linattn_edu import chunk_gated_delta_rule
    from linattn_edu.reference.delta.recurrent import recurrent
    from linattn_edu.testing import assert_close, gdn_inputs

    impl = "reference" if way == "reference" else "triton"
    device = "cuda" if way == "compiled" else "cpu"
    for name, tol in TOLERANCE.items():
        x = gdn_inputs(1, 70, 1, 2, 16, 16, dtype=getattr(torch, name), initial_state=True)
        o_ref, state_ref = recurrent(**x.double().asdict())
        args = {n: t.to(device) for n, t in x.asdict().items()}
        o, state = chunk_gated_delta_rule(**args, output_final_state=True, impl=impl)
        assert_close(f"o in {name}", o, o_ref, tol)
        assert_close(f"final state in {name}", state, state_ref, tol)
    return ", ".join(TOLERANCE)


def attempt(way: str) -> tuple[bool, str]:
    """check(way) in a process of its own, since a faulty kernel can take its process with it.

    Returns:
        Whether it holds, and the dtypes or the reason.
    """
    env = {"TRITON_INTERPRET": "1"} if way == "interpreter" else {}
    try:
        done = _process(f"from linattn_edu.doctor import check; print(check({way!r}))", **env)
    except subprocess.TimeoutExpired:
        return False, f"not finished after {TIMEOUT} s"
    if done.returncode == 0:
        return True, done.stdout.strip().splitlines()[-1]
    lines = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
    return False, lines[-1] if lines else f"the process ended with code {done.returncode}"


def report(machine: Machine, results: dict[str, tuple[bool | None, str]]) -> str:
    """The page that the doctor prints."""
    from linattn_edu import __version__

    def absent(v: tuple[int, ...] | None) -> str:
        return {None: "not installed", UNKNOWN: "of unknown version"}.get(v) or dotted(v)

    gpu = "none that torch can use"
    if machine.gpu is not None:
        gpu = f"{machine.gpu}, compute capability {dotted(machine.capability)}"
        gpu += f" ({generation(machine.capability)})"
    ptxas = machine.ptxas
    lines = [
        f"linattn_edu {__version__}",
        f"  Python  {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"  torch   {torch.__version__}",
        f"  Triton  {absent(machine.triton)}{', broken' if machine.triton_problem else ''}",
        f"  NumPy   {absent(machine.numpy)}",
        f"  GPU     {gpu}",
        *([] if ptxas is None else [f"  ptxas   {dotted(ptxas.version)}, {ptxas.path}"]),
        "",
        "chunk_gated_delta_rule against the recurrence in float64:",
    ]
    found = notes(machine)
    explained = {note.way for note in found}
    word = {True: "right", False: "FAILS", None: "-"}
    for way, (holds, text) in results.items():
        see = " (see below)" if holds is False and way in explained else ""
        lines.append(f"  {way:<12} {word[holds]:<6} {text}{see}")
        if holds:
            lines.append(f"  {'':<19} {WHAT[way]}")
    lines += ["", "kernels (linattn_edu.route says which of them a call runs, and why):"]
    for name, (on, text) in sets(machine).items():
        lines.append(f"  {name:<12} {'on' if on else 'off':<6} {text}")
    for note in found:
        lines += ["", *textwrap.wrap(note.text, 96, initial_indent="* ", subsequent_indent="  ")]
        lines += textwrap.wrap(
            f"-> {note.advice}.", 96, initial_indent="  ", subsequent_indent="     "
        )
    return "\n".join([*lines, "", conclusion(results)])


def needed(results: dict[str, tuple[bool | None, str]]) -> list[str]:
    """The ways that the library and the chapters take on this machine.

    With a usable GPU the interpreter is not among them.
    """
    ways = ["reference", "interpreter" if results["compiled"][0] is None else "compiled"]
    return [way for way in ways if results[way][0] is not None]


def conclusion(results: dict[str, tuple[bool | None, str]]) -> str:
    """One sentence: whether the library is usable here, and what impl="auto" takes."""
    failed = [way for way in needed(results) if not results[way][0]]
    if failed:
        right = [way for way, (holds, _) in results.items() if holds]
        return f"Not usable as it is. Failing: {', '.join(failed)}; right: {', '.join(right)}."
    if results["compiled"][0]:
        return "Usable: CUDA tensors run the compiled kernels, CPU tensors the reference stages."
    return "Usable: CPU tensors run the reference stages."


def main() -> int:
    """Print the report; 0 if every way that is needed here gives the right result."""
    machine = examine()
    results: dict[str, tuple[bool | None, str]] = {}
    for way in WAYS:
        reason = unavailable(way, machine)
        results[way] = (None, reason) if reason else attempt(way)
    print(report(machine, results))
    return int(not all(results[way][0] for way in needed(results)))
