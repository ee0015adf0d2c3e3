"""The benchmark of the host's part, without a GPU: what it prints and writes."""

import json
import os
import subprocess
import sys


def test_three_designs(tmp_path):
    """In a process of its own, which computes nothing from there on."""
    out = tmp_path / "host.json"
    command = [sys.executable, "-m", "benchmarks.host", "--device", "cpu", "--out", str(out)]
    sizes = ["--calls", "3", "--rounds", "2", "--cases", "gdn_token_1", "ssd_token_1"]
    variables = {**os.environ, "PYTHONPATH": ":".join(p for p in sys.path if p)}
    variables.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        command + sizes, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["case"], row["design"]) for row in rows] == [
        (case, design)
        for case in ("gdn_token_1", "ssd_token_1")
        for design in ("composed", "handles", "tape")
    ]
    for row in rows:
        assert row["calls"] == 6 and row["same_bits"]
        for name in ("host_us", "wall_us"):
            low, high = row[f"{name}_quartiles"]
            assert 0 < low <= row[name] <= high
    *_, last = done.stdout.splitlines()
    assert last.startswith("handles within 15 % of the tape") and last.split()[-1] in ("yes", "no")
