"""Compile the kernels with the newest Triton that there is, without a GPU (`make compile-newest`).

    python tools/newest.py      a sixtieth of the rows, another every day; all forms in Gluon

With LINATTN_EDU_FULL set every row is compiled. The newest `triton` goes into .venv/triton-newest,
and stays there while it is the newest. The tests that compile run with it in place of the pinned
one: kernels compile, shared memory suffices, spills are within bounds, products are on tensor
cores. What is kept of the pinned Triton is neither compared with nor changed.
"""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from notebooks import ROOT

FOLDER = ROOT / ".venv" / "triton-newest"
TESTS = (
    "tests/kernels/test_compile.py::test_rows",
    "tests/kernels/test_gluon.py::test_compiled_for_hopper",
)
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]


class NoAnswer(Exception):
    """pip has not found out, or not installed, what it was asked for."""


def pip(*options: str) -> str:
    """What `pip install` prints."""
    done = subprocess.run([*PIP, *options], capture_output=True, text=True)
    if done.returncode:
        raise NoAnswer(" ".join(done.stderr.split())[-300:])
    return done.stdout


def newest() -> str:
    """The version that pip would install; nothing is downloaded but what is said of it."""
    said = pip("--dry-run", "--ignore-installed", "--report", "-", "triton")
    return json.loads(said)["install"][0]["metadata"]["version"]


def installed(folder: Path) -> str | None:
    """The version that a folder has."""
    found = importlib.metadata.distributions(name="triton", path=[str(folder)])
    return next((x.version for x in found), None)


def provide(folder: Path) -> str:
    """Have the newest in the folder; its version."""
    here = installed(folder)
    try:
        version = newest()
    except NoAnswer as error:
        if here is None:
            raise
        print(f"pip cannot say which Triton is the newest; taken is {here}, the last one: {error}")
        return here
    if version != here:
        shutil.rmtree(folder, ignore_errors=True)
        pip("--target", str(folder), f"triton=={version}")
    return version


def main() -> int:
    """Run the tests that compile with it; 0 if they pass, or if it is the pinned one."""
    try:
        version = provide(FOLDER)
    except NoAnswer as error:
        print(f"the newest Triton cannot be installed, which needs a network: {error}")
        return 1
    if version == importlib.metadata.version("triton"):
        print(f"Triton {version}, the newest, is the one that is pinned: `make compile`")
        return 0
    path = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    env = os.environ | {"PYTHONPATH": path, "LINATTN_EDU_SAMPLE": "1"}
    code = "import triton; print(triton.__version__)"
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    if said.stdout.strip() != version:
        print(f"Triton {version} is in {FOLDER}, but another is imported: {said}")
        return 1
    print(f"Triton {version}", flush=True)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *TESTS], cwd=ROOT, env=env
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
