"""What a composition does: its launches and operations, each seen before it happens."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_aten = torch.ops.aten
MAKES = (
    _aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default,
    _aten.new_empty.default, _aten.new_empty_strided.default,
)  # fmt: skip
_seen = threading.Lock()  # a thread at a time; the others launch as ever


@contextmanager
def launches(instead: Callable) -> Iterator[bool]:
    """Every launch of this thread, by whichever kernel, becomes
    instead(run, kernel, args, grid, kwargs), where
    run(kernel, *args, grid=grid, warmup=False, **kwargs) launches it.

    Yields whether that is so: not while another thread's are seen.
    """
    if not _seen.acquire(blocking=False):
        yield False
        return
    kinds, thread = (JITFunction, InterpretedFunction), threading.get_ident()
    originals = [kind.run for kind in kinds]

    def seen(original: Callable) -> Callable:
        def run(self, *args, grid, warmup, **kwargs):
            if warmup or threading.get_ident() != thread:
                return original(self, *args, grid=grid, warmup=warmup, **kwargs)
            return instead(original, self, args, grid, kwargs)

        return run

    try:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = seen(original)
        yield True
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.run = original
        _seen.release()


class Operations(TorchDispatchMode):
    """Every operation of PyTorch becomes instead(func, args, kwargs); func runs it."""

    ours = True  # operators run under it as if nobody looked on

    def __init__(self, instead: Callable):
        super().__init__()
        self.instead = instead

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first operation imports PyTorch's compiler, which takes a second

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.instead(func, args, kwargs or {})
