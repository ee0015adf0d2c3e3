"""Every stage once: where it is, what it is called with, which rows its tables have.

STAGES feeds the tests of a kernel against its reference (`matches`, in the stage's own file), the
rows compiled for each GPU (kernels/compile_rows.py makes every call of every stage, on tensors
that are empty) and those run on a GPU (gpu/run_rows.py). kernels/test_registry.py asks for all.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from delta import stage_checks
from dplr import dplr_checks
from fused import kda_checks
from fused import parts as fused_parts
from grids import name
from ssd import ema_checks, ssd_checks

from stages import delta, dplr, fused, ssd
from stages.record import Stage, options

STAGES = [*delta.STAGES, *dplr.STAGES, *fused.STAGES, *ssd.STAGES]


class Family(NamedTuple):
    """What the stages of a family are tested on."""

    grid: pytest.MarkDecorator
    parts: Callable  # a case of the grid, device -> all that its stages read, by the reference
    check: Callable = stage_checks.check_stage


def _joined(make):
    def parts(*sizes, **kinds):
        x, r = make(*sizes, **kinds)
        return SimpleNamespace(**vars(x), **vars(r), h0=x.initial_state, **options(sizes[3]))

    return parts


def _ssd(make):
    def parts(*sizes, **kinds):
        r = make(*sizes, **kinds)
        own = {"ends": r.h0 is not None, "piece": 2 * sizes[3]}
        return SimpleNamespace(**vars(r), **options(sizes[3]), **own)

    return parts


def _ema(*sizes, **kinds):
    r = ema_checks.parts(*sizes, **kinds)
    return SimpleNamespace(**vars(r), **options(sizes[2]), wanted={"output_final_state": True})


FAMILIES = {
    "gdn": Family(stage_checks.grid, _joined(stage_checks.backward_inputs)),
    "kda": Family(kda_checks.grid, _joined(kda_checks.backward_parts)),
    "gdn2": Family(kda_checks.once, _joined(partial(kda_checks.backward_parts, gated=True))),
    "dplr": Family(kda_checks.once, dplr_checks.parts),
    "gdn_fused": Family(stage_checks.grid, _joined(fused_parts.gdn)),
    "kda_fused": Family(kda_checks.once, _joined(fused_parts.kda)),
    "gdn2_fused": Family(kda_checks.once, _joined(partial(fused_parts.kda, gated=True))),
    "ssd": Family(ssd_checks.grid, _ssd(ssd_checks.parts), ssd_checks.check_stage),
    "ssd_fused": Family(fused_parts.ssd_grid, _ssd(fused_parts.ssd), ssd_checks.check_stage),
    "ema": Family(ema_checks.grid, _ema, ssd_checks.check_stage),
}


def find(name: str, family: str) -> Stage:
    """The stage with this function on the parts of a family."""
    return next(s for s in STAGES if (s.name, s.family) == (name, family))


def parts(family: str, *sizes, **kinds) -> SimpleNamespace:
    """All that the stages of a family read, by name; sizes: a case of its grid, and the device."""
    return FAMILIES[family].parts(*sizes, **kinds)


def arguments(name: str, family: str, *sizes, **kinds) -> tuple:
    """What a stage is called with."""
    return find(name, family).call(parts(family, *sizes, **kinds))[0]


def check(names, family, *sizes, check=None, without=(), change=None, more=None, **kinds) -> None:
    """Each kernel is its reference on such parts, `without` some of them, or after a `change` of
    them; more: options beside those of the registry, or what makes them of the parts. Skipped where
    a GPU does not hold the parts.
    """
    r = parts(family, *sizes, **kinds)
    vars(r).update(dict.fromkeys(without))
    if change:
        change(r)
    for stage in (find(one, family) for one in names.split()):
        if not stage.when(r):
            pytest.skip("heads that the fused stages do not hold")
        args, given = stage.call(r)
        check_ = check or FAMILIES[family].check
        others = more(r) if callable(more) else more or {}
        check_(stage.kernel, stage.reference, args, **(given | others))


def matches(names: str, family: str = "gdn", grid=None, **how):
    """The test that each kernel is its reference on the grid of its family; `how`: as in check."""
    cases = (grid or FAMILIES[family].grid).args[1]

    @pytest.mark.usefixtures("poison")
    @pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(name, case)))
    def test(case, device):
        check(names, family, *case, device, **how)

    return test
