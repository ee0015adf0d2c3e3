"""Run the parts of the benchmarks and record their rows as they come."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks import measure, results
from benchmarks.adapters import makers, refusal
from benchmarks.cases import (
    ALL_CALLS,
    CALLS,
    SCALING,
    SCALING_FORMS,
    SCALING_T,
    STAGES,
    TRAINING,
    Case,
    ran,
)
from benchmarks.first_call import LIMIT_S, FirstCall, first_calls
from benchmarks.progress import Progress
from benchmarks.rows import (
    OURS,
    DeviceLost,
    Rows,
    Steps,
    call_rows,
    label,
    scaling_rows,
    stage_rows,
    staged,
)

PARTS = ("calls", "stages", "scaling", "first_call")
KEY = ("case", "what", "library")


class Record:
    """The file of results while it grows: whole after every row."""

    def __init__(self, path: Path, data: dict):
        self.path, self.data, self.old = path, data, results.load(path)
        self.lock = threading.Lock()

    def add(self, row: dict) -> None:
        with self.lock:
            self.data["rows"].append(results.stamped(row, ran(row)))
            results.save(self.path, results.merge(self.old, self.data))


def run(
    cases: list[Case], libraries: list[str], out: Path, *,
    parts: tuple[str, ...], jobs: int = 1, calls: tuple[str, ...] = ALL_CALLS,
    begun: list | None = None, again: Callable[[list], int] | None = None, limit: int = LIMIT_S,
) -> int:  # fmt: skip
    """Measure, printing a line a row and saving each; the exit code.

    Args:
        parts: Of PARTS.  calls: Those of "calls" and "first_call".
        begun: Measurements not to begin again.  again: Goes on in a fresh process, with a list of
            what was begun, after a kernel that ended the GPU's context.
        limit: Seconds that a fresh process may take. What it was to compile and has no time from
            before is then not timed, and its row says why.
    """
    old = results.load(out) or {}
    known = old.get("bytes_per_s"), old.get("flops_per_s")  # floors of one file have one rate
    data = results.new(measure.gpu_name(), known if all(known) else measure.rates())
    rates = data["bytes_per_s"], data["flops_per_s"]
    record, steps = Record(out, data), Steps(begun or ())
    print(f"{data['gpu']}, torch {data['torch']}, Triton {data['triton']}, {data['date']}")
    if record.old and results.differences(record.old, data):
        print(f"{out} will be replaced: {', '.join(results.differences(record.old, data))}")
    timed = {c: [x for x in CALLS[c.op] if x in calls] for c in cases if "calls" in parts}
    in_stages = [c for c in cases if c.op in STAGES and "stages" in parts]
    fresh = [] if begun is not None else _fresh(cases, libraries, parts, calls, jobs)
    total = len(fresh) + sum(len(staged(c)) for c in in_stages)
    total += sum(x in makers(c, what) for c in timed for what in timed[c] for x in libraries)
    total += ("scaling" in parts) * len(SCALING_T) * len(SCALING_FORMS)
    progress = Progress(total)

    def collect(rows: Rows, name: str) -> None:
        progress.at(name)
        for row, line in rows:
            if row is not None:
                record.add(row)
            progress.step(line)
        torch.cuda.empty_cache()

    def report(item: FirstCall, result: dict) -> None:
        said = result.get("why") or f"{result['first_call_s']:.1f} s"
        if "first_call" in parts and "why" not in result:
            row = {"case": item.case.name, "library": item.library, "what": item.whats[0]}
            record.add(row | {"first_call_s": float(f"{result['first_call_s']:.5g}")})
        if result.get("late") and "calls" in parts:
            known = {(r["case"], r["what"], r["library"]) for r in old.get("rows", ()) if "ms" in r}
            for what in {*item.whats} & {*CALLS[item.case.op]}:
                key = item.case.name, what, item.library
                if steps.begin(*key) and key not in known:
                    record.add(dict(zip(KEY, key, strict=True)) | {"refused": result["why"]})
        progress.step(f"{label(item.case, item.library, item.whats[0])} first call {said}")

    with ExitStack() as stack:
        stack.callback(progress.close)
        try:
            if fresh:
                if "first_call" in parts:
                    data["first_call_jobs"] = jobs
                stack.enter_context(first_calls(fresh, jobs=jobs, report=report, limit=limit))
            with torch.no_grad():
                for case in cases:
                    for what in timed.get(case, ()):
                        collect(call_rows(case, what, libraries, rates, steps=steps), case.name)
                    if case in in_stages:
                        collect(stage_rows(case, rates, steps=steps), case.name)
                if "scaling" in parts:
                    collect(scaling_rows(rates, steps=steps), SCALING)
        except DeviceLost as error:
            print(f"the GPU's context is lost: {error}\n{out} holds what was measured before")
            if again is not None:
                again(steps.begun)
            return 1
    print(f"wrote {out}")
    for name, what, library in results.missing(results.load(out) or data):
        print(f"not measured yet: {name} {what} {library}")
    return 0


def _fresh(
    cases: list[Case], libraries: list[str], parts: tuple[str, ...], calls: tuple[str, ...],
    jobs: int,
) -> list[FirstCall]:  # fmt: skip
    """What fresh processes do: first calls; or, several at a time, compile for this one."""
    fresh = []
    for case in cases:
        for library in libraries:
            whats = [x for x in CALLS[case.op] if x in calls and not refusal(case, x, library)]
            stages = library == OURS and case.op in STAGES and "stages" in parts
            if "first_call" in parts:
                fresh += [FirstCall(library, case, (what,)) for what in whats]
            elif jobs > 1 and whats and "calls" in parts:
                compared = ("gradients",) if TRAINING in whats else ()
                fresh.append(FirstCall(library, case, (*whats, *compared)))
            if stages and jobs > 1:
                fresh.append(FirstCall(library, case, ("stages",)))
    return sorted(fresh, key=lambda item: item.library.startswith(OURS))  # the slow ones first
