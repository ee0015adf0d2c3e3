"""Where scores leave the range of a format: against products of matrices and the reference."""

import math
import re

import pytest
import torch

from linattn_edu.figures import anchors
from linattn_edu.figures.anchors import FORMATS, LAYOUTS, LOST, NOT_FINITE, RIGHT, STRENGTHS, C
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra

LOWER = torch.ones(C, C, dtype=torch.bool).tril()


def scores(strength):
    """gc [C, 1] and P [C, C] of the reference, one channel with q = k = 1."""
    g = torch.full((1, C, 1, 1), -strength, dtype=torch.float64)
    one = torch.ones_like(g)
    gc = gate_cumsum(g, chunk_size=C)
    P, _ = kda_intra(one, one, one[..., 0], gc, chunk_size=C)
    return gc[0, :, 0], P[0, :, 0]


def by_blocks(gc, dtype, block):
    """The same scores as products of rounded matrices, a block of queries at a time."""
    P = torch.zeros(C, C)
    for a in range(0, C, block):
        queries, keys = slice(a, a + block), slice(0, a + block)
        left = torch.exp2((gc[queries] - gc[a]).float()).to(dtype).float()
        right = torch.exp2((gc[a] - gc[keys]).float()).to(dtype).float()
        P[queries, keys] = left @ right.mT
    return P.double()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", LAYOUTS.values())
def test_a_score_is_right_where_the_product_is(name, block):
    dtype, *_ = FORMATS[name]
    seen = set()
    for strength in STRENGTHS:
        gc, want = scores(strength)
        got = by_blocks(gc, dtype, block)
        status = anchors.layout(strength, dtype, block).status[LOWER]
        off = ((got - want).abs() > torch.clamp(2**-6 * want.abs(), min=2**-24))[LOWER]
        finite = got.isfinite()[LOWER]
        assert torch.equal(status == NOT_FINITE, ~finite)
        assert torch.equal(status == LOST, finite & off)
        assert torch.equal(status == RIGHT, finite & ~off)
        seen |= set(status.tolist())
    assert seen == {RIGHT, LOST, NOT_FINITE}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", LAYOUTS.values())
def test_the_limit_of_the_captions(name, block):
    dtype, most, least = FORMATS[name]
    limit = most * math.log(2) / (block - 1)
    bad = [
        anchors.counts(anchors.layout(x * limit, dtype, block))[NOT_FINITE] for x in (0.999, 1.01)
    ]
    assert bad[0] == 0 < bad[1]
    for exponent, finite, zero in (
        (most, False, False),
        (least, True, False),
        (least - 1, True, True),
    ):
        # half of the least number is a tie and becomes 0
        factor = torch.exp2(torch.tensor(float(exponent), dtype=torch.float64)).to(dtype)
        assert (bool(factor.isfinite()), factor.item() == 0) == (finite, zero)


def test_the_captions_count():
    frames, _, (_, names) = anchors.figure()
    assert len(frames) == len(FORMATS) * len(STRENGTHS) and names == list(FORMATS)
    bound = {
        (n, b): m * math.log(2) / (b - 1)
        for n, (_, m, _) in FORMATS.items()
        for b in LAYOUTS.values()
    }
    cases = [(name, strength) for name in FORMATS for strength in STRENGTHS]
    for (name, strength), (_, caption) in zip(cases, frames, strict=True):
        for block, part in zip(LAYOUTS.values(), caption.split(" With ")[1:], strict=True):
            assert ("infinite" in part) == (strength > bound[name, block])
            assert re.search(rf"up to a gate of -{bound[name, block]:.2g};", part)
