"""How many times as fast several GPUs are: which rows are divided, and what is said of them."""

import json
from pathlib import Path

import pytest

from linattn_edu import sources, teaching
from linattn_edu.figures import speedup

DATA = Path(__file__).resolve().parents[2] / "chapters" / "data"


def row(ranks, ms, tokens=speedup.STRONG, op="gdn", library="linattn_edu", **more):
    row = {"case": f"{op}_{tokens >> 10}k", "library": library, "what": "forward"}
    row |= {"layout": "contiguous", "gate": "trained", "ranks": ranks, "tokens": tokens, "ms": ms}
    row |= {"error": 1e-4, "error_gradients": 1e-3} if ranks > 1 else {}
    fresh = {"sources": sources.digests("chunk_gated_delta_rule")}
    return row | (fresh if library == "linattn_edu" else {}) | more


def gains(rows, *args, **options):
    return {
        key: {n: alone["ms"] / row["ms"] for n, (row, alone) in line.items()}
        for key, line in speedup.speedups(rows, "forward", *args, **options).items()
    }


ROWS = [
    row(4, 2.0), row(1, 6.0), row(2, 3.0), row(2, 4.0, layout="zigzag"),
    row(1, 8.0, library="fla"), row(2, 10.0, library="fla"),
    row(1, 9.0, gate="none"), row(2, 6.0, gate="none"),
    row(2, 1.0, what="gather"), row(1, 7.0, what="forward_backward"),
    row(1, 2.0, 8192), row(2, 1.5, 8192), row(1, 3.0, 32768), row(2, 2.0, 32768),
    row(2, 1.0, op="kda"),  # without its time on one GPU
]  # fmt: skip
OURS = "gdn", "linattn_edu", "contiguous"


def test_each_row_is_divided_by_one_gpu_of_the_same_kind():
    assert gains(ROWS) == {
        OURS: {2: 2.0, 4: 3.0},
        ("gdn", "linattn_edu", "zigzag"): {2: 1.5},
        ("gdn", "fla", "contiguous"): {2: 0.8},
    }
    assert gains(ROWS, gate="none") == {OURS: {2: 1.5}}
    assert gains(ROWS, "short") == {OURS: {2: pytest.approx(4 / 3)}}
    # four ranks of 16384 tokens have as many as in "strong"
    assert gains(ROWS, "weak") == {OURS: {2: 1.5, 4: 3.0}}


def test_one_gpu_of_other_sources_is_no_measure():
    rows = [row(1, 6.0, sources={"chunk_gated_delta_rule": "0" * 12}), row(2, 3.0)]
    assert gains(rows) == {} and speedup.paired(rows, "strong", "trained") == []


@pytest.mark.parametrize("is_stale", [False, True])
def test_lines_and_tables_say_what_is_stale(is_stale):
    plt = pytest.importorskip("matplotlib.pyplot")
    old = {"sources": {"chunk_gated_delta_rule": "0" * 12}}
    rows = [r | old if r["library"] != "fla" and is_stale else r for r in ROWS]
    fig, axes = plt.subplots(ncols=2)
    shown = speedup.draw(rows, axes)
    labels = axes[0].get_legend_handles_labels()[1]
    mark = sources.MARK * is_stale
    assert labels == [f"GDN{mark}", f"GDN, zigzag{mark}", "GDN, fla"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes[0].lines}
    assert lines[f"GDN{mark}"] == [[1, 1], [2, 2], [4, 3]]
    assert {r["ms"] for r in shown} == {2.0, 6.0, 3.0, 4.0, 8.0, 10.0}
    heads, table = speedup.cells(rows, "strong", "trained")
    assert table[0] == ["GDN: forward", "2", f"6.000{mark}", f"3.000{mark}", "2.00", "", "",
                        f"1.000{mark}", "1e-04"]  # fmt: skip
    assert [line[7] for line in table[1:]] == ["", "", ""]  # other ranks, layouts, libraries
    assert table[-1][:4] == ["GDN, fla: forward", "2", "8.000", "10.000"]
    assert len(heads) == len(table[0])
    plt.close(fig)


def test_other_clocks():
    rows = [row(1, 6.0, row_ms=4.0, graph_ms=None), row(2, 3.0, row_ms=1.0, graph_ms=1.0)]
    (line,) = speedup.cells(rows, "strong", "trained")[1]
    assert line[4:7] == ["2.00", "4.00", ""]


def test_rows_that_are_committed_can_be_read(capsys):
    for path in DATA.glob("cp_*.json"):
        rows = json.loads(path.read_text())["rows"]
        several = [r for r in rows if r["ranks"] > 1 and r["what"] != "gather"]
        pairs = [speedup.paired(rows, case, gate) for case in ("strong", "weak", "short")
                 for gate in ("trained", "none")]  # fmt: skip
        assert {id(r) for pair in pairs for r in pair} >= {id(r) for r in several}, path.name
    teaching.measured_ranks()
    assert "The same tokens." in capsys.readouterr().out
