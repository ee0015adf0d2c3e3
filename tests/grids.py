"""How much of a grid runs: all of it in the full suite, else every pair of values."""

import itertools
import os
from collections import Counter

import numpy as np
import pytest

# set by `make test-full`; `LINATTN_EDU_FULL=1 make gpu-test` does it on a GPU
FULL = os.environ.get("LINATTN_EDU_FULL", "") not in ("", "0")

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
    values = [list(v) for v in axes.values()]
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
    used, found = Counter(), []

    def gain(place):
        new = sum(frozenset((place, other)) in missing for other in chosen.items())
        return new, -used[place]

    while missing:
        chosen = dict(next(iter(missing.values())))
        for axis in sorted(set(range(len(values))) - set(chosen), key=lambda x: -len(values[x])):
            chosen[axis] = max(((axis, n) for n in range(len(values[axis]))), key=gain)[1]
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        used.update(chosen.items())
        found.append(tuple(values[axis][chosen[axis]] for axis in range(len(values))))
    return found


def few(*values, more=()):
    """Values of an axis, and more of them where `FULL` says so: those that cost and take no path
    of their own.
    """
    return (*values, *more) if FULL else values


def combinations(**axes):
    """Every combination where `FULL` says so, else `pairs`."""
    return list(itertools.product(*axes.values())) if FULL else pairs(**axes)


def parametrize(**axes):
    """A mark that runs a test with `combinations` of its arguments."""
    return pytest.mark.parametrize(tuple(axes), combinations(**axes), ids=name)


def name(value):
    """A value in a test's id: `float16` of torch.float16."""
    return str(value).removeprefix("torch.")
