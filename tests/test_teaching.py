"""The helpers of the chapters: set-up, map, listings, measured tables."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
from forks import python

from linattn_edu import pages, pipeline, tables, teaching
from linattn_edu.sources import MARK

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("recurrent", *pipeline.STAGES)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    keep = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return python("-c", code, env=keep | env)


# ---- setup

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this is about no GPU")


@needs_no_gpu
def test_setup_without_a_gpu_turns_the_interpreter_on():
    done = run(
        "from linattn_edu import teaching; print(teaching.setup())\n"
        "from linattn_edu.kernels import tiles; print(tiles.INTERPRETED.value)"
    )
    assert done.stdout.split() == ["cpu", "True"], done.stderr


@needs_no_gpu
@pytest.mark.parametrize(
    "before",
    ["import triton", "import linattn_edu.kernels.delta.solve",
     "import triton, os; os.environ['TRITON_INTERPRET'] = '1'"],
)  # fmt: skip
def test_setup_after_triton_says_what_to_do(before):
    pytest.importorskip("triton")
    done = run(f"{before}\nfrom linattn_edu import teaching; teaching.setup()")
    assert "RuntimeError" in done.stderr and "restart the kernel" in done.stderr


@needs_no_gpu
def test_setup_may_follow_an_import_made_with_the_interpreter():
    done = run(
        "import linattn_edu.kernels.tiles; from linattn_edu import teaching; teaching.setup()",
        TRITON_INTERPRET="1",
    )
    assert done.returncode == 0, done.stderr


def test_setup_seeds_torch():
    code = "from linattn_edu import teaching\nimport torch\n"
    code += "for s in (3, 3, 4): teaching.setup(s); print(torch.rand(()).item())"
    first, second, third = run(code).stdout.split()
    assert first == second != third


# ---- the pipeline map


@pytest.mark.parametrize("lit", [None, *STAGES])
def test_the_map_is_svg_with_every_stage_and_one_lit(lit):
    svg = teaching.pipeline_svg(lit)
    root = ET.fromstring(svg)
    texts = {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    assert set(STAGES) <= texts
    assert svg.count("#f2a33a") == (lit is not None)
    assert "id=" not in svg, "ids would clash when a page shows two maps"


@pytest.mark.parametrize("lit", [None, *pipeline.BACKWARD])
def test_the_backward_map_has_its_stages_and_what_goes_in_and_out(lit):
    svg = pipeline.backward_svg(lit)
    root = ET.fromstring(svg)
    words = {w for e in root.iter("{http://www.w3.org/2000/svg}text") for w in e.text.split()}
    assert set(pipeline.BACKWARD) <= words
    assert {"do", "dht", "dq", "dk", "dv", "dβ", "dg", "dh0"} <= words
    assert {"w", "u", "h", "v_new"} <= words, "what is recomputed"
    assert svg.count("#f2a33a") == (lit is not None)
    assert "id=" not in svg
    if lit is not None:
        assert teaching.pipeline_svg(lit) == svg


def test_the_map_names_the_lit_stage_outside_a_notebook(capsys):
    for lit in ("state", "state_bwd"):
        teaching.pipeline_map(lit)
        line = capsys.readouterr().out
        assert line.endswith(f"[here: {lit}]\n") and f"-> {lit} ->" in line


@pytest.mark.parametrize("draw", [pipeline.pipeline_svg, pipeline.backward_svg])
def test_an_unknown_stage_is_refused(draw):
    with pytest.raises(ValueError, match="lit must be"):
        draw("stat")


FIGURES = ROOT / "book" / "_static" / "figures"


@pytest.mark.parametrize(("name", "text"), pages.page_parts(FIGURES).items(), ids=lambda x: x[:16])
def test_what_the_pages_include_is_current(name, text):
    assert (FIGURES / name).read_text(encoding="utf-8") == text, (
        "run: python -m linattn_edu.teaching"
    )


def test_the_readme_has_the_measured_times():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert pages.readme_with_all(text) == text, "run: python -m linattn_edu.teaching"


# ---- listings


def test_show_source_of_a_function(capsys):
    teaching.show_source(teaching.measured)
    assert capsys.readouterr().out.startswith("def measured(")


def test_show_source_of_a_part(capsys):
    teaching.show_source(teaching.measured_where, "def ", "print(")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("def measured_where(")
    assert lines[-1].startswith("    print(textwrap.fill(measurements.provenance(")
    with pytest.raises(ValueError, match="no such line"):
        teaching.show_source(teaching.measured, "no such line", "return")


def test_show_source_unwraps_a_kernel():
    pytest.importorskip("triton")
    for interpret in ("0", "1"):
        done = run(
            "from linattn_edu.kernels.delta.state import state_kernel as f\n"
            "from linattn_edu import teaching; teaching.show_source(f)",
            TRITON_INTERPRET=interpret,
        )
        assert "def state_kernel(" in done.stdout, done.stderr


# ---- measured tables

ROW = {
    "case": "gdn_train", "library": "linattn_edu", "what": "stage:solve", "ms": 0.05,
    "bytes": 2e8, "flops": 1e10, "floor_ms": 0.04, "error": 1e-3, "first_call_s": 2.5,
    "peak_mib": 100, "sources": {},
}  # fmt: skip
DATA = {
    "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-01-01",
    "fla": "0.6.0", "flash_qla": None, "bytes_per_s": 4.3e12, "flops_per_s": 7.9e14,
    "rows": [ROW, {**ROW, "what": "forward", "ms": 0.4},
             {"case": "gdn_train", "library": "fla", "what": "forward", "ms": 0.8, "bytes": 2e8,
              "flops": 1e10, "floor_ms": 0.04},
             {**ROW, "what": "forward_backward", "ms": 1.25, "error_dq": 2e-3, "error_dg": 5e-3},
             {"case": "gdn_long", "library": "fla", "what": "forward_backward", "first_call_s": 9},
             {**ROW, "case": "gdn_decode", "what": "decode", "error_state": 1e-7},
             {**ROW, "case": "gdn_decode", "what": "decode_inplace", "peak_mib": 1.0}],
}  # fmt: skip


@pytest.fixture
def results(tmp_path, monkeypatch):
    folder = tmp_path / "chapters" / "data"
    folder.mkdir(parents=True)
    (folder / "made_up.json").write_text(json.dumps(DATA))
    monkeypatch.chdir(tmp_path / "chapters")
    return "made_up"


def test_measured_is_found_from_a_chapter(results):
    assert teaching.measured(results) == DATA


def test_measured_without_results_names_the_file():
    with pytest.raises(FileNotFoundError, match=r"chapters/data/no_such\.json"):
        teaching.measured("no_such")


def test_stage_table(results, capsys):
    teaching.measured_stage("solve", results)
    heads, row, caption = capsys.readouterr().out.splitlines()
    assert heads.split() == ["case", "ms", "floor", "ms", "GB/s", "TFLOP/s"]
    assert row.split() == ["gdn_train", "0.050", "0.040", "4000", "200.0"]
    assert caption == "Stage solve. NVIDIA H200, torch 2.11.0, Triton 3.6.0, 2026-01-01."


def test_forward_table(results, capsys):
    teaching.measured_forward(results)
    _, ours, fla, caption = capsys.readouterr().out.splitlines()
    assert ours.split() == ["gdn_train", "linattn_edu", "0.400", "0.040", "0.1", "2.5", "100"]
    assert fla.split() == ["gdn_train", "fla", "0.800", "0.040"]
    assert "NVIDIA H200, torch 2.11.0, Triton 3.6.0, fla-core 0.6.0, 2026-01-01." in caption


def test_backward_table(results, capsys):
    teaching.measured_backward(results)
    heads, ours, caption = capsys.readouterr().out.splitlines()  # no line for a first call alone
    assert "grad %" in heads
    assert ours.split() == ["gdn_train", "linattn_edu", "1.250", "0.040", "0.5", "2.5", "100"]
    assert caption.startswith("Forward and backward pass. NVIDIA H200")


def test_decode_table(results, capsys):
    teaching.measured_decode(results)
    _, new, in_place, caption = capsys.readouterr().out.splitlines()
    assert new.split()[:5] == ["gdn_decode", "new", "0.050", "0.040", "4000"]
    assert new.split()[5:] == ["0.1", "1e-05", "100"]
    assert in_place.split()[1:3] == ["in", "place"] and in_place.split()[-1] == "1"
    assert caption.startswith("One token of each sequence. NVIDIA H200")


def test_steps_table(results, tmp_path, capsys):
    row = {"case": "gdn", "library": "linattn_edu", "batch": 64, "sources": {}}
    rows = [
        {**row, "guesses": n, "right": n // 2, "how": how, "ms": ms}
        for n, both in ((0, (1.0, 0.08)), (4, (0.9, 0.03)))
        for how, ms in zip(("call", "step"), both, strict=True)
    ]
    path = tmp_path / "chapters" / "data" / "calls.json"
    path.write_text(json.dumps({**DATA, "rows": rows}))
    teaching.measured_steps("calls")
    heads, line, caption = capsys.readouterr().out.splitlines()
    assert heads.split() == ["layer", "sequences", "call", "ms", "step", "ms", "times"]
    assert line.split() == ["gdn", "64", "1.000", "0.080", "12.5"]
    assert caption.startswith("A token of each sequence. NVIDIA H200")
    teaching.measured_steps("calls", guesses=True)
    _, line, caption = capsys.readouterr().out.splitlines()
    assert line.split() == ["gdn", "64", "0.900", "0.030", "30.0"]
    assert caption.startswith("A token of each sequence, 2 of 4 guesses right. NVIDIA H200")


LADDER = [
    {"chapter": "05_state", "step": 2, "order": 1, "rung": "tiled", "dtype": "bfloat16",
     "refused": "ValueError: two dtypes"},
    {"chapter": "05_state", "step": 2, "order": 1, "rung": "tiled", "dtype": "float32",
     "sources": {}, "ms": 0.2346, "shape": {"T": 9, "K": 64, "V": 32}},
    {"chapter": "05_state", "step": 1, "order": 0, "rung": "naive", "dtype": "float32",
     "sources": {}, "ms": 12.345, "shape": {"T": 9, "K": 64, "V": 32}},
    {"chapter": "05_state", "step": 1, "order": 0, "rung": "naive", "dtype": "bfloat16",
     "sources": {}, "ms": 1234.6, "shape": {"T": 9, "K": 128, "V": 128}},
    {"chapter": "06_output", "step": 1, "order": 0, "rung": "x", "dtype": "float32",
     "sources": {}, "ms": 1.0},
]  # fmt: skip


WHY = {"naive": "token by token", "tiled": "a product"}


def test_ladder_table(results, tmp_path, capsys):
    """The gain is over the first rung in the same dtype; a refused rung of older code is marked."""
    older = {**LADDER[1], "sources": {"kernels.wy": "0" * 12}}
    data = {**DATA, "rows": [LADDER[0], older, *LADDER[2:]]}
    for name, day in (("h200", DATA["date"]), ("h100", "2025-01-01")):  # the latest is shown
        path = tmp_path / "chapters" / "data" / f"ladders_{name}.json"
        path.write_text(json.dumps({**data, "date": day}))
    teaching.measured_ladder("05_state", WHY, name="ladders")
    heads, naive, tiled, caption = capsys.readouterr().out.splitlines()
    heads = re.split("  +", heads)
    assert heads == ["step", "kernel", "bf16 ms (gain)", "fp32 ms (gain)", "why"]
    assert re.split("  +", naive)[1:] == ["naive", "1235 (1×)", "12.3 (1×)", "token by token"]
    assert re.split("  +", tiled)[2:] == [f"refused{MARK}", f"0.235{MARK} (53×)", "a product"]
    caption = caption.replace("\N{NO-BREAK SPACE}", " ")
    assert caption.startswith("bf16: T = 9, K = V = 128. fp32: T = 9, K = 64, V = 32. Triton ")
    assert f"refused tiled: two dtypes. {DATA['gpu']}, torch 2.11.0" in caption


def test_a_ladder_of_two_tasks_and_of_a_rung_without_a_time(results, tmp_path, capsys):
    (tmp_path / "chapters" / "data" / "ladders.json").write_text(
        json.dumps({**DATA, "rows": LADDER})
    )
    naive, tiled = ({name: why} for name, why in WHY.items())
    teaching.measured_ladder("05_state", naive, tiled | {"new": "next"}, name="ladders")
    _, _, tiled, new, caption = capsys.readouterr().out.splitlines()
    assert re.split("  +", tiled)[3] == "0.235 (1×)"
    assert new.split() == ["new", "next"] and "Not measured yet: new." in caption


def test_another_library_stands_last_in_its_task(results, tmp_path, capsys):
    peer = {"chapter": "05_state", "step": 2, "order": 1, "rung": "fla: tiled", "library": "fla",
            "version": "0.6.0", "functions": "chunk_f, solve", "of": "tiled"}  # fmt: skip
    refused = "Wrong: relative RMS 3.0e-04 from the shipped kernel"
    peers = [{**peer, "dtype": "bfloat16", "ms": 246.92, "shape": {"T": 8}},
             {**peer, "dtype": "float32", "refused": refused}]  # fmt: skip
    rows = [*LADDER, *peers, {**LADDER[2], "rung": "merge", "order": 3}]
    data = {**DATA, "rows": rows}
    (tmp_path / "chapters" / "data" / "ladders.json").write_text(json.dumps(data))
    teaching.measured_ladder("05_state", WHY, {"merge": "x"}, name="ladders")
    _, naive, _, other, merge, caption = capsys.readouterr().out.splitlines()
    told = ["fla 0.6.0", "247 (5×)", "refused", "chunk_f, solve"]
    assert re.split("  +", other.strip()) == told
    assert "naive" in naive and "merge" in merge and "T = 8" not in caption
    assert "fla 0.6.0 in fp32: relative RMS 3.0e-04 from ours, not timed." in caption
    page = tables.ladders_cells([{**data, "gpu": "NVIDIA H200"}])[1]
    place = [line[1] for line in page].index("fla 0.6.0")
    assert page[place - 1][1] == "tiled" and page[place][2:] == ["247", ""]
    page = tables.ladders_cells([{**data, "gpu": "NVIDIA H200", "rows": [*LADDER, peers[1]]}])[1]
    assert not any("fla" in line[1] for line in page)


def test_a_column_for_each_triton():
    """In the order of their numbers, beside the first; what is missing, or old, is seen."""
    head = {"case": "a", "ptxas": "13.4", "sources": {}}
    rows = [
        head | {"what": "forward", "triton": "3.10.0", "ms": 1.5, "sources": {"kernels.wy": "0"}},
        head | {"what": "forward", "triton": "3.6.0", "ms": 1.0},
        head | {"what": "forward_backward", "triton": "3.10.0", "ms": 2.0},
    ]
    heads, lines = tables.tritons_cells({"rows": rows})
    assert heads[2:] == [f"Triton {x}, ptxas 13.4: ms" for x in ("3.6.0", "3.10.0")]
    times = [["1.00", f"1.50{MARK} (+50 %)"], ["", "2.00"]]
    assert [line[2:] for line in lines] == times


def test_agreement_is_a_line_over_a_folded_table(capsys):
    x = torch.ones(2)
    teaching.agreement([("a", x, x, 1e-6), ("b", x + 1e-4, x, 1e-3)])
    line, *table = capsys.readouterr().out.splitlines()
    assert line == "2 checks pass  OK"
    assert [row.split() for row in table] == [[n, "OK", "<=", t] for n, t in
                                              (("a", "1e-06"), ("b", "1e-03"))]  # fmt: skip
    with pytest.raises(AssertionError, match="b: relative"):
        teaching.agreement([("a", x, x, 1e-6), ("b", x + 1, x, 1e-3)])


def test_sizes_of_a_ladder_name_their_rungs(results, tmp_path, capsys):
    merge = {**LADDER[2], "step": 3, "order": 2, "rung": "merge", "shape": {"T": 9, "K": 4, "V": 4}}
    data = {**DATA, "rows": [*LADDER, merge]}
    (tmp_path / "chapters" / "data" / "ladders.json").write_text(json.dumps(data))
    teaching.measured_ladder("05_state", WHY | {"merge": "x"}, name="ladders")
    caption = capsys.readouterr().out.splitlines()[-1].replace("\N{NO-BREAK SPACE}", " ")
    assert (
        "fp32 of naive, tiled: T = 9, K = 64, V = 32. fp32 of merge: T = 9, K = V = 4." in caption
    )
    assert caption.startswith("bf16: T = 9, K = V = 128.")


@pytest.mark.parametrize(
    "show", [lambda: teaching.measured_stage("solve", "no_such"),
             lambda: teaching.measured_ladder("05_state", WHY, name="no_such"),
             lambda: teaching.measured_ladder("05_state", WHY, name="made_up"),
             lambda: teaching.measured_stage("output_bwd", "made_up"),
             lambda: teaching.measured_forward("no_such"),
             lambda: teaching.measured_backward("no_such"),
             lambda: teaching.measured_steps("no_such"),
             lambda: teaching.measured_decode("no_such")]
)  # fmt: skip
def test_tables_say_not_measured_yet(show, results, capsys):
    show()
    assert capsys.readouterr().out == "not measured yet\n"


def test_a_stage_of_kda_alone_is_looked_for_in_its_results(results, tmp_path, capsys):
    safe = {**ROW, "what": "stage:kda_intra", "case": "kda_train", "library": "linattn_edu_safe"}
    rows = [{**safe, "library": "linattn_edu"}, safe, {**ROW, "what": "stage:wy", "ms": 7.0}]
    for name in ("gdn_h200", "kda_h200"):
        data = {**DATA, "gpu": name, "rows": [*rows, {**rows[2], "what": "stage:state_bwd"}]}
        (tmp_path / "chapters" / "data" / f"{name}.json").write_text(json.dumps(data))
    teaching.measured_stage("kda_intra")
    heads, _, safe, caption = capsys.readouterr().out.splitlines()
    assert heads.split()[:2] == ["case", "library"] and "Stage kda_intra. kda_h200" in caption
    assert safe.split()[:3] == ["kda_train", "linattn_edu_safe", "0.050"]
    for stage in ("wy", "state_bwd"):  # Gated DeltaNet has them too
        teaching.measured_stage(stage)
        assert f"Stage {stage}. gdn_h200" in capsys.readouterr().out
        teaching.measured_stage(stage, "kda_h200")
        assert f"Stage {stage}. kda_h200" in capsys.readouterr().out


def test_the_page_of_the_book(results, tmp_path):
    (tmp_path / "forward_made_up.svg").touch()
    text = pages.performance_page(results, tmp_path)
    assert "Measured on NVIDIA H200, torch 2.11.0, Triton 3.6.0, fla-core 0.6.0, 2026" in text
    assert "with 4.3 TB/s and 790 TFLOP/s." in text
    assert "| gdn_train | fla | 0.800 | 0.040 |  |  |  |" in text
    assert "### solve\n\n| case | ms |" in text
    assert "## Forward and backward\n\n| case | library | ms |" in text
    assert "| gdn_train | linattn_edu | 0.1 | 0.2 | 0.5 |" in text  # o dq dg
    assert "## Decoding\n\n| case | state | ms |" in text
    assert " _static/figures/forward_made_up.svg\n" in text and "roofline" not in text
    (tmp_path / "backward_made_up.svg").touch()
    text = pages.performance_page(results, tmp_path, under=1)
    assert "### Forward and backward\n\n```{image} _static/figures/backward_made_up.svg" in text
    assert "\n### The stages\n" in text and "\n#### solve\n" in text
    assert "\n## " not in text
    assert pages.performance_page("no_such") == "Nothing has been measured yet.\n"


def test_our_times_beside_the_fastest_library(results, tmp_path):
    begin, end = pages.README_PART
    readme = f"before\n{begin}\nold\n{end}\nafter\n"
    rows = [
        *DATA["rows"],
        {**ROW, "library": "flash_qla", "what": "forward", "ms": 0.25},
        {**ROW, "library": "flash_qla", "what": "forward_backward", "ms": 2.5},
        {**ROW, "library": "flash_qla", "what": "forward", "case": "gdn_long", "ms": 1.0},
    ]
    (tmp_path / "chapters" / "data" / "made_up.json").write_text(json.dumps({**DATA, "rows": rows}))
    text = pages.readme_with_results(readme, results)
    assert "| gdn_train | forward | 0.400 | 0.800 | 0.250 | 1.60 |\n" in text
    assert "| gdn_train | forward and backward | 1.250 |  | 2.500 | 0.50 |\n" in text
    assert "gdn_long" not in text and "old" not in text  # where both were measured
    assert text.startswith(f"before\n{begin}\nOn an NVIDIA H200:\n\n|")
    assert text.endswith(f"\n{end}\nafter\n")
    assert pages.readme_with_results(text, results) == text
    assert pages.readme_with_results(text, "no_such") == f"before\n{begin}\n{end}\nafter\n"


def test_mamba_2_stands_beside_mamba_ssm(results, tmp_path):
    ours = {**ROW, "what": "forward", "case": "ssd_2.7b", "ms": 2.0}
    rows = [ours, {**ours, "library": "mamba_ssm", "ms": 4.0}]
    (tmp_path / "chapters" / "data" / "made_up.json").write_text(json.dumps({**DATA, "rows": rows}))
    text = "\n".join(pages.README_SSD)
    text = pages.readme_with_results(text, results, pages.README_SSD, teaching.tables.BESIDE_SSD)
    assert "| ssd_2.7b | forward | 2.000 | 4.000 | 0.50 |\n" in text and "fla ms" not in text


def test_several_gpus_stand_in_the_readme(results, tmp_path):
    one = {**ROW, "what": "forward", "case": "gdn_64k", "ms": 6.0, "gate": "trained"}
    one |= {"layout": "contiguous", "ranks": 1, "tokens": 65536}
    two = one | {"ranks": 2, "ms": 4.0, "error": 1e-4}
    rows = [one, two, two | {"ms": 5.0, "layout": "zigzag"}]
    (tmp_path / "chapters" / "data" / "made_up.json").write_text(json.dumps({**DATA, "rows": rows}))
    text = pages.readme_with_ranks("\n".join(pages.README_RANKS), results)
    assert "| GDN: forward | 2 | 6.000 | 4.000 | 1.50 |" in text and "zigzag" not in text
    assert pages.readme_with_ranks(text, results) == text


def test_columns_are_those_that_were_measured():
    errors = {"error": 1e-3, "error_dx": 2e-3, "error_dA": 3e-3}
    heads, (line,) = teaching.tables.gradient_cells([{**ROW, **errors}])
    assert heads[2:] == ["o %", "dx %", "dA %"] and line[2:] == ["0.1", "0.2", "0.3"]
    alike = {**ROW, "rho50_o": 4e-3, "rho97_o": 8e-3, "rho97_dq": 1e-2}
    heads, lines = teaching.tables.alike_cells([ROW, alike])
    assert heads == ["case", "library", "cosine", "o %", "dq %"]
    assert [line[2:] for line in lines] == [["0.5", "0.4", ""], ["0.97", "0.8", "1"]]
    token = {**ROW, "what": "decode_inplace", "case": "ssd_decode", "state_share": 0.756}
    heads, (line,) = teaching.tables.decode_cells([token])
    assert line[heads.index("state's %")] == "76"
    assert "state's %" not in teaching.tables.decode_cells([{**ROW, "what": "decode"}])[0]


# ---- in a notebook

NOTEBOOK = """
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
from unittest import mock
from linattn_edu import teaching
with mock.patch("IPython.display.display") as display:
    {call}
import json
print(json.dumps(display.call_args.args[0]))
"""


@pytest.mark.parametrize(
    ("call", "mime", "holds"),
    [
        ("teaching.pipeline_map('wy')", "text/html", "<svg"),
        ("teaching.show_source(teaching.figure)", "text/markdown", "```python\ndef figure("),
        ("teaching._table(['case', 'ms'], [['a<b', '1']], 'c')", "text/html", "a&lt;b"),
    ],
)
def test_rich_output_in_a_notebook(call, mime, holds):
    pytest.importorskip("IPython")
    done = run(NOTEBOOK.format(call=call))
    data = json.loads(done.stdout.strip().splitlines()[-1])
    assert holds in data[mime] and data["text/plain"]


@pytest.mark.long
def test_figures_are_the_same_svg_every_time():
    pytest.importorskip("matplotlib_inline")
    code = """
from IPython.testing.globalipapp import start_ipython
start_ipython()
import hashlib
from IPython import get_ipython
from linattn_edu import teaching
teaching.setup()
svg = get_ipython().display_formatter.formatters["image/svg+xml"]
svg.enabled = True  # a terminal's shell leaves it off
for _ in range(2):
    fig, ax = teaching.figure()
    ax.plot([1, 2]); ax.fill_between([0, 1], [0, 1], hatch="/")
    text = svg(fig)
    print("<dc:date>" in text, hashlib.sha256(text.encode()).hexdigest())
"""
    command, env = [sys.executable, "-c", code], os.environ | {"MPLBACKEND": "agg"}
    first, second = subprocess.check_output(command, env=env, cwd=ROOT, text=True).splitlines()
    assert first.startswith("False ") and first == second


def test_the_front_says_in_how_many_calls_no_library_is_faster(tmp_path, monkeypatch):
    """The fastest of those that take a call decides."""
    folder = tmp_path / "chapters" / "data"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    row = {key: ROW[key] for key in ("bytes", "flops", "floor_ms")}
    times = {"forward": {"linattn_edu": 1.0, "fla": 2.0, "flashinfer": 0.8},
             "forward_backward": {"linattn_edu": 3.0, "fla": 3.0}}  # fmt: skip
    rows = [
        {**row, "case": "gdn_train", "what": what, "library": library, "ms": ms}
        for what, libraries in times.items()
        for library, ms in libraries.items()
    ]
    (folder / "gdn_h200.json").write_text(json.dumps({**DATA, "rows": rows}))
    for name in ("kda", "gdn2", "dplr"):
        (folder / f"{name}_h200.json").write_text(json.dumps({**DATA, "rows": []}))
    text = pages.front()
    assert text.startswith("**1 of 2 calls** of Gated DeltaNet that were")
    assert "measured on an NVIDIA H200," in text
    assert "other libraries, flash-linear-attention, FlashInfer. In the rest," in text
    assert "the rest, forward of gdn_train takes 25 % longer than with FlashInfer." in text
    assert text.endswith("with kernels that were not recorded (2026-01-01).\n")
    begin, end = pages.README_FRONT
    assert pages.readme_with_front(f"{begin}\nold\n{end}") == f"{begin}\n{text}{end}"
