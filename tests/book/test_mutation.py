"""A fault in a kernel turns its chapter and its test red; without it, both are green.

The fault is put into a copy of the package, so nothing of it ships.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest
from book.layout import ROOT, toc

STAGE = "gate_cumsum"
SKIP = shutil.ignore_patterns("__pycache__", "data", ".ipynb_checkpoints")
RUNS = {
    "chapter": ["--nbval-lax", "chapters/{chapter}.ipynb"],
    "test": [f"tests/delta/test_{STAGE}.py::test_low_precision_gates"],
}


def plant_fault(kernel):
    """Make the kernel's tagged step wrong by one percent."""
    text, count = re.subn(
        rf"(# eq:delta-{STAGE.replace('_', '-')}\b.*\n\s*\w+ = )(.+)\n",
        r"\1(\2) * 1.01\n",
        kernel.read_text(),
    )
    assert count == 1, "the fault found no place in the kernel"
    kernel.write_text(text)


@pytest.mark.parametrize("faulty", [False, True], ids=["sound", "faulty"])
@pytest.mark.parametrize("what", RUNS)
def test_fault_turns_it_red(what, faulty, tmp_path):
    chapter = next((c for c in toc() if c.endswith(STAGE)), None)
    assert chapter, f"no chapter on {STAGE}"
    for name in ("linattn_edu", "chapters", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=SKIP)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    if faulty:
        plant_fault(tmp_path / "linattn_edu" / "kernels" / "delta" / f"{STAGE}.py")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        + [a.format(chapter=chapter) for a in RUNS[what]],
        cwd=tmp_path,
        env=env | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    report = done.stdout + done.stderr
    assert done.returncode == (1 if faulty else 0), report[-3000:]
    if faulty:
        assert "AssertionError" in report, "red, but not by a failed comparison"
