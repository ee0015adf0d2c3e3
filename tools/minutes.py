"""How long a chapter takes to read: its main path, and all of it.

    python tools/minutes.py [NAME...]     a line a chapter

170 words a minute, or 12 lines of shown code or of a listing; 30 seconds a displayed equation,
20 seconds a figure; a formula inside a sentence is a word.  Off the main path: what is folded
(hidden cells, drop-down boxes, solutions) and the sections of `OFF`.
"""

import itertools
import json
import re
import sys
from pathlib import Path

import nbformat
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
DIRECTIVE = re.compile(r"^(`{3,}|:{3,})\{([\w-]+)\}")


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
            source, output = _cell(cell)
            main = 0.0
            if not section.startswith(OFF) and not any(f for _, f in folded):
                tags = set(cell.metadata.get("tags", ()))
                main += 0 if tags & (HIDDEN | {"hide-input"}) else source
                main += 0 if tags & (HIDDEN | {"hide-output", "remove-output"}) else output
            yield section, main, source + output
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


def _cell(cell) -> tuple[float, float]:
    """Minutes of a code cell's source, and of the listings and figures that it shows."""
    shown = [o["data"] for o in cell.outputs if "data" in o]
    texts = [data.get("text/markdown", "") for data in shown]
    listings = [x for text in texts for x in re.findall(r"```python\n(.*?)\n```", text, re.S)]
    output = sum(map(_code, listings)) / LINES + FIGURE * sum(map(_is_figure, shown))
    removed = "remove-input" in cell.metadata.get("tags", ())  # on no page
    return 0.0 if removed else _code(cell.source) / LINES, output


def _is_figure(data: dict) -> bool:
    """Whether an output is a picture; one that is gone through step by step is one."""
    return any(kind.startswith("image/") for kind in data) or "<svg" in data.get("text/html", "")


def _code(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def _lines(text: str):
    """Each line of Markdown, and the minutes that it takes."""
    equation = code = False
    for line in text.splitlines():
        if line.startswith("```") and not line.startswith("```{") and (code or line != "```"):
            code = not code and line != "```"
            yield line, 0
        elif line.startswith("$$"):
            begins = not equation
            equation ^= line.count("$$") == 1
            yield line, EQUATION if begins else 0
        elif equation:
            yield line, 0
        elif code:
            yield line, bool(line.strip()) / LINES
        elif line.startswith((":", "```")):
            yield line, 0
        else:
            plain = re.sub(r"\$[^$]*\$|\{[\w:]+\}`[^`]*`|`[^`]*`|\]\([^)]*\)", " x ", line)
            yield line, len(re.findall(r"\w+(?:['’.-]\w+)*", plain)) / WORDS


if __name__ == "__main__":
    for name in sys.argv[1:] or toc_chapters():
        text = (CHAPTERS / f"{name}.md").read_text()
        main, whole = minutes(name)
        says = " and ".join(STATED.search(text).groups()) if STATED.search(text) else "neither"
        print(f"{name:34} {main:5.0f} {whole:5.0f}   the box says {says}")
