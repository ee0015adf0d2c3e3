"""The rungs of the chapters' kernel ladders, and the command that times them, on the CPU."""

import ast
import json
import multiprocessing
import re
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ladders, rungs, tables
from benchmarks.ladders import LADDERS, ROOT, Rung, Size
from linattn_edu import measurements

CHAPTERS = sorted((ROOT / "chapters").glob("*.md"))
EVERY = measurements.every("rungs")
SHOWN = {chapter: measurements.last_of_chapter("rungs", chapter) for chapter in LADDERS}
MEASURED = [r for c, stem in SHOWN.items() for r in EVERY[stem]["rows"] if r["chapter"] == c]


def ladder_of(text: str) -> str:
    """The section of a chapter that is its ladder."""
    return "".join(re.findall(r"^## Kernel ladder\n(.*?)(?=^## |\Z)", text, re.M | re.S))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_kernel_of_a_ladder_is_a_rung(path):
    section = ladder_of(path.read_text())
    defined = re.findall(r"@triton\.jit\ndef (\w+)", section)
    assert bool(defined) == (path.stem in LADDERS)
    if defined:
        taken = ladders.source(path.stem, LADDERS[path.stem].defined)
        assert not [name for name in defined if f"\ndef {name}(" not in taken]
        (shown,) = re.findall(r"^teaching\.measured_ladder\(.*?^\)", section, re.M | re.S)
        chapter, *whys = map(ast.literal_eval, ast.parse(shown).body[0].value.args)
        told = [rung for why in whys for rung in why]
        assert chapter == path.stem and sorted(told) == sorted(LADDERS[chapter].steps)


def test_every_rung_has_a_time_or_a_reason():
    rows = {(row["chapter"], row["rung"], row["dtype"]): row for row in MEASURED}
    wanted = {(c, rung, d) for c, d in ladders.units() for rung in LADDERS[c].names(d)}
    assert set(rows) == wanted
    for row in rows.values():
        assert row["ms"] > 0 if "ms" in row else row["refused"], row
        assert row["step"] == LADDERS[row["chapter"]].steps[row["rung"]]
        assert not re.search("not measured|Wrong|process ended", row.get("refused", "")), row
        assert row.get("error", 0) <= rungs.TOLERANCE[row["dtype"]]


def test_what_ships_has_times():
    assert all("ms" in row for row in MEASURED if row.get("ships", False))
    shipped = {row["chapter"] for row in MEASURED if row.get("ships", False)}
    assert shipped == set(LADDERS)


def test_a_ladder_is_timed(tmp_path):
    out = tmp_path / "rungs.json"
    assert rungs.main(["--device", "cpu", "--chapters", "02", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {r["rung"] for r in rows} == set(LADDERS["02_gate_cumsum"].steps)
    assert all(r["ms"] > 0 and r["dtype"] == "float32" and r["shape"]["C"] == 16 for r in rows)
    assert all(r["ships"] or r["error"] < 1e-6 for r in rows)
    assert [r["rung"] for r in rows if r["ships"]] == ["gate_cumsum"]


def test_a_wrong_rung_is_refused(tmp_path):
    made = LADDERS["12_gate_bwd"].rungs(Size("tiny", torch.float32, "cpu"), tmp_path)
    right = made["from_the_end"]
    assert rungs._measured(right, "cpu", 1e-5)["error"] < 1e-6
    wrong = Rung(lambda: 1.001 * right.call(), right.like)
    with pytest.raises(rungs.Wrong, match=r"1\.0e-03 from the shipped"):
        rungs._measured(wrong, "cpu", 1e-5)
    lost = Rung(lambda: torch.full_like(right.call(), torch.nan), right.like)
    with pytest.raises(rungs.Wrong, match="inf"):
        rungs._measured(lost, "cpu", 1e-5)


def test_the_first_error_of_a_chain_is_the_reason():
    try:
        try:
            raise ValueError("at 3:4:\n  x = dot(a, b)\n  Both operands must be same dtype\n")
        except ValueError as error:
            raise RuntimeError("wrapped") from error
    except RuntimeError as error:
        assert rungs.reason(error) == "ValueError: Both operands must be same dtype"


def test_a_chapter_without_a_ladder(capsys):
    assert rungs.main(["--device", "cpu", "--chapters", "24"]) == 2
    assert "no chapter with a ladder begins with 24" in capsys.readouterr().err


@pytest.fixture
def spoken(tmp_path):
    """A run, one of its processes and the end of the line at which that one speaks."""
    device = torch.device("cpu")
    table = tables.Table(
        tmp_path / "rungs.json", {}, ("chapter", "rung", "dtype"), device, lambda _: ()
    )
    ours, theirs = multiprocessing.Pipe()
    process = SimpleNamespace(is_alive=lambda: False, join=lambda timeout: None)
    key = "05_state", "float32"
    return rungs.Run(table, "cpu", limit=60.0), rungs.Unit(key, process, ours), theirs


def test_a_process_that_ends_takes_one_rung_with_it(spoken):
    run, unit, theirs = spoken
    theirs.send(("begin", "state_naive"))
    theirs.send(("row", "state_naive", {"ms": 2.0, "error": 1e-7}, {"T": 4096}))
    theirs.send(("begin", "state_tiled"))
    theirs.close()
    run.listen(unit, "done", {"": 30.0})
    assert run.close(unit, set()) == {"state_naive", "state_tiled"}  # what another leaves out
    naive, tiled = (run.table.rows["05_state", f"state_{n}", "float32"] for n in ("naive", "tiled"))
    assert (naive["ms"], naive["step"], naive["ships"]) == (2.0, 1, False)
    assert tiled["refused"] == "the process ended" and "ms" not in tiled


def test_a_rung_that_takes_too_long_is_given_up(spoken):
    run, unit, theirs = spoken
    theirs.send(("begin", "state"))
    run.listen(unit, "ready", {"": 0.05})
    assert run.close(unit, set()) == {"state"}
    (row,) = run.table.rows.values()
    assert row["refused"] == "took more than 0.05 s" and row["rung"] == "state"


def test_inputs_that_fail_are_tried_once_more(spoken):
    run, unit, theirs = spoken
    theirs.send(("begin", "inputs"))
    theirs.send(("lost", "OutOfMemoryError: none left"))
    run.listen(unit, "done", {"": 30.0})
    assert (unit.state, unit.at) == ("lost", "inputs") and not run.table.rows
    assert run.close(unit, set()) == set() and run.close(unit, {"inputs"}) is None
