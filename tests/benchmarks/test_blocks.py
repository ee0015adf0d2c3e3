"""The file of the benchmark of layers in transformers."""

import pytest
import torch

from benchmarks import blocks, results

pytest.importorskip("transformers", reason="the layers are those of transformers")
PEER = {"case": "gdn_block", "library": "fla", "what": "decode_1", "ms": 2.0}
OURS = {"case": "gdn_block", "library": "linattn_edu", "what": "decode_1"}


@pytest.mark.parametrize("version", [None, "0.0.1"], ids=["same", "another"])
def test_rows_of_a_library_that_is_not_there(version, monkeypatch, tmp_path):
    """They stay, with their day; with the layers of another transformers they do not."""
    top = blocks.heading(torch.device("cpu")) | {"date": "2001-01-01"}
    if version:
        top["transformers"] = version
    results.save(out := tmp_path / "blocks.json", {**top, "rows": [PEER, OURS | {"ms": 5.0}]})
    monkeypatch.setattr(blocks, "rows_of", lambda case, device: [OURS | {"ms": 3.0}])
    assert blocks.main(["--device", "cpu", "--cases", "gdn_block", "--out", str(out)]) == 0
    data = results.load(out)
    ours = [row for row in data["rows"] if row["library"] == "linattn_edu"]
    assert [row["ms"] for row in ours] == [3.0] and ours[0]["date"] != "2001-01-01"
    others = [row for row in data["rows"] if row["library"] == "fla"]
    assert others == ([] if version else [PEER | {"date": "2001-01-01"}])
