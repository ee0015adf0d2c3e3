"""Public functions whose calls are written down whole: their checks, views and launches.

The host takes longer to check the arguments of a decoding step than its kernels run. Whatever is
checked of tensors on a GPU follows from their shapes, strides, dtypes and devices, from options,
and from whether what is written lies apart; their numbers are not looked at. So a call like an
earlier one, which was right in all that, runs the program of that one (`kernels.host.plan`).
"""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from linattn_edu.ops.inplace import memory
from linattn_edu.ops.tensors import alone

PLAN = "linattn_edu.kernels.host.plan"  # loaded where a kernel has run
VALUES = (int, float, str, torch.dtype)  # types of options; True is not 1
P, R = ParamSpec("P"), TypeVar("R")


def repeated(*writes: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """f, which writes to its arguments of these names, and returns tensors: one, or a tuple."""

    def decorate(f: Callable[P, R]) -> Callable[P, R]:
        signature, programs = inspect.signature(f), {}

        def written(args: tuple, kwargs: dict) -> list[bool]:
            """Which tensors of a call are written."""
            bound = signature.bind(*args, **kwargs).arguments
            given = (*args, *kwargs.values())
            named = [id(bound[n]) for n in writes if bound.get(n) is not None]
            return [id(x) in named for x in given for _ in _tensors(x)]

        @functools.wraps(f)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or PLAN not in sys.modules:
                return f(*args, **kwargs)
            if kwargs.get("impl") == "reference":  # in PyTorch alone
                return f(*args, **kwargs)
            key, tensors = [*kwargs], []
            if not (_take(args, key, tensors) and _take(kwargs.values(), key, tensors)):
                return f(*args, **kwargs)
            which = lambda: written(args, kwargs)
            return repeat(programs, key, tensors, which, lambda: f(*args, **kwargs))

        return call

    return decorate


def repeat(
    programs: dict,
    key: list,
    tensors: list[Tensor],
    writes: Callable[[], list[bool]],
    call: Callable[[], R],
) -> R:
    """call(), or the program of earlier calls of its kind.

    Args:
        programs: A dict of the caller, empty at first.
        key: What beside its tensors tells a call apart.
        tensors: All that it reads and writes.
        writes: Gives which of them it writes.
        call: Returns a tensor, or a tuple of tensors and None.
    """
    plan = sys.modules.get(PLAN)
    if plan is None or not alone() or not _fit(tensors, plan.DEVICES):
        return call()
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        key.append(torch.get_autocast_dtype(kind))
    key, known = tuple(key), programs.get("plans")
    if known is None:
        known = programs["plans"] = plan.plans()
    program = plan.find(known, key, tensors)
    if program is not None:
        return program(*tensors) if _apart(program, tensors) else call()
    return plan.run(known, key, tensors, call, writes())


def _apart(program: Callable, tensors: list[Tensor]) -> bool:
    """Whether nothing that a program writes lies where another tensor does."""
    if program.writes is None:
        return True
    if program.sizes is None:
        program.sizes = [end - begin for begin, end in map(memory, tensors)]
    begins, last, last_written = [x.data_ptr() for x in tensors], 0, 0
    for begin, size, written in sorted(zip(begins, program.sizes, program.writes, strict=True)):
        if begin < (last if written else last_written):
            return False
        last = max(last, begin + size)
        if written:
            last_written = max(last_written, begin + size)
    return True


def _fit(tensors: list[Tensor], devices: set[str]) -> bool:
    """Whether these are plain tensors of one of the devices, without gradients."""
    if not tensors or tensors[0].device.type not in devices:
        return False
    device = tensors[0].device
    recorded, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    for x in tensors:
        if (
            x.device != device or x.layout is not torch.strided or x.is_nested
            or is_legacy_batchedtensor(x) or (recorded and x.requires_grad)
            or (x.is_inference() and not inference)
        ):  # fmt: skip
            return False
    return True


def _tensors(x: object) -> list[Tensor]:
    """x, or what it holds."""
    if isinstance(x, Tensor):
        return [x]
    return [y for y in x if isinstance(y, Tensor)] if isinstance(x, tuple) else []


def _take(values: object, key: list, tensors: list[Tensor]) -> bool:
    """Add values to a key, and those that are tensors to these; False: there are others."""
    for x in values:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            key.append(Tensor)
            tensors.append(x)
        elif x is None or kind is bool:
            key.append(x)
        elif kind in VALUES:
            key.append((kind, x))
        elif isinstance(x, tuple) and x:
            key.append((kind, len(x)))
            if not _take(x, key, tensors):
                return False
        else:
            return False
    return True
