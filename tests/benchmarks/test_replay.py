"""The benchmark of decoding with a ring, on the CPU."""

import json

from benchmarks import replay


def test_every_way(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "replay.json"
    assert replay.main(["--device", "cpu", "--out", str(out), "--sequences", "2"]) == 0
    rows = json.loads(out.read_text())["rows"]
    cases = {(row["op"], row["tokens"], row["how"]) for row in rows}
    assert cases == {(op, T, how) for op in replay.OF for T in replay.CALLS for how in replay.HOW}
    assert all(row["ms"] > 0 for row in rows)
