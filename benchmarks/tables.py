"""What the commands have in common that fill one table: where they run, the file they add to."""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.adapters import version_of
from benchmarks.progress import fail
from benchmarks.results import default_path, differences, load, save, stamped


def heading(device: torch.device) -> dict:
    """Where and with what it is measured."""
    import triton

    gpu = "CPU" if device.type == "cpu" else measure.gpu_name()
    data = {"gpu": gpu, "torch": torch.__version__, "triton": triton.__version__}
    data |= {"fla": version_of("fla"), "cuda": torch.version.cuda}
    return data | {"date": date.today().isoformat()}


def parser(
    name: str, doc: str, *, file: str | None = None, **lists: tuple[int, ...]
) -> argparse.ArgumentParser:
    """The options --device and --out, and one for each list of integers.

    file: Of results, where it has another name than the command.
    """
    file = file or name
    p = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc)
    for option, default in lists.items():
        p.add_argument(f"--{option}", type=int, nargs="+", default=default)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    p.add_argument("--out", type=Path, help=f"file of results (chapters/data/{file}_<gpu>.json)")
    return p


@dataclass
class Table:
    """A file of results that is whole after every row."""

    path: Path
    top: dict  # where and with what it is measured
    key: tuple[str, ...]  # the columns by which a row is known
    device: torch.device
    ran: Callable[[dict], tuple[str, ...]]  # what of the package a row is the time of
    rows: dict = field(default_factory=dict)

    def known(self, row: dict) -> tuple:
        """What a row is known by; "" for a column that it does not have."""
        return tuple(row.get(name, "") for name in self.key)

    def add(self, row: dict) -> None:
        """Print a row and save it, over the one of its key if there is one."""
        row = stamped(row, self.ran(row))
        self.rows[self.known(row)] = row
        print(json.dumps(row), flush=True)
        save(self.path, {**self.top, "rows": [self.rows[key] for key in sorted(self.rows)]})


def opened(
    args: argparse.Namespace,
    name: str,
    *key: str,
    ran: Callable[[dict], tuple[str, ...]],
    apart: tuple[str, ...] = (),
) -> Table | None:
    """The table that a command adds to, with the rows that were measured in the same place.

    ran: What of the package a row is the time of, as linattn_edu.sources names it.  apart: What of
    the heading the rows tell instead, each its own. The result is None, with a line that says why,
    where nothing can be measured.
    """
    device = torch.device(args.device)
    if device.type == "cuda" and (reason := measure.usable_gpu()):
        fail(f"benchmarks run on a CUDA GPU: {reason}")
        return None
    path = args.out or default_path("cpu" if device.type == "cpu" else measure.gpu_name(), name)
    top = {name: value for name, value in heading(device).items() if name not in apart}
    table, old = Table(path, top, key, device, ran), load(path)
    if old and not differences(old, table.top):
        day = {"date": old["date"]}
        table.rows = {table.known(row): day | row for row in old["rows"]}
        table.top |= {name: old.get(name) for name, value in table.top.items() if value is None}
    return table
