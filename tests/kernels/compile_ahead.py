"""Launch kernels for Hopper, which need not be present, through `precompile`.

Prints a JSON line for each experiment. A program, because a process that interprets kernels cannot
compile them.
"""

import json
import os
import tempfile
import threading
from types import SimpleNamespace

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from linattn_edu.kernels.host import plan
from linattn_edu.kernels.host.precompile import precompile

launched, launchers = [], []


class Launcher:
    """Of a kernel; it tells that it was made, and what it would launch."""

    def __init__(self, src, metadata):
        self.name = src.fn.__name__
        launchers.append((self.name, threading.get_ident()))

    def __call__(self, *args):
        launched.append(self.name)


class Driver:
    """Of a GPU that is not there."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *args: (1, 1, 32, 0, 1024),
    )

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def kernel(body):
    """A new kernel of one pointer and a number, so that nothing of it is compiled yet."""

    @triton.jit
    def sum_kernel(x_ptr, n: tl.constexpr):
        tl.store(x_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, n)), 0))

    @triton.jit
    def max_kernel(x_ptr, n: tl.constexpr):
        tl.store(x_ptr, tl.max(tl.load(x_ptr + tl.arange(0, n)), 0))

    @triton.jit
    def wrong_kernel(x_ptr, n: tl.constexpr):
        tl.store(x_ptr, tl.nothing(n))

    return {"sum": sum_kernel, "max": max_kernel, "wrong": wrong_kernel}[body]


def composition(*kernels):
    def compose(x):
        for each in kernels:
            x = x.new_empty(x.shape)
            each[(1,)](x, n=16)
        return (x,)

    return compose


def call(*kernels, times=1):
    """Calls as an operator makes them, and the kernels that they launch."""
    launched.clear(), launchers.clear()
    place, x = plan.plans(), torch.zeros(16)
    for _ in range(times):
        plan.run(place, (), [x], lambda: composition(*kernels)(x))
    return [*launched]


def binary(kernel):
    (cache, *_) = kernel.device_caches[0]
    (compiled,) = cache.values()
    return compiled.asm["cubin"]


def side_by_side():
    """Each compilation waits until the other ends: one after the other they would wait for ever."""
    both = threading.Barrier(2)
    triton.knobs.compilation.listener = lambda **_: both.wait(timeout=60)
    first = kernel("sum"), kernel("max")
    names = call(*first, times=3)
    triton.knobs.compilation.listener = None
    made = {thread for _, thread in launchers if thread != threading.get_ident()}
    triton.knobs.compilation.always_compile = True
    again = kernel("sum"), kernel("max")
    with plan.off():
        call(*again)
    triton.knobs.compilation.always_compile = False
    return {
        "launched": names,
        "launchers elsewhere": len(made),
        "same binaries": [*map(binary, first)] == [*map(binary, again)],
        "threads left": threading.active_count() - 1,
    }


def with_an_error():
    """Of one kernel: it is told where the kernel is launched, behind the one before."""
    place, x = plan.plans(), torch.zeros(16)
    compose, told = composition(kernel("max"), kernel("wrong"), kernel("sum")), []
    launched.clear()
    for _ in range(2):
        try:
            plan.run(place, (), [x], lambda: compose(x))
        except Exception as error:
            told.append(type(error).__name__)
    return {"launched": [*launched], "told": told}


def interrupted():
    """By the user, while a kernel is handed over: the next call is as any other."""
    place, x, good = plan.plans(), torch.zeros(16), kernel("max")

    def compose():
        composition(good)(x)
        raise KeyboardInterrupt

    run = JITFunction.run
    try:
        precompile(compose)
    except KeyboardInterrupt:
        told = True
    plan.run(place, (), [x], lambda: composition(kernel("sum"), good)(x))
    return {"told": told, "launched": call(good), "as before": JITFunction.run is run}


def main():
    driver.set_active(Driver())
    plan.DEVICES.add("cpu")
    for experiment in (side_by_side, with_an_error, interrupted):
        print(json.dumps({experiment.__name__: experiment()}), flush=True)


if __name__ == "__main__":
    main()
