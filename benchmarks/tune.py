"""The tuner: searches the rows of the kernels' tables, kernel by kernel and case by case.

    python -m benchmarks.tune [KERNEL...] [--cases CASE...] [--jobs 12] [--out rows.json]

A kernel that serves several operators is tuned for that of the case: of KDA, with a gate for each
channel. Each candidate is first compared with the float64 reference stage on a small shape,
several worker processes at a time, then timed alone on the shapes of the case. A bad kernel can end
the GPU's context or never return: then its worker is gone, the candidate is listed as bad, and a
new worker goes on with the next one. The best rows are printed; the tables are edited by hand.
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
from benchmarks.cases import CHUNK, SAFE_BOUND, Case, select
from benchmarks.progress import Progress, fail

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {2: 5e-3, 4: 5e-6}  # relative RMS error of any output, by bytes of an element
LIMIT_S = 120  # a candidate that takes longer never returns
SMALL_T = 500
BEST = 5
WARMUP_MS, REPEAT_MS = 10, 40


@dataclass(frozen=True)
class Place:
    """Where a kernel's configuration lives and which values are tried."""

    stage: str
    module: str
    table: str = "CONFIGS"  # of the module; or an integer of it, which is tried alone
    tiles: tuple[tuple[str, ...], ...] = (("BV",),)  # names that change together
    sizes: tuple[int, ...] = (32, 64, 128)
    warps: tuple[int, ...] = (1, 2, 4, 8)
    stages: tuple[int, ...] = (1, 2, 3)
    registers: tuple[int | None, ...] = (None,)  # limits of a thread
    ops: tuple[str, ...] = ("gdn",)  # of the cases it is tuned on
    inner: bool = False  # whether there is a loop inside that over K, which may be pipelined
    options: tuple[tuple[str, float], ...] = ()  # keyword arguments of the stage


_BOTH = ("gdn", "kda")
_SCAN = {"sizes": (16, 32, 64, 128), "warps": (2, 4, 8), "stages": (1, 2, 3, 4)}
_CONSTANT = {"warps": (), "stages": ()}
_CHANNELS = {"tiles": (("BD",),), "sizes": (16, 32, 64, 128, 256), "ops": ("kda",), **_CONSTANT}
_ROWS = {
    "tiles": (("BK",),), "sizes": (16, 32, 64, 128), "warps": (1, 2), "ops": ("kda",),
    "registers": (None, 128, 168), "inner": True,
}  # fmt: skip
_ADJOINT = {"tiles": (("BK",), ("BV",)), "warps": (4, 8), "ops": ("kda",)}
PLACES = {
    "gate_cumsum": Place(
        "gate_cumsum", "delta.gate", "BH", (("BH",),), (4, 8, 16, 32, 64), **_CONSTANT
    ),
    "solve": Place("solve", "delta.solve", tiles=(("BK",),)),
    "wy": Place("wy", "delta.wy", tiles=(("BK", "BV"),)),
    "wy_channels": Place("wy", "delta.wy", "CHANNEL_CONFIGS", (("BK", "BV"),), ops=("kda",)),
    "state": Place("state", "delta.state", ops=_BOTH, **_SCAN),
    "output": Place("output", "delta.output", tiles=(("BK",), ("BV",)), warps=(2, 4, 8), ops=_BOTH),
    "scores": Place("intra_chunk", "fused.gdn_intra", "SCORES_CONFIGS", (("BK",),)),
    "resolvent": Place("intra_chunk", "fused.gdn_intra", "RESOLVENT_CONFIGS", (("BK",),)),
    "scan": Place("scan", "fused.gdn_fwd", "SCAN_CONFIGS", **_SCAN),
    "output_bwd": Place("output_bwd", "delta.output_bwd", tiles=(("BK",), ("BV",)), warps=(4, 8)),
    "state_bwd": Place("state_bwd", "delta.state_bwd", **_SCAN),
    "wy_bwd": Place("wy_bwd", "delta.wy_bwd", tiles=(("BK",), ("BV",)), warps=(4, 8)),
    "recurrent": Place(
        "recurrent", "delta.recurrent", "BV", sizes=(8, 16, 32, 64, 128), **_CONSTANT
    ),
    "gate_cumsum_channels": Place("gate_cumsum", "delta.gate", "BD", **_CHANNELS),
    "gate_bwd_channels": Place("gate_bwd", "delta.gate", "BD", **_CHANNELS),
    "kda_intra": Place("kda_intra", "delta.kda_intra", **_ROWS),
    "kda_intra_safe": Place(
        "kda_intra", "delta.kda_intra", options=(("lower_bound", SAFE_BOUND),), **_ROWS
    ),
    "kda_scan": Place("kda_scan", "delta.kda_scan", ops=("kda",), **_SCAN),
    "kda_scans": Place("kda_scans", "delta.kda_scans", ops=("kda",), **_SCAN),
    "state_bwd_channels": Place(
        "state_bwd", "delta.state_bwd", "CHANNEL_CONFIGS", ops=("kda",), **_SCAN
    ),
    "kda_output_bwd": Place("kda_output_bwd", "delta.kda_bwd", **_ADJOINT),
    "kda_wy_bwd": Place("kda_wy_bwd", "delta.kda_bwd", **_ADJOINT),
    "kda_intra_bwd": Place("kda_intra_bwd", "delta.kda_intra_bwd", **_ROWS),
}


def candidates(kernel: str, case: Case) -> Iterator[dict[str, int]]:
    """The rows tried for a kernel on a case."""
    place = PLACES[kernel]
    widths = {"BK": case.K, "BV": case.V, "BH": max(16, case.HV), "BD": case.HV * case.K}
    for tiles in itertools.product(place.sizes, repeat=len(place.tiles)):
        sizes = {n: x for names, x in zip(place.tiles, tiles, strict=True) for n in names}
        if any(x > widths[name] for name, x in sizes.items()):
            continue
        # a loop over K that runs once has nothing to pipeline
        once = sizes.get("BK", 0) >= case.K and not place.inner
        launches = itertools.product(
            place.warps or (0,), place.stages or (0,), place.registers or (None,)
        )
        for warps, stages, registers in launches:
            if once and stages > 1:
                continue
            launch = {"num_warps": warps, "num_stages": stages} if warps else {}
            limit = {} if registers is None else {"maxnreg": registers}
            yield {**sizes, **launch, **limit}


@contextmanager
def installed(kernel: str, case: Case, row: dict[str, int], generation: str) -> Iterator[None]:
    """The kernel's launcher uses this row in this process, then its own again."""
    from linattn_edu.kernels.rows import row as config

    def replaced(entry):
        """A table's entry with the row in every place, whatever it is chosen by."""
        if isinstance(entry, dict):
            return {key: replaced(value) for key, value in entry.items()}
        return [config(**row)] if isinstance(entry, list) else config(**row)

    place = PLACES[kernel]
    module = import_module(f"linattn_edu.kernels.{place.module}")
    before = getattr(module, place.table)
    if isinstance(before, dict):
        value = {generation: {case.size: replaced(before[generation][case.size])}}
    else:
        value = row[place.table]
    setattr(module, place.table, value)
    try:
        yield
    finally:
        setattr(module, place.table, before)


# ---- a worker: one process, one candidate after the other


class Worker:
    """Runs candidates; keeps the arguments of the case that it was last asked for."""

    def __init__(self, device: str = "cuda"):
        self.device, self.key, self.arguments, self.wanted = device, None, {}, {}

    def run(self, kernel: str, case: Case, row: dict[str, int], timed: bool) -> dict:
        """{"error": ...} against the reference, or {"ms": ...}."""
        from benchmarks.forms import stage_function
        from linattn_edu.kernels.rows import device_of

        stage, options = PLACES[kernel].stage, dict(PLACES[kernel].options)
        args, kwargs = self._arguments(case, timed)[stage]
        kwargs = kwargs | options
        generation, _ = device_of(args[0])
        f = stage_function(stage, "triton")
        with installed(kernel, case, row, generation):
            if timed:
                return {"ms": self._time(lambda: f(*args, **kwargs))}
            got = f(*map(copy, args), **kwargs)  # a kernel may add to its arguments in place
            return {"error": self._error(stage, got, args, kwargs)}

    def _arguments(self, case: Case, timed: bool) -> dict[str, tuple]:
        from benchmarks.forms import stage_arguments
        from benchmarks.measure import drawn

        if self.key != (case, timed):
            self.arguments, self.wanted = {}, {}  # the memory is free before more is taken
            i = drawn(case if timed else small(case), self.device, initial_state=True)
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

        if stage not in self.wanted:
            self.wanted[stage] = stage_function(stage, "reference")(
                *map(double, args), **{name: double(x) for name, x in kwargs.items()}
            )
        got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, self.wanted[stage]))
        pairs = [(x, y) for x, y in zip(got, want, strict=True) if y is not None]
        return max(relative_rms(x, y) for x, y in pairs)

    def _time(self, f: Callable[[], object]) -> float:
        from triton.testing import do_bench

        return do_bench(f, warmup=WARMUP_MS, rep=REPEAT_MS, return_mode="median")


def copy(x):
    """x, a copy of it if it is a tensor; whole, as the kernels want it."""
    return x.contiguous().clone() if hasattr(x, "clone") else x


def small(case: Case) -> Case:
    """A shape on which the reference is quick; its last chunk is not full.

    The heads stay, so the kernels compiled for the check are those that are timed.
    """
    return replace(case, B=1, T=SMALL_T)


def work(items: list[dict], timed: bool) -> None:
    """A line when an item starts and one when it has ended, so that a death is seen."""
    worker = Worker()
    for item in items:
        print(json.dumps({"n": item["n"], "started": True}), flush=True)
        try:
            case = Case(**item["case"])
            result = worker.run(item["kernel"], case, item["row"], timed)
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


def drive(
    items: list[dict],
    timed: bool,
    report: Callable[[dict], None],
    command: tuple[str, ...] = (sys.executable, "-m", "benchmarks.tune", "--worker"),
) -> None:
    """Run items in a worker; after one that dies in a new worker, from the next item on."""
    while items:
        process = subprocess.Popen(
            [*command, "time" if timed else "check"], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        )  # fmt: skip
        process.stdin.write(json.dumps(items))
        process.stdin.close()
        running, ended = None, 0
        for line in lines_of(process):
            running = items[ended]  # a worker takes them in order
            if line.pop("started", False):
                continue
            running.update(line)
            report(running)
            running, ended = None, ended + 1
        code = process.wait()
        if running is not None:
            running["failed"] = f"the worker died (exit code {code})"
            report(running)
            ended += 1
        elif ended == 0:  # it never began, and another would not either
            for item in items:
                item["failed"] = f"the worker did not start (exit code {code})"
                report(item)
            return
        items = items[ended:]


def search(kernels: list[str], cases: list[Case], jobs: int) -> list[dict]:
    """All candidates with their error and, where that is small enough, their time."""
    items = [
        {"kernel": kernel, "case": vars(case), "row": row}
        for case in cases
        for kernel in kernels
        if case.op in PLACES[kernel].ops
        for row in candidates(kernel, case)
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
    text = f"{item['case']['name']:10s} {item['kernel']:20s} {row:42s}"
    text += f" {item['ms']:.4f} ms" if "ms" in item else ""
    text += f" error {item['error']:.1e}" if "error" in item else ""
    return text + (f" -- {item['failed']}" if "failed" in item else "")


def summary(items: list[dict]) -> str:
    """What is wrong, what does not fit, and the best rows of each case and kernel."""
    failed = [x for x in items if "failed" in x and "OutOfResources" not in x["failed"]]
    wrong = [x for x in items if x.get("error", 0.0) > LIMITS[x["case"]["size"]]]
    fits = sum("OutOfResources" in x.get("failed", "") for x in items)
    lines = [f"{len(items)} candidates, {fits} need more shared memory or registers than there is"]
    lines += ["wrong results:", *map(line_of, wrong)] if wrong else []
    lines += ["failed:", *map(line_of, failed)] if failed else []
    timed = sorted((x for x in items if "ms" in x), key=lambda x: x["ms"])
    for key in dict.fromkeys((x["case"]["name"], x["kernel"]) for x in items):
        lines.append(f"best of {key[0]}, {key[1]}:")
        here = [x for x in timed if (x["case"]["name"], x["kernel"]) == key]
        lines += [line_of(x) for x in here[:BEST]] or ["  none"]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    p.add_argument("kernels", nargs="*", metavar="KERNEL", help=f"of {', '.join(PLACES)}")
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
        cases = [case for case in select(args.cases) if case.op == case.operator]
    except ValueError as error:
        return fail(str(error))
    if unknown := [name for name in args.kernels if name not in PLACES]:
        return fail(f"no kernel is called {unknown[0]!r}; there are {', '.join(PLACES)}")
    kernels = args.kernels or list(PLACES)
    cases = [replace(case, size=4 if args.dtype == "float32" else 2) for case in cases]
    if args.list:
        for case, kernel in itertools.product(cases, kernels):
            if case.op in PLACES[kernel].ops:
                print(f"{case.name:10s} {kernel:20s} {len(list(candidates(kernel, case))):4d}")
        return 0
    from benchmarks.measure import usable_gpu

    if reason := usable_gpu():
        return fail(f"the tuner runs on a CUDA GPU: {reason}")
    items = search(kernels, cases, args.jobs)
    if args.out:
        results.save(args.out, {"rows": items})
    print(summary(items))
    return 0


if __name__ == "__main__":
    sys.exit(main())
