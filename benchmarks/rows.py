"""The rows of the results: each measurement as (row, line), or (None, why there is none)."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from benchmarks import forms, measure
from benchmarks.adapters import makers, refusal
from benchmarks.cases import (
    CHUNK,
    SAFE_STAGES,
    SCALING_FORMS,
    SCALING_T,
    STAGES,
    TRAINING,
    Case,
    scaling_case,
    work,
)
from linattn_edu.testing import GDNInputs

OURS, OURS_SAFE = "linattn_edu", "linattn_edu_safe"
SLOW_MS = 1000.0  # a form that takes longer is not tried on a longer sequence
Rows = Iterator[tuple[dict | None, str]]


class DeviceLost(RuntimeError):
    """The GPU's context is gone: nothing more can be measured in this process."""


class Steps:
    """The measurements that were begun, so that none is begun twice."""

    def __init__(self, begun: list | tuple = ()):
        self.begun = [tuple(key) for key in begun]

    def begin(self, *key) -> bool:
        """Whether the measurement is new."""
        if key in self.begun:
            return False
        self.begun.append(key)
        return True


def why(error: Exception) -> str:
    """One line that says why a library or a case was left out."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:200]


def check_device(error: Exception) -> None:
    """Raise DeviceLost if the error ended the GPU's context."""
    lost = "CUDA error" in str(error) or "an illegal memory access" in str(error)
    try:
        measure.synchronize()
    except Exception:  # what went wrong in a kernel is reported by any later call
        lost = True
    if lost:
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


def state_share(case: Case, ms: float, copy: float) -> float:
    """The part of a token's time in which the states alone could be read and written."""
    return 1e3 * 2 * case.state_bytes / copy / ms


def label(case: Case, library: str, what: str) -> str:
    return f"{case.name:11s} {library:16s} {what:20s}"


def line_of(row: dict) -> str:
    """A row as a line of text."""
    what = f"{row['what']} T={row['T']}" if "T" in row else row["what"]
    text = f"{row['case']:11s} {row['library']:16s} {what:20s}"
    text += f" {row['ms']:9.4f} ms  floor {row['floor_ms']:7.4f}"
    errors = {key: x for key, x in row.items() if key.startswith("error")}
    text += "".join(f"  {key.replace('error_', '')} {x:.2e}" for key, x in errors.items())
    text += f"  state {100 * row['state_share']:.0f}%" if "state_share" in row else ""
    return text + (f"  peak {row['peak_mib']:6.0f} MiB" if "peak_mib" in row else "")


def call_rows(
    case: Case, what: str, libraries: list[str], rates: tuple, device: str = "cuda",
    steps: Steps | None = None,
) -> Rows:  # fmt: skip
    """One call, a forward pass say, of every library that has it."""
    steps = steps or Steps()
    adapters = makers(case, what)
    libraries = [x for x in libraries if x in adapters]
    libraries = [x for x in libraries if steps.begin(case.name, what, x)]
    for library in [x for x in libraries if refusal(case, what, x)]:
        libraries.remove(library)
        yield None, f"{label(case, library, what)} -- {refusal(case, what, library)}"
    if not libraries:
        return
    i = measure.inputs(case, device)
    oracle = measure.GradientOracle(case, device) if what == TRAINING else measure.Oracle(i)
    cosines = measure.ALIKE if what == TRAINING and isinstance(i, GDNInputs) else ()
    alike = {x: measure.GradientOracle(case, device, x) for x in cosines}
    call = measure.prepare(what, i)
    for library in libraries:
        try:
            if what in ("decode_inplace", "decode_graph"):  # each writes its own states
                call = measure.prepare(what, replace(i, initial_state=i.initial_state.clone()))
            f = adapters[library]()
            errors = _errors(what, f, i, oracle)
            if bad := [name for name, x in errors.items() if x == math.inf]:
                raise ArithmeticError(f"NaN or inf in what is compared: {', '.join(bad)}")
            errors |= measure.alike_errors(alike, f)
            once = partial(call, f)
            once()  # compilation and tuning for these shapes are not timed
            peak = measure.peak_mib(once)
            ms = measure.time_ms(measure.captured(once) if what == "decode_graph" else once)
        except Exception as e:
            check_device(e)
            yield None, f"{label(case, library, what)} -- {why(e)}"
            continue
        share = state_share(case, ms, rates[0]) if case.op == "ssd_decode" else None
        row = make_row(case, library, what, ms, rates, **errors, peak_mib=peak, state_share=share)
        yield row, line_of(row)


def _errors(what: str, f, i, oracle) -> dict[str, float]:
    """Relative RMS errors by the key of the row."""
    if what == TRAINING:
        return oracle.errors(f)
    if not what.startswith("decode"):
        return {"error": oracle.error(f(i))}
    state = i.initial_state.clone()  # it may be updated in place
    o, final_state = f(replace(i, initial_state=state))
    return {"error": oracle.error(o), "error_state": oracle.state_error(final_state)}


def stage_rows(case: Case, rates: tuple, device: str = "cuda", steps: Steps | None = None) -> Rows:
    """Every stage of every set, and the recurrence."""
    steps, arguments = steps or Steps(), None
    for name, library in staged(case):
        what = f"stage:{name}"
        if not steps.begin(case.name, what, library):
            continue
        try:
            arguments = arguments or forms.stage_arguments(measure.inputs(case, device), CHUNK)
            call = forms.stage_call(arguments, name, safe=library == OURS_SAFE)
            call()
            ms = measure.time_ms(call)
        except Exception as e:
            check_device(e)
            yield None, f"{label(case, library, what)} -- {why(e)}"
            continue
        row = make_row(case, library, what, ms, rates)
        yield row, line_of(row)


def staged(case: Case) -> list[tuple[str, str]]:
    """The stages of a case that are timed, each with the library it is part of."""
    return [
        (name, library)
        for name in STAGES.get(case.op, ())
        for library in (OURS, OURS_SAFE)
        if library == OURS or name in SAFE_STAGES.get(case.op, ())
    ]


def scaling_rows(
    rates: tuple, lengths: tuple[int, ...] = SCALING_T, device: str = "cuda",
    steps: Steps | None = None,
) -> Rows:  # fmt: skip
    """The three forms against the length of the sequence."""
    steps = steps or Steps()
    longest = measure.inputs(scaling_case(max(lengths)), device)
    oracle = measure.Oracle(longest)
    for what in SCALING_FORMS:
        ms = 0.0
        for T in lengths:
            case = scaling_case(T)
            if not steps.begin(case.name, what, OURS, T):
                continue
            at = label(case, OURS, f"{what} T={T}")
            if ms > SLOW_MS:
                yield None, f"{at} -- left out: half the length took {ms:.0f} ms"
                continue
            i = longest.prefix(T)
            try:
                error = oracle.error(forms.FORMS[what](i))
                ms = measure.time_ms(lambda i=i, what=what: forms.FORMS[what](i))
            except Exception as e:
                check_device(e)
                yield None, f"{at} -- {why(e)}"
                continue
            row = make_row(case, OURS, what, ms, rates, error=error) | {"T": T}
            yield row, line_of(row)
