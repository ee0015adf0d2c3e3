"""Build the book: run the chapters that changed, then render it to _build/html.

    python tools/book.py               run what changed since it was run (what `make book` does)
    python tools/book.py --all         run every chapter
    python tools/book.py --no-execute  render the committed outputs

All of it happens on a copy under _build; the working tree stays as it is.  A warning is an error.
What a chapter printed is kept under _build/executed with a key of all that it depends on.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from importlib.metadata import distributions
from pathlib import Path

import minutes
import nbformat
import where
from notebooks import ROOT, ChapterError, execute, toc_chapters, toc_files

from chapters import runs, take_outputs

BUILD = ROOT / "_build"
SOURCE = BUILD / "source"
STALE = (BUILD / "html", BUILD / ".doctrees")
KEPT = BUILD / "executed"
SKIP = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
# what a chapter's outputs come from, beside its cells
READ = ("linattn_edu/**/*.py", "benchmarks/**/*.py", "puzzles/*.py", "chapters/data/*")
# and the packages whose versions matter to it
RUN_WITH = {
    *("torch", "triton", "numpy", "transformers", "matplotlib", "matplotlib-inline"),
    *("ipykernel", "ipython", "nbclient"),
}


def stage(source: Path = SOURCE, stale: tuple[Path, ...] = STALE) -> None:
    """Copy what the book is made of to a folder, and remove what was made of an older copy."""
    for folder in (source, *stale):
        shutil.rmtree(folder, ignore_errors=True)
    source.mkdir(parents=True)
    for name in ("_config.yml", "_toc.yml"):
        shutil.copy2(ROOT / name, source / name)
    # pages include listings of the package, and a chapter counts with the benchmarks
    for name in ("book", "chapters", "linattn_edu", "benchmarks"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=SKIP)
    where.write(source / "book" / "_parts")
    minutes.write(source / "book" / "_parts")


def missing() -> list[str]:
    """Entries of the table of contents without a file."""
    suffixes = {"chapters": (".md", ".ipynb"), "book": (".md",)}
    return [
        f"{entry}{suffix}"
        for entry in toc_files()
        for suffix in suffixes[entry.split("/")[0]]
        if not (ROOT / f"{entry}{suffix}").exists()
    ]


def surroundings(root: Path = ROOT) -> str:
    """A hash of what every chapter depends on: the package's files, data, versions, the device."""
    digest = hashlib.sha256()
    for path in sorted({p for pattern in READ for p in root.glob(pattern) if p.is_file()}):
        digest.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    versions = sorted(
        {f"{d.name}=={d.version}" for d in distributions() if d.name.lower() in RUN_WITH}
    )
    gpus = sorted(map(str, Path("/proc/driver/nvidia/gpus").glob("*/information")))
    switches = sorted(
        f"{k}={v}" for k, v in os.environ.items() if k.startswith(("TRITON_", "CUDA"))
    )
    digest.update(
        "\n".join([sys.version, platform.machine(), *versions, *gpus, *switches]).encode()
    )
    return digest.hexdigest()


def key(nb: nbformat.NotebookNode, around: str) -> str:
    """The key under which a notebook's outputs are kept: its cells' code and `surroundings`."""
    return hashlib.sha256(f"{around}\n{runs(nb)!r}".encode()).hexdigest()[:20]


def kept(name: str, nb: nbformat.NotebookNode, under: str) -> bool:
    """Give a notebook the outputs that are kept under this key; whether there are any."""
    path = KEPT / f"{name}.{under}.ipynb"
    return path.exists() and take_outputs(nb, nbformat.read(path, as_version=4))


def keep(name: str, nb: nbformat.NotebookNode, under: str, seconds: float) -> None:
    """Keep a notebook's outputs in place of what was kept for this chapter."""
    KEPT.mkdir(parents=True, exist_ok=True)
    new = KEPT / f"{name}.new"
    nb.metadata["seconds"] = seconds
    nbformat.write(nb, new)
    for old in KEPT.glob(f"{name}.*.ipynb"):
        old.unlink()
    os.replace(new, KEPT / f"{name}.{under}.ipynb")


def expected(name: str) -> float:
    """Seconds that a chapter took when it was last run; without that, its size stands in."""
    for path in KEPT.glob(f"{name}.*.ipynb"):
        return nbformat.read(path, as_version=4).metadata.get("seconds", 0.0)
    return (SOURCE / "chapters" / f"{name}.ipynb").stat().st_size / 1e4


def run_chapter(name: str) -> tuple[nbformat.NotebookNode, float]:
    """Execute a staged notebook; what came of it, and its seconds."""
    path = SOURCE / "chapters" / f"{name}.ipynb"
    nb = nbformat.read(path, as_version=4)
    return nb, execute(nb, name, path.parent)


def run_chapters(always: bool, jobs: int) -> None:
    """Give the staged notebooks outputs: kept ones, or new ones, a line of progress each.

    Raises:
        ChapterError: a cell failed; what ran before is kept.
    """
    names, around, keys = toc_chapters(), surroundings(), {}
    for name in names:
        path = SOURCE / "chapters" / f"{name}.ipynb"
        nb = nbformat.read(path, as_version=4)
        under = key(nb, around)
        if not always and kept(name, nb, under):
            nbformat.write(nb, path)
        else:
            keys[name] = under
    if len(keys) < len(names):
        print(f"{len(names) - len(keys)} of {len(names)} chapters unchanged since they were run")
    if not keys:
        print("nothing to execute (--all executes every chapter)", flush=True)
        return
    # those that run at the same time share the cores; more threads only get in each other's way
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    # the longest first, so that none is left alone at the end
    order = sorted(keys, key=expected, reverse=True)
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run_chapter, name): name for name in order}
        done = 0
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                name = running.pop(future)
                try:
                    nb, seconds = future.result()
                except ChapterError:
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
                done += 1
                print(f"[{done}/{len(keys)}] chapters/{name}  {seconds:.1f} s", flush=True)
                nbformat.write(nb, SOURCE / "chapters" / f"{name}.ipynb")
                keep(name, nb, keys[name], seconds)


def render(source: Path = SOURCE, output: Path = ROOT, builder: str = "html") -> bool:
    """Run Jupyter Book with warnings as errors; whether it succeeded."""
    program = "from jupyter_book.cli.main import main; main()"
    command = [sys.executable, "-c", program, "build", str(source), "--builder", builder]
    options = ["--path-output", str(output), "-W", "-n", "--keep-going", "--quiet"]
    return subprocess.run(command + options).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description="build the book")
    parser.add_argument("--no-execute", action="store_true", help="use the committed outputs")
    parser.add_argument("--all", action="store_true", help="execute even what did not change")
    parser.add_argument("--jobs", type=int, default=2, help="chapters at a time (2)")
    args = parser.parse_args()
    if absent := missing():
        print(f"_toc.yml lists files that are not there: {', '.join(absent)}")
        return 1
    start = time.perf_counter()
    stage()
    try:
        if not args.no_execute:
            run_chapters(args.all, args.jobs)
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
