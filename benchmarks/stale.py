"""Which results are of older sources: what `make bench` says first, and all that --stale does."""

import json
from pathlib import Path

from linattn_edu import sources

# beginning of a file's name -> what writes it; a file that no command writes any more has none
COMMANDS = {
    **{op: f"python -m benchmarks {op}{more} --all" for op, more in
       (("gdn", ""), ("kda", ""), ("ssd", " ema"))},
    **{op: f"python -m benchmarks {op}{more} --calls" for op, more in
       (("gdn2", ""), ("dplr", " rwkv7"))},
    **{name: f"python -m benchmarks.{name}" for name in
       ("rungs", "fusion", "pieces", "decoding", "blocks", "host", "steps", "replay", "tritons")},
    "losses": "python -m benchmarks.losses --out FILE",
    "cp": "python -m benchmarks.ranks",
}  # fmt: skip
SAID = {
    "changed": "of older sources",
    "unrecorded": "of sources that were not recorded",
}


def listing(folder: Path, gpu: str | None = None) -> str:
    """The stale cases of every file of results, or of one card's, and what measures them again."""
    lines, cards = [], set()
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if "gpu" not in data or gpu not in (None, data["gpu"]):
            continue
        cards.add(data["gpu"])
        every = stale(data)
        for why, cases in every.items():
            lines.append(f"{path.name}: {SAID[why]}: {', '.join(cases)}")
        if every and (command := COMMANDS.get(path.stem.split("_")[0])):
            lines.append(f"  again: {command}")
    on = gpu or ", ".join(sorted(cards)) or "any GPU"
    if not cards:
        return f"nothing has been measured on {on}"
    return "\n".join(lines) or f"all results of {on} are of today's sources"


def stale(data: dict) -> dict[str, list[str]]:
    """Why rows of a file are stale -> their cases, with how many rows of each."""
    found = {}
    for row in data["rows"]:
        if why := sources.changed(row):
            cases = found.setdefault(why, {})
            cases[case_of(row)] = cases.get(case_of(row), 0) + 1
    return {
        why: [f"{case} ({n} rows)" if n > 1 else case for case, n in cases.items()]
        for why, cases in found.items()
    }


def case_of(row: dict) -> str:
    """What a row is a case of, in any of the files."""
    return next(str(row[key]) for key in ("case", "chapter", "op", "mixer") if key in row)
