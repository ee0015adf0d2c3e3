"""Build the book: run every chapter, then render it to _build/html.

    python tools/book.py               run the chapters (what `make book` does)
    python tools/book.py --no-execute  render the committed outputs

All of it happens on a copy under _build; the working tree stays as it is.  A warning is an error.
"""

import argparse
import shutil
import subprocess
import sys
import time

import nbformat
from notebooks import ROOT, ChapterError, execute, toc_chapters, toc_files

BUILD = ROOT / "_build"
SOURCE = BUILD / "source"
SKIP = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")


def stage() -> None:
    """Copy what the book is made of to _build/source."""
    for folder in (SOURCE, BUILD / "html", BUILD / ".doctrees"):
        shutil.rmtree(folder, ignore_errors=True)
    SOURCE.mkdir(parents=True)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy2(ROOT / name, SOURCE / name)
    # pages include listings of the package, and a chapter counts with the benchmarks
    for name in ("book", "chapters", "linattn_edu", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, SOURCE / name, ignore=SKIP)


def missing() -> list[str]:
    """Entries of the table of contents without a file."""
    suffixes = {"chapters": (".md", ".ipynb"), "book": (".md",)}
    return [
        f"{entry}{suffix}"
        for entry in toc_files()
        for suffix in suffixes[entry.split("/")[0]]
        if not (ROOT / f"{entry}{suffix}").exists()
    ]


def run_chapters() -> None:
    """Execute the staged notebooks in place, a line of progress each."""
    names = toc_chapters()
    for i, name in enumerate(names, 1):
        print(f"[{i}/{len(names)}] chapters/{name}", end="  ", flush=True)
        path = SOURCE / "chapters" / f"{name}.ipynb"
        nb = nbformat.read(path, as_version=4)
        print(f"{execute(nb, name, path.parent):.1f} s", flush=True)
        nbformat.write(nb, path)


def render() -> bool:
    """Run Jupyter Book with warnings as errors; whether it succeeded."""
    program = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", program, "build", str(SOURCE)]
    options = ["--path-output", str(ROOT), "-W", "-n", "--keep-going", "--quiet"]
    return subprocess.run(command + options).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="build the book")
    parser.add_argument("--no-execute", action="store_true", help="use the committed outputs")
    args = parser.parse_args()
    if absent := missing():
        print(f"_toc.yml lists files that are not there: {', '.join(absent)}")
        return 1
    start = time.perf_counter()
    stage()
    try:
        if not args.no_execute:
            run_chapters()
    except ChapterError as error:
        print(f"FAILED\n{error}")
        return 1
    print("rendering", flush=True)
    if not render():
        print("the book was not rendered; the warnings above are errors here")
        return 1
    print(f"done in {time.perf_counter() - start:.0f} s")
    print(BUILD / "html" / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
