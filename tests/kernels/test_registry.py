"""The registry of stages has them all."""

import importlib
import re
from pathlib import Path

import pytest
import stages
import torch
from kernels import blanks
from kernels.kept import is_kernel

pytest.importorskip("triton")

pytestmark = pytest.mark.whole
ROOT = Path(__file__).parents[2]
FILES = sorted(
    f"{folder}/{p.stem}"
    for folder in ("delta", "dplr", "ssd", "fused")
    for p in (ROOT / "linattn_edu/kernels" / folder).glob("*.py")
    if p.stem != "__init__"
)
# what launches nothing of its own, or only as a part of others
WITHIN = {
    "delta/warm_up warm_up": "of the scans in pieces",
    "delta/causal_conv1d reach": "of causal_conv1d",
}


def functions(file):
    """The names of what is in both rooms, but for code of kernels."""
    rooms = [
        importlib.import_module(f"linattn_edu.{room}.{file.replace('/', '.')}")
        for room in ("kernels", "reference")
    ]
    return {
        name
        for name, f in vars(rooms[0]).items()
        if getattr(f, "__module__", "") == rooms[0].__name__ and not name.startswith("_")
        and callable(f) and hasattr(rooms[1], name) and not is_kernel(f)
    }  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_every_stage_is_in_the_registry(file):
    known = {s.name for s in stages.STAGES if s.file == file}
    known |= {x.split()[1] for x in WITHIN if x.split()[0] == file}
    assert known and functions(file) == known


@pytest.mark.parametrize("file", FILES)
def test_every_stage_is_in_its_test(file):
    text = "".join(p.read_text() for p in (ROOT / "tests" / file).parent.glob("test_*.py"))
    missing = {n for n in functions(file) if not re.search(rf"\b{n}\b", text)}
    assert missing <= {x.split()[1] for x in WITHIN}


def test_every_table_is_there():
    tables = [(s, t) for s in stages.STAGES for t in s.tables]
    assert len({t.name for _, t in tables}) == len(tables) > 20
    assert all(getattr(s.module, t.table) for s, t in tables)


def test_every_family_is_compiled():
    """And a family's stage finds there all that it reads."""
    found = blanks.of_sizes(64, 64, torch.bfloat16, 64)
    assert {s.family for s in stages.STAGES} == set(found) >= set(stages.FAMILIES)
    for s in stages.STAGES:
        assert all(s.calls(r) for r in found[s.family] if s.when(r)), s.name
