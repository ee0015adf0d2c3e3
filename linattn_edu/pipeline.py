"""The picture of the pipeline, drawn by code so that every chapter shows the same one."""

import html

STAGES = ("gate_cumsum", "solve", "wy", "state", "output")

# stage -> (top of its box, what it reads from the arguments, what it computes)
_BOXES = {
    "gate_cumsum": (46, "g", "decay inside the chunk"),
    "solve": (118, "k β", "inverse of the chunk"),
    "wy": (190, "k v β", "what the chunk writes"),
    "state": (262, "k S₀", "chunk to chunk"),
    "output": (334, "q k", "read state and chunk"),
}
_X, _WIDTH, _HEIGHT, _BUS = 70, 168, 44, 262
_STYLE = (
    "svg.la-map{display:block;width:100%;max-width:430px;height:auto;margin:0.5em auto;"
    "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
)


def pipeline_svg(lit: str | None = None) -> str:
    """The pipeline of chunk_gated_delta_rule as SVG text, with one stage lit.

    Lines and letters take the colour of the surrounding text, so it fits a dark page.

    Args:
        lit: "recurrent", "gate_cumsum", "solve", "wy", "state", "output", or None for none.
    """
    if lit is not None and lit != "recurrent" and lit not in STAGES:
        raise ValueError(f"lit must be 'recurrent', one of {STAGES} or None, got {lit!r}")
    parts = []
    for name, (y, inputs, note) in _BOXES.items():
        middle = y + _HEIGHT / 2
        parts += _box(_X, y, _WIDTH, _HEIGHT, name, note, name == lit)
        side = middle - 9 if name == "state" else middle
        parts += _arrow([(6, side), (_X, side)])
        parts.append(_text(34, side - 6, inputs))
    state_y = _BOXES["state"][0] + _HEIGHT / 2 + 12
    parts += _arrow([(_X, state_y), (6, state_y)])
    parts.append(_text(34, state_y + 15, "final S"))
    x = _X + _WIDTH / 2
    for above, below, label in (
        ("solve", "wy", "A"),
        ("wy", "state", "w  u"),
        ("state", "output", "h  v_new"),
    ):
        parts += _arrow([(x, _BOXES[above][0] + _HEIGHT), (x, _BOXES[below][0])])
        parts.append(_text(x + 8, _BOXES[below][0] - 10, label, anchor="start"))
    right = _X + _WIDTH
    parts.append(_text(_BUS + 6, _BOXES["gate_cumsum"][0] + 48, "gc", anchor="start"))
    top = _BOXES["gate_cumsum"][0] + _HEIGHT / 2
    for name in ("wy", "state", "output"):
        end = _BOXES[name][0] + _HEIGHT / 2
        parts += _arrow([(right, top), (_BUS, top), (_BUS, end), (right, end)])
    bottom = _BOXES["output"][0] + _HEIGHT
    parts += _arrow([(x, bottom), (x, bottom + 32)])
    parts.append(_text(x, bottom + 48, "o"))
    parts.append(_text(x, 18, "in chunks", small=True))
    # the definition beside it
    left, width = 302, 112
    centre = left + width / 2
    parts.append(_text(centre, 18, "the definition", small=True))
    parts.append(_text(centre, 84, "q k v g β  S₀"))
    parts += _arrow([(centre, 92), (centre, 170)])
    parts += _box(left, 170, width, 60, "recurrent", "token by token", lit == "recurrent")
    parts += _arrow([(centre, 230), (centre, bottom + 32)])
    parts.append(_text(centre, bottom + 48, "o  final S"))
    parts.append(_text((x + centre) / 2 - 6, bottom + 48, "="))
    title = "Stages of chunk_gated_delta_rule" + (f", {lit} lit" if lit else "")
    return (
        f'<svg class="la-map" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 420 436" role="img" '
        f'width="420" aria-label="{title}" fill="currentColor"><title>{title}</title>'
        f"<style>{_STYLE}</style>{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", small: bool = False) -> str:
    size = 12 if small else 14
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" '
        f'xml:space="preserve">{html.escape(text)}</text>'
    )


def _box(
    x: float, y: float, width: float, height: float, name: str, note: str, lit: bool
) -> list[str]:
    paint = 'fill="#f2a33a"' if lit else 'fill-opacity="0.07"'
    ink = ' fill="#1b1b1b"' if lit else ""
    middle = y + height / 2
    return [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" {paint} '
        f'stroke="currentColor" stroke-width="{2 if lit else 1}"/>',
        f"<g{ink}>",
        f'<text x="{x + width / 2:g}" y="{middle - 3:g}" text-anchor="middle" font-size="15" '
        f'font-weight="bold">{name}</text>',
        f'<text x="{x + width / 2:g}" y="{middle + 14:g}" text-anchor="middle" '
        f'font-size="12">{note}</text>',
        "</g>",
    ]


def _arrow(points: list[tuple[float, float]]) -> list[str]:
    (x0, y0), (x, y) = points[-2:]
    line = " ".join(f"{a:g},{b:g}" for a, b in points)
    dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
    head = f"{x:g},{y:g} {x - 8 * dx - 4 * dy:g},{y - 8 * dy - 4 * dx:g} "
    head += f"{x - 8 * dx + 4 * dy:g},{y - 8 * dy + 4 * dx:g}"
    return [
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.3"/>',
        f'<polygon points="{head}"/>',
    ]
