"""Ranks whose parts are longer than what a map is made of first: the results of one rank.

tests/fused/test_near_maps.py has the maps by themselves.
"""

import functools

import pytest
import torch
from cp.cp_checks import check
from grids import few

from linattn_edu.kernels.delta import cp_merge

pytestmark = pytest.mark.usefixtures("poison", "few_are_near")

C = 16  # what cp_checks calls with
NEAR = 5  # in place of 16, which take the interpreter three times as long
PART = (NEAR + 2) * C + 5  # tokens of a part: the last chunk is short
FIRST_NEAR = 3 * C  # in a part, of the chunks that a map is made of first
BEHIND = NEAR * C  # the first that is not near back in time


@pytest.fixture
def few_are_near(monkeypatch):
    monkeypatch.setattr(cp_merge, "NEAR", NEAR)


def forget(tokens, kind):
    """Gates of two heads. all: both forget in a few chunks; none: neither ever; some: one of them;
    slow: so little that the near chunks leave some of it; edge: one at the first token that is near
    and at no other, the other at the token before; edge back: the same back in time. Writes are
    weak: with eight keys those of a chunk would else overwrite what the state held.
    """
    tokens["beta"].mul_(0.02)
    each = {"all": (-2.0, -0.5), "some": (-2.0, 0.0), "slow": (-0.09, -0.03)}
    g = tokens["g"]
    by_head = torch.tensor(each.get(kind, (0.0, 0.0)), dtype=g.dtype, device=g.device)
    g.copy_(by_head.reshape(2, *[1] * (g.ndim - 3)).expand_as(g))
    if kind.startswith("edge"):
        near, far = (BEHIND - 1, BEHIND) if "back" in kind else (FIRST_NEAR, FIRST_NEAR - 1)
        g[:, near::PART, 0] = g[:, far::PART, 1] = -60.0


def ranks(operator, dtype, gates, device, world=3, parts=3, bounds=None, **options):
    bounds = bounds or [0, parts * PART]
    change = functools.partial(forget, kind=gates)
    options |= {"change": change, "device": device, "dtype": dtype}
    check(operator, bounds, world, impl="triton", **options)


@pytest.mark.parametrize(
    ("operator", "dtype", "gates"),
    [
        ("gdn", torch.bfloat16, "none"),
        ("gdn", torch.bfloat16, "edge back"),
        ("kda", torch.bfloat16, "all"),
        ("kda", torch.bfloat16, "edge"),
        # the forward pass alone has such maps, and shows smaller mistakes
        ("gdn", torch.float32, "slow"),
        ("gdn", torch.float32, "edge"),
    ],
    ids=str,
)
def test_ranks_are_one(operator, dtype, gates, device):
    ranks(operator, dtype, gates, device, states=gates != "all")


@pytest.mark.parametrize(("operator", "gates"), few(("gdn", "some"), more=(("kda", "slow"),)))
def test_zigzag(operator, gates, device):
    ranks(operator, torch.bfloat16, gates, device, 2, 4, layout="zigzag")


@pytest.mark.parametrize(("operator", "gates"), few(("kda", "some"), more=(("gdn", "slow"),)))
def test_a_batch(operator, gates, device):
    """Local sequences of one length, a part without a middle one."""
    ranks(operator, torch.bfloat16, gates, device, 2, 2, B=2)


@pytest.mark.parametrize(("operator", "gates"), few(("kda", "none"), more=(("gdn", "some"),)))
def test_documents(operator, gates, device):
    """Some end soon after a cut, one has no tokens; what follows is longer than the near chunks."""
    bounds = [0, 20, PART + 5, PART + 5, 3 * PART]
    ranks(operator, torch.bfloat16, gates, device, bounds=bounds)
