"""The pages "Where everything is" and "What is tested where" hold all that there is, and say it."""

import functools
import json
import re

import pytest
from book.layout import ROOT, tool

import linattn_edu
from linattn_edu import layers


@pytest.fixture(scope="module")
def where():
    """The tool; what it makes of all sources it makes once."""
    where = tool("where")
    for name in ("kernel_table", "function_table"):
        setattr(where, name, functools.cache(getattr(where, name)))
    return where


def rows(text):
    """The rows of all tables in a text, without their heads."""
    lines = [x for x in text.splitlines() if x.startswith("| ")]
    lines = [
        x for x, below in zip(lines, [*lines[1:], ""], strict=True) if "| ---" not in x + below
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_equation_has_a_row(where):
    found = [re.findall(r"`(eq:[\w-]+)`$", row[0])[0] for row in rows(where.equation_tables())]
    text = "\n".join(p.read_text() for p in sorted(ROOT.glob("chapters/*.md")))
    assert sorted(found) == sorted(re.findall(r"\$\$ *\((eq:[\w-]+)\)", text))


def test_the_row_of_an_equation(where):
    row = next(r for r in rows(where.equation_tables()) if "`eq:delta-v-new`" in r[0])
    _, reference, kernel, tests, measured = row
    assert "linattn_edu.reference.delta.state.state>" in reference
    assert "linattn_edu.kernels.delta.state.state_kernel>" in kernel
    assert "tests/delta/test_state.py" in tests
    assert re.search(r"`gdn_h200 <performance>`: .*\bgdn_train\b", measured)
    assert measured.count("gdn_train") == measured.count("`gdn_h")  # once a card


def test_every_stage_kernel_and_function_has_a_row(where):
    package = ROOT / "linattn_edu"
    folders = ("delta", "dplr", "ssd", "fused")
    files = [p for f in folders for p in package.glob(f"kernels/{f}/[!_]*.py")]
    stages = {f"{p.parent.name}/{p.stem}" for p in files}
    assert {r[0].split("`")[1] for r in rows(where.stage_table())} == stages
    named = {x for p in files for x in re.findall(r"^def (\w+_kernel)\(", p.read_text(), re.M)}
    first = [re.search(r"`(\w+)", r[0]) for r in rows(where.kernel_table())]
    assert {x[1] for x in first} == named
    first = [re.search(r"`(\w+)", r[0]) for r in rows(where.function_table())]
    assert [x[1] for x in first] == [*linattn_edu.__all__, *layers.__all__]


def test_every_kernel_is_compiled_and_tested(where):
    for row in rows(where.kernel_table()):
        assert re.search(r"\b90:\s[1-9]", row[-1]) and "tests/" in row[-2], row[0]


def test_a_function_is_timed_where_its_benchmark_calls_it(where):
    found = {re.search(r"`(\w+)", r[0])[1]: r[-1] for r in rows(where.function_table())}
    assert "kda_h200" in found["chunk_kda"] and "gdn_h200" not in found["chunk_kda"]
    assert "ssd_decode" in found["selective_state_update"]


def test_tags_belong_to_the_function_around_them(where, tmp_path):
    path = tmp_path / "one.py"
    path.write_text("def f():\n    # eq:a\n    pass\n\n\ndef g():\n    # eq:b\n    pass\n")
    assert where.functions(path) == {"f": ["eq:a"], "g": ["eq:b"]}


def test_only_a_gpu_with_results_counts_as_run(where, monkeypatch):
    gpus = {json.loads(p.read_text()).get("gpu") for p in ROOT.glob("chapters/data/*.json")}
    gpus.discard(None)
    assert gpus <= set(where.GPUS)
    said = where.never_run()
    assert all(f"{cc // 10}.{cc % 10}" in said for cc in where.capabilities() if cc != 90)
    ran = [r for r in rows(where.gpu_table()) if "never" not in r[-1]]
    assert [r[0] for r in ran] == ["9.0"] and all(gpu in ran[0][-1] for gpu in gpus)
    # two cards of one capability are both named
    known = {"torch": "1", "triton": "1", "cuda": "1"}
    two = {gpu: {**known, "gpu": gpu, "date": f"day {i}"} for i, gpu in enumerate(where.GPUS)}
    with monkeypatch.context() as patch:
        patch.setattr(where, "results", lambda: two)
        assert "NVIDIA H200, day 0; NVIDIA H100 80GB HBM3, day 1" in where.gpu_table()
        assert "come from 2 kinds of GPUs, NVIDIA H200, NVIDIA H100" in where.never_run()
    # another GPU is not taken for one that is known
    other = {"x": {"gpu": "Another", "torch": "1", "triton": "1", "cuda": "1", "date": "d"}}
    monkeypatch.setattr(where, "results", lambda: other)
    with pytest.raises(KeyError, match="Another"):
        where.gpu_table()


def test_versions_are_those_of_the_files(where):
    cells = {r[0]: r for r in rows(where.version_table())}
    pins = "".join(x.read_text() for x in sorted(ROOT.glob("constraints*.txt")))
    assert f"torch=={cells['PyTorch'][2]}" in pins
    assert all(f"triton=={x}" in pins for x in cells["Triton"][2].split(", "))
    ran = {r["triton"] for r in where.suites()} | {
        r.get("triton") for r in where.results().values()
    }
    assert cells["PyTorch"][4].startswith("2.11.0")
    assert {*cells["Triton"][4].split(", ")} == ran - {None}
    assert cells["Python"][2].split(", ")[0] == "3.10"


def test_sizes_are_those_of_the_grids(where):
    from delta import stage_checks

    row = next(r for r in rows(where.size_table()) if r[0].startswith("stages of the delta"))
    assert row[1].startswith(", ".join(map(str, stage_checks.DIMS)) + "; V ")
    numbers = ", ".join(map(str, stage_checks.INTERPRETED))
    assert row[2] == f"{numbers}; {stage_checks.COMPILED[-1]} on a GPU"


def test_errors_are_those_of_the_file(where):
    """A row each, with the largest error of an output and of a gradient, and their names."""
    import accuracy

    text = where.accuracy_table()
    operators = [c.operator for c in accuracy.read()]
    assert re.findall(r"linattn_edu\.(\w+)>", text) == [*dict.fromkeys(operators)]
    table = rows(text)
    assert len(table) == len(operators)
    for cells, (case, errors) in zip(table, accuracy.read().items(), strict=True):
        beta = "–" if case.beta is None else f"{case.beta:g}"
        assert cells[:3] == [case.inputs, beta, f"{case.gate:g}"]
        for cell, found in zip(cells[3:], errors.values(), strict=True):
            told = [part.split("\u00a0") for part in cell.split(", ")]
            sides = ({"o", "ht"}, found.keys() - {"o", "ht"})
            assert len(told) == sum(any(n in found for n in side) for side in sides)
            for (name, number), side in zip(told, sides, strict=False):
                largest = max(found[n] for n in side if n in found)
                names = {where.short(n) for n in side if found.get(n) == largest}
                assert name in names and abs(float(number) - largest) <= 0.05 * largest + 0.05
    told = dict(re.findall(r"(\w+) ([\d.]+)[,.]", where.accuracy_of_keys_alike()))
    alike = [
        e for c, kinds in accuracy.read().items() for d, e in kinds.items()
        if c.operator in ("chunk_gated_delta_rule", "chunk_kda") and d != "float32"
        and c.inputs != "random keys" and c.beta <= 1
    ]  # fmt: skip
    for n in ("o", "ht", "dv", "dbeta", "dg"):
        assert float(told[n]) == pytest.approx(max(e[n] for e in alike), rel=0.05)
    assert where.worst({"o": 2.04, "ht": 0.1, "dq": 1, "dinitial_states": 1234}) == (
        "o\u00a02.0, dh0\u00a01200"
    )


def test_runs_of_the_tests_on_gpus(where, tmp_path):
    """Every record has its row; a new one takes the place of that of the same versions."""
    from gpu import ran

    assert len(rows(where.suite_table())) == len(ran.read())
    file, one = tmp_path / "ran.json", {"gpu": "G", "torch": "2", "triton": "3.9.0", "cuda": "13"}
    one |= {"ptxas": "13.4", "date": "2026-01-01", "tests": "tests", "passed": 1}
    for new in (one, one | {"triton": "3.6.0"}, one | {"passed": 2}):
        ran.add(new, file)
    assert [(r["triton"], r["passed"]) for r in ran.read(file)] == [("3.6.0", 1), ("3.9.0", 2)]
