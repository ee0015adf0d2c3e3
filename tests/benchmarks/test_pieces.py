"""The benchmark of pieces, on the CPU."""

import json

from benchmarks import pieces


def test_lengths_of_a_piece(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "pieces.json"
    sizes = ["--heads", "1", "--tokens", "256", "--lengths", "64", "128", "512", "--ops", "gdn"]
    assert pieces.main(["--device", "cpu", "--out", str(out), *sizes]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["piece"] for row in rows] == [0, 64, 128]
    assert all(row["ms"] > 0 for row in rows)
    errors = [row["error"] for row in rows]
    assert errors[0] == 0 and 0 < errors[1] < 1e-6 and errors[2] < 1e-6


def test_scans_that_begin_where_the_state_is_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "pieces.json"
    sizes = ["--pairs", "1/2", "--tokens", "256", "--ops", "scans"]
    assert pieces.main(["--device", "cpu", "--out", str(out), *sizes]) == 0
    rows = json.loads(out.read_text())["rows"]
    kinds = ("every third", "usual", "zero")
    assert [(r["op"], r["gates"], r["piece"]) for r in rows] == [
        (op, gates, piece) for op in ("scan", "scans") for gates in kinds for piece in (0, 128)
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert all(row["error"] < 1e-6 for row in rows)
    found = {row["gates"]: row["forgotten"] for row in rows if row["piece"]}
    assert found == {"usual": 1, "zero": 0, "every third": 0.5}


def test_a_piece_of_half_a_chunk(capsys):
    assert pieces.main(["--device", "cpu", "--lengths", "96"]) == 2
    assert "whole chunks of 64 tokens, got [96]" in capsys.readouterr().err
