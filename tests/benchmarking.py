"""What the tests of the benchmarks share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from benchmarks import measure
from benchmarks.cases import CASES, Case, scaling_case, work

TINY = Case("tiny", "gdn", 2, 7, 1, 2, 3, 2)
SMALL = Case("gdn_train", "gdn", 1, 80, 1, 2, 16, 16)
DECODE = Case("gdn_decode", "gdn_decode", 3, 1, 2, 4, 16, 8)
KDA_SMALL = Case("kda_train", "kda", 1, 80, 1, 2, 16, 16)
KDA_DECODE = Case("kda_decode", "kda_decode", 3, 1, 2, 4, 16, 8)
RATES = (4.3e12, 790e12)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about no GPU")


def module(*args: str) -> subprocess.CompletedProcess:
    """Run a module as a user does."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *args],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def stop_the_clock(monkeypatch) -> None:
    """Calls run, on a GPU or in the interpreter; times and sizes are made up."""
    monkeypatch.setattr(measure, "time_ms", lambda f: (f(), 0.25)[1])
    monkeypatch.setattr(measure, "peak_mib", lambda f: (f(), 3.0)[1])
    monkeypatch.setattr(measure, "synchronize", lambda: None)


def some(rows=(), **top) -> dict:
    """Results made up."""
    base = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "fla": None}
    return {**base, "date": "2026-01-01", **top, "rows": list(rows)}


def some_row(case="gdn_train", library="fla", what="forward", ms=1.0, **more) -> dict:
    """A row made up."""
    w = work(CASES.get(case) or scaling_case(more.get("T", 256)), what)
    counts = {"bytes": w.bytes, "flops": w.flops, "floor_ms": w.floor_ms()}
    return {"case": case, "library": library, "what": what, "ms": ms, **counts, **more}
