"""How long a chapter takes to read: its main path, and all of it.

    python tools/minutes.py [NAME...]     a line a chapter

170 words a minute, or 12 lines of shown code or of a listing; 30 seconds a displayed equation,
20 seconds a figure.  Words are those of paragraphs, lists, tables and captions, of what cells
print, of tables that they show and of the quiz.  A formula inside a sentence has as many as it has
letters, numbers, operators and relations; an index or an accent belongs to its letter.  A row of a
display is an equation if it has a left side, else it goes on with the one before.  Off the main
path: what is folded (hidden cells, drop-down boxes, solutions, the quiz's answers) and the sections
of `OFF`.  Not counted: what is on no page, and alternative texts.
"""

import itertools
import json
import re
import sys
from pathlib import Path

import nbformat
import yaml
from notebooks import CHAPTERS, toc_chapters, toc_parts

WORDS, LINES = 170, 12  # a minute
EQUATION, FIGURE = 30 / 60, 20 / 60  # minutes
OFF = ("Exercises", "In production", "Appendix", "References")
HIDDEN = {"hide-cell", "remove-cell"}
LIMIT, WHOLE = 60, 90  # minutes of a main path, of a chapter
# the paths through the book: a key -> how its line of the table in chapter 0 begins
TABLE = "00_ten_minutes.md"
PATHS = {
    "maths": "I want the maths",
    "kernels": "I write kernels",
    "library": "I use the library",
}
STATED = re.compile(r"\*\*Time:\*\* (\d+) minutes for the main path, (\d+) with ")
WORD = re.compile(r"\w+(?:['’.-]\w+)*")
LISTING = re.compile(r"```python\n(.*?)\n```", re.S)
DETAILS, TAG = re.compile(r"<details>.*?</details>", re.S), re.compile(r"</?\w[^>]*>")
STYLE = r"\\(?:tilde|hat|bar|dot|vec|mathbf|mathbb|mathcal|left|right|[Bb]igg?[lr]?|quad|qquad)\b"
LISTED = re.compile(r"```\w")  # begins a listing; ```` and ```{ are directives
DIRECTIVE = re.compile(r"^(`{3,}|:{3,})\{([\w:-]+)\}")


def minutes(name: str) -> tuple[float, float]:
    """Minutes of a chapter's main path, and of the whole."""
    parts = list(_parts(name))
    return sum(main for _, main, _ in parts), sum(whole for _, _, whole in parts)


def appendices(name: str) -> list[float]:
    """Minutes of each appendix of a chapter, in their order."""
    sections = []
    for heading, group in itertools.groupby(_parts(name), key=lambda part: part[0]):
        if heading.startswith("Appendix"):
            sections.append(sum(whole for _, _, whole in group))
    return sections


def path(who: str) -> list[str]:
    """The chapters of a path of chapter 0's table, whose line begins with *who*, in its order."""
    line = re.search(rf"^\| \*{who}\* \|([^|]*)\|", (CHAPTERS / TABLE).read_text(), re.M)
    return re.findall(r"<(\d\d[a-z]?_\w+)>", line[1])


def hours() -> dict[str, int]:
    """Hours that the main paths of chapters take: of each of `PATHS`, of each part (part_iii), of
    all.
    """
    takes = {name: minutes(name)[0] for name in toc_chapters()}
    chapters = {key: path(who) for key, who in PATHS.items()} | {"all": list(takes)}
    for caption, names in toc_parts().items():
        if numbered := re.match(r"Part (\w+):", caption):
            chapters[f"part_{numbered[1].lower()}"] = names
    return {k: max(1, round(sum(takes[n] for n in names) / 60)) for k, names in chapters.items()}


def write(folder: Path) -> None:
    """Write what the pages show: the minutes of all appendices, the hours of paths and parts."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {name: appendices(name) for name in toc_chapters()}
    (folder / "appendices.json").write_text(json.dumps(shown))
    (folder / "hours.json").write_text(json.dumps(hours()))


def _parts(name: str):
    """The heading that each line or cell of a chapter stands under, its minutes of both kinds."""
    section, folded = "", []  # fences that are open, and whether each folds what it holds
    for cell in nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            source, output, whole = _cell(cell)
            main = 0.0
            if not section.startswith(OFF) and not any(f for _, f in folded):
                tags = set(cell.metadata.get("tags", ()))
                main += 0 if tags & (HIDDEN | {"hide-input"}) else source
                main += 0 if tags & (HIDDEN | {"hide-output", "remove-output"}) else output
            yield section, main, source + whole
            continue
        for line, takes in _lines(cell.source):
            if heading := re.match(r"## +(.*)", line):
                section = heading[1]
            if directive := DIRECTIVE.match(line):
                fence, kind = directive.groups()
                if kind.endswith("-end"):
                    folded.pop()
                else:
                    # the fence of a -start directive closes at once, its fold at its -end
                    fence = fence if not kind.endswith("-start") else None
                    folded.append((fence, kind in ("solution-start", "exercise-start", "dropdown")))
            elif line.startswith(":class:") and "dropdown" in line:
                folded[-1] = (folded[-1][0], True)
            elif folded and line.strip() == folded[-1][0]:
                folded.pop()
            off = section.startswith(OFF) or any(f for _, f in folded)
            yield section, 0 if off else takes, takes
    yield "Quiz", *_quiz(name)


def _cell(cell) -> tuple[float, float, float]:
    """Minutes of a code cell's source, of what its outputs show, and of these with their folds."""
    removed = "remove-input" in cell.metadata.get("tags", ())  # on no page
    shown, whole = zip((0, 0), *map(_output, cell.outputs), strict=True)
    return 0.0 if removed else _code(cell.source) / LINES, sum(shown), sum(whole)


def _output(output) -> tuple[float, float]:
    """Minutes of an output as it shows, and with what it folds."""
    data = output.get("data", {})
    if _is_figure(data):
        return FIGURE, FIGURE
    text = data.get("text/markdown") or data.get("text/html") or data.get("text/plain", "")
    text = text or output.get("text", "")
    listings = sum(map(_code, LISTING.findall(text))) / LINES
    text = LISTING.sub("", text)
    shown, whole = (_words(TAG.sub(" ", x)) for x in (DETAILS.sub("", text), text))
    return listings + shown, listings + whole


def _quiz(name: str) -> tuple[float, float]:
    """Minutes of a chapter's questions with their options, and with all answers."""
    file = CHAPTERS.parent / "book" / "quiz" / f"{name}.yml"
    asked = answers = 0.0
    for question in yaml.safe_load(file.read_text()) if file.exists() else ():
        options = question["options"]
        texts = [question["ask"], *(str(x.get("right", x.get("wrong"))) for x in options)]
        asked += sum(map(_words, texts))
        answers += sum(_words(x["why"]) for x in options)
    return asked, asked + answers


def _words(text: str) -> float:
    """Minutes of running text."""
    symbols = sum(map(_symbols, re.findall(r"\$([^$]*)\$", text)))
    plain = re.sub(r"\$[^$]*\$", " ", text)
    plain = re.sub(r"\{[\w:]+\}`[^`]*`|`[^`]*`|\]\([^)]*\)", " x ", plain)
    return (symbols + len(WORD.findall(plain))) / WORDS


def _symbols(formula: str) -> int:
    """Letters, numbers, operators and relations of a formula."""
    formula = re.sub(r"\\(?:operatorname|mathrm|text|mathtt)\*?\{[^{}]*\}", "a", formula)
    formula = re.sub(r"[_^](?:\{[^{}]*\}|\\\w+|\w)", "", formula)
    formula = re.sub(STYLE, "", formula)
    return max(1, len(re.findall(r"\\[a-zA-Z]+|[a-zA-Z]|[\d.]+|[-=+<>/]", formula)))


def _is_figure(data: dict) -> bool:
    """Whether an output is a picture; one that is gone through step by step is one."""
    return any(kind.startswith("image/") for kind in data) or "<svg" in data.get("text/html", "")


def _code(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def _lines(text: str):
    """Each line of Markdown, and the minutes that it takes."""
    equation, code, display = False, False, ""
    for line in text.splitlines():
        if code or LISTED.match(line):
            yield line, 0 if line.startswith("```") else bool(line.strip()) / LINES
            code = line != "```"
        elif line.startswith("$$"):
            if equation or line.count("$$") == 2:
                yield line, EQUATION * max(1, _rows(display + line))
                equation, display = False, ""
            else:
                equation, display = True, line
                yield line, 0
        elif equation:
            display += line
            yield line, 0
        elif line.startswith((":", "```")):
            yield line, 0
        else:
            yield line, _words(line)


def _rows(display: str) -> int:
    """Rows of a display that have a left side; those of a matrix are one."""
    display = re.sub(r"\\begin\{(\w?matrix|array|cases)\}.*?\\end\{\1\}", "M", display)
    display = re.sub(r"\\begin\{(?:aligned|split|gathered)\}|\\end\{\w+\}|\$\$", "", display)
    rows = re.split(r"\\\\(?:\[[^]]*\])?", display)
    return sum(
        bool(re.search(r"=|\\(?:le|ge|leftarrow|approx|to)\b", row))
        and not row.strip().startswith("&")
        for row in rows
    )


if __name__ == "__main__":
    for name in sys.argv[1:] or toc_chapters():
        text = (CHAPTERS / f"{name}.md").read_text()
        main, whole = minutes(name)
        says = " and ".join(STATED.search(text).groups()) if STATED.search(text) else "neither"
        print(f"{name:34} {main:5.0f} {whole:5.0f}   the box says {says}")
