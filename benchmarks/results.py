"""The file of results: its rows, how runs are merged, how it is written."""

import json
import os
import re
import tempfile
from collections.abc import Iterable
from datetime import date
from pathlib import Path

from benchmarks.adapters import (
    DISTRIBUTIONS,
    NAMES,
    OPTIONAL,
    makers,
    refusal,
    version_of,
)
from benchmarks.cases import (
    ALL_CALLS,
    BEYOND,
    CALLS,
    CASES,
    OPERATORS,
    SCALING,
    SCALING_FORMS,
    STAGES,
)
from linattn_edu import sources
from linattn_edu.measurements import CARDS

DATA = Path(__file__).resolve().parents[1] / "chapters" / "data"
ENVIRONMENT = ("gpu", "torch", "triton", *DISTRIBUTIONS)


def default_path(gpu: str, operator: str) -> Path:
    """chapters/data/<operator>_<gpu>.json: "NVIDIA H200", "gdn" -> gdn_h200.json."""
    slug = re.sub(r"[^a-z0-9]+", "_", gpu.lower().removeprefix("nvidia")).strip("_")
    slug = CARDS.get(gpu, slug)
    return DATA / f"{operator}_{slug}.json"


def of_operators(folder: Path = DATA) -> list[Path]:
    """The files of results of operators: those of parts and pieces have other columns."""
    return sorted(p for p in folder.glob("*.json") if p.stem.split("_")[0] in OPERATORS)


def new(gpu: str, rates: tuple[float, float]) -> dict:
    """An empty set of results that says where and with what it was measured."""
    import torch
    import triton

    data = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    data |= {library: version_of(library) for library in DISTRIBUTIONS}
    data["cuda"] = torch.version.cuda
    data["bytes_per_s"], data["flops_per_s"] = rates
    return {**data, "date": date.today().isoformat(), "rows": []}


def stamped(row: dict, entries: Iterable[str]) -> dict:
    """A row with the day and, if it is ours, the hash of the sources that ran.

    Args:
        entries: As in linattn_edu.sources.digests.
    """
    row = row | {"date": date.today().isoformat()}
    return row | ({"sources": sources.digests(*entries)} if sources.ours(row) else {})


def differences(old: dict, new: dict) -> list[str]:
    """What of the environment differs; a library that one of the two did not have does not."""
    return [
        f"{name} {old[name]} -> {new[name]}"
        for name in ENVIRONMENT
        if old.get(name) and new.get(name) and old[name] != new[name]
    ]


def merge(old: dict | None, new: dict) -> dict:
    """`new` over `old`, row by row; only `new` where the two were measured in different places.

    A row measured again keeps what only the older run measured (a first call, say), if both are of
    the same sources; a row without "ms" is one of which only the first call has been measured.
    Where nothing but Triton's version differs, libraries of OPTIONAL, which do not use it, keep
    their rows, with their day, if the newer run did not have them: a peer that is faster stays.
    """
    if old is None:
        old = {"rows": []}
    elif differences(old, new):
        old = _of_absent(old, new)
    rows, again = {}, {_key(row) for row in new["rows"]}
    day = {"date": old["date"]} if "date" in old else {}  # of what is not measured again
    kept = [row if _key(row) in again else day | row for row in old["rows"]]
    for row in (*kept, *new["rows"]):
        before = {n: x for n, x in rows.get(_key(row), {}).items() if n != "refused"}
        both = {**(before if before.get("sources") == row.get("sources") else {}), **row}
        rows[_key(row)] = dict(sorted(both.items(), key=lambda item: item[0] == "first_call_s"))
    known = {name: value for name, value in old.items() if value is not None}
    top = {**known, **{name: value for name, value in new.items() if value is not None}}
    return {**new, **top, "rows": sorted(rows.values(), key=_order)}


def _of_absent(old: dict, new: dict) -> dict:
    """Of older results what holds beside those of another Triton."""
    without = [{**data, "triton": None} for data in (old, new)]
    absent = [x for x in OPTIONAL if old.get(x) and not new.get(x)]
    if differences(*without) or not absent:
        return {"rows": []}
    rows = [{"date": old["date"]} | row for row in old["rows"] if row["library"] in absent]
    return {**{x: old[x] for x in absent}, "rows": rows}


def missing(data: dict) -> list[tuple[str, str, str]]:
    """(case, call, library) of what a library that was there can run and has no time for.

    Of the operators that have rows, and without a row that says why. A figure without these says
    less than could be known; cases with beta up to 2 are not measured on every card. A library that
    has one row was there; one of OPTIONAL that has none, and no version, was not.
    """
    told = [row for row in data["rows"] if row.keys() & {"ms", "refused"}]
    timed = {(row["case"], row["what"], row["library"]) for row in told}
    has_rows = {library for _, _, library in timed}

    def there(library: str) -> bool:
        if library in OPTIONAL and library in has_rows:
            return True
        return bool(data.get(library.removesuffix("_safe"), library not in OPTIONAL))

    names = {name for name, _, _ in timed if name in CASES}
    here = {CASES[name].operator for name in names}
    every = [
        (case, what, library)
        for case in CASES.values()
        if case.operator in here and (case.name in names or not case.op.endswith(BEYOND))
        for what in CALLS[case.op]
        for library in makers(case, what)
        if there(library) and not refusal(case, what, library)
    ]
    return [(c.name, what, x) for c, what, x in every if (c.name, what, x) not in timed]


def _key(row: dict) -> tuple:
    return row["case"], row["library"], row["what"], row.get("T")


def _order(row: dict) -> tuple:
    cases = [*CASES, SCALING]
    stages = STAGES.get(CASES[row["case"]].operator, ()) if row["case"] in CASES else ()
    whats = [*ALL_CALLS, *(f"stage:{name}" for name in stages), *SCALING_FORMS]

    def place(names, name):
        names = list(names)
        return (names.index(name), "") if name in names else (len(names), name)

    key = (row["case"], cases), (row["what"], whats), (row["library"], NAMES)
    return (*(place(names, name) for name, names in key), row.get("T") or 0)


def load(path: Path) -> dict | None:
    """The results in a file, None if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def save(path: Path, data: dict) -> None:
    """Write whole or not at all: a run that is stopped leaves the older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_text(data))
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _text(data: dict) -> str:
    """JSON with a line a row, so that a diff shows which rows changed."""
    top = {name: value for name, value in data.items() if name != "rows"}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in top.items()]
    rows = ",\n".join(f"  {json.dumps(row)}" for row in data["rows"])
    return "\n".join(["{", *lines, ' "rows": [', *([rows] if rows else []), " ]", "}", ""])
