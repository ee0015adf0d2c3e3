"""What the tests of the book share: where things are, and how to read them."""

import importlib.util
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
HTML = ROOT / "_build" / "html"
CHAPTERS = ROOT / "chapters"


def tool(name: str):
    """A module of tools/ (by its file: tests/book and tools/book.py share a name)."""
    folder = str(ROOT / "tools")
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"tools_{name}", f"{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toc() -> list[str]:
    """The chapters of _toc.yml, as "01_recurrent"."""
    return tool("notebooks").toc_chapters()


def notebook(name: str) -> nbformat.NotebookNode:
    """A chapter's committed notebook."""
    return nbformat.read(CHAPTERS / f"{name}.ipynb", as_version=4)


def tagged(nb: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """The cells whose output nbval compares."""
    return [c for c in nb.cells if "nbval-check-output" in c.metadata.get("tags", ())]
