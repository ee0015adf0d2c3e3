"""README and CONTRIBUTING: their Python runs, their links and commands exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PYTHON = [
    (name, i, code)
    for name in DOCUMENTS
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S))
]


@pytest.mark.parametrize(("name", "i", "code"), PYTHON, ids=[f"{n}-{i}" for n, i, _ in PYTHON])
def test_python_examples_run(name, i, code):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"print\(.*# (.*)$", code, re.M):
        shapes = re.findall(r"\[[\d, ]+\]", said)
        assert re.findall(r"\[[\d, ]+\]", done.stdout) == shapes


@pytest.mark.parametrize("name", DOCUMENTS)
def test_linked_files_exist(name):
    links = re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", (ROOT / name).read_text())
    local = [a or b for a, b in links if "://" not in (a or b)]
    assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_make_targets_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)\b(?=[`\s])", code_of(name))) <= targets


def code_of(name: str) -> str:
    """Blocks and spans of code of a document."""
    text = (ROOT / name).read_text()
    return "\n".join(re.findall(r"```bash\n.*?```|`[^`\n]+`", text, re.S))


JOINED = {"fused": ("intra", "scan"), "kda_bwd": ("kda_output_bwd", "kda_wy_bwd")}


def test_the_interface_lists_every_stage_and_kernel():
    """Functions of the stage files without an underscore, read without importing Triton."""
    listed = set(re.findall(r"autofunction:: ([\w.]+)", (ROOT / "book" / "api.md").read_text()))
    for side in ("reference", "kernels"):
        files = [
            p for p in (ROOT / "linattn_edu" / side / "delta").glob("*.py") if p.stem[0] != "_"
        ]
        stages = {
            f"linattn_edu.{side}.delta.{p.stem}.{name}"
            for p in files
            for name in JOINED.get(p.stem, (p.stem,))
        }
        kernels = {
            f"linattn_edu.{side}.delta.{p.stem}.{name}"
            for p in files
            for name in re.findall(r"^def (\w+_kernel)\(", p.read_text(), re.M)
        }
        ours = {name for name in listed if name.startswith(f"linattn_edu.{side}.delta.")}
        assert stages | kernels <= ours
