"""Shapes of SVG text, of which the book's drawings are made.

Lines and letters take the colour of the surrounding text, so that they fit a light and a dark
page. The colours are those of shapes that stand on both and carry white letters.
"""

import html
from collections.abc import Iterable

BLUE, ORANGE, GREEN, PURPLE, GRAY = "#3b6ea5", "#b5521b", "#3a7d44", "#7a5c99", "#6f6f6f"
# of the maps of the pipeline: the lit box, and the letters on it
LIT, ON_LIT = "#f2a33a", "#1b1b1b"
MONOSPACE = "ui-monospace,SFMono-Regular,Menlo,Consolas,monospace"


def picture(parts: Iterable[str], height: float, title: str, width: float = 420) -> str:
    """An SVG of its own.

    Args:
        parts: Elements.  height, width: Of the drawing.  title: What a screen reader says.
    """
    title = html.escape(title)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'width="{width + 10:g}" aria-label="{title}" fill="currentColor" '
        f'font-family="{MONOSPACE}">{"".join(parts)}</svg>'
    )


def text(
    x: float,
    y: float,
    text: str,
    anchor: str = "middle",
    small: bool = False,
    fill: str | None = None,
    bold: bool = False,
) -> str:
    """A line of letters whose baseline is at y."""
    size = 12 if small else 14
    paint = (f' fill="{fill}"' if fill else "") + (' font-weight="bold"' if bold else "")
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"{paint} '
        f'xml:space="preserve">{html.escape(text)}</text>'
    )


def box(
    x: float,
    y: float,
    width: float,
    height: float,
    name: str,
    note: str,
    lit: bool,
    size: int = 15,
) -> list[str]:
    """A rounded box with a name and a note below it."""
    paint = f'fill="{LIT}"' if lit else 'fill-opacity="0.07"'
    ink = f' fill="{ON_LIT}"' if lit else ""
    middle = y + height / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" {paint} '
        f'stroke="currentColor" stroke-width="{2 if lit else 1}"/>',
        f"<g{ink}>",
        f'<text x="{x + width / 2:g}" y="{middle - 3:g}" text-anchor="middle" font-size="{size}" '
        f'font-weight="bold">{name}</text>',
        f'<text x="{x + width / 2:g}" y="{middle + 14:g}" text-anchor="middle" '
        f'font-size="12">{note}</text>',
        "</g>",
    ]


def arrow(points: list[tuple[float, float]]) -> list[str]:
    """A line with a head at its end; its last piece is horizontal or vertical."""
    (x0, y0), (x, y) = points[-2:]
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    head = f"{x:g},{y:g} {x - 8 * dx - 4 * dy:g},{y - 8 * dy - 4 * dx:g} "
    head += f"{x - 8 * dx + 4 * dy:g},{y - 8 * dy + 4 * dx:g}"
    return [line(points), f'<polygon points="{head}"/>']


def line(points: list[tuple[float, float]], width: float = 1.3, more: str = "") -> str:
    """A line through points."""
    line = " ".join(f"{a:g},{b:g}" for a, b in points)
    return (
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="{width:g}"'
        f"{more}/>"
    )


def rect(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    """A plain rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'


def matrix(x: float, y: float, rows: list[list[float]], cell: float, most: float = 1.0) -> str:
    """A matrix as squares: the side is the root of the size, hollow ones are negative.

    Args:
        x, y: Top left corner.  rows: Its entries.  cell: Side of a cell.
        most: The size that fills its cell; larger ones do too.
    """
    parts = []
    for i, row in enumerate(rows):
        for j, value in enumerate(row):
            side = round((cell - 3) * min(1.0, abs(value) / most) ** 0.5, 1)
            if side < 1:
                continue
            side -= 0 if value > 0 else min(2, side - 0.5)  # its stroke makes it a full one
            a = round(x + (j + 0.5) * cell - side / 2, 2)
            b = round(y + (i + 0.5) * cell - side / 2, 2)
            stroke = f' stroke="{ORANGE}" stroke-width="2"'
            paint = (BLUE, "") if value > 0 else ("none", stroke)
            parts.append(rect(a, b, side, side, *paint))
    width, height = cell * len(rows[0]), cell * len(rows)
    frame = rect(x, y, width, height, "none", ' stroke="currentColor" stroke-width="1"')
    return "".join([*parts, frame])
