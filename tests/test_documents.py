"""README and CONTRIBUTING: their Python runs, their links and commands exist."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from forks import python

import linattn_edu
from benchmarks.results import of_operators
from linattn_edu import testing

pytestmark = pytest.mark.whole
ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")
PYTHON = [
    (name, i, code)
    for name in DOCUMENTS
    for i, code in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.S))
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "i", "code"), PYTHON, ids=[f"{n}-{i}" for n, i, _ in PYTHON])
def test_python_examples_run(name, i, code):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = python("-c", code, env=env)
    assert done.returncode == 0, done.stderr
    for said in re.findall(r"print\(.*# (.*)$", code, re.M):
        shapes = re.findall(r"\[[\d, ]+\]", said)
        assert re.findall(r"\[[\d, ]+\]", done.stdout) == shapes


@pytest.mark.parametrize("name", DOCUMENTS)
def test_linked_files_exist(name):
    links = re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", (ROOT / name).read_text())
    local = [a or b for a, b in links if "://" not in (a or b)]
    assert [link for link in local if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_named_make_targets_exist(name):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)\b(?=[`\s])", code_of(name))) <= targets


def code_of(name: str) -> str:
    """Blocks and spans of code of a document."""
    text = (ROOT / name).read_text()
    return "\n".join(re.findall(r"```bash\n.*?```|`[^`\n]+`", text, re.S))


def paragraph(begins: str) -> str:
    """The paragraph of the README that begins like this."""
    return next(x for x in (ROOT / "README.md").read_text().split("\n\n") if x.startswith(begins))


def test_what_the_readme_says_about_speed_is_measured():
    """Of every card, how often we are faster than each library, reckoned anew from the files."""
    names = {
        "fla": "flash-linear-attention", "flash_qla": "FlashQLA", "flashinfer": "FlashInfer",
        "cudnn": "cuDNN's KDA", "attn_gym": "attention-gym",
    }  # fmt: skip
    counts = {}
    for path in of_operators():
        data = json.loads(path.read_text())
        rows = [row for row in data["rows"] if "ms" in row]
        ms = {(row["case"], row["what"], row["library"]): row["ms"] for row in rows}
        for case, what, library in ms:
            peer = library.removesuffix("_safe")
            if peer in names:
                promised = path.stem[:4] != "dplr"  # ours takes no promise, theirs may
                ours = library.replace(peer, "linattn_edu") if promised else "linattn_edu"
                call = case, what, ours
                ratios = counts.setdefault(data["gpu"], {}).setdefault(peer, {})
                ratios[call] = max(ratios.get(call, 0), ms[call] / ms[case, what, library])
    assert counts
    readme = (ROOT / "README.md").read_text()
    for gpu, peers in counts.items():
        said = readme.split(f"\nOn an {gpu}, linattn_edu is\n\n")[1].split("\n\n")[0].splitlines()
        assert len(said) == len(peers)
        for peer, ratios in peers.items():
            (line,) = (x for x in said if f" {names[peer]} " in x)
            slower = [x for x in ratios.values() if x > 1]
            many = f"{len(ratios) - len(slower)} of {len(ratios)}" if slower else "all"
            assert f"in {many} " in line and line.count("% longer") == len(slower)
            assert all(f"takes {100 * (x - 1):.0f} % longer" in line for x in slower)
        assert f"\nInputs in bfloat16; {gpu}, torch" in readme


# a chapter, what it says of times or memory on an H200, where that is measured, and each case and
# library with the least and the most that the library's number is of ours
SHORT, LONG = ("gdn_train", "gdn_gva", "gdn_long"), ("kda_train", "kda_kimi", "kda_long")
SAID = (
    ("06_output", "three to five times as fast as fla's in all four cases", "gdn", "forward", "ms",
     [(case, "fla", 3.0, 5.0) for case in (*SHORT, "gdn_d64")]),
    ("06_output", "FlashQLA takes a third to a half longer than ours in its three", "gdn",
     "forward", "ms", [(case, "flash_qla", 1.3, 1.55) for case in SHORT]),
    ("06_output", "takes some percent less time than ours on `gdn_train`", "gdn", "forward", "ms",
     [("gdn_train", "flashinfer", 0.9, 0.99)]),
    ("06_output", "on `gdn_gva` and `gdn_long` ours is faster", "gdn", "forward", "ms",
     [(case, "flashinfer", 1.02, 2.0) for case in SHORT[1:]]),
    ("06_output", "a third of what fla's does or less", "gdn", "forward", "peak_mib",
     [(case, "fla", 3.0, 9.0) for case in (*SHORT, "gdn_d64")]),
    ("06_output", "it allocates less on `gdn_train`, and more on the other two", "gdn", "forward",
     "peak_mib", [("gdn_train", "flash_qla", 1.1, 2.0),
                  *((case, "flash_qla", 0.5, 0.95) for case in SHORT[1:])]),
    ("12_gate_bwd", "ours takes about a third of fla's time or less", "gdn", "forward_backward",
     "ms", [(case, "fla", 2.7, 4.5) for case in (*SHORT, "gdn_d64")]),
    ("12_gate_bwd", "a seventh to a sixth less time than FlashQLA on `gdn_train` and `gdn_gva`",
     "gdn", "forward_backward", "ms", [(case, "flash_qla", 1.15, 1.22) for case in SHORT[:2]]),
    ("12_gate_bwd", "and little more than half on `gdn_long`", "gdn", "forward_backward", "ms",
     [("gdn_long", "flash_qla", 1.7, 2.0)]),
    ("12_gate_bwd", "half as much again on `gdn_gva` and `gdn_long`, an eighth more on `gdn_train`",
     "gdn", "forward_backward", "peak_mib",
     [("gdn_train", "flash_qla", 0.86, 0.91), *((c, "flash_qla", 0.62, 0.7) for c in SHORT[1:])]),
    ("12b_kda_backward", "about a quarter of fla's time", "kda", "forward_backward", "ms",
     [(case, "fla", 3.6, 4.4) for case in LONG]),
    ("12b_kda_backward", "a third of what fla takes with the promise of a bound", "kda",
     "forward_backward", "ms", [(case, "fla_safe", 2.8, 3.8) for case in LONG]),
    ("12b_kda_backward", "less than half of fla's memory", "kda", "forward_backward", "peak_mib",
     [(case, "fla", 2.0, 3.0) for case in LONG]),
    ("12b_kda_backward", "cuDNN takes half as long again as ours on `kda_train`, more than twice",
     "kda", "forward_backward", "ms",
     [("kda_train", "cudnn", 1.4, 1.6), ("kda_kimi", "cudnn", 2.0, 2.6)]),
    ("12b_kda_backward", "more than six times as long on `kda_long`", "kda", "forward_backward",
     "ms", [("kda_long", "cudnn", 6.0, 8.0)]),
    ("12b_kda_backward", "attention-gym takes between three and five times as long", "kda",
     "forward_backward", "ms", [(case, "attn_gym", 3.0, 5.0) for case in LONG]),
)  # fmt: skip


@pytest.mark.parametrize(("chapter", "said", "operator", "what", "column", "claims"), SAID)
def test_what_chapters_say_of_other_libraries_is_measured(
    chapter, said, operator, what, column, claims
):
    assert said in (ROOT / "chapters" / f"{chapter}.md").read_text()
    rows = json.loads((ROOT / "chapters" / "data" / f"{operator}_h200.json").read_text())["rows"]
    found = {(row["case"], row["library"]): row[column] for row in rows if row["what"] == what}
    for case, library, least, most in claims:
        assert least < found[case, library] / found[case, "linattn_edu"] < most, (case, library)


def test_what_chapter_26b_says_of_captured_rounds_is_measured():
    text = (ROOT / "chapters" / "26b_replay.md").read_text()
    rows = json.loads((ROOT / "chapters" / "data" / "steps_h200.json").read_text())["rows"]
    ms = {(r["case"], r["batch"], r["guesses"], r["how"]): r["ms"] for r in rows}
    assert "A model's captured round beats its plain step" in text
    assert all(ms["model", n, 4, "step"] < ms["model", n, 0, "step"] for n in (1, 64))
    assert "hardly gains, and Kimi Delta Attention's loses" in text
    assert all(ms[x, 1, 4, "step"] > 0.9 * ms[x, 1, 0, "step"] for x in ("gdn", "mamba2"))
    assert ms["kda", 1, 4, "step"] > ms["kda", 1, 0, "step"]
    assert "Called, a round loses to a plain step that is captured, whatever is guessed" in text
    best = {r["case"]: (1 + r["right"]) / (1 + r["guesses"]) for r in rows if r["guesses"]}
    for case, n, guesses, how in ms:
        if guesses and how == "call":  # a round of which all guesses are right
            assert best[case] * ms[case, n, guesses, how] > ms[case, n, 0, "step"]


def test_the_names_of_fla_that_the_readme_lists_are_there_and_the_others_not():
    names = re.compile(r"`([a-zA-Z_0-9]+)`")
    there, absent = paragraph("These names are there too").split("These are not")
    there, absent = names.findall(there), names.findall(absent)
    assert len(there) >= 14 and [x for x in there if not hasattr(linattn_edu, x)] == []
    assert len(absent) >= 3 and [x for x in absent if hasattr(linattn_edu, x)] == []


def call(function, **more):
    """A recurrence or a chunked operator on two heads of 4 tokens, with other arguments."""
    inputs = testing.kda_inputs if "kda" in function else testing.gdn_inputs
    i = inputs(1, 4, 2, 2, 8, 8)
    return getattr(linattn_edu, function)(**{**i.asdict(), **more})


CHUNKED, RECURRENT = "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"


def test_what_the_readme_says_that_is_taken():
    """A flag written otherwise, any shape of A_log and dt_bias, fla's defaults, short chunks."""
    o, state = call(CHUNKED)
    assert state is None and torch.equal(call(CHUNKED, output_final_state=None)[0], o)
    assert call(CHUNKED, output_final_state=1)[1] is not None
    assert torch.equal(call(CHUNKED, cp_context=None)[0], o)
    call("chunk_kda", cp_context=None, use_graph=False, max_num_seqs=None, chunk_size=16)
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(1, 1, 2, 1)}
    for function, size in (("chunk_kda", 8), ("fused_recurrent_kda", 8), (RECURRENT, 1)):
        call(function, **gate, dt_bias=torch.zeros(2, size))
    i = testing.gdn_inputs(1, 4, 1, 1, 8, 512)
    assert linattn_edu.chunk_gated_delta_rule(i.q, i.k, i.v, i.g, i.beta)[0].shape[-1] == 512
    q = torch.randn(1, 1, 2, 8).requires_grad_()
    state = torch.zeros(1, 2, 8, 8)
    i = testing.gdn_inputs(1, 1, 2, 2, 8, 8)
    o, _ = linattn_edu.fused_recurrent_gated_delta_rule(
        q, i.k, i.v, i.g, beta=i.beta, initial_state=state
    )
    o.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        ("chunk_kda", {"cp_context": object()}, "build_cp_context"),
        ("chunk_kda", {"use_graph": True}, "use_graph belongs to cu_seqlens"),
        (CHUNKED, {"max_num_seqs": 4}, "max_num_seqs belongs to cu_seqlens"),
        (CHUNKED, {"use_gate": True}, "use_gate"),
        (CHUNKED, {"A_log": torch.zeros(2)}, "A_log"),
        ("chunk_kda", {"lower_bound": -5.0}, "lower_bound"),
        ("chunk_kda", {"safe_gate": True, "lower_bound": -6.0}, "lower_bound"),
        (CHUNKED, {"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must end at T=4 or before"),
        (RECURRENT, {"v": torch.zeros(1, 4, 2, 513)}, "V <= 512"),
        (CHUNKED, {"v": torch.zeros(1, 4, 2, 513)}, "V <= 512"),
        (RECURRENT, {"beta": torch.zeros(1, 4, 2, 8)}, "beta"),
    ],
)
def test_what_the_readme_says_that_is_refused(function, arguments, said):
    with pytest.raises((ValueError, TypeError), match=said):
        call(function, **arguments)


JOINED = {
    "fused.cancel": ("cancels", "those"),
    "delta.cumsum": ("cumsum", "global_cumsum"),
    "delta.cp_merge": ("piece_map", "cp_merge", "cp_join"),
    "delta.cp_merge_bwd": ("piece_map_bwd", "cp_merge_bwd", "cp_join_bwd"),
    "delta.gate": ("gate", "layer_gate_bwd"),
    "delta.kda_bwd": ("kda_output_bwd", "kda_wy_bwd"),
    "fused.gdn_intra": ("intra_chunk",),
    "fused.gdn_fwd": ("scan", "scan_map", "chunk_fwd"),
    "fused.gdn_scans": ("scan_states", "scan_bwd", "scans", "scan_map_bwd"),
    "fused.gdn_bwd": ("intra_chunk_bwd", "chunk_bwd"),
    "fused.kda_fwd": ("kda_prepare", "kda_gate_prepare", "kda_fused_scan", "kda_fused_scan_map"),
    "fused.kda_scans": (
        "kda_gates", "kda_fused_scans", "kda_fused_scan_map_bwd",
    ),
    "fused.kda_bwd": ("kda_outer_bwd", "kda_fused_intra_bwd"),
    "fused.kda_halves": ("unit_rows", "kda_halves", "kda_halves_bwd"),
}  # fmt: skip


def test_the_interface_lists_every_public_name():
    text = (ROOT / "book" / "api.md").read_text()
    listed = {*re.findall(r"auto\w+:: linattn_edu\.(\w+)\n", text), *re.findall(r"`(\w+)`", text)}
    assert [name for name in linattn_edu.__all__ if name not in listed] == []


def test_the_interface_lists_every_stage_and_kernel():
    """Functions of the stage files without an underscore, read without importing Triton."""
    listed = set(re.findall(r"auto\w+:: ([\w.]+)", (ROOT / "book" / "api.md").read_text()))
    for side in ("reference", "kernels"):
        for folder in ("delta", "fused"):
            files = (ROOT / "linattn_edu" / side / folder).glob("[!_]*.py")
            for path in files:
                module = f"{folder}.{path.stem}"
                if module.startswith("fused.ssd"):
                    continue
                names = [*JOINED.get(module, (path.stem,))]
                names += re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.M)
                assert {f"linattn_edu.{side}.{module}.{name}" for name in names} <= listed
