"""The tuner's driver and its worker; nothing is timed."""

import json
import sys
from importlib import import_module

import pytest
import torch
from benchmarking import DEVICE, SMALL

from benchmarks import tune
from benchmarks.cases import CASES, Case


@pytest.mark.parametrize(
    ("op", "kernel"), [(op, name) for name, place in tune.PLACES.items() for op in place.ops]
)
def test_tuner_checks_a_row_and_puts_the_shipped_one_back(op, kernel, monkeypatch):
    monkeypatch.setattr(tune, "SMALL_T", 70)
    wide = 64 if DEVICE == "cuda" else 16  # narrower products are miscompiled for some GPUs
    case = Case("tiny", op, 2, 128, 1, 2, wide, wide)
    rows = list(tune.candidates(kernel, CASES[f"{op}_train"]))
    assert len(rows) == len({json.dumps(row) for row in rows}) > 1
    sizes = {"BK": wide, "BV": wide, "BH": 16, "BD": 32}
    row = {name: sizes.get(name, x) for name, x in rows[0].items()}
    place = tune.PLACES[kernel]
    module = import_module(f"linattn_edu.kernels.{place.module}")
    before = getattr(module, place.table)
    result = tune.Worker(DEVICE).run(kernel, case, row, timed=False)
    assert result["error"] < 5e-3
    assert getattr(module, place.table) is before


def test_tuner_uses_the_row_that_it_is_given():
    with tune.installed("scan", SMALL, {"BV": 32, "num_warps": 2, "num_stages": 5}, "hopper"):
        from linattn_edu.kernels.fused.gdn_fwd import SCAN_CONFIGS
        from linattn_edu.kernels.routes import scan_launch

        k = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
        _, chosen = scan_launch(SCAN_CONFIGS, k, 8, 128)
    assert chosen == {"BK": 128, "BV": 32, "num_warps": 2, "num_stages": 5}


WORKER = """
import json, os, sys
for item in json.load(sys.stdin):
    print(json.dumps({"n": item["n"], "started": True}), flush=True)
    if item["n"] == 1:
        os._exit(9)
    if item["n"] == 3:
        import time
        time.sleep(60)
    result = {"failed": "CUDA error"} if item["n"] == 4 else {"error": 0.5}
    print(json.dumps({"n": item["n"], **result}), flush=True)
    if item["n"] == 4:
        sys.exit(1)
print("noise")
"""


def test_tuner_goes_on_after_a_worker_that_dies_or_hangs(monkeypatch):
    monkeypatch.setattr(tune, "LIMIT_S", 3)
    items = [{"n": n} for n in range(6)]
    seen = []
    tune.drive(items, False, lambda x: seen.append(x["n"]), (sys.executable, "-c", WORKER))
    assert seen == list(range(6))
    assert [("died" in x.get("failed", ""), x.get("error")) for x in items] == [
        (False, 0.5), (True, None), (False, 0.5), (True, None), (False, None), (False, 0.5),
    ]  # fmt: skip


def test_tuner_gives_up_when_no_worker_starts():
    items = [{"n": 0}, {"n": 1}]
    tune.drive(items, False, lambda x: None, (sys.executable, "-c", "raise SystemExit(5)"))
    assert all("did not start (exit code 5)" in x["failed"] for x in items)


def test_tuner_summary_lists_the_bad_ones_and_the_best():
    base = {"kernel": "solve", "case": vars(CASES["gdn_train"])}
    items = [
        {**base, "row": {"BK": 32}, "error": 1e-3, "ms": 0.2},
        {**base, "row": {"BK": 64}, "error": 1e-3, "ms": 0.1},
        {**base, "row": {"BK": 128}, "error": 0.3},
        {**base, "row": {"BK": 16}, "failed": "the worker died (exit code 1)"},
        {**base, "row": {"BK": 8}, "failed": "OutOfResources: shared memory"},
    ]
    text = tune.summary(items)
    assert text.index("wrong results:") < text.index("BK=128") < text.index("failed:")
    assert text.index("BK=16") < text.index("best of") < text.index("BK=64") < text.index("BK=32")
    assert "5 candidates, 1 need" in text
