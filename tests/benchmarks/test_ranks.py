"""The benchmark of several ranks, with two processes on the CPU."""

import json

import pytest
import torch

from benchmarks import ranks


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_two_processes(tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the reference: many calls
    out = tmp_path / "cp.json"
    sizes = ["--tokens", "200", "--heads", "1", "--size", "16", "--ops", "gdn"]
    assert ranks.main(["--device", "cpu", "--out", str(out), *sizes]) == 0
    rows = json.loads(out.read_text())["rows"]
    found = {(row["what"], row["ranks"]) for row in rows}
    calls = ("forward", "forward_backward")
    assert found == {("gather", 2), *((what, n) for what in calls for n in (1, 2))}
    assert all(row["ms"] > 0 for row in rows)
    errors = [row[n] for row in rows for n in ("error", "error_gradients") if n in row]
    assert len(errors) == 8 and max(errors) < 1e-5


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are two GPUs")
def test_too_few_gpus(capsys):
    assert ranks.main([]) == 2
    assert "2 GPUs are wanted" in capsys.readouterr().err
