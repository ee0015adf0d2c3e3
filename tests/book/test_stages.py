"""Book and library in step: every stage has its four rooms, every tag its equation.

Nothing is listed here: folders, stages and chapters are those that there are. A file's chapter is
found by tools/where.py: the one with its name, or that its docstrings name as their source.
"""

import ast
import dataclasses
import re

import pytest
from book.layout import CHAPTERS, ROOT, toc, tool

from linattn_edu.ops import gdn, kda, ssd

REFERENCE = ROOT / "linattn_edu" / "reference"
KERNELS = ROOT / "linattn_edu" / "kernels"
TAG = re.compile(r"#\s*(eq:[\w-]+)")
NAMED = re.compile(r"Reference:\s+linattn_edu\.reference\.(\w+)\.(\w+)(?:\.(\w+))?\.")
WHERE = tool("where")


def functions(file):
    """The functions at a file's top level."""
    found = ast.parse(file.read_text()).body
    return {f.name: f for f in found if isinstance(f, ast.FunctionDef)}


def files(root):
    """Every file of stages under reference/ or kernels/, as "delta/state": of each folder in which
    there is a function with a tag or a kernel.
    """
    found = [p for p in sorted(root.glob("*/*.py")) if p.stem != "__init__"]
    text = {p: p.read_text() for p in found}
    folders = {p.parent for p in found if TAG.search(text[p]) or "_kernel(" in text[p]}
    return [f"{p.parent.name}/{p.stem}" for p in found if p.parent in folders]


MODULES = files(REFERENCE)
# kernels in folders of their own: what they compute has its rooms where the reference is
OTHERS = [m for m in files(KERNELS) if not (REFERENCE / m.split("/")[0]).exists()]
SETS = [s for op in (gdn, kda, ssd) for s in (op.Stages, op.FusedStages)]
STAGES = sorted({f.name for set_ in SETS for f in dataclasses.fields(set_)})


def test_every_folder_of_kernels_is_seen():
    assert {m.split("/")[0] for m in MODULES + OTHERS} == {
        p.parent.name
        for p in KERNELS.glob("*/*.py")
        if re.search(r"^@\w+\.jit", p.read_text(), re.M)
    }


def test_reference_and_kernels_hold_the_same_files():
    assert sorted(MODULES) == sorted(m for m in files(KERNELS) if m not in OTHERS)


@pytest.mark.parametrize("stage", STAGES)
def test_stage_has_a_reference_and_a_kernel(stage):
    """In files of the same name."""
    found = [
        {m for m in MODULES if stage in functions(root / f"{m}.py")}
        for root in (REFERENCE, KERNELS)
    ]
    assert found[0] == found[1] and len(found[0]) == 1


@pytest.mark.parametrize("module", MODULES)
def test_module_has_a_test_and_a_chapter(module):
    """A chapter that names one of its functions, as text and as a notebook."""
    folder, name = module.split("/")
    assert (ROOT / "tests" / folder / f"test_{name}.py").exists()
    chapter = WHERE.chapter_of(module)
    assert chapter in toc() and (CHAPTERS / f"{chapter}.ipynb").exists()
    words = {*re.findall(r"\w+", (CHAPTERS / f"{chapter}.md").read_text())}
    assert words & {name, *functions(REFERENCE / f"{module}.py")}


@pytest.mark.parametrize("module", MODULES + OTHERS)
def test_kernels_name_references_that_there_are(module):
    """In their docstrings; those in folders of their own all do, and its test knows of them."""
    kernels = [f for n, f in functions(KERNELS / f"{module}.py").items() if n.endswith("_kernel")]
    for kernel in kernels:
        named = NAMED.search(" ".join((ast.get_docstring(kernel) or "").split()) + " ")
        if named is None:
            assert module not in OTHERS, kernel.name
            continue
        folder, name, function = named.groups()
        assert f"{folder}/{name}" in MODULES, kernel.name
        assert function is None or function in functions(REFERENCE / folder / f"{name}.py")
        if module in OTHERS:
            own = module.split("/")[0]
            assert own in (ROOT / "tests" / folder / f"test_{name}.py").read_text(), kernel.name


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
    """The tags of a file's functions, in the order in which a call comes by them.

    shared: files whose functions, where the file imports them, count as its own.
    """

    def __init__(self, text, shared=()):
        self.functions, self.lines = {}, {}
        imported = {a.name for n in ast.parse(text).body if isinstance(n, ast.ImportFrom)
                    for a in n.names}  # fmt: skip
        for other in (*shared, text):
            for f in ast.parse(other).body:
                if isinstance(f, ast.FunctionDef) and (other is text or f.name in imported):
                    self.functions[f.name], self.lines[f.name] = f, other.splitlines()

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
            events += [(number, 0, [tag]) for tag in TAG.findall(self.lines[name][number - 1])]
        for node in ast.walk(function):
            callee = self.functions.get(getattr(node, "id", None))
            if callee and callee.name not in above:
                inner = self._walk(callee.name, (*above, callee.name))
                events.append((node.lineno, node.col_offset, inner))
        return [tag for *_, tags in sorted(events, key=lambda e: e[:2]) for tag in tags]


@pytest.mark.parametrize("module", MODULES)
def test_kernel_takes_the_steps_of_its_reference(module):
    reference = Module((REFERENCE / f"{module}.py").read_text())
    near = (KERNELS / "delta/kda_intra_bwd.py").read_text()  # whose sums two stages have
    kernel = Module((KERNELS / f"{module}.py").read_text(), [near])
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
