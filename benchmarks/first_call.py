"""The first call of a library: a fresh process, empty caches of compiled kernels.

    python -m benchmarks.first_call LIBRARY CASE [--stages]

prints one line of JSON. The clock runs from before the library is imported until its output is
there; torch is imported, the GPU is set up and the inputs are made before that.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.cases import CASES, CHUNK, Case

ROOT = Path(__file__).resolve().parents[1]
CACHES = {"triton": "TRITON_CACHE_DIR", "tilelang": "TILELANG_CACHE_DIR"}
LIMIT_S = 300


def measure(case: Case, library: str, device: str = "cuda") -> float:
    """Seconds of the first call, import of the library included, in this process."""
    import torch

    from benchmarks import adapters
    from benchmarks.measure import inputs, synchronize

    with torch.no_grad():
        i = inputs(case, device)
        synchronize()
        start = time.perf_counter()
        adapters.LIBRARIES[case.op][library]()(i)
        synchronize()
        return time.perf_counter() - start


def child(library: str, case: Case, folder: Path, stages: bool) -> dict:
    """Run this module with its caches in `folder`; its result, or {"why": ...}."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    caches = {variable: str(folder / name) for name, variable in CACHES.items()}
    command = [sys.executable, "-m", __spec__.name, library, case.name]
    try:
        done = subprocess.run(
            command + ["--stages"] * stages,
            env={**os.environ, **caches, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"why": f"no end after {LIMIT_S} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_call_s"')]
    if lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {"why": said[-1][:200]}


def first_calls(
    wanted: list[tuple[str, Case]],
    *,
    jobs: int,
    stages: bool,
    report: Callable[[str, Case, dict], None],
) -> tuple[dict[tuple[str, str], float], tempfile.TemporaryDirectory]:
    """First calls of all (library, case), `jobs` at a time.

    Returns:
        (library, case name) -> seconds; and a folder that holds the kernels they compiled. This
        process is set to use that, so they are not compiled again. Choices of a library's tuner
        are left out of it: those made beside other processes may be bad ones.
    """
    folder = tempfile.TemporaryDirectory(prefix="linattn_edu_bench_")
    root = Path(folder.name)

    def one(item: tuple[str, Case]) -> tuple[tuple[str, str], dict]:
        library, case = item
        result = child(
            library, case, root / f"{library}-{case.name}", stages and library == "linattn_edu"
        )
        report(library, case, result)
        return (library, case.name), result

    with ThreadPoolExecutor(jobs) as pool:
        results = dict(pool.map(one, wanted))
    for name, variable in CACHES.items():
        merged = root / "merged" / name
        for library, case in wanted:
            part = root / f"{library}-{case.name}" / name
            if part.is_dir():
                skip = shutil.ignore_patterns("*.autotune.json")
                shutil.copytree(part, merged, ignore=skip, dirs_exist_ok=True)
        if merged.is_dir():
            os.environ[variable] = str(merged)
    seconds = {key: r["first_call_s"] for key, r in results.items() if "first_call_s" in r}
    return seconds, folder


def main(argv: list[str]) -> None:
    library, case = argv[0], CASES[argv[1]]
    seconds = measure(case, library)
    print(json.dumps({"first_call_s": seconds}), flush=True)
    if "--stages" in argv:  # compiled here, beside others, instead of one by one later
        from benchmarks.forms import stage_calls
        from benchmarks.measure import inputs, synchronize

        for call in stage_calls(inputs(case), CHUNK).values():
            call()
        synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
