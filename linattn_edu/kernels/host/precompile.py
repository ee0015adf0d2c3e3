"""Kernels compiled side by side, before the first call that launches them.

Triton compiles a kernel when it is launched, so a first call waits for its kernels one after the
other. Here the composition is gone through once before it runs: tensors are made, launches are
handed to threads that compile, and nothing is computed. Most of a compilation is done in C++ and by
other programs, which do not hold Python's lock. `plan.off` leaves every kernel to its launch.
"""

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from linattn_edu.kernels.host.watching import MAKES, Operations, launches


def precompile(compose: Callable[[], object]) -> int:
    """Compile, side by side, what compose() will launch on the current GPU.

    Nothing that compose does to a tensor is done, and no number of a tensor is read; where it wants
    one the kernels that follow are left to their launches. So is what cannot be compiled, which
    fails there as it would without this.

    Returns:
        How many kernels this process did not have yet.
    """
    with _Threads() as threads:
        # a context of its own: what is left behind if this is interrupted is left there
        with suppress(Exception):
            contextvars.Context().run(_go_through, compose, threads)
        return threads.given


def _go_through(compose: Callable, threads: "_Threads") -> None:
    with AsyncCompileMode(threads, ignore_errors=True), launches(_only_compile) as seen:
        if seen:
            with Operations(_only_made):
                compose()


def _only_compile(run: Callable, kernel: object, args: tuple, grid: object, kwargs: dict) -> None:
    if isinstance(kernel, JITFunction):  # else it is interpreted
        run(kernel, *args, grid=grid, warmup=True, **kwargs)


class _Threads(ThreadPoolExecutor):
    """The threads that compile; they use no GPU."""

    given = 0

    def submit(self, compile: Callable) -> Future:
        self.given += 1
        return super().submit(_compiled, compile)


def _compiled(compile: Callable) -> object:
    """A kernel, and in Triton's cache its launcher, which Triton 3.6 has a C compiler make."""
    kernel = compile()
    with suppress(Exception):  # the launch makes it again, and fails where it cannot be made
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _only_made(func: Callable, args: tuple, kwargs: dict) -> object:
    """What an operation of PyTorch gives: new tensors of the right form, with any numbers."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if func.is_view or func in MAKES or not tensors:
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        return args[0]
    args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))

    def new(x: Tensor) -> Tensor:
        form = {"dtype": x.dtype, "device": tensors[0].device}
        return torch.empty_strided(x.shape, x.stride(), **form)

    return tree_map_only(Tensor, new, func(*args, **kwargs))
