"""The benchmark of the fused stages, on the CPU."""

import json
from dataclasses import fields

import pytest
import torch

from benchmarks import fusion, measure
from benchmarks.cases import FUSED_ADJOINT_STAGES, work

SHAPE = (1, 70, 1, 2, 16)


def nbytes(values) -> int:
    return sum(x.nbytes for x in values if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("form", fusion.FORMS)
def test_bytes_of_every_stage_are_those_of_its_tensors(form):
    case = fusion.case_of(SHAPE, 4)
    i = measure.inputs(case, "cpu")
    stages, kept = fusion.FORMS[form]("reference"), fusion.KEPT[form]
    recording, calls = fusion.recorded(stages)
    inputs, scale = (i.q, i.k, i.v, i.g, i.beta), 0.25
    *_, kept = fusion.gdn.forward(recording, *inputs, scale=scale, keep=kept)
    fusion.each_stage(stages, calls)
    # with the inverse: the forward pass alone has none
    intra = calls.pop("intra_chunk", None)
    fusion.gdn.backward(recording, *inputs, kept, measure.gradient(i.v), scale=scale)
    fusion.each_stage(stages, calls)
    if form == "fused":
        assert set(FUSED_ADJOINT_STAGES) < set(calls) and intra is not None
    for name, call in calls.items():
        out = call()
        out = out if isinstance(out, tuple) else (out,)
        assert work(case, f"stage:{name}").bytes == nbytes((*call.args, *out)), name


def test_a_recording_runs_the_same_stages():
    stages = fusion.gdn.fused_stages("reference")
    recording, calls = fusion.recorded(stages)
    g = torch.zeros(1, 64, 1)
    assert torch.equal(recording.gate_cumsum(g, chunk_size=64), calls["gate_cumsum"]())
    assert list(calls) == ["gate_cumsum"]
    assert [f.name for f in fields(recording)] == [f.name for f in fields(stages)]


def test_passes_and_their_stages(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(fusion, "TRIAL", (SHAPE,))
    out = tmp_path / "fusion.json"
    assert fusion.main(["--device", "cpu", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    whats = {(row["form"], row["what"]) for row in rows}
    assert {(form, what) for form in fusion.FORMS for what in ("forward", "backward")} < whats
    assert {("fused", f"backward:{name}") for name in FUSED_ADJOINT_STAGES} < whats
    scans = {row["what"].split(":")[-1] for row in rows if "programs" in row}
    assert scans == set(fusion.SCANS)
    assert all(row["ms"] > 0 for row in rows)
    for row in rows:
        errors = [x for name, x in row.items() if name.startswith("error")]
        assert len(errors) == (5 if row["what"] == "backward" else 0)
        assert all(x < 1e-5 for x in (*errors, row.get("apart", 0.0)))
