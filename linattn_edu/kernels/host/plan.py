"""Calls that are written down, so that a short one does not wait for the host.

Most of the host's time goes into what is the same in every call with tensors of the same shapes,
strides and dtypes: choosing rows and grids, and what Triton does with each argument of a launch.
So the second such call is watched, and what it did becomes a program that later ones run (`tape`).

Why not compose every call and only launch past Triton's front, as `benchmarks.handles` does: most
of the host's time is the composition's. `python -m benchmarks.host` measures the three.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode
from triton import knobs

from linattn_edu.kernels.host.bounded import Bounded
from linattn_edu.kernels.host.launchers import maps
from linattn_edu.kernels.host.precompile import precompile
from linattn_edu.kernels.host.tape import record

LIMIT = 512  # programs of an operator's pass
SEEN = "seen once"
DEVICES = {"cuda"}  # where calls are not composed anew; elsewhere the host is not waited for
_all: list[Bounded] = []
_compiled = Bounded(lambda: LIMIT)  # kinds of calls, whatever their lengths, all compiled
_OFF = "linattn_edu.plan.off"  # among what PyTorch keeps for a thread
_offs, _counting = 0, threading.Lock()  # how many `off` are open in all threads


def plans() -> Bounded:
    """A place for the programs of one operator's pass: what kind of call -> program."""
    _all.append(Bounded(lambda: LIMIT))
    return _all[-1]


def clear() -> None:
    """Forget all programs: after a change of what a composition launches."""
    for forgotten in (*_all, _compiled, maps):
        forgotten.clear()


@contextmanager
def off():
    """Every call of this thread is composed, and launched by Triton; so are the gradients that it
    asks for, which PyTorch computes in another thread.
    """
    global _offs
    before = _is_off()
    with _counting:
        _offs += 1
    torch._C._stash_obj_in_tls(_OFF, True)
    try:
        yield
    finally:
        torch._C._stash_obj_in_tls(_OFF, before)
        with _counting:
            _offs -= 1


def _is_off() -> bool:
    return bool(_offs and torch._C._is_key_in_tls(_OFF) and torch._C._get_obj_in_tls(_OFF))


def find(programs: dict, key: tuple, inputs: Sequence[Tensor | None]) -> Callable | None:
    """The program of earlier calls of this kind, or None; arguments as of `run`."""
    device = next(x for x in inputs if x is not None).device
    if not _repeats(device):
        return None
    program = programs.get(_kind(device, key, inputs))
    if not callable(program) or (program.computes and torch.is_autocast_enabled(device.type)):
        return None  # autocast chooses the precision of an operation itself
    return program


def run(
    programs: dict,
    key: tuple,
    inputs: Sequence[Tensor | None],
    compose: Callable[[], object],
    writes: Sequence[bool] | None = None,
) -> object:
    """compose(), a composition of these inputs alone, by the program of earlier calls if there is
    one: a tuple of tensors, or None for some.

    Args:
        programs: From `plans`.
        key: What beside the shapes, strides, dtypes, alignment and device of the inputs tells
            calls apart. Whatever compose launches must follow from both.
        inputs: A tensor, and others or None.
        writes: Which inputs it writes to, if compose is a public function: it has plans of its own,
            an input that it returns is that itself, a result alone no tuple. The program is for
            `find` alone, whose caller sees to it that what is written lies apart.
    """
    device = next(x for x in inputs if x is not None).device
    if not _repeats(device):
        return compose()
    kind = _kind(device, key, inputs)
    program = programs.get(kind)
    if callable(program):
        program = find(programs, key, inputs) if writes is None else None
        return compose() if program is None else program(*inputs)
    if program is None:
        programs.put(kind, SEEN)
        if writes is None:
            _precompile(programs, (key, device.index), inputs, compose)
    elif program is SEEN:
        results, program = record(inputs, compose, writes)
        if program is not None:
            programs.put(kind, program)
        return results
    return compose()


def _precompile(programs: dict, key: tuple, inputs: Sequence, compose: Callable) -> None:
    """Before the first call of a kind; but with ever new lengths and batches only until there is
    nothing left to compile, since it takes as long as the host's part of a call.
    """
    heads = (None if x is None else (x.dtype, x.shape[2:]) for x in inputs)
    family = (id(programs), *key, *heads)
    if family not in _compiled and not precompile(compose):
        _compiled.put(family, True)


def _repeats(device: torch.device) -> bool:
    """Whether calls on this device may be repeated, and nobody wants to see each launch."""
    if device.type not in DEVICES or _is_off() or _get_current_dispatch_mode() or _watched():
        return False
    return device.index is None or device.index == torch.cuda.current_device()


def _kind(device: torch.device, key: tuple, inputs: Sequence[Tensor | None]) -> tuple:
    """What tells calls apart."""
    # Triton's kernels are others where an address is not a multiple of 16
    kinds = [
        None
        if x is None
        else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.data_ptr() % 16)
        for x in inputs
    ]
    return (key, device.index, *kinds)


def _watched() -> bool:
    """Whether a profiler wants to be told of every launch, with what Triton alone has for it; or
    Triton launches other kernels for now: with assertions, instrumented, through other stages.

    Its other knobs reach no kernel that this process has, whoever launches it.
    """
    at = knobs.runtime
    if at.debug or at.add_stages_inspection_hook or knobs.compilation.instrumentation_mode:
        return True
    enter, leave = at.launch_enter_hook, at.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
