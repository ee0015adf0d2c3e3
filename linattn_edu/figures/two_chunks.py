"""Two chunks in the stage state: which product waits for which."""

from typing import NamedTuple

from linattn_edu.figures.drawing import BLUE, LIT, ON_LIT, arrow, picture, rect, text


class Operation(NamedTuple):
    """One operation of a chunk."""

    name: str
    chunk: int
    product: bool
    needs: tuple[str, ...]  # names of what it waits for
    row: int  # of the drawing
    note: str


def operations() -> list[Operation]:
    """Those of the stages state and output on two chunks, in a possible order."""
    found, before = [], "S₀"
    for c, sub in ((1, "₁"), (2, "₂")):
        after = f"S{sub}"
        found += [
            Operation(
                f"w{sub}{before}", c, True, (before,), 1,
                f"Chunk {c} looks into the memory that enters it: a product with {before}, which "
                "must be there.",
            ),
            Operation(
                f"V'{sub}", c, False, (f"w{sub}{before}",), 2,
                f"Chunk {c} takes off what the memory knows already: V' = u - w {before}, the rows "
                "that it really writes.",
            ),
            Operation(
                f"K→ᵀV'{sub}", c, True, (f"V'{sub}",), 3,
                f"K→, the keys decayed to the end of chunk {c}, times the rows: a product that "
                "needs V'.",
            ),
            Operation(
                after, c, False, (before, f"K→ᵀV'{sub}"), 4,
                f"The memory decays and takes the writes of chunk {c}: {after} leaves it."
                + (f" Now chunk {c + 1} can begin." if c == 1 else ""),
            ),
        ]  # fmt: skip
        before = after
    # of the stage output, a kernel of its own that begins when state is done: with S₂, the last
    for c, sub, entering in ((1, "₁", "S₀"), (2, "₂", "S₁")):
        needs = (entering, f"V'{sub}", "S₂")
        note = (
            "The stage output is a kernel of its own and begins when this stage has ended. It "
            "reads the states that entered and the rows written, of both chunks at the same time."
        )
        found.append(Operation(f"o{sub}", c, True, needs, 5, note))
    return found


def levels(found: list[Operation]) -> dict[str, int]:
    """When each operation can begin if none waits for more than it needs; S₀ is there at 0."""
    level = {"S₀": 0}
    for op in found:
        level[op.name] = 1 + max(level[n] for n in op.needs)
    return level


def depth(found: list[Operation], name: str) -> int:
    """Products in a row on the longest way to an operation, with its own."""
    if name == "S₀":
        return 0
    op = next(op for op in found if op.name == name)
    return op.product + max(depth(found, n) for n in op.needs)


LABEL = "The stages state and output on two chunks"
_FIRST = (
    "What needs no state has been made of both chunks at the same time, by the stages before: w, u "
    "and the accumulated gates ḡ. The keys K are given, and this stage decays them. The memory "
    "that enters, S₀, is known. Chunk 2 has all but one thing: S₁."
)
_LAST = (
    " In a row there were {} products, {} for each chunk; with more chunks this number grows, "
    "and that of the other stages does not."
)


def figure() -> tuple[list[tuple[str, str]], str]:
    """A frame for each moment."""
    found = operations()
    level = levels(found)
    shown = []
    for now in range(max(level.values()) + 1):
        notes = [op.note for op in found if level[op.name] == now]
        caption = notes[0] if now else _FIRST
        if now == max(level.values()):
            in_a_row = depth(found, "S₂")
            caption += _LAST.format(in_a_row, in_a_row // 2)
        shown.append((_frame(found, level, now), caption))
    return shown, LABEL


_LEFT, _WIDE, _HIGH = {1: 56, 2: 264}, 150, 40


def _top(row: int) -> float:
    return 20 + 62 * row + (18 if row == 5 else 0)


def _frame(found: list[Operation], level: dict[str, int], now: int) -> str:
    parts = []
    done = sum(op.product for op in found if level[op.name] < now and op.row < 5)
    for c, x in _LEFT.items():
        sub = "₁₂"[c - 1]
        parts.append(text(x + _WIDE / 2, 14, f"chunk {c}", bold=True))
        parts += _cell(x, 0, f"w{sub} u{sub} K{sub} ḡ{sub}", "there", BLUE, "#fff")
        middle = x + _WIDE / 2
        for row in range(4):
            parts += arrow([(middle, _top(row) + _HIGH), (middle, _top(row + 1))])
    x, y = _LEFT[1], _top(1) + _HIGH / 2
    parts += [*arrow([(6, y), (x, y)]), text(30, y - 6, "S₀")]
    x, y, end = _LEFT[1] + _WIDE, _top(4) + _HIGH / 2, _top(1) + _HIGH / 2
    parts += [*arrow([(x, y), (236, y), (236, end), (_LEFT[2], end)]), text(226, end - 8, "S₁")]
    parts.append(text(6, _top(5) - 10, "then, in the stage output:", "start", small=True))
    for op in found:
        if level[op.name] < now:
            paint = "done", BLUE, "#fff"
        elif level[op.name] == now:
            paint = "now", LIT, ON_LIT
        else:
            missing = "stage end" if op.row == 5 else max(op.needs, key=level.get)
            state = "next" if level[op.name] == now + 1 else f"waits for {missing}"
            paint = state, None, None
        name = f"{op.name}, a product" if op.product and op.row < 5 else op.name
        parts += _cell(_LEFT[op.chunk], op.row, name, *paint)
    title = f"Products done one after the other: {done}"
    parts.append(text(6, _top(5) + 62, title, "start"))
    return picture(parts, _top(5) + 72, f"{LABEL}, moment {now}. {title}")


def _cell(x, row, name, state, fill, ink) -> list[str]:
    more = "" if fill else ' stroke="currentColor" stroke-dasharray="4 3"'
    y = _top(row)
    return [
        rect(x, y, _WIDE, _HIGH, fill or "none", f'{more} rx="5"'),
        text(x + _WIDE / 2, y + 17, name, fill=ink, bold=True),
        text(x + _WIDE / 2, y + 33, state, fill=ink, small=True),
    ]
