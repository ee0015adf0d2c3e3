"""The files of measurements, chapters/data/<what>_<card>.json, a file a GPU: found, read, dated."""

import json
from collections.abc import Iterable
from pathlib import Path

from linattn_edu import sources

# name of a GPU -> in the names of files; the first that is there has the plain names of figures
CARDS = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
# key of the results -> distribution
PEERS = {
    "fla": "fla-core",
    "flash_qla": "flash-qla",
    "flashinfer": "flashinfer-python",
    "attn_gym": "attn_gym",
    "cudnn": "nvidia-cudnn-frontend",
    "mamba_ssm": "mamba_ssm",
    "transformers": "transformers",
}


def files(name: str, folder: Path | None = None) -> list[Path]:
    """The file of this name; without one, name_<card>.json of each card.

    The cards in the order of CARDS, then by name. Without a folder, that of the first chapters/data
    above the working directory or this file that has one of them.
    """
    if folder is None:
        roots = [Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents]
        found = (files(name, root / "chapters" / "data") for root in roots)
        return next(filter(None, found), [])
    if (folder / f"{name}.json").is_file():
        return [folder / f"{name}.json"]
    return sorted(folder.glob(f"{name}_*.json"), key=lambda path: (_place(path), path.name))


def _place(path: Path) -> int:
    known = [f"_{card}" for card in CARDS.values()]
    return next((i for i, end in enumerate(known) if path.stem.endswith(end)), len(known))


def every(name: str) -> dict[str, dict]:
    """Name of each file -> what it holds; empty where nothing has been measured."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files(name)}


def last_of_chapter(name: str, chapter: str) -> str | None:
    """Of the files by this name, the one whose rows of a chapter are the latest, or None: by the
    day in the middle, since a few rows may be of another.
    """
    found = {}
    for stem, data in every(name).items():
        days = [r.get("date", data["date"]) for r in data["rows"] if r.get("chapter") == chapter]
        found |= {stem: sorted(days)[len(days) // 2]} if days else {}
    return max(found, key=found.get, default=None)


def load(name: str) -> dict:
    """What the first of the files holds.

    Raises:
        FileNotFoundError: nothing has been measured under this name.
    """
    for data in every(name).values():
        return data
    raise FileNotFoundError(f"chapters/data/{name}.json: not measured yet")


def suffix(stem: str, folder: Path | None = None) -> str:
    """What the names of a file's figures end in: nothing for the first of Gated DeltaNet's."""
    main = files("gdn", folder)
    return "" if main and main[0].stem == stem else f"_{stem}"


def timed(data: dict, *whats: str) -> list[dict]:
    """The timed rows of `whats`; of some calls only the first may have been measured."""
    return [row for row in data["rows"] if row["what"] in whats and "ms" in row]


def provenance(data: dict, rows: Iterable[dict] | None = None) -> str:
    """Where, with what and when it was measured, and whether of kernels that have changed since.

    Args:
        rows: Those that are shown, if not all; of them are the day and the libraries.
    """
    rows = list(data["rows"] if rows is None else rows)
    there = {row.get("library", "").removesuffix("_safe") for row in rows}
    versions = [f"torch {data['torch']}"]
    versions += [f"Triton {data['triton']}"] if data.get("triton") else []
    versions += [f"{name} {data[key]}" for key, name in PEERS.items() if key in there & set(data)]
    last = max((row.get("date", data["date"]) for row in rows), default=data["date"])
    parts = [f"{data['gpu']}, {', '.join(versions)}, {last}."]
    days = {}
    for row in rows:
        if row.get("date", data["date"]) != last:
            days.setdefault(row["date"], {})[row.get("library", "some rows")] = None
    earlier = [f"{', '.join(libraries)} of {day}" for day, libraries in sorted(days.items())]
    if earlier:
        parts.append(f"Some lines are of another day: {'; '.join(earlier)}.")
    shown = {(row.get("case"), row.get("what")) for row in rows}
    refused: dict[str, list[str]] = {}
    for row in data["rows"]:
        named = {"refused", "library", "case"} <= row.keys()  # a ladder says itself what it lacks
        if named and (row["case"], row.get("what")) in shown:
            name = f"{row['case']} {row['what'].replace('_', ' ')}"
            refused.setdefault(f"{row['library']}, {row['refused']}", []).append(name)
    parts += [f"Not measured: {why}: {', '.join(names)}." for why, names in refused.items()]
    return " ".join(filter(None, [*parts, sources.note(rows, data["date"])]))
