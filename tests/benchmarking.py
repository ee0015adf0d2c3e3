"""What the tests of the benchmarks share."""

import os
import sys
from pathlib import Path

import pytest
import torch
from forks import python

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
GDN2_DECODE = Case("gdn2_decode", "gdn2_decode", 3, 1, 4, 4, 16, 8)
DPLR_SMALL = Case("dplr_train", "dplr", 1, 80, 2, 2, 16, 12)
RWKV7_SMALL = Case("rwkv7_train", "rwkv7", 1, 80, 2, 2, 16, 12)
SSD_SMALL = Case("ssd_2.7b", "ssd", 2, 80, 2, 4, 16, 16)
SSD_DECODE = Case("ssd_decode", "ssd_decode", 3, 1, 2, 4, 16, 8)
EMA_SMALL = Case("ema_train", "ema", 2, 80, 1, 1, 1, 33)
RATES = (4.3e12, 790e12)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about no GPU")


def modules(commands: list[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[int, str, str]]:
    """Run modules as a user does, (name, *arguments), each in a fork of a process that has loaded
    torch; return of each its exit code and what it wrote to stdout and stderr."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ends = (python("-m", *command, env=env) for command in commands)
    return {c: (x.returncode, x.stdout, x.stderr) for c, x in zip(commands, ends, strict=True)}


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
