"""The chapters: the pair .md and .ipynb agrees, was executed, and checks something."""

import re

import pytest
from book.layout import CHAPTERS, ROOT, notebook, tagged, toc, tool

import linattn_edu


def test_toc_and_folder_list_the_same_chapters():
    assert sorted(toc()) == toc(), "chapters stand in the order of their numbers"
    assert toc() == sorted(p.stem for p in CHAPTERS.glob("*.md"))
    assert toc() == sorted(p.stem for p in CHAPTERS.glob("*.ipynb"))


def test_toc_entries_exist():
    assert tool("book").missing() == []


@pytest.mark.parametrize("name", toc())
def test_pair_agrees_and_is_executed(name):
    assert tool("chapters").problems(CHAPTERS / f"{name}.md") == []


@pytest.mark.parametrize("name", toc())
def test_verdicts_are_checked(name):
    """nbval compares only tagged cells, and skips a cell without an execution count."""
    cells = tagged(notebook(name))
    said = ["".join(o.get("text", "") for o in c.outputs) for c in cells]
    assert all(c.execution_count is not None for c in cells)
    assert all(said), "a tagged cell prints nothing, so nothing is compared"
    assert any(re.search(r"\bOK\b", x) for x in said), "no tagged cell prints a verdict"


@pytest.mark.parametrize("name", toc())
def test_no_output_is_an_address(name):
    """The value of a cell's last line that nobody meant to show."""
    outputs = [o for c in notebook(name).cells for o in c.get("outputs", ())]
    said = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs]
    assert [x for x in said if re.search(r" at 0x[0-9a-f]+>", x)] == []


@pytest.mark.parametrize("name", toc())
def test_equations_are_referred_to_by_label(name):
    """A reference to a label that is not there would be caught by the build; a number would not."""
    text = (CHAPTERS / f"{name}.md").read_text()
    assert re.findall(r"\b(?:Eq\.|Equation|equation) \(?\d", text) == []


@pytest.mark.parametrize("name", toc())
def test_references_are_not_empty(name):
    """The list holds what the chapter cites."""
    text = (CHAPTERS / f"{name}.md").read_text()
    assert ("```{bibliography}" in text) == ("{cite}" in text)


@pytest.mark.parametrize("name", toc())
def test_opens_in_colab(name):
    """The first code cell fetches this release on Colab; the metadata asks for its GPU."""
    nb = notebook(name)
    first = next(c.source for c in nb.cells if c.cell_type == "code")
    assert first == tool("chapters").setup_cell().strip(), "python tools/chapters.py --pin"
    assert nb.metadata["accelerator"] == "GPU"
    assert nb.metadata["colab"]["gpuType"]


def test_colab_gets_the_release_and_keeps_its_torch():
    """Git fetches the tag of the version; pip installs the package and nothing else."""
    cell = tool("chapters").setup_cell()
    assert cell.index("google.colab") < cell.index("!git")
    assert f"clone -q {address()} /content/linattn_edu\n" in cell
    assert re.findall(r"git checkout -q (\S+);", cell) == [f"v{linattn_edu.__version__}"]
    assert re.findall(r"pip install(.*)", cell) == [" -q --no-deps ."]


def address() -> str:
    """The repository's address, from the one place where it stands."""
    text = (ROOT / "pyproject.toml").read_text()
    return re.search(r'^Repository = "(https://[^"]+)"', text, re.M)[1]


def test_one_repository_address():
    owner, name = address().removeprefix("https://github.com/").split("/")
    files = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "_config.yml")]
    for pattern in ("book/*.md", "chapters/*.md", "chapters/*.ipynb", "linattn_edu/**/*.py"):
        files += sorted(ROOT.glob(pattern))
    found = {}
    for path in files:
        places = re.findall(
            r"(?:github\.com|githubusercontent\.com|colab\.research\.google\.com/github)"
            r"/([\w-]+)/([\w-]+)",
            path.read_text(),
        )
        ours = {p for p in places if owner == p[0] or name == p[1]}
        found |= {f"{path.name}: {'/'.join(p)}": p for p in ours}
        if path.name in ("README.md", "_config.yml"):
            assert ours, f"{path.name} does not give the repository's address"
    assert {k for k, v in found.items() if v != (owner, name)} == set()


def test_launch_buttons_open_the_branch_the_config_names():
    config = (ROOT / "_config.yml").read_text()
    assert re.search(r"^  branch: main$", config, re.M)
    for path in [*CHAPTERS.glob("*.md"), ROOT / "README.md"]:
        links = re.findall(
            r"colab\.research\.google\.com/github/[\w-]+/[\w-]+/(\S+?)[)\"']", path.read_text()
        )
        for link in links:
            assert link.startswith("blob/main/chapters/")
            assert (ROOT / link.removeprefix("blob/main/")).exists()


# chapters whose figures still have the words drawn in them as their alternative text
UNTOLD = [f"{n}_" for n in range(14, 20)]


@pytest.mark.parametrize("name", [n for n in toc() if not n.startswith(tuple(UNTOLD))])
def test_a_figure_says_what_is_seen(name):
    """The option `:alt:` of its cell: sentences, not its labels."""
    for cell in notebook(name).cells:
        kinds = {kind for o in cell.get("outputs", ()) for kind in o.get("data", ())}
        if any(kind.startswith("image/") for kind in kinds):
            said = cell.metadata.get("alt", "")
            assert len(said.split()) >= 15 and said.endswith("."), cell.source[:80]
