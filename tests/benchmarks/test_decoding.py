"""The benchmark of decoding, on the CPU."""

import json

from benchmarks import decoding


def test_sequences_and_tokens(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "decoding.json"
    sizes = ["--sequences", "1", "2", "--tokens", "1", "3"]
    for _ in range(2):  # what is there already is measured again and has one row
        assert decoding.main(["--device", "cpu", "--out", str(out), *sizes]) == 0
    rows = json.loads(out.read_text())["rows"]
    cases = [(row["sequences"], row["tokens"], row["what"]) for row in rows]
    assert cases == [(N, T, "plain") for N in (1, 2) for T in (1, 3)]
    assert all(row["ms"] > 0 for row in rows)
