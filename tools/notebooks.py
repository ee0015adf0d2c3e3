"""What the tools share: the list of chapters, and running one."""

import re
import time
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = ROOT / "chapters"
CELL_TIMEOUT = 900


class ChapterError(Exception):
    """A cell of a chapter failed; the message names the chapter and the cell."""


def toc_files(toc: Path = ROOT / "_toc.yml") -> list[str]:
    """Every file the table of contents lists, in order, without suffix."""
    tree = yaml.safe_load(toc.read_text())

    def walk(node):
        if "file" in node:
            yield node["file"]
        for key in ("parts", "chapters", "sections"):
            for child in node.get(key, ()):
                yield from walk(child)

    return [tree["root"], *walk(tree)]


def toc_chapters(toc: Path = ROOT / "_toc.yml") -> list[str]:
    """The names of the chapters in the table of contents, as "01_recurrent"."""
    return [f.removeprefix("chapters/") for f in toc_files(toc) if f.startswith("chapters/")]


def toc_parts(toc: Path = ROOT / "_toc.yml") -> dict[str, list[str]]:
    """Caption of each part of the table of contents -> its chapters, as "01_recurrent"."""
    return {
        part["caption"]: [Path(chapter["file"]).name for chapter in part["chapters"]]
        for part in yaml.safe_load(toc.read_text())["parts"]
        if part["chapters"][0]["file"].startswith("chapters/")
    }


def cell_name(nb: nbformat.NotebookNode, index: int) -> str:
    """A cell in words: its number, the heading it stands under, its first line."""
    heading = "the top"
    for cell in nb.cells[: index + 1]:
        if cell.cell_type == "markdown":
            found = re.findall(r"^#+ +(.+)$", cell.source, re.MULTILINE)
            heading = found[-1] if found else heading
    line = next((x for x in nb.cells[index].source.splitlines() if x.strip()), "")
    return f"cell {index} under {heading!r}: {line.strip()!r}"


def execute(nb: nbformat.NotebookNode, name: str, folder: Path) -> float:
    """Run a notebook in place from a fresh kernel; return the seconds it took.

    Raises:
        ChapterError: a cell failed, and was not tagged raises-exception.
    """
    current = [0]

    def on_start(cell, cell_index):
        current[0] = cell_index

    client = NotebookClient(
        nb,
        timeout=CELL_TIMEOUT,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=40"],  # a loopback kernel needs no warning about TCP
        resources={"metadata": {"path": str(folder)}},
        on_cell_start=on_start,
    )
    start = time.perf_counter()
    try:
        client.execute()
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        where = f"chapters/{name}.ipynb, {cell_name(nb, current[0])}"
        raise ChapterError(f"{where}\n{error}") from None
    return time.perf_counter() - start
