"""Every kernel, every row its launcher picks, compiled for GPUs that are not here."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from linattn_edu.kernels.tiles import generation

pytest.importorskip("triton")

# shared memory one program may use, in bytes: CUDA C++ programming guide, compute capabilities
SHARED = {75: 64 << 10, 80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
# Kernels of the state keep S [BK, BV] and a chunk in registers, output_bwd and wy_bwd whole values.
# In fp32 each operand is split in three (tf32x3), without tensor cores whole operands are held, and
# heads that are no multiple of 16 bytes have masks and addresses beside them: these spill, by at
# most this many bytes.
STACK = {
    "half": 1 << 10,
    "half, K=256": 2 << 10,
    "half, odd heads": 12 << 10,
    "float32": 2 << 10,
    "float32, K=256": 10 << 10,
    "turing": 4 << 10,
}
# kernels without a matrix product, or with small ones only
SCALAR = ("gate_", "recurrent", "cumsum", "l2norm", "solve_tril")
ONE_BLOCK = re.compile(r"^kda_inverse.*\bBT=16\b")  # nothing is left to merge


def bound(cc, row):
    if generation(divmod(cc, 10)) == "turing":
        return STACK["turing"]
    if "ptr=torch.float32" in row and "ptr=torch.bfloat16" not in row:
        return STACK["float32, K=256" if "K=256" in row else "float32"]
    if re.search(r"\bK=(33|255)\b", row):
        return STACK["half, odd heads"]
    return STACK["half, K=256" if "K=256" in row else "half"]


@pytest.mark.parametrize("cc", SHARED)
def test_rows_compile(cc, record_property):
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    worker = Path(__file__).with_name("compile_rows.py")
    result = subprocess.run(
        [sys.executable, worker, str(cc)],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    kernels = {row["row"].split()[0] for row in rows}
    assert kernels >= {
        f"{name}_kernel"
        for name in (
            "recurrent", "gate_cumsum", "solve", "wy", "state", "output",
            "scores", "resolvent", "scan", "output_bwd", "state_bwd", "wy_bwd", "gate_bwd",
            "recurrent_bwd", "solve_tril", "cumsum", "l2norm", "l2norm_bwd",
            "kda_scores", "kda_inverse", "kda_output_bwd", "kda_wy_bwd", "kda_intra_bwd",
        )
    }  # fmt: skip
    spilling = []
    for row in rows:
        assert row["shared"] <= SHARED[cc], row
        assert row["stack"] <= bound(cc, row["row"]), row
        if cc >= 80 and not row["row"].startswith(SCALAR) and not ONE_BLOCK.match(row["row"]):
            assert row["mma"], row
        if row["stack"]:
            spilling.append(f"{row['stack']} B: {row['row']}")
    record_property("spills", spilling)
    print(f"cc {cc}: {len(rows)} rows, {len(spilling)} spill", *spilling, sep="\n  ")
