"""Launches of kernels in Gluon that Python runs."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from linattn_edu.gluon_interpreter import language
from linattn_edu.gluon_interpreter.machine import Machine
from linattn_edu.gluon_interpreter.source import Sources
from linattn_edu.gluon_interpreter.values import Descriptor, Number, Pointer


@contextmanager
def interpreted(
    *,
    seed: int = 0,
    changes: tuple[tuple[ModuleType, str, str], ...] = (),
    constants: dict[str, int] | None = None,
) -> Iterator[list]:
    """Meanwhile kernels in Gluon are interpreted; the list of those that were launched.

    Args:
        seed: Of whose turn it is, in each program.
        changes: Mistakes to plant: (module, a text that it has once, another one).
        constants: Arguments that kernels get in place of the launcher's.

    Raises:
        KernelError: from a launch, and others as `linattn_edu.gluon_interpreter` says.
        ValueError: a text of `changes` is not once in its module, or in no function that ran.
    """
    sources, ran = Sources(changes), []

    def run(kernel, *args, grid, warmup, **options):
        ran.append(kernel)
        signature = inspect.signature(kernel.fn)
        num_warps = options.get("num_warps", 4)
        named = {n: x for n, x in options.items() if n in signature.parameters}
        given = signature.bind(*args, **named).arguments
        given |= {n: x for n, x in (constants or {}).items() if n in given}
        function = sources.plain(kernel)
        (programs,) = grid
        for pid in range(programs):
            _run(function, given, seed, programs, pid, num_warps)

    inherited = "run" not in vars(GluonJITFunction)
    before = GluonJITFunction.run
    GluonJITFunction.run = run
    try:
        yield ran
        if sources.unplanted:
            raise ValueError(f"in no function that ran: {sources.unplanted}")
    finally:
        if inherited:
            del GluonJITFunction.run
        else:
            GluonJITFunction.run = before


def _run(function, given: dict, seed: int, programs: int, pid: int, num_warps: int) -> None:
    """One program."""
    machine = Machine(function.__name__, seed, programs, pid, num_warps)
    language.enter(machine)
    try:
        function(**{n: _value(n, x) for n, x in given.items()})
        machine.main.check_end()
        if machine.copies:
            raise machine.left_behind()
    finally:
        language.leave()


def _value(name: str, x: object) -> object:
    """An argument as the kernel has it."""
    if isinstance(x, torch.Tensor):
        return Pointer.to_tensor(x)
    if hasattr(x, "block_shape"):
        return Descriptor(name, x)
    return Number(x) if type(x) is int else x
