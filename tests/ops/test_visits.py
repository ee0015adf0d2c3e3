"""A tensor goes by the files that check arguments once each, on its way to an operator."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from ops.calls import CALLS, call
from torch import Tensor

import linattn_edu
from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments

FILES = {f.__file__: Path(f.__file__).stem for f in (check, arguments)}


def parts(x):
    """x, and what tuples and dicts hold."""
    if isinstance(x, dict):
        x = (*x.values(),)
    return [y for part in x for y in parts(part)] if isinstance(x, tuple) else [x]


def visits(work, tensors: dict[str, Tensor]) -> Counter:
    """(tensor, file) -> how often another file hands it to a function of this one."""
    names, seen = {id(x): n for n, x in tensors.items()}, Counter()

    def watch(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file in FILES and frame.f_back.f_code.co_filename != file:
            handed = {names[id(x)] for x in parts((*frame.f_locals.values(),)) if id(x) in names}
            seen.update((n, FILES[file]) for n in handed)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize("name", CALLS)
def test_once_each(name):
    function, tensors, options = call(name)
    seen = visits(lambda: function(**tensors, **options, impl="reference"), tensors)
    assert {n: seen[n, "check"] for n in tensors} == dict.fromkeys(tensors, 1)
    assert not [n for n in tensors if seen[n, "arguments"] > 1]


def test_a_second_visit_is_counted():
    x = torch.randn(2, 8)

    def twice():
        linattn_edu.l2norm(x, impl="reference")
        check.same_device(("x", x), ("y", x))

    assert visits(twice, {"x": x}) == {("x", "check"): 2}
