"""Run all checks, the cheap ones first (what `make test` does).

    python tools/check.py              everything that runs on every push
    python tools/check.py ruff nbval   only the steps with one of these words in their name
    python tools/check.py --quick      ruff, and one case of each test of the library (`make check`)
    python tools/check.py --full       with whole grids, every row compiled, with the pinned Triton
                                       and with the newest, mistakes planted

All steps run even if one fails; the exit code is 0 only if none did.
"""

import ctypes
import os
import resource
import subprocess
import sys
import time

from newest import TESTS as COMPILING
from notebooks import ROOT

PYTEST = [sys.executable, "-m", "pytest", "-q"]
WORKERS = ["-n", "2"]
NOTEBOOKS = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "chapters").glob("*.ipynb"))
PAGES = "tests/book/test_pages.py"

STEPS = {
    "ruff check": [sys.executable, "-m", "ruff", "check", "."],
    "ruff format": [sys.executable, "-m", "ruff", "format", "--check", "."],
    "pytest": [
        *PYTEST,
        *WORKERS,
        "--dist",
        "worksteal",
        "--durations",
        "8",
        "tests",
        "--ignore",
        PAGES,
    ],
    # a notebook's cells share a kernel, so they stay on one worker
    "nbval": [
        *PYTEST,
        *WORKERS,
        "--dist",
        "loadscope",
        "-p",
        "tests.chapters_forks",
        "--nbval-lax",
        *NOTEBOOKS,
    ],
    "book": [sys.executable, "tools/book.py", "--no-execute"],
    # a page spends half of its time waiting: two browsers a core
    "pages": [*PYTEST, "-n", "4", "--dist", "worksteal", PAGES],
}
ALLOWED = 120  # seconds of one core a chapter: 28 chapters in half an hour on two
ALLOWED_QUICK = 400  # seconds of one core: under four minutes on two
QUICK = {n: STEPS[n] for n in ("ruff check", "ruff format")} | {
    # the library's tests: the book, benchmarks and compiling wait for `make test`
    "pytest": [
        *STEPS["pytest"],
        "--ignore",
        "tests/book",
        "--ignore",
        "tests/benchmarks",
        *(f"--deselect={test}" for test in COMPILING),
        "--quick",
    ],
}
FULL = {
    "newest Triton": [sys.executable, "tools/newest.py"],
    "mutants": [sys.executable, "tools/mutants.py"],
}


def run(name: str, command: list[str], full: bool) -> tuple[bool, float, float]:
    """Run one step; whether it passed, its seconds, and those of all cores together."""
    print(f"\n=== {name}", flush=True)
    start, before = time.perf_counter(), cpu_seconds()
    if name == "nbval" and not NOTEBOOKS:
        print("there are no chapters/*.ipynb")
        return False, 0.0, 0.0
    env = dict(os.environ)
    if "-n" in command:  # the workers share the cores; more threads only get in each other's way
        env["OMP_NUM_THREADS"] = "1"
    if name == "nbval":  # IPython runs it before the first cell
        env["PYTHONSTARTUP"] = str(ROOT / "tests" / "chapters_startup.py")
    if full:
        env["LINATTN_EDU_FULL"] = "1"
    code = subprocess.run(command, cwd=ROOT, env=env).returncode
    bury_orphans()
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - before
    print(f"=== {name}: {'passed' if code == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    return code == 0, seconds, cpu


def adopt_orphans() -> None:
    """A process whose parent ends first, such as a browser's tabs, becomes a child of this one, so
    that what it took is counted; on Linux, else it is not.
    """
    if sys.platform == "linux":
        set_child_subreaper = 36
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


def bury_orphans() -> None:
    """Those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # none is left
        return


def cpu_seconds() -> float:
    """What the steps have taken of all cores so far."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main(words: list[str]) -> int:
    full, quick = "--full" in words, "--quick" in words
    words = [w for w in words if w not in ("--full", "--quick")]
    steps = QUICK if quick else STEPS | (FULL if full else {})
    names = [n for n in steps if not words or any(w in n for w in words)]
    adopt_orphans()
    results = {n: run(n, steps[n], full) for n in names}
    print("\n=== seconds, and of all cores together")
    for name, (passed, seconds, cpu) in results.items():
        print(f"{name:13s} {'passed' if passed else 'FAILED'} {seconds:5.0f} {cpu:5.0f}")
    chapters = len(NOTEBOOKS)
    taken = sum(cpu for *_, cpu in results.values())
    if names == [*QUICK]:
        print(f"{taken:.0f} s of one core; {ALLOWED_QUICK} are allowed (CONTRIBUTING)")
    if set(STEPS) <= set(names):  # a part says nothing of a chapter
        print(
            f"{taken / chapters:.0f} s of one core a chapter; {ALLOWED} are allowed (CONTRIBUTING)"
        )
    failed = [n for n, (passed, *_) in results.items() if not passed]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
