"""The first call of a library: a fresh process, empty caches of compiled kernels.

    python -m benchmarks.first_call LIBRARY CASE CALL...

prints one line of JSON about the first of the calls; the others are made so that their kernels are
compiled. The clock runs from before the library is imported until its output, or the gradients, are
there; torch is imported, the GPU is set up and the inputs are made before that.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.adapters import NAMES, refusal
from benchmarks.cases import CALLS, CASES, CHUNK, TRAINING, Case
from benchmarks.progress import fail

ROOT = Path(__file__).resolve().parents[1]
CACHES = {"triton": "TRITON_CACHE_DIR", "tilelang": "TILELANG_CACHE_DIR"}
LIMIT_S = 300
EXTRAS = ("stages", "gradients")  # no calls: what else a run launches, to be compiled with them


@dataclass(frozen=True)
class FirstCall:
    """What one fresh process does."""

    library: str
    case: Case
    whats: tuple[str, ...]  # calls, or of EXTRAS

    @property
    def folder(self) -> str:
        return "-".join((self.library, self.case.name, *self.whats))


def measure(case: Case, library: str, what: str, device: str = "cuda") -> float:
    """Seconds of the first call, import of the library included, in this process."""
    import torch

    from benchmarks.adapters import makers
    from benchmarks.measure import inputs, prepare, synchronize

    with torch.no_grad():
        call = prepare(what, inputs(case, device))
        synchronize()
        start = time.perf_counter()
        call(makers(case, what)[library]())
        synchronize()
        return time.perf_counter() - start


def compile_gradients(case: Case, library: str, device: str = "cuda") -> float:
    """Make the call by which gradients are compared, whose shapes are its own; the seconds."""
    from benchmarks.measure import short

    return measure(short(case), library, TRAINING, device)


def compile_stages(case: Case, device: str = "cuda") -> float:
    """Launch every stage once; the seconds. A stage that fails is left to the run itself."""
    from benchmarks.forms import stage_arguments, stage_call
    from benchmarks.measure import inputs, synchronize
    from benchmarks.rows import OURS_SAFE, staged

    start = time.perf_counter()
    arguments = stage_arguments(inputs(case, device), CHUNK)
    for name, library in staged(case):
        try:
            stage_call(arguments, name, safe=library == OURS_SAFE)()
            synchronize()
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
    return time.perf_counter() - start


def child(item: FirstCall, folder: Path, limit: int = LIMIT_S) -> dict:
    """Run this module with its caches in `folder`; its result, or {"why": ...}, and with "late" it
    had not ended after `limit` seconds.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    caches = {variable: str(folder / name) for name, variable in CACHES.items()}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, item.library, item.case.name, *item.whats],
            env={**os.environ, **caches, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"why": f"not compiled in {limit} s", "late": True}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"first_call_s"')]
    if lines:
        return json.loads(lines[-1])
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return {"why": said[-1][:200]}


@contextmanager
def first_calls(
    wanted: list[FirstCall], *, jobs: int, report: Callable[[FirstCall, dict], None],
    limit: int = LIMIT_S,
) -> Iterator[None]:  # fmt: skip
    """Make all first calls, `jobs` at a time; inside the block their kernels are this process's.

    So they are not compiled again. Choices of a library's tuner are left out: those made beside
    other processes may be bad ones.

    Args:
        report: Called with each item and {"first_call_s": seconds} or {"why": reason}.
        limit: Seconds after which an item is given up.
    """
    with tempfile.TemporaryDirectory(prefix="linattn_edu_bench_") as folder:
        root = Path(folder)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda x: report(x, child(x, root / x.folder, limit)), wanted))
        for name, variable in CACHES.items():
            merged = root / "merged" / name
            for item in wanted:
                part = root / item.folder / name
                if part.is_dir():
                    skip = shutil.ignore_patterns("*.autotune.json")
                    shutil.copytree(part, merged, ignore=skip, dirs_exist_ok=True)
            if merged.is_dir():
                os.environ[variable] = str(merged)
        yield


def unusable(library: str, case: str, whats: list[str]) -> str | None:
    """Why this module cannot do what its arguments ask for, None if it can."""
    if library not in NAMES:
        return f"no library is called {library!r}; there are {', '.join(NAMES)}"
    if case not in CASES:
        return f"no case is called {case!r}; there are {', '.join(CASES)}"
    known = CALLS[CASES[case].op]
    for what in whats:
        if what in EXTRAS:
            continue
        if what not in known:
            return f"{case} has no call {what!r}; it has {', '.join(known)}"
        if reason := refusal(CASES[case], what, library):
            return f"{library} does not run {what} of {case}: {reason}"
    import torch

    # triton is not asked for here: its import is a part of a first call
    if not torch.cuda.is_available():
        return "first calls are made on a CUDA GPU: no CUDA GPU is visible to torch"
    return None


def main(argv: list[str]) -> int:
    if len(argv) < 3:
        return fail("usage: python -m benchmarks.first_call LIBRARY CASE CALL...")
    library, case, *whats = argv
    if problem := unusable(library, case, whats):
        return fail(problem)
    for n, what in enumerate(whats):
        if what == "stages":
            seconds = compile_stages(CASES[case])
        elif what == "gradients":
            seconds = compile_gradients(CASES[case], library)
        else:
            seconds = measure(CASES[case], library, what)
        if n == 0:
            print(json.dumps({"first_call_s": seconds}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
