"""A gate's powers of two against the range of a format, by where they are measured from."""

import math
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.figures.drawing import BLUE, GRAY, ORANGE, line, picture, rect, text

C = 64
# exponents at which 2^x is finite and not zero: below the first, from the second on
FORMATS = {
    "fp32": (torch.float32, 128, -149),
    "bf16": (torch.bfloat16, 128, -133),
    "fp16": (torch.float16, 16, -24),
}
STRENGTHS = (0.05, 0.1, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 5.0, 5.9, 8.0)
LAYOUTS = {"one anchor a chunk": C, "an anchor every 16 rows": 16}
RIGHT, LOST, NOT_FINITE = 0, 1, 2
CLOSE = 2**-6  # two factors rounded to bfloat16, and some room
SMALL = 2**-24  # scores below this beside those of 1 are nothing in float32


class Layout(NamedTuple):
    """A chunk whose every token decays by the same factor, with anchors."""

    key: Tensor  # [C] exponent of a key in its own block; that of a query is its negative
    status: Tensor  # [C, C] of the score of query i and key j: RIGHT, LOST, NOT_FINITE


def layout(strength: float, dtype: torch.dtype, block: int) -> Layout:
    """Scores of one channel with q = k = 1, as products of two rounded factors.

    Args:
        strength: Minus the natural-log decay of each token.  dtype: Of the factors.
        block: Rows that share an anchor, the first of them; a key of an earlier block is measured
            from the anchor of the query's.
    """
    t = torch.arange(C)
    gc = -strength * math.log2(math.e) * (t + 1).double()
    anchor = gc[t // block * block]
    query, key = gc - anchor, anchor[:, None] - gc  # [C], [C, C] by the query's anchor
    to_query = torch.exp2(query.float()).to(dtype).float()
    to_key = torch.exp2(key.float()).to(dtype).float()
    got = (to_query[:, None] * to_key).double()
    true = torch.exp2(gc[:, None] - gc)
    wrong = (got - true).abs() > CLOSE * true.clamp(min=SMALL / CLOSE)
    status = torch.where(got.isfinite(), torch.where(wrong, LOST, RIGHT), NOT_FINITE)
    return Layout(anchor - gc, status)


def counts(found: Layout) -> list[int]:
    """Pairs of a query and a key not after it, by status."""
    pairs = found.status[torch.ones(C, C, dtype=torch.bool).tril()]
    return [int((pairs == status).sum()) for status in (RIGHT, LOST, NOT_FINITE)]


LABEL = "Strength of the gate"


def figure() -> tuple[list[tuple[str, str]], str, tuple[str, list[str]]]:
    """A frame for each format and strength."""
    shown = []
    for name, (dtype, most, least) in FORMATS.items():
        for strength in STRENGTHS:
            found = {at: layout(strength, dtype, block) for at, block in LAYOUTS.items()}
            caption = (
                f"Each token decays by exp(-{strength:g}). 2^x is finite in {name} for x < {most}."
            )
            for at, result in found.items():
                _, lost, bad = counts(result)
                reach = result.key.max().item()
                limit = most * math.log(2) / (LAYOUTS[at] - 1)
                caption += f" With {at} all factors are finite up to a gate of -{limit:.2g}; here "
                caption += f"exponents reach {reach:.0f}: "
                parts = [f"{bad} scores are infinite or no number"] if bad else []
                parts += [f"{lost} are off or zero"] if lost else []
                caption += (" and ".join(parts) or "all scores are right") + "."
            shown.append((_frame(name, strength, found, most, least), caption))
    return shown, LABEL, ("format", list(FORMATS))


_WIDE, _TOP, _HIGH, _MAP = 160, 44, 120, 204  # of a column, and the top of its map


def _frame(name: str, strength: float, found: dict[str, Layout], most: int, least: int) -> str:
    parts = [text(6, 14, f"{name}, gate -{strength:g} a token", "start", bold=True)]
    for (at, result), x in zip(found.items(), (40, 240), strict=True):
        parts.append(text(x, 34, at, "start", small=True))
        parts += _exponents(x, result, most, least)
        parts += _scores(x, result)
    marks = ((GRAY, ' fill-opacity="0.5"', "right"), (BLUE, "", "off"), (ORANGE, "", "not finite"))
    y = _MAP + _WIDE + 14
    for x, (fill, more, label) in zip((40, 130, 200), marks, strict=True):
        parts += [rect(x, y, 12, 12, fill, more), text(x + 18, y + 11, label, "start", small=True)]
    pairs = C * (C + 1) // 2
    said = "; ".join(f"{at}: {counts(r)[RIGHT]} of {pairs} right" for at, r in found.items())
    return picture(parts, y + 20, f"{name}, gate -{strength:g} a token. {said}")


def _exponents(x: float, result: Layout, most: int, least: int) -> list[str]:
    """The exponents of queries and keys over the tokens, and the range of the format."""
    span, middle = 1.6 * most, _TOP + _HIGH / 2
    parts = [rect(x, _TOP, _WIDE, _HIGH, "none", ' stroke="currentColor" stroke-opacity="0.4"')]
    for limit in (most, least):
        y = round(middle - limit / span * _HIGH / 2, 1)
        parts.append(line([(x, y), (x + _WIDE, y)], 1.2, ' stroke-dasharray="4 3"'))
        parts.append(text(x - 3, y + 4, str(limit), "end", small=True))
    # straight between two anchors, and cut where the picture ends
    starts = [t for t in range(C) if not result.key[t]]
    for sign, colour, label, at in (
        (-1, GRAY, "query", _TOP + _HIGH - 6),
        (1, ORANGE, "key", _TOP + 13),
    ):
        path = ""
        for first, after in pairwise([*starts, C]):
            reach = result.key[after - 1].item()
            share = min(1.0, span / reach)
            width = (after - 1 - first) * share * _WIDE / (C - 1)
            height = sign * reach * share / span * _HIGH / 2
            path += f"M{x + first * _WIDE / (C - 1):.4g} {middle:g}l{width:.4g} {-height:.4g}"
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(x + 4, at, f"{label}'s exponent", "start", small=True))
    return parts


def _scores(x: float, result: Layout) -> list[str]:
    """The pairs, four by four; a square shows the worst of its pairs."""
    side, n = _WIDE // 16, C // 4
    mask = torch.ones(C, C, dtype=torch.bool).tril()
    status = torch.where(mask, result.status, -1)
    worst = status.reshape(n, 4, n, 4).amax((1, 3)).tolist()
    parts = [text(x, _MAP - 6, "scores, query ↓ key →", "start", small=True)]
    paths: dict[int, str] = {RIGHT: "", LOST: "", NOT_FINITE: ""}
    for i, row in enumerate(worst):
        j = 0
        while j < n:
            end = j
            while end < n and row[end] == row[j]:
                end += 1
            if row[j] >= 0:
                paths[row[j]] += f"M{x + side * j} {_MAP + side * i}h{side * (end - j)}v{side}"
                paths[row[j]] += f"h-{side * (end - j)}z"
            j = end
    for status, fill, more in (
        (RIGHT, GRAY, ' fill-opacity="0.5"'), (LOST, BLUE, ""), (NOT_FINITE, ORANGE, ""),
    ):  # fmt: skip
        if paths[status]:
            parts.append(f'<path d="{paths[status]}" fill="{fill}"{more}/>')
    parts.append(rect(x, _MAP, _WIDE, _WIDE, "none", ' stroke="currentColor"'))
    return parts
