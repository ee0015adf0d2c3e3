"""The benchmark of one Triton beside another, without a GPU."""

import json

import pytest
import torch
import triton

from benchmarks import measure, tritons


@pytest.fixture
def card(monkeypatch):
    """A GPU on which a call takes as many ms as it has heads, longer with another Triton."""
    monkeypatch.setattr(measure, "usable_gpu", lambda: None)
    monkeypatch.setattr(measure, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(tritons, "assembler", lambda: "13.4")
    slower = {"3.6.0": 0, "3.9.0": 1}
    monkeypatch.setattr(tritons, "time_ms", lambda case, what: case.HV + slower[triton.__version__])


def test_a_row_a_triton(card, tmp_path, monkeypatch):
    out = tmp_path / "tritons.json"
    for version in ("3.6.0", "3.9.0", "3.9.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert tritons.main(["--out", str(out), "--cases", "gdn_train", "kda_kimi"]) == 0
    data = json.loads(out.read_text())
    assert "triton" not in data
    assert data["torch"] == torch.__version__
    rows = {(r["case"], r["what"], r["triton"]): r["ms"] for r in data["rows"]}
    assert len(rows) == len(data["rows"]) == 8
    assert rows["gdn_train", "forward", "3.9.0"] == 17
    assert rows["kda_kimi", "forward_backward", "3.6.0"] == 32
    assert all(r["ptxas"] == "13.4" and r["sources"] for r in data["rows"])


@pytest.mark.parametrize("args", [["--cases", "other"], ["--device", "cpu"]], ids=str)
def test_refused(args, capsys):
    assert tritons.main(args) == tritons.EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: ")
