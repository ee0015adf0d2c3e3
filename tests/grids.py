"""How much of a grid runs: all of it in the full suite, on a GPU every pair of values."""

import itertools
import os
from collections import Counter

import numpy as np
import pytest
import torch

# set by `make test-full`; `LINATTN_EDU_FULL=1 make gpu-test` does it on a GPU
FULL = os.environ.get("LINATTN_EDU_FULL", "") not in ("", "0")
GPU = torch.cuda.is_available()

# Whether sums of a product of NumPy or PyTorch on this CPU have one order, whatever the shapes:
# where there is no AVX-512, OpenBLAS and MKL take other kernels for other sizes.
ONE_ORDER = np._core._multiarray_umath.__cpu_features__["AVX512F"]


def pairs(**axes):
    """Few combinations in which every value of each axis meets every value of every other.

    Greedy: each new combination starts at the first pair that is missing and takes on every other
    axis the value that adds most pairs, an early one of those used least. No chance is involved.

    Args:
        axes: name -> its values.
    Returns:
        tuples of values, in the order of the axes.
    """
    return _rows([list(v) for v in axes.values()])


def spread(times=2, **axes):
    """Fewer: every value of the longest axis so many times, the others as often as may be, each
    time beside values that it has not met. Arguments and order as in `pairs`.
    """
    values = [list(v) for v in axes.values()]
    longest = max(range(len(values)), key=lambda axis: len(values[axis]))
    return _rows(values, [(longest, n) for n in range(len(values[longest]))] * times)


def _rows(values, starts=()):
    """The combinations of `pairs`, or those that begin at these places (axis, number)."""
    if len(values) == 1:
        return [(v,) for v in values[0]]
    missing = {  # a dictionary keeps its order
        frozenset(pair): pair
        for one, other in itertools.combinations(range(len(values)), 2)
        for pair in itertools.product(
            ((one, a) for a in range(len(values[one]))),
            ((other, b) for b in range(len(values[other]))),
        )
    }
    used, found = Counter(), {}

    def gain(place):
        new = sum(frozenset((place, other)) in missing for other in chosen.items())
        return new, -used[place]

    for first in ([place] for place in starts) if starts else _while(missing):
        chosen = dict(first)
        for axis in sorted(set(range(len(values))) - set(chosen), key=lambda x: -len(values[x])):
            chosen[axis] = max(((axis, n) for n in range(len(values[axis]))), key=gain)[1]
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        used.update(chosen.items())
        found[tuple(chosen[axis] for axis in range(len(values)))] = None
    return [tuple(v[n] for v, n in zip(values, row, strict=True)) for row in found]


def _while(missing):
    """The first pair that is missing, until none is."""
    while missing:
        yield next(iter(missing.values()))


def usual(times=2, **axes):
    """What a push takes: every pair where kernels are compiled, in the interpreter `spread`."""
    return pairs(**axes) if GPU else spread(times, **axes)


def few(*values, more=()):
    """Values of an axis, and more of them where `FULL` says so: those that cost and take no path
    of their own.
    """
    return (*values, *more) if FULL else values


def combinations(times=2, **axes):
    """Every combination where `FULL` says so, else `usual`."""
    return list(itertools.product(*axes.values())) if FULL else usual(times, **axes)


def parametrize(times=2, **axes):
    """A mark that runs a test with `combinations` of its arguments."""
    return pytest.mark.parametrize(tuple(axes), combinations(times, **axes), ids=name)


def name(value):
    """A value in a test's id, the same in every process: `float16` of torch.float16, a function's
    name.
    """
    if isinstance(value, tuple):
        return "(" + ", ".join(map(name, value)) + ")"
    return getattr(value, "__name__", str(value)).removeprefix("torch.")
