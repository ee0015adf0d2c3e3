"""Every kernel of the chapters' ladders in three dtypes, against the reference in float64."""

import importlib

import pytest
import torch
import triton
import triton.language as tl
from grids import parametrize

from benchmarks import forms, ladders
from benchmarks.ladders import LADDERS, Size, differences
from linattn_edu.kernels import tiles

TOLERANCE = {"float32": 5e-6, "float16": 1e-3, "bfloat16": 8e-3}


@triton.jit
def strict_dot(a, b, acc=None, precision: tl.constexpr = tiles.TF32X3):
    """`dot` as it is compiled, where operands of two dtypes are refused."""
    tl.static_assert(a.dtype == b.dtype)
    return tiles.dot(a, b, acc, precision)


def in_float64(stage):
    """A reference stage on any tensors; the recurrence leaves its state where it is asked to."""
    wide = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    def call(*args, output_final_state=True, inplace=False, **kwargs):
        results = stage(*map(wide, args), **{name: wide(x) for name, x in kwargs.items()})
        if inplace:
            kwargs["initial_state"].copy_(results[1])
        return results

    return call


@pytest.fixture
def by_reference(monkeypatch):
    """What ships is the reference in float64, and products take operands of one dtype."""

    def stage_function_of(family, name, module=None):
        module = importlib.import_module(f"linattn_edu.reference.{family}.{module or name}")
        return in_float64(getattr(module, name))

    stage_function = lambda name, _: in_float64(forms.stage_function(name, "reference"))
    monkeypatch.setattr(ladders, "stage_function", stage_function)
    monkeypatch.setattr(ladders, "stage_function_of", stage_function_of)
    load = ladders._module

    def strict(path):
        module = load(path)
        if hasattr(module, "dot"):
            module.dot = strict_dot
        return module

    monkeypatch.setattr(ladders, "_module", strict)


@parametrize(chapter=LADDERS, dtype=TOLERANCE)
def test_every_rung_runs_in_every_dtype(chapter, dtype, by_reference, tmp_path):
    made = LADDERS[chapter].rungs(Size("tiny", getattr(torch, dtype), "cpu"), tmp_path)
    for name, rung in made.items():
        if rung.like is not None:
            error = differences(rung.part((rung.first or rung.call)()), rung.like())
            assert error <= TOLERANCE[dtype], f"{name}: relative RMS {error:.1e}"
