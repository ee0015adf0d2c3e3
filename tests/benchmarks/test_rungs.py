"""The rungs of the chapters' kernel ladders, and the command that times them, on the CPU."""

import ast
import contextlib
import importlib
import inspect
import json
import multiprocessing
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from triton.runtime.autotuner import Autotuner

from benchmarks import ladder_peers, ladders, rungs, tables
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
    beside = {key: rows.pop(key) for key in set(rows) - wanted}
    assert set(rows) == wanted
    for (chapter, name, _), row in beside.items():
        peer = ladder_peers.PEERS[chapter][name]
        assert (row["library"], row["of"], row["functions"], row["version"] > "") == (
            peer.library, peer.of, peer.functions, True,
        )  # fmt: skip
        assert row["ms"] > 0 if "ms" in row else row["refused"], row
        assert not re.search("not measured|process ended", row.get("refused", "")), row
        assert row.get("error", 0) <= rungs.TOLERANCE[row["dtype"]] and not row.get("ships", False)
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


def test_each_peer_stands_beside_a_rung_that_ships(tmp_path):
    for chapter, peers in ladder_peers.PEERS.items():
        made = LADDERS[chapter].rungs(Size("tiny", torch.float32, "cpu"), tmp_path)
        for name, peer in peers.items():
            assert LADDERS[chapter].ships(peer.of) and name == f"{peer.library}: {peer.of}"
            taken = peer.make.__code__.co_varnames[: peer.make.__code__.co_argcount]
            assert len(made[peer.of].given) == len(taken), name


@pytest.fixture
def fla(monkeypatch):
    """A library in fla's place, that sums a chunk's gates from its beginning or end."""
    package = ModuleType("fla.ops.utils")

    def chunk_local_cumsum(g, chunk_size, reverse=False, scale=1.0):
        rows = g.unflatten(1, (-1, chunk_size)) * scale
        return (rows.flip(2).cumsum(2).flip(2) if reverse else rows.cumsum(2)).flatten(1, 2)

    package.chunk_local_cumsum = chunk_local_cumsum
    for name in ("fla", "fla.ops", "fla.ops.utils"):
        monkeypatch.setitem(sys.modules, name, package)
    there = {"fla": "0.6.0"}
    monkeypatch.setattr(ladder_peers, "version_of", there.get)
    monkeypatch.setattr(Autotuner, "do_bench", Autotuner.do_bench)
    return package


def measured_here(key: tuple[str, str], skip: set[str]) -> dict[str, tuple]:
    """What a process says of a ladder's rungs: of each the message."""
    ours, theirs = multiprocessing.Pipe()
    ours.send("go")
    rungs.work(key, "cpu", skip, list(LADDERS[key[0]].peers), theirs)
    theirs.close()
    said = {}
    with contextlib.suppress(EOFError):
        while True:
            what, *rest = ours.recv()
            said |= {rest[0]: (what, *rest[1:])} if what in ("row", "refused") else {}
    return said


def test_a_peer_is_timed_and_a_wrong_one_refused(fla, monkeypatch):
    key = "02_gate_cumsum", "float32"
    said = measured_here(key, {"naive_kernel", "scan_kernel"})
    assert list(said) == ["gate_cumsum", "fla: gate_cumsum"]
    what, row, shape = said["fla: gate_cumsum"]
    assert what == "row" and row["ms"] > 0 and row["error"] < 1e-6 and shape["C"] == 16
    right = fla.chunk_local_cumsum
    fla.chunk_local_cumsum = lambda g, C, scale: right(g, C)  # in other units
    assert measured_here(key, set())["fla: gate_cumsum"][:1] == ("refused",)
    monkeypatch.delattr(fla, "chunk_local_cumsum")
    (what, why) = measured_here(key, set())["fla: gate_cumsum"]
    assert what == "refused" and why.startswith("ImportError: cannot import name")


def test_rows_of_peers(fla, spoken):
    run, unit, theirs = spoken
    unit.key = "12_gate_bwd", "float32"
    for of, ms in (("gate_bwd without a raw gate", 1.0), ("gate_bwd", 2.0)):
        theirs.send(("row", f"fla: {of}", {"ms": ms, "error": 1e-7}, {"T": 9}))
    theirs.send(("done",))
    run.listen(unit, "done", {"": 30.0})
    one, two = run.table.rows.values()
    assert (one["of"], two["of"]) == ("gate_bwd without a raw gate", "gate_bwd")
    assert one["functions"] == "chunk_local_cumsum" and one["order"] == two["order"] - 1
    for row in (one, two):
        assert (row["library"], row["version"], row["step"]) == ("fla", "0.6.0", 4)
        assert "sources" not in row and not row["ships"] and rungs.ran(row) == ()
    assert "fla: gate_bwd" in rungs.summary([one, two])


def test_peers_are_compiled_and_where_there_are_none_it_says_so(fla, monkeypatch, capsys):
    assert list(rungs.warm(("12_gate_bwd", "float32"), "cpu")) == [
        "fla: gate_bwd without a raw gate", "fla: gate_bwd",
    ]  # fmt: skip
    told = rungs.warm(("02_gate_cumsum", "float32"), "cpu")
    assert told["fla: gate_cumsum"].endswith(" s")
    monkeypatch.setattr(ladder_peers, "version_of", lambda library: None)
    assert rungs.main(["--device", "cpu", "--warm"]) == 2
    assert "no other library" in capsys.readouterr().err


def test_only_peers_and_what_ships(fla, monkeypatch, tmp_path):
    seen = {}
    monkeypatch.setattr(rungs.Run, "all", lambda run, keys, skip: seen.update(skip))
    out = ["--out", str(tmp_path / "rungs.json")]
    assert rungs.main(["--device", "cpu", "--peers", *out]) == 0
    assert seen["12_gate_bwd", "float32"] == {"from_the_end", "gate_bwd_scan", "puzzle 12"}
    assert ("07_kda_intra", "float32") not in seen


def test_what_a_peer_calls_is_what_it_names():
    """And it is there, where the library is installed."""
    for peer in (p for peers in ladder_peers.PEERS.values() for p in peers.values()):
        tree = ast.parse(inspect.getsource(peer.make))
        found = set()
        installed = ladder_peers.version_of(peer.library)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                load, name = importlib.import_module, node.module
                names = [x.name for x in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
                call = ast.unparse(node.value)
                if not call.startswith("mamba_ssm_module("):
                    continue
                load, name = ladder_peers.mamba_ssm_module, ast.literal_eval(node.value.args[0])
                names = [node.attr]
            else:
                continue
            if installed:
                module = load(name)
                assert all(hasattr(module, x) for x in names), (peer.name, module)
            found |= set(names)
        assert found == set(peer.functions.split(", ")), peer.name


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
