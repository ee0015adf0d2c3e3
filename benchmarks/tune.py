"""The tuner: searches the rows of the kernels' tables, stage by stage and case by case.

    python -m benchmarks.tune [STAGE...] [--cases CASE...] [--out rows.json]

Each candidate is first compared with the float64 reference stage on a small shape, several worker
processes at a time, then timed alone on the shapes of the case. A bad kernel can end the GPU's
context or never return: then its worker is gone, the candidate is listed as bad, and a new worker
goes on with the next one. The best rows are printed; the tables are edited by hand.
"""

import argparse
import itertools
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from benchmarks import results
from benchmarks.cases import CHUNK, Case, select
from benchmarks.progress import Progress

LIMITS = {2: 5e-3, 4: 5e-6}  # relative RMS error of any output, by bytes of an element
LIMIT_S = 120  # a candidate that takes longer never returns
SMALL_T = 500
BEST = 5
WARMUP_MS, REPEAT_MS = 10, 40


@dataclass(frozen=True)
class Place:
    """Where a stage's configuration lives and which values are tried."""

    module: str
    table: str = "CONFIGS"
    kind: str = "row"  # "row": a row; "rows": rows by BK; "constant": a module's constant
    tiles: tuple[tuple[str, ...], ...] = ()  # names that change together
    sizes: tuple[int, ...] = (32, 64, 128)
    warps: tuple[int, ...] = (1, 2, 4, 8)
    stages: tuple[int, ...] = (1, 2, 3)


_LOOP = {"kind": "rows", "tiles": (("BV",),), "sizes": (16, 32, 64, 128), "warps": (2, 4, 8)}
PLACES = {
    "gate_cumsum": Place("gate_cumsum", "BH", "constant", (("BH",),), (4, 8, 16, 32, 64), (), ()),
    "solve": Place("solve", tiles=(("BK",),)),
    "wy": Place("wy", tiles=(("BK", "BV"),), stages=(1, 2)),
    "state": Place("state", **_LOOP, stages=(1, 2, 3, 4)),
    "output": Place("output", tiles=(("BK",), ("BV",)), warps=(2, 4, 8)),
    "intra": Place("fused", "INTRA_CONFIGS", tiles=(("BK",),)),
    "scan": Place("fused", "SCAN_CONFIGS", **_LOOP, stages=(1, 2, 3, 4)),
    "recurrent": Place("recurrent", "BV", "constant", (("BV",),), (8, 16, 32, 64, 128), (), ()),
}


def candidates(stage: str, case: Case) -> Iterator[dict[str, int]]:
    """The rows tried for a stage on a case."""
    place = PLACES[stage]
    widths = {"BK": case.K, "BV": case.V, "BH": max(16, case.HV)}
    for tiles in itertools.product(place.sizes, repeat=len(place.tiles)):
        sizes = {n: x for names, x in zip(place.tiles, tiles, strict=True) for n in names}
        if any(x > widths[name] for name, x in sizes.items()):
            continue
        # a loop over K that runs once has nothing to pipeline
        once = place.kind == "row" and sizes.get("BK", 0) >= case.K
        for warps, stages in itertools.product(place.warps or (0,), place.stages or (0,)):
            if once and stages > 1:
                continue
            yield {**sizes, **({"num_warps": warps, "num_stages": stages} if warps else {})}


@contextmanager
def installed(stage: str, case: Case, row: dict[str, int], generation: str) -> Iterator[None]:
    """The stage's launcher uses this row in this process, then its own again."""
    from linattn_edu.kernels import tiles

    place = PLACES[stage]
    module = import_module(f"linattn_edu.kernels.delta.{place.module}")
    before = getattr(module, place.table)
    if place.kind == "constant":
        value = row[place.table]
    else:
        entry = tiles.row(**row)
        if place.kind == "rows":
            entry = {max(128, tiles.block(case.K)): [entry]}
        value = {generation: {case.size: entry}}
    setattr(module, place.table, value)
    try:
        yield
    finally:
        setattr(module, place.table, before)


# ---- a worker: one process, one candidate after the other


class Worker:
    """Runs candidates; keeps the arguments of the case that it was last asked for."""

    def __init__(self, device: str = "cuda"):
        self.device, self.key, self.arguments = device, None, {}

    def run(self, stage: str, case: Case, row: dict[str, int], timed: bool) -> dict:
        """{"error": ...} against the reference, or {"ms": ...}."""
        from benchmarks.forms import stage_function
        from linattn_edu.kernels import tiles

        args, kwargs = self._arguments(case, timed)[stage]
        generation, _ = tiles.device_of(args[0])
        f = stage_function(stage, "triton")
        with installed(stage, case, row, generation):
            if timed:
                return {"ms": self._time(lambda: f(*args, **kwargs))}
            return {"error": self._error(stage, f(*args, **kwargs), args, kwargs)}

    def _arguments(self, case: Case, timed: bool) -> dict[str, tuple]:
        from benchmarks.forms import stage_arguments
        from benchmarks.measure import DTYPES
        from linattn_edu.testing import gdn_inputs

        if self.key != (case, timed):
            self.arguments = {}  # so that the memory is free before more is taken
            shape = case.shape if timed else small(case).shape
            dtype = DTYPES[case.size]
            i = gdn_inputs(*shape, dtype=dtype, device=self.device, initial_state=not timed)
            impl = "triton" if timed else "reference"
            self.key, self.arguments = (case, timed), stage_arguments(i, CHUNK, impl)
        return self.arguments

    def _error(self, stage: str, got: object, args: tuple, kwargs: dict) -> float:
        """The largest relative RMS error of any output against the float64 reference stage."""
        import torch

        from benchmarks.forms import stage_function
        from linattn_edu.testing import relative_rms

        def double(x):
            return x.double() if isinstance(x, torch.Tensor) else x

        want = stage_function(stage, "reference")(
            *map(double, args), **{name: double(x) for name, x in kwargs.items()}
        )
        got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, want))
        return max(relative_rms(x, y) for x, y in zip(got, want, strict=True))

    def _time(self, f: Callable[[], object]) -> float:
        from triton.testing import do_bench

        return do_bench(f, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="median")


def small(case: Case) -> Case:
    """A shape of the same kind on which the reference is quick; its last chunk is not full."""
    heads = {"H": 2, "HV": 2 * (case.HV // case.H)}
    return replace(case, B=1, T=SMALL_T, **heads)


def work(items: list[dict], timed: bool) -> None:
    """A line when an item starts and one when it has ended, so that a death is seen."""
    worker = Worker()
    for item in items:
        print(json.dumps({"n": item["n"], "started": True}), flush=True)
        try:
            case = Case(**item["case"])
            result = worker.run(item["stage"], case, item["row"], timed)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            result = {"failed": " ".join(text.split())[:160]}
            if "CUDA error" in text or "illegal" in text:
                print(json.dumps({"n": item["n"], **result}), flush=True)
                sys.exit(1)  # the context is gone
        print(json.dumps({"n": item["n"], **result}), flush=True)


# ---- the driver


def lines_of(process: subprocess.Popen) -> Iterator[dict]:
    """The lines of JSON of a worker; ends when it ends or says nothing for LIMIT_S."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=LIMIT_S)
        except queue.Empty:
            process.kill()
            return
        if line is None:
            return
        if line.startswith('{"n"'):
            yield json.loads(line)


def drive(items: list[dict], timed: bool, report: Callable[[dict], None]) -> None:
    """Run items in a worker; after one that dies in a new worker, from the next item on."""
    command = [sys.executable, "-m", "benchmarks.tune", "--worker", "time" if timed else "check"]
    while items:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, cwd=results.DATA.parents[1],
        )  # fmt: skip
        process.stdin.write(json.dumps(items))
        process.stdin.close()
        by_number = {item["n"]: item for item in items}
        running = None
        for line in lines_of(process):
            item = by_number[line.pop("n")]
            if line.pop("started", False):
                running = item
                continue
            item.update(line)
            report(item)
            running = None
            items = items[items.index(item) + 1 :]
        process.wait()
        if running is None and items and process.returncode == 0:
            return
        if running is None and items and items[0]["n"] == min(by_number):
            running = items[0]  # it died before it began: not started means not importable
        if running is not None:
            running["failed"] = f"the worker died (exit code {process.returncode})"
            report(running)
            items = items[items.index(running) + 1 :]


def search(stages: list[str], cases: list[Case], jobs: int) -> list[dict]:
    """All candidates with their error and, where that is small enough, their time."""
    items = [
        {"stage": stage, "case": vars(case), "row": row}
        for case in cases
        for stage in stages
        for row in candidates(stage, case)
    ]
    for n, item in enumerate(items):
        item["n"] = n
    progress = Progress(len(items))
    with ThreadPoolExecutor(jobs) as pool:
        parts = [items[j::jobs] for j in range(jobs)]
        list(pool.map(lambda part: drive(part, False, lambda x: progress.step(line_of(x))), parts))
    progress.close()
    good = [x for x in items if x.get("error", 1.0) <= LIMITS[x["case"]["size"]]]
    progress = Progress(len(good))
    drive(good, True, lambda x: progress.step(line_of(x)))
    progress.close()
    return items


def line_of(item: dict) -> str:
    row = " ".join(f"{name}={x}" for name, x in item["row"].items())
    text = f"{item['case']['name']:10s} {item['stage']:11s} {row:42s}"
    text += f" {item['ms']:.4f} ms" if "ms" in item else ""
    text += f" error {item['error']:.1e}" if "error" in item else ""
    return text + (f" -- {item['failed']}" if "failed" in item else "")


def summary(items: list[dict]) -> str:
    """What is wrong, what does not fit, and the best rows of each case and stage."""
    failed = [x for x in items if "failed" in x and "OutOfResources" not in x["failed"]]
    wrong = [x for x in items if x.get("error", 0.0) > LIMITS[x["case"]["size"]]]
    fits = sum("OutOfResources" in x.get("failed", "") for x in items)
    lines = [f"{len(items)} candidates, {fits} need more shared memory or registers than there is"]
    lines += ["wrong results:", *map(line_of, wrong)] if wrong else []
    lines += ["failed:", *map(line_of, failed)] if failed else []
    timed = sorted((x for x in items if "ms" in x), key=lambda x: x["ms"])
    for key in dict.fromkeys((x["case"]["name"], x["stage"]) for x in items):
        lines.append(f"best of {key[0]}, {key[1]}:")
        here = [x for x in timed if (x["case"]["name"], x["stage"]) == key]
        lines += [line_of(x) for x in here[:BEST]] or ["  none"]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    p.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(PLACES)}")
    p.add_argument("--cases", nargs="*", default=[], metavar="CASE", help="all if not given")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--jobs", type=int, default=8, help="workers that check (default 8)")
    p.add_argument("--out", type=Path, help="write every candidate as JSON")
    p.add_argument("--list", action="store_true", help="count the candidates, and end")
    p.add_argument("--worker", choices=("check", "time"), help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.worker:
        work(json.load(sys.stdin), args.worker == "time")
        return 0
    try:
        cases = select(args.cases)
    except ValueError as error:
        return fail(str(error))
    if unknown := [name for name in args.stages if name not in PLACES]:
        return fail(f"no stage is called {unknown[0]!r}; there are {', '.join(PLACES)}")
    stages = args.stages or list(PLACES)
    cases = [replace(case, size=4 if args.dtype == "float32" else 2) for case in cases]
    if args.list:
        for case, stage in itertools.product(cases, stages):
            print(f"{case.name:10s} {stage:11s} {len(list(candidates(stage, case))):4d}")
        return 0
    from benchmarks.measure import usable_gpu

    if reason := usable_gpu():
        return fail(f"the tuner runs on a CUDA GPU: {reason}")
    items = search(stages, cases, args.jobs)
    if args.out:
        results.save(args.out, {"rows": items})
    print(summary(items))
    return 0


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
