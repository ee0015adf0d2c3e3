"""The doctor: its notes for made-up machines, and its report on this one."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from forks import python
from grids import few

from linattn_edu import doctor
from linattn_edu.doctor import Assembler, Machine, notes, unavailable

ROOT = Path(__file__).resolve().parents[1]
H200 = {"gpu": "NVIDIA H200", "capability": (9, 0), "cuda_build": True, "nvidia_driver": True}
T4 = {"gpu": "Tesla T4", "capability": (7, 5), "cuda_build": True, "nvidia_driver": True}
OLD = Assembler((12, 8, 93), "bin/ptxas", "TRITON_PTXAS_PATH")
P100 = {"gpu": "Tesla P100", "capability": (6, 0), "cuda_build": True, "nvidia_driver": True}


def machine(**facts) -> Machine:
    return Machine(**{"torch": (2, 13, 0), "triton": (3, 7, 1), "numpy": (2, 4, 6), **facts})


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"triton": None}, "Triton is not installed"),
        ({"triton": (3, 5, 1)}, "older than 3.6"),
        ({"triton": (3, 5, 1), "triton_problem": "it is broken"}, "cannot be used: it is broken. "),
        ({"triton": doctor.UNKNOWN, "triton_problem": "it is broken"}, "it is broken. "),
        ({"too_late": True}, "after Triton had been imported"),
        ({"triton": (3, 6, 0), "numpy": (2, 4, 0)}, "fails with NumPy 2.4.0"),
        ({"numpy": None}, "NumPy is not installed"),
        ({"nvidia_driver": True}, "built for the CPU only"),
        ({"nvidia_driver": True, "cuda_build": True}, "sees no GPU"),
        ({"hip_build": True, "gpu": "MI300", "capability": (9, 4)}, "AMD"),
        (T4, "does not use the tensor cores"),
        (P100, "need 7.5"),
        ({**H200, "ptxas": OLD}, "ptxas 12.8.93"),
        ({**H200, "c_compiler": False}, "C compiler"),
        ({**H200, "interpret": True}, "TRITON_INTERPRET=1 is set"),
    ],
)
def test_a_known_problem_gets_one_note_with_advice(facts, says):
    (note,) = notes(machine(**facts))
    assert says in note.text
    assert note.advice


@pytest.mark.parametrize(
    "facts",
    [
        {},
        H200,
        {**H200, "ptxas": OLD._replace(version=(13, 1, 80))},
        {**T4, "capability": (8, 9), "ptxas": OLD},
        {"triton": (3, 6, 0), "numpy": (2, 3, 5)},
        {"triton": (3, 8, 0)},
        {"c_compiler": False},
        {"triton": doctor.UNKNOWN},
    ],
)
def test_a_good_machine_gets_no_note(facts):
    assert notes(machine(**facts)) == []


@pytest.mark.parametrize(
    ("facts", "runs"),
    [
        ({}, {"interpreter", "reference"}),
        ({"triton": None}, {"reference"}),
        ({**H200, "triton_problem": "it is broken"}, {"reference"}),
        (H200, {"compiled", "interpreter", "reference"}),
        (P100, {"interpreter", "reference"}),
    ],
)
def test_what_runs_where(facts, runs):
    assert {way for way in doctor.WAYS if unavailable(way, machine(**facts)) is None} == runs


def test_a_failing_way_is_named_with_its_note_and_the_reason():
    results = {
        "compiled": (None, "no CUDA GPU"),
        "interpreter": (False, "TypeError: only length-1 arrays"),
        "reference": (True, "float32"),
    }
    text = doctor.report(machine(triton=(3, 6, 0)), results)
    assert "interpreter  FAILS  TypeError: only length-1 arrays (see below)" in text
    assert 'pip install "numpy<2.4"' in text
    assert "Failing: interpreter; right: reference." in text


A100 = {"gpu": "NVIDIA A100", "capability": (8, 0), "cuda_build": True, "nvidia_driver": True}
B200 = {"gpu": "NVIDIA B200", "capability": (10, 0), "cuda_build": True, "nvidia_driver": True}
OFF = "off, Triton 3.5.1: it needs 3.6 or newer"
NEW = "Triton 3.10.0, newer than 3.9, the last one with which they have been run"


@pytest.mark.parametrize(
    ("facts", "on", "why"),
    [
        (H200, "staged fused Gluon", "whole chunks of 64"),
        ({**H200, "gluon_problem": OFF}, "staged fused", "Triton 3.5.1"),
        ({**H200, "gluon_problem": NEW}, "staged fused Gluon", "Triton 3.10.0, newer than 3.9"),
        (B200, "staged fused", "for Hopper: the NVIDIA B200 is none"),
        (A100, "staged", "for Hopper and later: the NVIDIA A100 is none"),
        (T4, "staged", "for Hopper and later: the Tesla T4 is none"),
        (P100, "staged fused", "in the interpreter alone: the GPU is older"),
        ({}, "staged fused", "in the interpreter alone: no CUDA GPU"),
        ({"triton": None}, "", "Triton is not installed"),
        ({**H200, "triton_problem": "it is broken"}, "", "Triton cannot be imported"),
    ],
)
def test_which_sets_are_on(facts, on, why):
    sets = doctor.sets(machine(**facts))
    assert [*sets] == ["staged", "fused", "Gluon"]
    assert [name for name, (is_on, _) in sets.items() if is_on] == on.split()
    assert why in " ".join(text for _, text in sets.values())


def test_the_report_says_which_sets_are_on():
    results = dict.fromkeys(doctor.WAYS, (True, "float32"))
    text = doctor.report(machine(**H200, gluon_problem=OFF), results)
    assert "fused        on     float16 and bfloat16, heads of up to 128" in text
    assert "Gluon        off    Triton 3.5.1: it needs 3.6 or newer" in text


@pytest.mark.parametrize(
    ("compiled", "interpreter", "reference", "usable"),
    [
        (True, True, True, True),
        (True, False, True, True),  # with a GPU nothing needs the interpreter
        (False, True, True, False),
        (None, True, True, True),
        (None, False, True, False),  # the chapters need it
        (None, None, True, True),
        (True, True, False, False),
    ],
)
def test_usable_is_what_this_machine_needs(
    compiled, interpreter, reference, usable, monkeypatch, capsys
):
    holds = {"compiled": compiled, "interpreter": interpreter, "reference": reference}
    monkeypatch.setattr(doctor, "examine", machine)
    monkeypatch.setattr(doctor, "unavailable", lambda way, _: holds[way] is None and "absent")
    monkeypatch.setattr(doctor, "attempt", lambda way: (holds[way], "float32"))
    assert doctor.main() == (not usable)
    assert capsys.readouterr().out.splitlines()[-1].startswith("Usable" if usable else "Not usable")


def test_an_attempt_reports_the_error_of_its_process(monkeypatch):
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor.attempt("reference") == (False, "the process ended with code 1")


def run(*command: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return python(*command, env=env)


@pytest.mark.long
def test_the_command_runs_each_way_that_is_here():
    done = run("-m", "linattn_edu", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    used = "compiled" if torch.cuda.is_available() else "interpreter"
    for way in (used, "reference"):
        assert f"{way:<12} right  float32, float16, bfloat16" in done.stdout
    assert "Usable" in done.stdout
    assert f"{'staged':<12} on" in done.stdout


@pytest.mark.long
def test_the_command_runs_without_triton():
    hide = "import sys; sys.modules['triton'] = None; from linattn_edu.__main__ import main; "
    done = run("-c", hide + "sys.exit(main(['doctor']))")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Triton is not installed" in done.stdout
    assert f"{'reference':<12} right" in done.stdout


BROKEN = {
    "raise ImportError('libcuda is not\\n  there')": "(ImportError: libcuda is not there)",
    "raise RuntimeError('libcuda is not there')": "(RuntimeError: libcuda is not there)",
    "import os; os.no_such_thing": "(AttributeError: module 'os' has no attribute",
    "import os; os._exit(3)": "ends the process with code 3",
}


@pytest.fixture
def broken(request, tmp_path, monkeypatch) -> str:
    """The one line of a package triton that is found before the others."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(request.param)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return request.param


@pytest.mark.parametrize("broken", few(*[*BROKEN][::3], more=[*BROKEN][1:3]), indirect=True)
def test_what_importing_triton_fails_with(broken):
    assert BROKEN[broken] in doctor._triton_problem()


@pytest.mark.long
@pytest.mark.parametrize("broken", [next(iter(BROKEN))], indirect=True)
def test_the_command_goes_on_where_triton_is_broken(broken):
    """One sentence says so; the reference works, in the doctor and in the library."""
    done = run("-m", "linattn_edu", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert text.count("Triton cannot be used: ") == 1 and BROKEN[broken] in text
    assert f"{'reference':<12} right  float32, float16, bfloat16" in done.stdout
    for way in ("compiled", "interpreter"):
        assert f"{way:<12} -      Triton cannot be imported (see below)" in done.stdout
    assert done.stdout.splitlines()[-1] == "Usable: CPU tensors run the reference stages."


@pytest.mark.long
def test_the_doctor_sees_that_the_interpreter_was_asked_for_too_late():
    pytest.importorskip("triton")
    late = "import os, sys, triton; os.environ['TRITON_INTERPRET'] = '1'; "
    done = run("-c", late + "from linattn_edu.doctor import examine; sys.exit(examine().too_late)")
    assert done.returncode == 1, done.stderr


@pytest.mark.long
def test_asking_the_doctor_does_not_import_triton():
    """Else TRITON_INTERPRET could no longer be set in that process."""
    code = "import sys; from linattn_edu.doctor import examine; examine(); "
    done = run("-c", code + "sys.exit('triton.language' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_the_assembler_is_the_one_that_triton_calls(tmp_path, monkeypatch):
    """For each capability, its own and where the environment names others."""
    get_ptxas = pytest.importorskip("triton.backends.nvidia.compiler").get_ptxas
    names = "TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"
    for name in names:
        monkeypatch.delenv(name, raising=False)
    called = {arch: get_ptxas(arch) for arch in (80, 90, 100)}
    own = {arch: doctor._ptxas(divmod(arch, 10)) for arch in called}
    for n, name in enumerate(names):
        path = tmp_path / f"ptxas{n}"
        path.write_text(f"#!/bin/sh\necho Cuda compilation tools, release 7.{n}, V7.{n}.9")
        path.chmod(0o755)
        monkeypatch.setenv(name, str(path))
    for arch, tool in called.items():
        assert own[arch].path == tool.path
        assert doctor.dotted(own[arch].version).startswith(tool.version)
        other = doctor._ptxas(divmod(arch, 10))
        assert other.path == get_ptxas(arch).path == os.environ[own[arch].variable]
        assert other == ((7, names.index(other.variable), 9), other.path, own[arch].variable)


def test_the_report_and_the_advice_name_the_assembler():
    facts = {**H200, "ptxas": OLD._replace(variable="TRITON_PTXAS_BLACKWELL_PATH")}
    text = doctor.report(machine(**facts), dict.fromkeys(doctor.WAYS, (True, "float32")))
    assert "  ptxas   12.8.93, bin/ptxas\n" in text
    assert "set TRITON_PTXAS_BLACKWELL_PATH to a ptxas 13.1" in " ".join(text.split())


def test_the_kernels_in_gluon_have_been_run_with_this_triton():
    assert doctor._gluon_problem() is None


def test_an_unknown_command_is_refused():
    done = run("-m", "linattn_edu", "docter")
    assert done.returncode == 2
    assert "doctor" in done.stderr
