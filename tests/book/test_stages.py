"""Book and library in step: every stage has its four rooms, every tag its equation."""

import ast
import dataclasses
import re

import pytest
from book.layout import CHAPTERS, ROOT, toc

from linattn_edu import pipeline
from linattn_edu.ops import gdn, kda

REFERENCE = ROOT / "linattn_edu" / "reference"
KERNELS = ROOT / "linattn_edu" / "kernels"
TAG = re.compile(r"#\s*(eq:[\w-]+)")

# files of several stages, and those that compute several at once, and the chapter of each
JOINED = {
    "delta/kda_bwd": "11_kda_intra_bwd",
    "fused/kda_fwd": "24_fusion",
    "fused/kda_bwd": "24_fusion",
    "delta/kda_scan": "07_kda_intra",
    "delta/kda_scans": "12_gate_bwd",
    "fused/gdn_fwd": "06_output",
    "fused/gdn_bwd": "12_gate_bwd",
    "delta/warm_up": "25_few_heads",
    "delta/gate": "12_gate_bwd",
    "delta/l2norm": "08_output_bwd",
    "delta/cumsum": "12_gate_bwd",
    "delta/causal_conv1d": "23_cp_conv",
    "delta/causal_conv1d_update": "27_model_end_to_end",
    "delta/rms_norm_gated": "27_model_end_to_end",
    **{f"ssd/{stage}": "13_ssd" for stage in pipeline.SSD_STAGES},
    "ssd/selective_state_update": "13_ssd",
    "ssd/chunk_cumsum_bwd": "19_chunk_scan_bwd_da_cs",
    "fused/ssd_fwd": "13_ssd",
    "fused/ssd_bwd": "18_chunk_scan_chunk_state_bwd_dx",
    "ssd/ema_bwd": "20_ema",
}
# in the file or in the chapter of another stage
IN_JOINED = {
    "kda_output_bwd", "kda_scan", "kda_scans", "kda_wy_bwd", "piece_map", "piece_map_bwd",
}  # fmt: skip
STAGES = {f.name for set_ in (gdn.Stages, kda.Stages) for f in dataclasses.fields(set_)}
STAGES = [f"delta/{stage}" for stage in ("recurrent", *sorted(STAGES - IN_JOINED))]
STAGES += [x for x in map("ssd/{}".format, pipeline.SSD_BACKWARD) if x not in JOINED]


def modules(root):
    """Every stage file under reference/ or kernels/, as "delta/state"."""
    folders = ("delta", "ssd", "fused")
    files = (p for folder in folders for p in root.glob(f"{folder}/*.py"))
    return sorted(str(p.relative_to(root).with_suffix("")) for p in files if p.stem != "__init__")


@pytest.mark.parametrize("stage", STAGES)
def test_stage_has_its_four_rooms(stage):
    folder, name = stage.split("/")
    chapters = [chapter for chapter in toc() if chapter.split("_", 1)[1] == name]
    assert len(chapters) == 1
    rooms = [
        CHAPTERS / f"{chapters[0]}.md",
        CHAPTERS / f"{chapters[0]}.ipynb",
        REFERENCE / f"{stage}.py",
        KERNELS / f"{stage}.py",
        ROOT / "tests" / folder / f"test_{name}.py",
    ]
    assert [str(r) for r in rooms if not r.exists()] == []


def test_reference_and_kernels_hold_the_same_files():
    assert modules(REFERENCE) == modules(KERNELS)


@pytest.mark.parametrize("module", modules(KERNELS))
def test_module_has_a_test_and_a_chapter(module):
    folder, name = module.split("/")
    assert (ROOT / "tests" / folder / f"test_{name}.py").exists()
    chapter = JOINED.get(module) or next((c for c in toc() if c.split("_", 1)[1] == name), None)
    assert chapter in toc()
    assert name in (CHAPTERS / f"{chapter}.md").read_text()


def labels():
    """Every equation label of the book."""
    text = "\n".join(p.read_text() for p in CHAPTERS.glob("*.md"))
    return re.findall(r"\$\$ *\((eq:[\w-]+)\)", text)


def test_labels_are_unique():
    assert sorted(set(labels())) == sorted(labels())


@pytest.mark.parametrize("root", [REFERENCE, KERNELS], ids=["reference", "kernels"])
def test_tags_are_labels_of_the_book(root):
    files = sorted(root.rglob("*.py"))
    unknown = {
        f"{p.name}: {tag}"
        for p in files
        for tag in TAG.findall(p.read_text())
        if tag not in labels()
    }
    assert unknown == set()


class Module:
    """The tags of a file's functions, in the order in which a call comes by them."""

    def __init__(self, text):
        self.lines = text.splitlines()
        functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        self.functions = {f.name: f for f in functions}

    def tags(self, name, apart=()):
        """Tags of a function and of those it calls, each once, at its first appearance.

        apart: functions whose tags are their own, whoever calls them.
        """
        return list(dict.fromkeys(self._walk(name, (name, *apart))))

    def calls(self, name):
        """The functions of the file that a function calls."""
        names = {getattr(node, "id", None) for node in ast.walk(self.functions[name])}
        return names & set(self.functions) - {name}

    def reach(self, name):
        """The functions of the file that a call of a function comes by."""
        return self.calls(name).union(*(self.reach(f) for f in self.calls(name)))

    def _walk(self, name, above):
        function = self.functions[name]
        events = []
        for number in range(function.lineno, function.end_lineno + 1):
            events += [(number, 0, [tag]) for tag in TAG.findall(self.lines[number - 1])]
        for node in ast.walk(function):
            callee = self.functions.get(getattr(node, "id", None))
            if callee and callee.name not in above:
                inner = self._walk(callee.name, (*above, callee.name))
                events.append((node.lineno, node.col_offset, inner))
        return [tag for *_, tags in sorted(events, key=lambda e: e[:2]) for tag in tags]


@pytest.mark.parametrize("module", modules(KERNELS))
def test_kernel_takes_the_steps_of_its_reference(module):
    reference = Module((REFERENCE / f"{module}.py").read_text())
    kernel = Module((KERNELS / f"{module}.py").read_text())
    shared = [f for f in kernel.functions if f in reference.functions and reference.tags(f)]
    assert shared, "the kernel shares no tagged function with its reference"
    for name in shared:
        if kernel.tags(name, shared) != reference.tags(name, shared):  # one calls a stage
            others = [f for f in shared if f not in reference.reach(name)]  # maps of pieces
            apart = others if reference.calls(name) else ()
            assert kernel.tags(name, apart) == reference.tags(name, apart), f"{module}.{name}"


def test_a_swapped_or_missing_step_is_noticed():
    text = "def f():\n    # eq:a\n    g()\n    # eq:c\n    return\n"
    text += "\ndef g():\n    # eq:b\n    return\n"
    assert Module(text).tags("f") == ["eq:a", "eq:b", "eq:c"]
    assert Module(text.replace("eq:a", "eq:d")).tags("f") == ["eq:d", "eq:b", "eq:c"]
    assert Module(text.replace("    g()\n", "")).tags("f") == ["eq:a", "eq:c"]
    assert Module(text).tags("f", apart=["f", "g"]) == ["eq:a", "eq:c"]
