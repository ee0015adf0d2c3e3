"""A state that is written, erased and forgotten, as a picture that moves: the book's front.

One SVG with a style sheet, without a script. Where a reader asks for less motion, and on paper, it
is five states side by side.
"""

import torch
from torch import Tensor

from linattn_edu.figures.drawing import BLUE, ORANGE, matrix, picture, rect, text
from linattn_edu.reference.delta.recurrent import recurrent

# two keys of length 1 at a right angle; the values are rows of 6 numbers
KEYS = {"a": (0.8, 0.6, 0.0, 0.0), "b": (0.0, 0.0, 0.6, 0.8)}
VALUES = {1: (1, 0.7, 0, 0, 0.3, 0), 2: (0, 0.3, 1, 0.7, 0, 0), 3: (0, 0, 0.3, 0, 1, 0.7)}
GATE = 0.3
# key and value of each token; the last one has a gate and writes nothing
TOKENS = (("a", 1), ("b", 2), ("a", 3))
SECONDS = 18
SAID = (
    "an empty state",
    "written: value 1 under key a",
    "written: value 2 under key b",
    "erased: what key a reads",
    "written: value 3 under key a",
    "forgotten: the gate fades all",
)
SHORT = ("written", "written", "erased", "written", "forgotten")
ALT = (
    "A state, a matrix of 4 rows and 6 columns, token by token. It is empty. Value 1 is written "
    "under key a, into the two upper rows; value 2 under key b, into the two lower ones. Key a "
    "comes again: what it reads, value 1, is erased, and value 3 is written in its place, while "
    "key b reads value 2 as before. Then the gate fades all of the state to three tenths."
)


def row(numbers: tuple[float, ...]) -> Tensor:
    """A row vector."""
    return torch.tensor(numbers, dtype=torch.float64)


def states() -> list[Tensor]:
    """The state [4, 6] in float64 at each of SAID: the third token's write is two of them."""
    S = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    found = [S[0, 0]]
    for name, value in TOKENS:
        k, v = (x[None, None, None] for x in (row(KEYS[name]), row(VALUES[value])))
        if name == "a" and value == 3:  # to write nothing at full strength erases
            found.append(recurrent(k, k, 0 * v, 0 * one, one, initial_state=S)[1][0, 0])
        _, S = recurrent(k, k, v, 0 * one, one, initial_state=S)
        found.append(S[0, 0])
    _, S = recurrent(k, k, v, (GATE * one).log(), 0 * one, initial_state=S)
    return [*found, S[0, 0]]


def reads(S: Tensor, key: str) -> Tensor:
    """What a key reads of a state: a row of 6."""
    return row(KEYS[key]) @ S


class _Style:
    """Rules of animation, each once: what they animate -> the name of their class."""

    def __init__(self):
        self.names, self.rules = {}, []

    def over(self, form: str, values: list[float]) -> str:
        """The class that gives a property, written as `form`, one value at each of SAID."""
        key = form, tuple(round(x, 2) for x in values)
        if key not in self.names:
            name, step = f"lm{len(self.names)}", 100 / len(values)
            stops = "".join(
                f"{i * step:.3g}%,{(i + 0.72) * step:.3g}%{{{form % f'{x:g}'}}}"
                for i, x in enumerate(key[1])
            )
            stops += f"100%{{{form % '0'}}}"
            self.rules.append(f"@keyframes {name}{{{stops}}}.{name}{{animation-name:{name}}}")
            self.names[key] = name
        return self.names[key]

    def sheet(self) -> str:
        return (
            "<style>.lm-moves *{animation:0s linear infinite;transform-box:fill-box;"
            f"transform-origin:center}}.lm-moves [class]{{animation-duration:{SECONDS}s}}"
            ".lm-still{display:none}@media print,(prefers-reduced-motion:reduce)"
            "{.lm-moves{display:none}.lm-moves *{animation:none!important}"
            ".lm-still{display:inline}}" + "".join(self.rules) + "</style>"
        )


def _cells(
    style: _Style, x: float, y: float, cell: float, frames: list[Tensor], paint: str = ""
) -> str:
    """A matrix whose squares grow and shrink: their area is the size of the entry."""
    parts, side = [], cell - 3
    fill = paint or f' fill="{BLUE}"'
    for i, j in torch.cartesian_prod(*map(torch.arange, frames[0].shape)).tolist():
        values = [frame[i, j].clamp(0, 1).sqrt().item() for frame in frames]
        if any(value > 0.01 for value in values):
            name = style.over("transform:scale(%s)", values)
            a, b = x + j * cell + 1.5, y + i * cell + 1.5
            parts.append(
                f'<rect class="{name}" x="{a:g}" y="{b:g}" width="{side:g}" height="{side:g}"'
                f"{fill}/>"
            )
    return "".join(parts)


def _frame(x: float, y: float, cell: float, rows: int, columns: int) -> str:
    more = ' stroke="currentColor" stroke-width="1"'
    return rect(x, y, cell * columns, cell * rows, "none", more)


def _moves(style: _Style, found: list[Tensor]) -> str:
    steps, nothing = len(SAID), torch.zeros(1, 6, dtype=torch.float64)
    keys = ["", "a", "b", "a", "a", ""]
    given = [nothing, *(row(VALUES[n])[None] for n in (1, 2)), nothing, row(VALUES[3])[None]]
    erased = [nothing] * 3 + [reads(found[2], "a")[None]] + [nothing] * 2
    columns = [row(KEYS[k])[:, None] if k else torch.zeros(4, 1).double() for k in keys]
    parts = []
    for i, said in enumerate(SAID):
        shown = style.over("opacity:%s", [float(i == j) for j in range(steps)])
        parts.append(f'<g class="{shown}">{text(6, 16, said, "start", bold=True)}</g>')
    hollow = f' fill="none" stroke="{ORANGE}" stroke-width="2"'
    x, y, cell = 52, 66, 28
    parts += [
        _frame(x, y - 36, cell, 1, 6),
        _cells(style, x, y - 36, cell, [*given, nothing]),
        _cells(style, x, y - 36, cell, erased, hollow),
        _frame(x - 38, y, cell, 4, 1),
        _cells(style, x - 38, y, cell, columns),
        _frame(x, y, cell, 4, 6),
        _cells(style, x, y, cell, found),
        text(x - 38, y + 4 * cell + 16, "key", "start", small=True),
        text(x, y + 4 * cell + 16, "state", "start", small=True),
        text(x + 6 * cell + 8, y - 17, "value", "start", small=True),
    ]
    for i, key in enumerate(KEYS):
        below = y + 12 + 58 * i
        parts += [
            text(272, below, f"key {key} reads", "start", small=True),
            _frame(272, below + 8, 23, 1, 6),
            _cells(style, 272, below + 8, 23, [reads(S, key)[None] for S in found]),
        ]
    return f'<g class="lm-moves">{"".join(parts)}</g>'


def _still(found: list[Tensor]) -> str:
    parts = [text(6, 16, "a state, token by token", "start", bold=True)]
    what = ("a: value 1", "b: value 2", "a", "a: value 3", f"gate {GATE:g}")
    for i, S in enumerate(found[1:]):
        x = 6 + 83 * i
        parts += [
            matrix(x, 60, S.tolist(), 12.5),
            text(x, 128, SHORT[i], "start", small=True),
            text(x, 144, what[i], "start", small=True),
        ]
    return f'<g class="lm-still">{"".join(parts)}</g>'


def svg(paper: bool = False) -> str:
    """The picture.

    Args:
        paper: Whether dark on a light card of its own, for a page whose colours are not known;
            else its lines and letters have the colour of the text around it.
    """
    style, found = _Style(), states()
    parts = [_moves(style, found), _still(found)]
    if paper:
        card = '<rect width="420" height="206" rx="6" fill="#fff"/>'
        parts = [f'{card}<g color="#1b1b1b" fill="currentColor">{"".join(parts)}</g>']
    return picture([style.sheet(), *parts], 206, ALT)


def front() -> str:
    """The picture for a page of HTML, with a box to hold it still."""
    return (
        '<div class="lm"><style>.lm{max-width:560px;margin:1em 0}.lm svg{display:block;width:100%;'
        "height:auto}.lm:has(:checked) svg *{animation-play-state:paused}.lm label{font-size:"
        "0.85rem}@media print,(prefers-reduced-motion:reduce){.lm label{display:none}}</style>"
        f'{svg()}<label><input type="checkbox"> hold it still</label></div>\n'
    )
