"""The stages of an operator, each named once: a record that is filled from either room.

    @dataclass(frozen=True)
    class Stages:
        gate_cumsum: Callable = stage("delta.gate_cumsum")
        piece_map: Callable = stage("delta.cp_merge")

    stages = implementations(Stages)

stages("reference").piece_map is that of `reference/delta/cp_merge.py`, stages("triton").piece_map
that of `kernels/delta/cp_merge.py`. A name that the record lacks is an AttributeError, and
`dataclasses.replace` swaps a single stage.
"""

import functools
from collections.abc import Callable
from dataclasses import field, fields
from importlib import import_module
from typing import Any, TypeVar

from linattn_edu.ops import check

ROOMS = {"reference": "linattn_edu.reference", "triton": "linattn_edu.kernels"}
Record = TypeVar("Record")


def stage(file: str) -> Any:
    """A field of a record: the function of its name, in this file of either room."""
    return field(metadata={"file": file})


def implementations(record: type[Record]) -> Callable[[str], Record]:
    """impl -> the record, filled when it is first asked for: Triton may be missing.

    A field with a value of its own, in the place of a file, is the same in both.
    """

    def stages(impl: str) -> Record:
        """The stages of an implementation, "reference" or "triton"."""
        check.choice("impl", impl, check.STAGES)
        files = {f.name: f.metadata["file"] for f in fields(record) if "file" in f.metadata}
        found = {n: import_module(f"{ROOMS[impl]}.{file}") for n, file in files.items()}
        return record(**{n: getattr(module, n) for n, module in found.items()})

    stages.__annotations__["return"] = record  # as help() shows it
    return functools.cache(stages)
