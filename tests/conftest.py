"""One suite for both: compiled kernels where there is a GPU, else Triton's interpreter."""

import gc
import importlib.util
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.10 will change the default

import pytest

from linattn_edu import testing

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from interpreter import quicken

    quicken()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="of each test function one case")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        kept = first_cases(items)
        config.hook.pytest_deselected(items=[x for x in items if x not in kept])
        items[:] = kept
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish():
    """What is loaded by now stays: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    """Or Triton's bindings say at the end what is left; after pytest's own collections, as the last
    of what is cleaned up is what was added first.
    """
    config.add_cleanup(gc.unfreeze)


def first_cases(items):
    """What --quick keeps: the first case of every test function, all of a file marked `whole`, and
    nothing that is marked `long`.
    """
    seen = set()

    def first(item):
        function = item.nodeid.partition("[")[0]
        return not (function in seen or seen.add(function))

    short = [x for x in items if not x.get_closest_marker("long")]
    return [x for x in short if first(x) or x.get_closest_marker("whole")]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """An illegal access ends the CUDA context: end the worker too, or every later test fails."""
    yield
    if call.excinfo is not None and "illegal memory access" in str(call.excinfo.value):
        if os.environ.get("PYTEST_XDIST_WORKER"):
            os._exit(3)
        pytest.exit(f"{item.nodeid}: illegal memory access", returncode=3)


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Where LINATTN_EDU_RAN names a file, what ran on which GPU goes into it."""
    file = os.environ.get("LINATTN_EDU_RAN")
    if not file or not torch.cuda.is_available() or hasattr(config, "workerinput"):
        return
    from gpu import ran

    counts = {name: len(found) for name, found in terminalreporter.stats.items()}
    only = [f"-k {config.option.keyword}"] if config.option.keyword else []
    cut = exitstatus == pytest.ExitCode.INTERRUPTED
    ran.add(ran.record([*config.args, *only], counts, cut), Path(file))


@pytest.fixture(autouse=True)
def no_plans():
    """A test that changes what is launched does not meet the programs of another."""
    if plan := sys.modules.get("linattn_edu.kernels.host.plan"):
        plan.clear()


@pytest.fixture
def device(request) -> torch.device:
    """The GPU if there is one; but in a module with REFERENCE_ON_CPU the CPU for the reference."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    on_cpu = parameters.get("impl") == "reference" and hasattr(request.module, "REFERENCE_ON_CPU")
    return torch.device("cuda" if torch.cuda.is_available() and not on_cpu else "cpu")


@pytest.fixture
def force():
    """force(scan="triton", LENGTH=256): what routes choose in a test, and limits that they have."""
    from linattn_edu.kernels.routes import forced

    with ExitStack() as stack:
        yield lambda **what: stack.enter_context(forced(**what))


@pytest.fixture
def poison():
    """Uninitialised memory reads as NaN: an output left unwritten fails."""
    with testing.poison():
        yield


@pytest.fixture
def undo(monkeypatch):
    """undo(): from now on Triton's own interpreter, without what interpreter.py replaced."""
    from interpreter import REPLACED
    from triton.runtime import interpreter

    def act():
        for where, name in REPLACED:
            monkeypatch.setattr(where, name, getattr(where, name).__wrapped__)
        builder = interpreter.interpreter_builder
        monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions())

    return act
