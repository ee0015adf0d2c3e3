"""Run all checks, the cheap ones first (what `make test` does).

    python tools/check.py          everything
    python tools/check.py ruff nbval   only the steps with one of these words in their name

All steps run even if one fails; the exit code is 0 only if none did.
"""

import os
import subprocess
import sys
import time

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
    "nbval": [*PYTEST, *WORKERS, "--dist", "loadscope", "--nbval-lax", *NOTEBOOKS],
    "book": [sys.executable, "tools/book.py", "--no-execute"],
    "pages": [*PYTEST, *WORKERS, "--dist", "worksteal", PAGES],
}


def run(name: str) -> tuple[bool, float]:
    """Run one step; whether it passed, and its seconds."""
    print(f"\n=== {name}", flush=True)
    start = time.perf_counter()
    if name == "nbval" and not NOTEBOOKS:
        print("there are no chapters/*.ipynb")
        return False, 0.0
    # two workers share the cores; more threads than that only get in each other's way
    env = os.environ | {"OMP_NUM_THREADS": "1"} if WORKERS[0] in STEPS[name] else None
    code = subprocess.run(STEPS[name], cwd=ROOT, env=env).returncode
    seconds = time.perf_counter() - start
    print(f"=== {name}: {'passed' if code == 0 else 'FAILED'} in {seconds:.0f} s", flush=True)
    return code == 0, seconds


def main(words: list[str]) -> int:
    names = [n for n in STEPS if not words or any(w in n for w in words)]
    results = {}
    for name in names:
        if name == names[-1] and len(names) > 1:
            summary(results)
        results[name] = run(name)
    failed = [n for n, (passed, _) in results.items() if not passed]
    print(f"failed: {', '.join(failed)}" if failed else "all checks passed")
    return 1 if failed else 0


def summary(results: dict[str, tuple[bool, float]]) -> None:
    """A line a step, before the last one runs."""
    print("\n=== so far")
    for name, (passed, seconds) in results.items():
        print(f"{name:12s} {'passed' if passed else 'FAILED'} {seconds:5.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
