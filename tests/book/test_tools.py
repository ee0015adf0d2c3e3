"""tools/: a notebook is replaced only when all of its cells ran, and names the one that did not."""

import copy
import importlib.metadata
import json
import shutil

import nbformat
import pytest
from book.layout import tool

HEADER = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
"""
CHAPTER = HEADER + "\n# Title\n\nText.\n\n```{code-cell} ipython3\nx = 6 * 7\nprint(x)\n```\n"


@pytest.fixture
def chapter(tmp_path):
    md = tmp_path / "01_one.md"
    md.write_text(CHAPTER)
    return md


def test_a_chapter_from_first_run_to_failure(chapter):
    chapters = tool("chapters")
    notebook = chapter.with_suffix(".ipynb")
    assert chapters.problems(chapter) == ["01_one.ipynb is missing"]
    assert chapters.update(chapter, always=False).startswith("executed")
    assert chapters.problems(chapter) == []
    assert "42" in notebook.read_text()
    assert chapters.update(chapter, always=False) == "up to date"

    # other text: the outputs stay, nothing runs
    chapter.write_text(CHAPTER.replace("Text.", "Other text."))
    assert "differ, first at cell 0" in chapters.problems(chapter)[0]
    assert chapters.update(chapter, always=False) == "text only"
    assert chapters.problems(chapter) == []

    # a failing cell: named, and the notebook stays as it was
    before = notebook.read_bytes()
    chapter.write_text(CHAPTER.replace("6 * 7", "6 / 0"))
    with pytest.raises(Exception, match=r"01_one\.ipynb, cell 1 under 'Title': 'x = 6 / 0'"):
        chapters.update(chapter, always=False)
    assert notebook.read_bytes() == before


def test_tables_of_measurements_are_run_alone(chapter):
    """Their outputs are new; of the other cells nothing changes, and nothing runs."""
    chapters = tool("chapters")
    cell = '\n```{code-cell} ipython3\nteaching.measured_ladder("no_such", {"a": "b"})\n```\n'
    chapter.write_text(CHAPTER.replace("x = 6", "from linattn_edu import teaching\nx = 6") + cell)
    chapters.update(chapter, always=False)
    path = chapter.with_suffix(".ipynb")
    before = path.read_text()
    path.write_text(before.replace("42", "43").replace("Not measured yet", "Old"))
    assert chapters.measure_again(chapter) in ("1 of 1 tables are new", "0 of 1 tables are new")
    assert path.read_text() == before.replace("42", "43")
    for source in ("data = teaching.measured()", "!ls", "teaching.setup()", ""):
        assert not chapters.shows_measurements(source)


def test_another_release_changes_the_set_up_cell_alone(chapter):
    chapters = tool("chapters")
    setup = chapters.setup_cell()
    chapter.write_text(CHAPTER.replace("x = 6", setup.replace("v0", "v7") + "\nx = 6"))
    chapters.update(chapter, always=False)
    assert chapters.pin(chapter) and not chapters.pin(chapter)
    assert setup in chapter.read_text()
    assert chapters.update(chapter, always=False) == "text only"
    assert chapters.problems(chapter) == []


def test_an_unexecuted_notebook_is_noticed(chapter):
    chapters = tool("chapters")
    nbformat.write(chapters.from_markdown(chapter), chapter.with_suffix(".ipynb"))
    assert chapters.problems(chapter) == ["01_one.ipynb was not executed from top to bottom"]


def test_an_old_listing_is_noticed(chapter):
    """Committed outputs show the package; when that changes, the chapter has to run again."""
    chapters = tool("chapters")
    chapters.update(chapter, always=False)
    nb = nbformat.read(chapter.with_suffix(".ipynb"), as_version=4)
    for said, known in (('"""Linear attention', True), ("no such line", False)):
        text = f"`linattn_edu/__init__.py`\n\n```python\n{said}\n```"
        nb.cells[1].outputs = [
            nbformat.v4.new_output("display_data", {"text/markdown": text, "text/plain": said})
        ]
        nbformat.write(nb, chapter.with_suffix(".ipynb"))
        assert (chapters.problems(chapter) == []) == known
    assert chapters.update(chapter, always=False).startswith("executed")


@pytest.fixture
def book(tmp_path, monkeypatch):
    """tools/book.py on a book of two chapters, with a package of one file."""
    book, chapters = tool("book"), tool("chapters")
    (tmp_path / "source" / "chapters").mkdir(parents=True)
    (tmp_path / "linattn_edu").mkdir()
    (tmp_path / "linattn_edu" / "one.py").write_text("x = 1\n")
    names = ["01_one", "02_two"]

    def write(name, line):
        md = tmp_path / "source" / "chapters" / f"{name}.md"
        md.write_text(CHAPTER.replace("x = 6 * 7", line))
        nbformat.write(chapters.from_markdown(md), md.with_suffix(".ipynb"))

    def outputs(name):
        nb = nbformat.read(tmp_path / "source" / "chapters" / f"{name}.ipynb", as_version=4)
        return [o["text"] for c in nb.cells for o in c.get("outputs", ())]

    for name in names:
        write(name, "x = 6 * 7")
    monkeypatch.setattr(book, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(book, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(book, "toc_chapters", lambda: names)
    around = book.surroundings
    monkeypatch.setattr(book, "surroundings", lambda: around(tmp_path))
    book.write, book.outputs, book.package = write, outputs, tmp_path / "linattn_edu" / "one.py"
    return book


def test_a_chapter_of_the_book_runs_again_only_when_something_changed(book, capsys):
    def ran(always=False):
        book.run_chapters(always, jobs=2)
        said = capsys.readouterr().out
        return sorted(name for name in ("01_one", "02_two") if f"chapters/{name}" in said), said

    assert ran()[0] == ["01_one", "02_two"]
    assert book.outputs("01_one") == book.outputs("02_two") == ["42\n"]

    # a fresh copy of the same text: nothing runs, and the outputs are there
    book.write("01_one", "x = 6 * 7")
    names, said = ran()
    assert names == [] and "nothing to execute" in said
    assert book.outputs("01_one") == ["42\n"]

    book.write("02_two", "x = 6 * 8")
    assert ran()[0] == ["02_two"]
    assert book.outputs("02_two") == ["48\n"]

    book.package.write_text("x = 2\n")
    assert ran()[0] == ["01_one", "02_two"]
    assert ran(always=True)[0] == ["01_one", "02_two"]

    # a chapter that fails is named, and runs again
    book.write("02_two", "x = 6 / 0")
    for _ in range(2):
        with pytest.raises(Exception, match=r"02_two\.ipynb, cell 1 under 'Title': 'x = 6 / 0'"):
            book.run_chapters(False, jobs=2)


def test_ids_follow_from_the_text(chapter):
    chapters = tool("chapters")
    first = [c.id for c in chapters.from_markdown(chapter).cells]
    chapter.write_text(CHAPTER.replace("# Title", "# Title\n\n+++\n\nA cell between."))
    assert set(first[1:]) < {c.id for c in chapters.from_markdown(chapter).cells}


def test_an_appendix_is_collapsed_in_the_notebook(chapter):
    """Its heading alone in a cell, a tag on each of its cells, no others hidden or tagged."""
    chapters = tool("chapters")
    want = ["Here.\n\n(one)=", "## Appendix: one", "More.", "y = 1", "## Appendix: two", "Still."]
    want.append("## References\n\nNone.")
    text = "\n\n".join(want).replace("=\n\n", "=\n")
    cell = '```{code-cell} ipython3\n:tags: ["hide-input"]\n\ny = 1\n```'
    chapter.write_text(f"{CHAPTER}\n{text}\n".replace("y = 1", cell))
    chapters.update(chapter, always=False)
    notebook = chapter.with_suffix(".ipynb")
    nb = nbformat.read(notebook, as_version=4)
    assert [c.source for c in nb.cells[-7:]] == want
    tags = [c.metadata.get("tags", []) for c in nb.cells[-8:]]
    assert tags == [[], [], *[["appendix"]] * 2, ["hide-input", "appendix"], *tags[2:4], []]
    headings = [c for c in nb.cells if c.source.startswith("## Appendix")]
    assert [c for c in nb.cells if c.metadata.get("jp-MarkdownHeadingCollapsed")] == headings
    assert [c.metadata.id for c in headings] == [c.id for c in headings]
    assert nb.metadata.colab.collapsed_sections == [c.id for c in headings]
    assert chapters.problems(chapter) == []
    old = copy.deepcopy(nb)
    old.cells[-4].metadata.tags.remove("appendix")
    del nb.cells[-3].metadata["jp-MarkdownHeadingCollapsed"]
    for other in (old, nb):
        nbformat.write(other, notebook)
        assert len(chapters.problems(chapter)) == 1
        # neither has to do with what a cell prints
        assert chapters.update(chapter, always=False) == "text only"
        assert chapters.problems(chapter) == []


def test_the_newest_triton_is_installed_once(tmp_path, monkeypatch, capsys):
    """And again when there is a newer one; without a network the last one is taken, or none."""
    newest, folder, asked = tool("newest"), tmp_path / "triton-newest", []
    there = ["9.8.7"]

    def pip(*options):
        asked.append(options[0])
        if not there:
            raise newest.NoAnswer("no such host")
        if options[0] == "--dry-run":
            return json.dumps({"install": [{"metadata": {"version": there[0]}}]})
        assert options == ("--target", str(folder), f"triton=={there[0]}")
        about = folder / f"triton-{there[0]}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True)
        about.write_text(f"Metadata-Version: 2.1\nName: triton\nVersion: {there[0]}\n")
        return ""

    monkeypatch.setattr(newest, "pip", pip)
    monkeypatch.setattr(newest, "FOLDER", folder)
    for version, installs in (("9.8.7", True), ("9.8.7", False), ("9.9.0", True)):
        there[:], asked[:] = [version], []
        assert newest.provide(folder) == newest.installed(folder) == version
        assert asked == ["--dry-run"] + ["--target"] * installs
    assert len([*folder.iterdir()]) == 1
    there.clear()
    assert newest.provide(folder) == "9.9.0" and "no such host" in capsys.readouterr().out
    shutil.rmtree(folder)
    assert newest.main() == 1
    assert "needs a network: no such host" in capsys.readouterr().out


def test_the_newest_triton_may_be_the_pinned_one(monkeypatch, capsys):
    """Whose rows have results that are kept: there is nothing to run."""
    pytest.importorskip("triton")
    newest = tool("newest")
    monkeypatch.setattr(newest, "provide", lambda _: importlib.metadata.version("triton"))
    assert newest.main() == 0 and "is the one that is pinned" in capsys.readouterr().out


def test_the_quick_check_is_ruff_and_one_case_of_each_test(monkeypatch, capsys):
    check, ran = tool("check"), {}

    def run(name, command, full):
        ran[name] = command
        return name != failing, 0.0, 0.0

    monkeypatch.setattr(check, "run", run)
    for failing in ("no step", "pytest"):
        ran.clear()
        assert check.main(["--quick"]) == (failing == "pytest")
        assert list(ran) == ["ruff check", "ruff format", "pytest"]
        step = len(check.STEPS["pytest"])
        assert ran["pytest"][:step] == check.STEPS["pytest"] and "--quick" in ran["pytest"][step:]
    assert "failed: pytest" in capsys.readouterr().out
    check.main(["pytest"])
    assert ran["pytest"] == check.STEPS["pytest"]
