"""What a measured row is of: hashes of sources, what makes a row stale, where that is said."""

import json
import re
from pathlib import Path

import pytest
from benchmarking import ROOT

from benchmarks import __main__ as command
from benchmarks import blocks, fusion, ladders, losses, pieces, plot, results, rungs, stale
from benchmarks.cases import CALLS, CASES, FUNCTIONS, OPERATORS, SCALING, SCALING_FORMS, STAGES, ran
from linattn_edu import measurements, pages, sources

PACKAGE = {
    "__init__": "from linattn_edu.ops.one import call\n",
    "ops/__init__": "",
    "ops/check": "def number(x):\n    return x\n",
    "ops/operator": """
def run(f):
    from linattn_edu.kernels import plan
    return plan.kept(f)
""",
    "ops/one": """
from linattn_edu.ops import check
from linattn_edu.ops.operator import run
from linattn_edu.reference.one import stage

def call(x):
    return one(check.number(x))

def stages():
    from linattn_edu.kernels.delta.one import stage
    return stage

one = run(stages)

@one.forward
def forward(stages, x):
    return stages.stage(x)
""",
    "reference/__init__": "",
    "reference/one": "def stage(x):\n    return 1 * x\n",
    "kernels/__init__": "",
    "kernels/plan": "def kept(f):\n    return f\n",
    "kernels/tiles": "def load(p):\n    return p[0]\n\ndef store(p):\n    return p[1]\n",
    "kernels/delta/__init__": "",
    "kernels/delta/one": """
if 3 > 2:
    from linattn_edu.kernels import tiles

TILE = {64: 2}

def stage(x):
    \"\"\"A launcher.\"\"\"
    # with a comment
    return stage_kernel[TILE](x)

def stage_kernel(p):
    return tiles.load(p)

def another(p):
    return tiles.store(p)
""",
}


@pytest.fixture
def package(tmp_path):
    """A small package of the same form: write(file, text) and edit(file, before, after)."""

    class Package:
        def write(self, name: str, text: str) -> None:
            path = tmp_path / "linattn_edu" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

        def edit(self, name: str, before: str, after: str) -> None:
            text = (tmp_path / "linattn_edu" / f"{name}.py").read_text()
            assert before in text
            self.write(name, text.replace(before, after))

        def digest(self, entry: str = "call") -> str:
            return sources.Tree(tmp_path).digest(entry)

        def chapter(self, name: str, *cells: str) -> None:
            (tmp_path / "chapters").mkdir(exist_ok=True)
            text = "\n".join(f"```{{code-cell}} ipython3\n{cell}```\n" for cell in cells)
            (tmp_path / "chapters" / f"{name}.md").write_text(text)

        def remove(self, name: str) -> None:
            (tmp_path / "linattn_edu" / f"{name}.py").unlink()

    package = Package()
    for name, text in PACKAGE.items():
        package.write(name, text)
    return package


KERNEL = "kernels/delta/one"


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        (KERNEL, '"""A launcher."""', '"""Launches."""'),
        (KERNEL, "# with a comment", "# with another"),
        (KERNEL, "stage_kernel[TILE](x)", "(\n        stage_kernel[TILE](x)\n    )"),
        (KERNEL, "tiles.store(p)", "tiles.store(p) + 1"),  # nobody calls it
        ("kernels/tiles", "return p[1]", "return p[2]"),
        ("ops/check", "return x", "return float(x)"),
        ("ops/one", "check.number(x)", "check.number(2 * x)"),
        ("reference/one", "1 * x", "2 * x"),
    ],
)
def test_what_does_not_run_does_not_change_a_hash(package, file, before, after):
    whole, stage = package.digest(), package.digest("kernels.stage")
    package.edit(file, before, after)
    assert (package.digest(), package.digest("kernels.stage")) == (whole, stage)


@pytest.mark.parametrize(
    ("file", "before", "after", "of_a_stage"),
    [
        (KERNEL, "return tiles.load(p)", "return tiles.load(p) + 1", True),
        (KERNEL, "{64: 2}", "{64: 4}", True),
        ("kernels/tiles", "return p[0]", "return p[-1]", True),
        ("kernels/plan", "return f", "return f and f", False),
        ("ops/one", "return stages.stage(x)", "return stages.stage(x), x", False),
    ],
)
def test_what_runs_changes_a_hash(package, file, before, after, of_a_stage):
    whole, stage = package.digest(), package.digest("kernels.stage")
    package.edit(file, before, after)
    assert package.digest() != whole
    assert (package.digest("kernels.stage") != stage) == of_a_stage


def test_moves_and_names_of_modules_do_not_change_a_hash(package):
    whole, stage = package.digest(), package.digest("kernels.stage")
    text = PACKAGE[KERNEL]
    package.remove(KERNEL)
    # the file goes elsewhere, one of its functions to a file of its own, tiles is called otherwise
    text = text.replace("def stage_kernel(p):\n    return tiles.load(p)\n", "")
    text = text.replace("if 3 > 2:\n    from linattn_edu.kernels import tiles", "")
    moved = "from linattn_edu.kernels.fused.kernel import stage_kernel as launched\n"
    moved += "from linattn_edu.kernels import blocks\n"
    moved += text.replace("stage_kernel[", "launched[").replace("tiles.", "blocks.")
    package.write("kernels/fused/gdn_fwd", moved)
    kernel = "from linattn_edu.kernels.blocks import load as l\n\ndef stage_kernel(p):\n"
    package.write("kernels/fused/kernel", kernel + "    return l(p)\n")
    package.write("kernels/blocks", PACKAGE["kernels/tiles"])
    package.remove("kernels/tiles")
    package.edit("ops/one", "linattn_edu.kernels.delta.one", "linattn_edu.kernels.fused.gdn_fwd")
    assert (package.digest(), package.digest("kernels.stage")) == (whole, stage)


def test_what_is_not_there_is_an_error(package):
    for entry in ("nothing", "kernels.nothing", "layers.Nothing", "05_state.f", "puzzle 99"):
        with pytest.raises(LookupError, match="no"):
            package.digest(entry)


def test_of_a_chapter_only_what_a_rung_runs_counts(package):
    """Its functions and those they call; no other cell, and no assignment in one."""

    def digest(*cells: str) -> str:
        package.chapter("12e_one", *cells)
        return package.digest("12e_one.rung")

    rung = "def rung(x):\n    return helper(x, y)\n"
    first = digest(rung, "def helper(x, y):\n    return x + y\n")
    assert digest("y = rung(1)\n", rung, "def helper(x, y):\n    return x + y\n") == first
    assert digest(rung, "def helper(x, y):\n    return x - y\n") != first


# ---- this package


def reached(entry: str) -> set[str]:
    """The names that are counted for an entry."""
    return {name for d in sources.tree().counted(entry) for name in sources._bound(d.node)}


def test_an_operator_reaches_its_stages_and_not_those_of_others():
    forms = {op: reached(f) for op, f in FUNCTIONS.items()}
    for op in OPERATORS:
        for stage in (s for s in STAGES.get(op, ()) if not s.startswith("recurrent")):
            assert stage in forms[op], (op, stage)
        assert {"forward", "backward"} <= forms[op]
    only = {"kda": {s for s in STAGES["kda"] if s.startswith(("kda_", "channel_"))}}
    only["ssd"] = {s for s in STAGES["ssd"] if s.startswith(("ssd_", "chunk_"))}
    for op, stages in only.items():
        assert len(stages) > 5
        # GDN-2 has the stages of Kimi Delta Attention
        others = [x for x in OPERATORS if x != op and (op, x) != ("kda", "gdn2")]
        assert all(not forms[other] & stages for other in others)
    assert all("recurrent" in forms[f"{op}_decode"] for op in ("gdn", "kda"))
    kernels = {name for name in forms["gdn"] if name.endswith("_kernel")}
    assert len(kernels) > 10
    assert not {"number", "check_tensors", "Operator"} & forms["gdn"]  # checks, machinery


def entries() -> set[str]:
    """Whatever the commands record."""
    calls = [{"case": c.name, "what": what} for c in CASES.values() for what in CALLS[c.op]]
    calls += [{"case": "gdn_train", "what": f"stage:{s}"} for op in STAGES for s in STAGES[op]]
    calls += [{"case": SCALING, "what": form} for form in SCALING_FORMS]
    found = {entry for row in calls for entry in ran(row)}
    for name, it in ladders.LADDERS.items():
        for rung in it.steps:
            found |= (one := set(rungs.ran({"chapter": name, "rung": rung})))
            assert one, (name, rung)
    whats = (
        "forward",
        *(f"backward:{stage}" for stage in fusion.FORMS["fused"]("triton").__dict__),
    )
    found |= {x for what in whats for x in fusion.ran({"what": what})}
    found |= {x for op in ("gdn", "kda", "scan", "scans") for x in pieces.ran({"op": op})}
    found |= {x for case in blocks.PEERS for x in blocks.RAN[case]} | set(losses.LAYERS.values())
    return found | {"cp"}


def test_everything_that_is_recorded_has_sources():
    every = entries()
    assert len(every) > 100
    digests = sources.digests(*every)
    assert all(re.fullmatch("[0-9a-f]{12}", x) for x in digests.values())
    assert ran({"case": SCALING, "what": "quadratic"}) == ()


# ---- rows


def row(case="gdn_train", library="linattn_edu", what="forward", ms=1.0, **more) -> dict:
    row = {"case": case, "library": library, "what": what, "ms": ms, "bytes": 2e8, "flops": 1e10}
    return {**row, "floor_ms": 0.1, "error": 1e-3, **more}


def data(rows: list[dict], gpu="NVIDIA H200") -> dict:
    top = {"gpu": gpu, "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-01"}
    return {**top, "bytes_per_s": 4.3e12, "flops_per_s": 7.9e14, "rows": rows}


OLD = {"sources": {"chunk_gated_delta_rule": "0" * 12}}


def test_why_a_row_is_stale():
    stamped = results.stamped(row(), ("chunk_gated_delta_rule", "kernels.wy"))
    assert sources.changed(stamped) is None and re.match(r"\d{4}-\d\d-\d\d$", stamped["date"])
    assert sources.changed(row()) == "unrecorded"
    assert sources.changed(row(**OLD)) == "changed"
    assert sources.changed(row(sources={"no_longer_there": "0" * 12})) == "changed"
    other = results.stamped(row(library="fla"), ("chunk_gated_delta_rule",))
    assert "sources" not in other and other["date"] == stamped["date"]
    for none in (other, row(sources={}), {"rung": "x", "refused": "no"}, {"way": "fla"}):
        assert sources.changed(none) is None
    said = sources.note([row(**OLD, date="2026-01-02"), row(), stamped, other], "2026-01-01")
    assert said == (
        "\N{DAGGER} Measured with older kernels (2026-01-02), or with kernels that were not "
        "recorded (2026-01-01)."
    )
    assert sources.note([stamped, other], "2026-01-01") == ""


def test_a_row_of_other_sources_is_replaced_whole():
    old, new = row(first_call_s=9.0, **OLD), row(ms=2.0, sources={"chunk_kda": "1" * 12})
    assert results.merge(data([old]), data([new]))["rows"] == [new]
    (kept,) = results.merge(data([old]), data([row(ms=2.0, **OLD)]))["rows"]
    assert (kept["ms"], kept["first_call_s"]) == (2.0, 9.0)


# ---- where it is said


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of results that everything reads: of one card, then of two."""
    folder = tmp_path / "chapters" / "data"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(results, "DATA", folder)
    return folder


def written(folder: Path, card: str, gpu: str, more: dict, ms: float = 1.0) -> None:
    calls = ("forward", "forward_backward")
    rows = [row(what=what, ms=ms, **more) for what in calls]
    rows += [row(library=x, what=what, ms=2.0) for x in ("fla", "flash_qla") for what in calls]
    rows += [row(what="stage:wy", **more)]
    results.save(folder / f"gdn_{card}.json", data(rows, gpu))


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"


def fresh() -> dict:
    return {"sources": sources.digests("chunk_gated_delta_rule")}


def test_the_names_of_cards():
    assert results.default_path(H100, "gdn").name == "gdn_h100.json"
    assert results.default_path(H200, "cp").name == "cp_h200.json"


@pytest.mark.parametrize("is_stale", [False, True])
def test_tables_pages_and_figures_say_what_is_stale(folder, tmp_path, is_stale, capsys):
    pytest.importorskip("matplotlib")
    from linattn_edu import teaching

    written(folder, "h200", H200, OLD if is_stale else fresh())
    said = {"page": pages.performance_page()}
    for name, show in {
        "forward": teaching.measured_forward, "backward": teaching.measured_backward,
        "stage": lambda: teaching.measured_stage("wy"),
        "where": lambda: teaching.measured_where(teaching.measured()),
        "bench": lambda: command.main(["--stale"]),
    }.items():  # fmt: skip
        show()
        said[name] = capsys.readouterr().out
    marks = pages.README_PART
    said["readme"] = pages.readme_with_results(f"{marks[0]}\n{marks[1]}\n", said=True)
    for path in plot.draw(measurements.load("gdn"), tmp_path):
        said[path.stem] = path.read_text(encoding="utf-8")
    assert {"forward", "backward", "roofline"} < said.keys()
    for name, text in said.items():
        note = "of older sources" if name == "bench" else "Measured with older kernels (2026-01-01)"
        assert (note in " ".join(text.split())) == is_stale, name
    assert ("1.000\N{DAGGER}" in said["stage"]) == is_stale
    assert "2.000\N{DAGGER}" not in said["forward"]
    if not is_stale:
        assert said["bench"] == "all results of NVIDIA H200 are of today's sources\n"


def test_a_ladder_says_what_is_stale(folder, capsys):
    from linattn_edu import teaching

    rungs = [
        {"chapter": "05_state", "step": n, "order": n, "rung": f"rung {n}", "dtype": "float32",
         "ms": 1.0, "shape": {"T": 9}, **more}
        for n, more in enumerate((OLD, {"sources": sources.digests("kernels.state")}))
    ]  # fmt: skip
    results.save(folder / "rungs_h200.json", data(rungs))
    teaching.measured_ladder("05_state", {f"rung {n}": "why" for n in range(2)})
    _, old, new, caption = capsys.readouterr().out.splitlines()
    assert "1.00\N{DAGGER} (1" in old and "1.00 (1" in new
    assert caption.endswith("\N{DAGGER} Measured with older kernels (2026-01-01).")


def test_each_card_has_its_tables_and_figures(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from linattn_edu import teaching

    written(folder, "h100", H100, OLD, ms=3.0)
    written(folder, "h200", H200, fresh())
    assert plot.main(["--data", str(folder), "--out", str(tmp_path / "figures")]) == 0
    figures = {p.stem for p in (tmp_path / "figures").iterdir()}
    assert {"forward", "forward_gdn_h100", "backward", "backward_gdn_h100"} <= figures
    page = pages.performance_page(figures=tmp_path / "figures")
    first, second = page.split(f"## {H100}\n")
    assert first.startswith(f"## {H200}\n") and "\n### The forward pass\n" in first
    assert "| 1.000 |" in first and "figures/forward.svg" in first and "older" not in first
    assert "| 3.000\N{DAGGER} |" in second and "figures/forward_gdn_h100.svg" in second
    assert "older kernels" in second
    begin, end = pages.README_PART
    readme = pages.readme_with_results(f"{begin}\n{end}\n", said=True)
    first, second = readme.split(f"On an {H100}, linattn_edu is\n")
    assert f"On an {H200}, linattn_edu is\n" in first
    assert "- faster than FlashQLA in all 2 calls that were measured\n" in first
    assert (
        "- faster than FlashQLA in 0 of 2 calls that were measured: forward of gdn_train takes "
        "50 % longer, forward and backward of gdn_train takes 50 % longer\n" in second
    )
    assert "| gdn_train | forward | 1.000 | 2.000 | 2.000 | 0.50 |" in first
    assert "| gdn_train | forward | 3.000\N{DAGGER} | 2.000 | 2.000 | 1.50 |" in second
    capsys.readouterr()
    teaching.measured_forward()
    assert capsys.readouterr().out.count("Forward pass. NVIDIA H") == 2
    assert teaching.measured()["gpu"] == H200 and teaching.measured("gdn_h100")["gpu"] == H100
    said = stale.listing(folder)
    assert said.splitlines()[0] == "gdn_h100.json: of older sources: gdn_train (3 rows)"
    assert "gdn_h200" not in said and said.endswith("again: python -m benchmarks gdn --all")
    assert stale.listing(folder, H200) == "all results of NVIDIA H200 are of today's sources"
    assert stale.listing(folder, "NVIDIA B200") == "nothing has been measured on NVIDIA B200"


def test_one_card_of_two_leaves_the_page_as_it_was(folder):
    written(folder, "h100", H100, fresh())
    page = pages.performance_page()
    assert page.startswith(f"Measured on {H100}, torch") and "\n## The forward pass\n" in page


def test_lines_of_another_day_are_named(folder):
    rows = [row(date="2026-01-01", **fresh()), row(library="fla", date="2025-12-30")]
    said = measurements.provenance(data(rows))
    assert said.endswith("2026-01-01. Some lines are of another day: fla of 2025-12-30.")


def test_bench_says_first_what_is_stale_on_its_card(folder, monkeypatch, capsys):
    from benchmarks import measure, run

    written(folder, "h100", H100, OLD)
    written(folder, "h200", H200, OLD)
    monkeypatch.setattr(measure, "usable_gpu", lambda: None)
    monkeypatch.setattr(measure, "gpu_name", lambda: H100)
    monkeypatch.setattr(run, "run", lambda *a, **k: print("runs") or 0)
    assert command.main(["gdn"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "gdn_h100.json: of older sources: gdn_train (3 rows)"
    assert said[-1] == "runs" and not [x for x in said if "h200" in x]
    assert command.main(["gdn", "--begun", "[]"]) == 0  # it goes on
    assert capsys.readouterr().out == "runs\n"


def test_the_command_for_each_file_of_results_exists():
    stems = {p.stem.split("_")[0] for p in (ROOT / "chapters" / "data").glob("*_h*.json")}
    assert stems - {"state"} <= set(stale.COMMANDS)  # state_chain: of a kernel that is gone
    for text in stale.COMMANDS.values():
        if "benchmarks." in text:
            assert (ROOT / "benchmarks" / f"{text.split('.')[1].split()[0]}.py").is_file()


def test_no_compared_output_says_what_is_stale():
    """Kernels change after a chapter was executed: nbval must not compare a sentence on that."""
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        for cell in json.loads(path.read_text())["cells"]:
            if "nbval-check-output" in cell["metadata"].get("tags", ()):
                text = "".join(cell["source"])
                assert not re.search(r"teaching\.measured_", text), (path.stem, text)
                assert sources.MARK not in json.dumps(cell["outputs"], ensure_ascii=False)
