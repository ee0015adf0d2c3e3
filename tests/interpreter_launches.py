"""A launch in Triton's interpreter whose like was run before: its results, without running it.

What a launch writes follows from the kernel, what it calls, its arguments, what lies in the storage
of each tensor and the grid. Tests of one operator launch alike a dozen times: with other strides,
under a checkpoint, for the gradient of one tensor alone.
"""

import ctypes
import hashlib
import inspect
from collections import OrderedDict

import numpy as np
import torch
from triton.language import core
from triton.runtime import interpreter

ROOM = 128 << 20  # bytes of results that are kept; the oldest go
PLAIN = (int, float, bool, str, type(None))


class Unknown(Exception):
    """Nobody can say whether two such launches are alike."""


def remember_launches(instead_of, launch=None):
    """Put what looks first into the place of the interpreter's launch; `launch` is another one for
    tensors on the CPU, which gets what the kernel is too.
    """
    run, kept, room = interpreter.GridExecutor.__call__, OrderedDict(), [ROOM]
    names, alive = {}, {}

    @instead_of(interpreter.GridExecutor, "__call__")
    def once(self, *args, **kwargs):
        try:
            storages = {}
            given = value((self.grid, args, sorted(kwargs.items())), storages)
            tensors = [bytes_of(x) for x in storages.values()]
            before = [hashlib.blake2b(x).digest() for x in tensors]
            kernel = code(self.fn, names, alive)
            key = kernel, given, tuple(before)
        except Unknown:
            return run(self, *args, **kwargs)
        results = kept.get(key)
        if results is None or self.pre_run_hooks:
            if launch is None or self.pre_run_hooks:
                run(self, *args, **kwargs)
            else:
                launch(self, kernel, args, kwargs)
            after = [hashlib.blake2b(x).digest() for x in tensors]
            changed = [i for i in range(len(after)) if after[i] != before[i]]
            keep(key, [(i, tensors[i].copy()) for i in changed])
            return
        for i, result in results:
            tensors[i][:] = result

    def keep(key, results):
        if key not in kept:
            kept[key] = results
            room[0] -= sum(x.nbytes for _, x in results)
            while room[0] < 0:
                room[0] += sum(x.nbytes for _, x in kept.popitem(last=False)[1])


def bytes_of(storage):
    """Without an operation of PyTorch, which others may watch."""
    if not storage.nbytes():
        return np.empty(0, np.uint8)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(memory, np.uint8)


def value(x, storages):
    """What two arguments have in common that are alike; of a tensor its place in its storage, which
    goes into `storages`.
    """
    if isinstance(x, core.constexpr):
        return "constexpr", value(x.value, storages)
    if isinstance(x, (tuple, list)):
        return (type(x), *[value(y, storages) for y in x])
    if isinstance(x, PLAIN):
        return type(x), repr(x)
    if isinstance(x, core.dtype):
        return "dtype", str(x)
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        raise Unknown
    storage = x.untyped_storage()
    place = [*storages, storage.data_ptr()].index(storage.data_ptr())
    storages.setdefault(storage.data_ptr(), storage)
    return x.dtype, place, x.storage_offset()


def code(fn, names, alive):
    """What a kernel is: it, what it calls, and what both read of their modules, as it is now."""
    reached, read = [fn], []
    for f in reached:
        if f not in names:
            names[f] = sorted(names_in(f.__code__))
        found = [f.__globals__[n] for n in names[f] if n in f.__globals__]
        for x in (*found, *[cell.cell_contents for cell in f.__closure__ or ()]):
            if isinstance(x, interpreter.InterpretedFunction):
                if x.fn not in reached:
                    reached.append(x.fn)
                read.append(x.fn)
            elif isinstance(x, (core.constexpr, tuple, *PLAIN)):
                read.append(value(x, {}))
            elif isinstance(x, (list, dict, set, torch.Tensor)):
                raise Unknown
            else:  # alive, so that nothing else gets its id
                alive[id(x)] = x
                read.append(id(x))
    return *reached, *read


def names_in(code):
    inner = (names_in(x) for x in code.co_consts if inspect.iscode(x))
    return {*code.co_names}.union(*inner)
