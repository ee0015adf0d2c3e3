"""The minutes that a chapter's box promises are those that its text and code take."""

import re

import nbformat
import pytest
from book.layout import CHAPTERS, ROOT, toc, tool

minutes = tool("minutes")
SHORT = {"00_ten_minutes": 11}


@pytest.mark.parametrize("name", toc())
def test_a_chapter_fits(name):
    """Its main path, and all of it."""
    limits = SHORT.get(name, minutes.LIMIT), minutes.WHOLE
    for takes, most in zip(minutes.minutes(name), limits, strict=True):
        assert takes <= most, f"{takes:.1f} minutes"


@pytest.mark.parametrize("name", toc())
def test_box_states_both_times(name):
    """Within a tenth, or three minutes."""
    main, whole = minutes.minutes(name)
    stated = minutes.STATED.search((CHAPTERS / f"{name}.md").read_text())
    assert stated, "**Time:** M minutes for the main path, W with ..."
    for said, takes in zip(map(int, stated.groups()), (main, whole), strict=True):
        assert abs(said - takes) <= max(3, 0.1 * takes), f"{takes:.0f} minutes, not {said}"
    rest = stated.string[stated.end() :].partition(";")[0]
    count = len(minutes.appendices(name))
    assert ("the appendix" in rest, "the appendices" in rest) == (count == 1, count > 1), rest


@pytest.mark.parametrize(
    "extra, main, whole",
    [
        ("word " * 170, 1, 1),
        ("$$\n" + "a\n" * 12 + "$$ (eq:x)\n" + "$$ b $$", 1, 1),
        ("```text\n" + "a\n" * 12 + "```", 1, 1),
        ("$$\n\\begin{aligned}\na &= b \\\\\n&= c \\\\\nd &= e\n\\end{aligned}\n$$", 1, 1),
        ("$$ a = \\begin{pmatrix} b = 1 \\\\ c = 2 \\end{pmatrix} $$", 0.5, 0.5),
        (r"$\tilde a_{ij} + b$ " * 170, 3, 3),
        ("```{admonition} x\n:class: dropdown\n" + "word " * 170 + "\n```\n" + "word " * 170, 1, 2),
        ("```{solution-start} a\n```\n" + "word " * 170 + "\n```{solution-end}\n```",
         0, 1),
        ("````{prf:proof}\nword\n````\n" + "word " * 168, 1, 1),
        ("````{admonition} Proof\n:class: dropdown\n" + "word " * 170 + "\n````", 0, 1),
        ("## Appendix: more\n" + "word " * 170, 0, 1),
    ],
)  # fmt: skip
def test_count(extra, main, whole, tmp_path, monkeypatch):
    counted = _count(tmp_path, monkeypatch, [nbformat.v4.new_markdown_cell(extra)])
    assert counted == pytest.approx((main, whole), abs=0.02)


@pytest.mark.parametrize(
    "tags, main, whole",
    [([], 2, 2), (["hide-input"], 1, 2), (["remove-input"], 1, 1), (["hide-output"], 1, 2),
     (["hide-cell"], 0, 2)],
)  # fmt: skip
def test_count_of_cells(tags, main, whole, tmp_path, monkeypatch):
    listing = {"text/markdown": "`a.py`\n\n```python\n" + "x = 1\n" * 12 + "\n```"}
    cell = nbformat.v4.new_code_cell(
        "y = 2\n" * 12,
        metadata={"tags": tags},
        outputs=[nbformat.v4.new_output("display_data", data=listing)],
    )
    assert _count(tmp_path, monkeypatch, [cell]) == pytest.approx((main, whole), abs=0.02)


@pytest.mark.parametrize(
    "tags, main", [([], 1), (["hide-input"], 1), (["hide-output"], 0), (["remove-output"], 0)]
)
def test_count_of_figures(tags, main, tmp_path, monkeypatch):
    """An image, an SVG in HTML and one of several steps; a table is none."""
    shown = [
        {"image/svg+xml": "<svg/>", "text/plain": "x"},
        {"text/html": "<p><svg></svg></p>"},
        {"text/html": "<svg></svg><svg></svg>"},
        {"text/html": "<table></table>"},
    ]
    outputs = [nbformat.v4.new_output("display_data", data=data) for data in shown]
    cell = nbformat.v4.new_code_cell("", metadata={"tags": tags}, outputs=outputs)
    assert _count(tmp_path, monkeypatch, [cell]) == pytest.approx((main, 1))


@pytest.mark.parametrize(
    "output, main, whole",
    [
        (nbformat.v4.new_output("stream", text="word " * 170), 1, 1),
        ({"text/html": "<td>word</td>" * 170, "text/plain": "x"}, 1, 1),
        ({"text/html": "<details>" + "word " * 170 + "</details>" + "word " * 170}, 1, 2),
    ],
)
def test_count_of_what_a_cell_prints(output, main, whole, tmp_path, monkeypatch):
    if "output_type" not in output:
        output = nbformat.v4.new_output("display_data", data=output)
    cell = nbformat.v4.new_code_cell("", outputs=[output])
    assert _count(tmp_path, monkeypatch, [cell]) == pytest.approx((main, whole), abs=0.02)


def test_count_of_the_quiz(tmp_path, monkeypatch):
    """Questions and options are on the main path, answers are not."""
    (tmp_path / "book/quiz").mkdir(parents=True)
    options = "  options: [{right: a b, why: c d}, {wrong: e, why: f}]\n"
    (tmp_path / "book/quiz/one.yml").write_text("- ask: g h\n" + options)
    (tmp_path / "chapters").mkdir()
    assert _count(tmp_path / "chapters", monkeypatch, []) == pytest.approx((5 / 170, 8 / 170))


def test_minutes_of_each_appendix(tmp_path, monkeypatch):
    """One after the other, their cells with them; what follows them is in none."""
    texts = ["word " * 170, "## Appendix: a\n" + "word " * 168, "## Appendix: b\n" + "word " * 338]
    cells = [nbformat.v4.new_markdown_cell(text) for text in texts]
    cells.insert(2, nbformat.v4.new_code_cell("y = 2\n" * 12))
    cells.append(nbformat.v4.new_markdown_cell("## References\n" + "word " * 170))
    assert _count(tmp_path, monkeypatch, cells) == pytest.approx((1, 6), abs=0.02)
    assert minutes.appendices("one") == pytest.approx([2, 2])


def _count(tmp_path, monkeypatch, cells):
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "one.ipynb")
    monkeypatch.setattr(minutes, "CHAPTERS", tmp_path)
    return minutes.minutes("one")


def test_hours_of_the_paths():
    """Of each path the main paths of the chapters that chapter 0's map marks with its dot."""
    text = (CHAPTERS / minutes.TABLE).read_text()
    found = minutes.hours()
    for key, who in minutes.PATHS.items():
        marked = re.search(rf'\("{key}", \w+, \{{([\d, ]+)\}}\)', text)[1].split(", ")
        names = minutes.path(who)
        assert sorted({int(name[:2]) for name in names}) == [int(n) for n in marked]
        takes = sum(minutes.minutes(name)[0] for name in names) / 60
        assert found[key] == max(1, round(takes))
    parts = [hours for key, hours in found.items() if key.startswith("part_")]
    assert len(parts) == 7 and abs(sum(parts) - found["all"]) <= len(parts) / 2 + 1


def test_the_readme_says_these_hours():
    said = re.search(
        r"the maths take (\d+) hours to read, the kernels (\d+), the library (\d+)",
        (ROOT / "README.md").read_text(),
    )
    found = minutes.hours()
    assert [int(x) for x in said.groups()] == [found[key] for key in minutes.PATHS]
