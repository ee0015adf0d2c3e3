"""The records of stages: filled from either room, alike in both, one stage swapped at a time."""

import dataclasses
import inspect
import os

import pytest
from forks import python

from linattn_edu.ops import (
    causal_conv1d,
    causal_conv1d_update,
    cumsum,
    dplr,
    ema,
    gdn,
    kda,
    l2norm,
    rms_norm_gated,
    solve_tril,
    ssd,
)
from linattn_edu.ops.delta import gate, recurrence
from linattn_edu.ops.dplr import chunk
from linattn_edu.ops.ssd import step

OPERATORS = (
    gdn, kda, ssd, ema, causal_conv1d, causal_conv1d_update, cumsum, l2norm, rms_norm_gated,
    solve_tril, gate, recurrence, dplr, chunk, step,
)  # fmt: skip
SETS = [o.stages for o in OPERATORS] + [o.fused_stages for o in (gdn, kda, ssd)]
STAGES = [(f, x.name) for f in SETS for x in dataclasses.fields(f("reference")) if x.metadata]


def parameters(f):
    """Its parameters; of a launcher that hands **which on, also the keywords of who takes them."""
    own = {**inspect.signature(f).parameters}
    if any(p.kind is p.VAR_KEYWORD for p in own.values()):
        called = filter(inspect.isfunction, map(f.__globals__.get, f.__code__.co_names))
        for p in (p for g in called for p in inspect.signature(g).parameters.values()):
            if p.kind is p.KEYWORD_ONLY:
                own.setdefault(p.name, p)
    return own


@pytest.mark.parametrize(("stages", "name"), STAGES, ids=[n for _, n in STAGES])
def test_a_stage_has_one_name_and_one_signature_in_both_rooms(stages, name):
    """A kernel takes the reference's arguments in their order, and after them its own."""
    reference, kernel = (getattr(stages(impl), name) for impl in ("reference", "triton"))
    assert reference is not kernel
    assert reference.__module__.split(".")[2:] == kernel.__module__.split(".")[2:]
    assert reference.__name__ == kernel.__name__ == name
    wanted, got = parameters(reference), parameters(kernel)
    assert [n for n in got if n in wanted] == [*wanted]
    for n, p in wanted.items():
        assert (got[n].kind, got[n].default) == (p.kind, p.default)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda o: o.__name__.rpartition(".")[2])
def test_a_set_is_made_once_and_cannot_be_changed(operator):
    stages = operator.stages("reference")
    assert operator.stages("reference") is stages
    name = dataclasses.fields(stages)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(stages, name, None)
    with pytest.raises(AttributeError):
        getattr(stages, name + "s")
    with pytest.raises(ValueError, match="impl must be one of 'triton', 'reference', got 'cuda'"):
        operator.stages("cuda")


def test_one_stage_is_swapped():
    mine = lambda *args: None
    mixed = dataclasses.replace(gdn.stages("reference"), state=mine)
    assert isinstance(mixed, gdn.Stages) and not isinstance(mixed, gdn.FusedStages)
    assert mixed.state is mine
    assert mixed.output is gdn.stages("reference").output
    with pytest.raises(TypeError, match="sate"):
        dataclasses.replace(mixed, sate=mine)


def test_kernels_are_imported_when_they_are_asked_for():
    code = """
import sys
from linattn_edu.ops import gdn
gdn.stages("reference"), gdn.fused_stages("reference")
print(any(m.split(".")[0] == "triton" or "edu.kernels" in m for m in sys.modules), end=" ")
gdn.stages("triton")
print("triton" in sys.modules, "linattn_edu.kernels.delta.wy" in sys.modules)
"""
    done = python("-c", code, env=dict(os.environ))
    assert done.stdout.split() == ["False", "True", "True"], done.stderr
