"""Make each chapter's executed .ipynb from its .md.

    python tools/chapters.py                 chapters whose code, or a listing in them, changed
    python tools/chapters.py 05_state --all  this chapter, changed or not
    python tools/chapters.py --measured      once more the cells that only show measurements
    python tools/chapters.py --check         say what is out of step, change nothing
    python tools/chapters.py --pin           write the version's cell for Colab into each .md

The .md is the source; only --pin writes it, and only its first cell.  A notebook is replaced at
once and only after all of its cells have run, so a failing cell leaves the old one as it was.
"""

import argparse
import ast
import copy
import hashlib
import os
import re
import sys
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from notebooks import CHAPTERS, ROOT, ChapterError, cell_name, execute

METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}

# the heading of an appendix; the key by which Jupyter shows its section collapsed (Colab has a
# list of ids); the tag of each of its cells, for a program that counts the main path
APPENDIX, COLLAPSED, TAG = "## Appendix: ", "jp-MarkdownHeadingCollapsed", "appendix"

# what a chapter runs first, on Colab alone: the release that it belongs to is put beside the
# runtime's torch and triton.  Until the release has its tag, git says so and main is there.
ON_COLAB = """\
import sys

if "google.colab" in sys.modules:
    !git clone -q {address} /content/{name}
    !cd /content/{name}; git checkout -q v{version}; pip install -q --no-deps .
    %cd -q /content/{name}/chapters
"""
SETUP = re.compile(r'import sys\n\nif "google\.colab" in sys\.modules:\n(?:    .+(?:\n|$))+')


def setup_cell() -> str:
    """The first code cell of every chapter: the repository's address and the version of today."""
    project = (ROOT / "pyproject.toml").read_text()
    address = re.search(r'^Repository = "(.+)"', project, re.M)[1]
    version = re.search(r'^version = "(.+)"', project, re.M)[1]
    return ON_COLAB.format(address=address, name=address.rsplit("/", 1)[1], version=version)


def pin(md: Path) -> bool:
    """Write `setup_cell` in place of a chapter's; whether it was another."""
    text = md.read_text()
    new, count = SETUP.subn(lambda _: setup_cell(), text)
    if count != 1:
        raise ChapterError(f"{md.name} has {count} set-up cells")
    if new != text:
        md.write_text(new)
    return new != text


def from_markdown(md: Path) -> nbformat.NotebookNode:
    """The chapter as a notebook without outputs, with ids that follow from the cells' text."""
    nb = jupytext.read(md, fmt="md:myst")
    nb.cells = collapsible(nb.cells)
    nb.nbformat, nb.nbformat_minor = 4, 5
    seen, inside = Counter(), False
    for cell in nb.cells:
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
        cell.id = digest + (f"-{seen[digest]}" if seen[digest] else "")
        seen[digest] += 1
        if cell.source.startswith(APPENDIX):
            cell.metadata |= {COLLAPSED: True, "id": cell.id}
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            inside = cell.source.startswith(APPENDIX)
        if inside:
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), TAG]
    nb.metadata = metadata(nb)
    return nb


def collapsible(cells: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The cells, cut so that an appendix has whole ones, its heading one of its own.

    Jupyter and Colab hide the cells below a collapsed heading, to the next section.
    """
    found, inside = [], False
    for cell in cells:
        texts = [""]
        for line in cell.source.splitlines(keepends=True):
            heading = cell.cell_type == "markdown" and line.startswith("## ")
            before, inside = inside, line.startswith(APPENDIX) if heading else inside
            texts += [""] if heading and (before or inside) else []
            texts[-1] += line
            texts += [""] if heading and inside else []
        texts = [text.strip("\n") for text in texts if text.strip()]
        cut = [nbformat.from_dict(cell | {"source": text}) for text in texts]
        found += cut if len(cut) > 1 else [cell]
    return found


def metadata(nb: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The metadata of a notebook with these cells."""
    found = copy.deepcopy(METADATA)
    if collapsed := [cell.id for cell in nb.cells if COLLAPSED in cell.metadata]:
        found["colab"]["collapsed_sections"] = collapsed
    return nbformat.from_dict(found)


def text(nb: nbformat.NotebookNode) -> list[tuple]:
    """What must agree between the pair: kind, text, tags, folding and `:alt:` of every cell."""
    return [
        (
            *(c.cell_type, c.source, tuple(c.metadata.get("tags", ()))),
            *(COLLAPSED in c.metadata, c.metadata.get("alt")),
        )
        for c in nb.cells
    ]


def code(nb: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The code cells that have text."""
    return [c for c in nb.cells if c.cell_type == "code" and c.source.strip()]


def runs(nb: nbformat.NotebookNode) -> list[tuple]:
    """What outputs come from: text and tags of the code cells, wherever they stand."""
    return [(c.source, tuple(t for t in c.metadata.get("tags", ()) if t != TAG)) for c in code(nb)]


def stale(nb: nbformat.NotebookNode) -> list[str]:
    """Listings of the package in the outputs that are not its text of today."""
    form = re.compile(r"`(linattn_edu/\S+\.py)`\n+```python\n(.*?)\n```", re.DOTALL)
    found = []
    for output in (o for c in code(nb) for o in c.outputs):
        for name, listing in form.findall(output.get("data", {}).get("text/markdown", "")):
            path = ROOT / name
            if not path.exists() or listing not in path.read_text():
                found.append(f"{name}: {listing.splitlines()[0]}")
    return found


def problems(md: Path) -> list[str]:
    """How a chapter's .ipynb falls short of its .md; empty when it does not."""
    path = md.with_suffix(".ipynb")
    if not path.exists():
        return [f"{path.name} is missing"]
    nb, source = nbformat.read(path, as_version=4), from_markdown(md)
    found = []
    if text(nb) != text(source):
        pairs = zip(text(source), text(nb), strict=False)
        shorter = min(len(nb.cells), len(source.cells))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        in_md = first < len(source.cells)
        where = cell_name(source, first) if in_md else f"cell {first} of the .ipynb alone"
        found.append(f"{md.name} and {path.name} differ, first at {where}")
    if [c.execution_count for c in code(nb)] != list(range(1, len(code(nb)) + 1)):
        found.append(f"{path.name} was not executed from top to bottom")
    found += [
        f"{path.name} holds an error at {cell_name(nb, i)}"
        for i, c in enumerate(nb.cells)
        if c.cell_type == "code"
        and "raises-exception" not in c.metadata.get("tags", ())
        and any(o.output_type == "error" for o in c.outputs)
    ]
    found += [f"{path.name} shows an old listing of {listing}" for listing in stale(nb)]
    if {k: nb.metadata.get(k) for k in METADATA} != metadata(source):
        found.append(f"{path.name} has other metadata than tools/chapters.py writes")
    return found


def take_outputs(nb: nbformat.NotebookNode, old: nbformat.NotebookNode) -> bool:
    """Copy the old outputs if the code did not change; whether that was possible.

    The set-up cell does not count: it does nothing but on Colab.
    """

    def without_setup(nb: nbformat.NotebookNode) -> list[tuple]:
        return [(SETUP.sub("", source), tags) for source, tags in runs(nb)]

    if without_setup(nb) != without_setup(old) or any(c.execution_count is None for c in code(old)):
        return False
    for new_cell, old_cell in zip(code(nb), code(old), strict=True):
        new_cell.outputs = old_cell.outputs
        new_cell.execution_count = old_cell.execution_count
    return True


def tidy(nb: nbformat.NotebookNode) -> None:
    """Drop what changes from run to run without meaning anything."""
    nb.metadata = metadata(nb)
    for cell in code(nb):
        cell.metadata.pop("execution", None)
        merged = []
        for output in cell.outputs:
            output.get("metadata", {}).clear()
            last = merged[-1] if merged else None
            if (
                last
                and last.output_type == output.output_type == "stream"
                and last.name == output.name
            ):
                last.text += output.text
            else:
                merged.append(output)
        cell.outputs = merged


def write(nb: nbformat.NotebookNode, path: Path) -> None:
    """Replace the notebook in one step."""
    nbformat.validate(nb)
    new = path.with_suffix(".ipynb.new")
    new.write_text(nbformat.writes(nb).rstrip("\n") + "\n", encoding="utf-8")
    os.replace(new, path)


def update(md: Path, always: bool) -> str:
    """Bring one chapter's .ipynb up to its .md; return what was done."""
    path = md.with_suffix(".ipynb")
    if not always and not problems(md):
        return "up to date"
    nb = from_markdown(md)
    old = nbformat.read(path, as_version=4) if path.exists() else None
    if old is None or always or stale(old) or not take_outputs(nb, old):
        seconds = execute(nb, md.stem, md.parent)
        done = f"executed, {seconds:.1f} s"
    else:
        done = "text only"
    tidy(nb)
    write(nb, path)
    return done


def shows_measurements(source: str) -> bool:
    """Whether a cell is nothing but calls of teaching.measured_..., which read chapters/data/."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a command of the shell
        return False
    names = {n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name)}
    shown = [ast.unparse(s).startswith("teaching.measured_") for s in statements]
    return names == {"teaching"} and all(shown)


def measure_again(md: Path) -> str:
    """Run the cells of a notebook that only show measurements, and keep all others' outputs."""
    path = md.with_suffix(".ipynb")
    nb = nbformat.read(path, as_version=4)
    cells = [c for c in code(nb) if shows_measurements(c.source)]
    if not cells:
        return "shows no measurements"
    first = nbformat.v4.new_code_cell("from linattn_edu import teaching\n\nteaching.setup();")
    few = nbformat.v4.new_notebook(cells=[first, *copy.deepcopy(cells)])
    execute(few, md.stem, md.parent)
    tidy(few)
    changed = [c.outputs != new.outputs for c, new in zip(cells, few.cells[1:], strict=True)]
    for cell, new in zip(cells, few.cells[1:], strict=True):
        cell.outputs = new.outputs
    write(nb, path)
    return f"{sum(changed)} of {len(cells)} tables are new"


def main() -> int:
    parser = argparse.ArgumentParser(description="sync and execute the chapters")
    parser.add_argument("names", nargs="*", help="chapters, such as 05_state; all if none")
    parser.add_argument("--all", action="store_true", help="execute even what did not change")
    parser.add_argument("--measured", action="store_true", help="only what shows measurements")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of step")
    parser.add_argument("--pin", action="store_true", help="write each first cell; then as without")
    args = parser.parse_args()
    available = {md.stem: md for md in sorted(CHAPTERS.glob("*.md"))}
    names = [Path(n).stem for n in args.names] or list(available)
    if unknown := [n for n in names if n not in available]:
        parser.error(f"no such chapter: {', '.join(unknown)}; there are {', '.join(available)}")
    failed = 0
    for i, name in enumerate(names, 1):
        print(f"[{i}/{len(names)}] chapters/{name}", end="  ", flush=True)
        if args.check:
            found = problems(available[name])
            print("; ".join(found) or "in step")
            failed += bool(found)
            continue
        try:
            if args.measured:
                print(measure_again(available[name]), flush=True)
                continue
            if args.pin and pin(available[name]):
                print("pinned,", end=" ")
            print(update(available[name], args.all), flush=True)
        except ChapterError as error:
            print(f"FAILED, notebook left as it was\n{error}", flush=True)
            failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
