"""Run cases and record their rows."""

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import forms, measure, results
from benchmarks.adapters import LIBRARIES
from benchmarks.cases import (
    ALL_STAGES,
    CHUNK,
    SCALING,
    SCALING_FORMS,
    SCALING_T,
    Case,
    scaling_case,
    work,
)
from benchmarks.first_call import first_calls
from benchmarks.progress import Progress

OURS = "linattn_edu"
SLOW_MS = 1000.0  # a form that takes longer is not tried on a longer sequence


class DeviceLost(RuntimeError):
    """The GPU's context is gone: nothing more can be measured in this process."""


def why(error: Exception) -> str:
    """One line that says why a library or a case was left out."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


def check_device(error: Exception) -> None:
    """Raise DeviceLost if the error ended the GPU's context."""
    if "CUDA error" in str(error) or "an illegal memory access" in str(error):
        raise DeviceLost(why(error)) from error


def significant(x: float) -> float:
    """x to five digits: more is noise."""
    return float(f"{x:.5g}")


def make_row(case: Case, library: str, what: str, ms: float, rates: tuple, **more) -> dict:
    """A row of the results; what was not measured is left out."""
    w = work(case, what)
    row = {"case": case.name, "library": library, "what": what, "ms": significant(ms)}
    row |= {"bytes": w.bytes, "flops": w.flops, "floor_ms": significant(w.floor_ms(*rates))}
    return row | {k: significant(x) for k, x in more.items() if x is not None}


def line_of(row: dict) -> str:
    """A row as a line of text."""
    what = f"{row['what']} T={row['T']}" if "T" in row else row["what"]
    text = f"{row['case']:11s} {row['library']:11s} {what:18s}"
    text += f" {row['ms']:9.4f} ms  floor {row['floor_ms']:7.4f}"
    for key, form in (
        ("error", "  error {:.2e}"),
        ("peak_mib", "  peak {:6.0f} MiB"),
        ("first_call_s", "  first call {:5.1f} s"),
    ):
        text += form.format(row[key]) if key in row else ""
    return text


def forward_rows(
    case: Case, libraries: list[str], first: dict, rates: tuple, device: str = "cuda"
) -> Iterator[tuple[dict | None, str]]:
    """The forward pass of every library: (row, line), or (None, why there is none)."""
    i = measure.inputs(case, device)
    oracle = measure.Oracle(i)
    for library in libraries:
        try:
            f = LIBRARIES[case.op][library]()
            error = oracle.error(f(i))  # the first call, so compilation is not timed
            if error == float("inf"):
                raise ArithmeticError("the output holds NaN or inf")
            peak = measure.peak_mib(lambda f=f: f(i))
            ms = measure.time_ms(lambda f=f: f(i))
        except Exception as e:
            check_device(e)
            yield None, f"{case.name:11s} {library:11s} forward            -- {why(e)}"
            continue
        more = {"error": error, "peak_mib": peak, "first_call_s": first.get((library, case.name))}
        row = make_row(case, library, "forward", ms, rates, **more)
        yield row, line_of(row)


def stage_rows(case: Case, rates: tuple, device: str = "cuda") -> Iterator[tuple[dict | None, str]]:
    """Every stage of both sets, and the recurrence, as forward_rows."""
    calls = {}
    for name in ALL_STAGES:
        what = f"stage:{name}"
        try:
            calls = calls or forms.stage_calls(measure.inputs(case, device), CHUNK)
            calls[name]()
            ms = measure.time_ms(calls[name])
        except Exception as e:
            check_device(e)
            yield None, f"{case.name:11s} {OURS:11s} {what:18s} -- {why(e)}"
            continue
        row = make_row(case, OURS, what, ms, rates)
        yield row, line_of(row)


def scaling_rows(
    rates: tuple, lengths: tuple[int, ...] = SCALING_T, device: str = "cuda"
) -> Iterator[tuple[dict | None, str]]:
    """The three forms against the length of the sequence, as forward_rows."""
    longest = measure.inputs(scaling_case(max(lengths)), device)
    oracle = measure.Oracle(longest)
    for what in SCALING_FORMS:
        ms = 0.0
        for T in lengths:
            case = scaling_case(T)
            label = f"{case.name:11s} {OURS:11s} {f'{what} T={T}':18s}"
            if ms > SLOW_MS:
                yield None, f"{label} -- left out: half the length took {ms:.0f} ms"
                continue
            i = longest.prefix(T)
            try:
                error = oracle.error(forms.FORMS[what](i))
                ms = measure.time_ms(lambda i=i, what=what: forms.FORMS[what](i))
            except Exception as e:
                check_device(e)
                yield None, f"{label} -- {why(e)}"
                continue
            row = make_row(case, OURS, what, ms, rates, error=error) | {"T": T}
            yield row, line_of(row)


def run(
    cases: list[Case], libraries: list[str], out: Path, *,
    stages: bool, scaling: bool, first_call: bool, jobs: int,
) -> int:  # fmt: skip
    """Measure, printing a line a row, and save after every case; the exit code."""
    old = results.load(out)
    rates = measure.rates()
    data = results.new(measure.gpu_name(), rates)
    print(f"{data['gpu']}, torch {data['torch']}, Triton {data['triton']}, {data['date']}")
    if old and results.differences(old, data):
        print(f"{out} will be replaced: {', '.join(results.differences(old, data))}")
    if first_call:
        data["first_call_jobs"] = jobs
    wanted = [(x, c) for c in cases for x in libraries if x in LIBRARIES[c.op]] * first_call
    total = len(wanted) + len(cases) * (len(libraries) + stages * len(ALL_STAGES))
    progress = Progress(total + scaling * len(SCALING_T) * len(SCALING_FORMS))

    def report(library: str, case: Case, result: dict) -> None:
        said = f"{result['first_call_s']:.1f} s" if "why" not in result else result["why"]
        progress.step(f"{case.name:11s} {library:11s} first call         {said}")

    first, folder = first_calls(wanted, jobs=jobs, stages=stages, report=report)
    try:
        with torch.no_grad():
            for case in cases:
                present = [x for x in libraries if x in LIBRARIES[case.op]]
                _collect(forward_rows(case, present, first, rates), case.name, data, progress)
                if stages:
                    _collect(stage_rows(case, rates), case.name, data, progress)
                results.save(out, results.merge(old, data))
                torch.cuda.empty_cache()
            if scaling:
                _collect(scaling_rows(rates), SCALING, data, progress)
                results.save(out, results.merge(old, data))
    except DeviceLost as error:
        results.save(out, results.merge(old, data))
        print(f"stopped, the GPU's context is lost: {error}\n{out} holds what was measured before")
        return 1
    finally:
        progress.close()
        folder.cleanup()
    print(f"wrote {out}")
    return 0


def _collect(rows: Iterator[tuple[dict | None, str]], name: str, data: dict, progress) -> None:
    progress.at(name)
    for row, line in rows:
        if row is not None:
            data["rows"].append(row)
        progress.step(line)
