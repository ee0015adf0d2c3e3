"""What the chapters share: set-up, the pipeline map, source listings and measured tables."""

import html
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

STAGES = ("gate_cumsum", "solve", "wy", "state", "output")
HASH_SALT = "linattn_edu"


def setup(seed: int = 0) -> torch.device:
    """Choose the device of a chapter, seed torch, and make figures inline SVG.

    With a CUDA GPU that Triton can use, the kernels are compiled for it. Otherwise
    ``TRITON_INTERPRET=1`` is set, and the same kernels run in Triton's interpreter on the CPU.
    Call it before anything that imports triton.

    Args:
        seed: Seed of torch's default generators.
    Returns:
        The device on which the chapter makes its tensors.
    Raises:
        RuntimeError: there is no usable GPU, and triton was imported without the interpreter.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 5):
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
        os.environ["TRITON_INTERPRET"] = "1"
        if _imported_for_compilation():
            raise RuntimeError(
                "triton was imported before teaching.setup() and without TRITON_INTERPRET=1, so "
                "its kernels need a GPU and there is none: restart the kernel of the notebook "
                "and run teaching.setup() first"
            )
    torch.manual_seed(seed)
    _inline_svg()
    return device


def _imported_for_compilation() -> bool:
    """Whether triton is loaded with its own library decorated for the compiler.

    Decorating happens at import, so the variable set later would reach only half the functions.
    """
    standard = sys.modules.get("triton.language.standard")
    return standard is not None and type(standard.cdiv).__name__ == "JITFunction"


def _inline_svg() -> None:
    """Deterministic inline SVG where IPython and matplotlib are there; nothing elsewhere."""
    try:
        from IPython import get_ipython

        if get_ipython() is None:
            return
        import matplotlib
        from matplotlib_inline.backend_inline import set_matplotlib_formats
        from matplotlib_inline.config import InlineBackend
    except ImportError:
        return
    # in the configuration as well as in the shell: pyplot's first import reads it again
    config = InlineBackend.instance()
    config.print_figure_kwargs = {"metadata": {"Date": None}, "bbox_inches": "tight"}
    config.figure_formats = {"svg"}
    set_matplotlib_formats("svg")
    matplotlib.rcParams.update(
        {
            # ids inside the file are hashes of this salt instead of random numbers
            "svg.hashsalt": HASH_SALT,
            "figure.figsize": (5.2, 3.2),
            "figure.facecolor": "white",
            "font.size": 10,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "lines.linewidth": 1.8,
        }
    )


def figure(width: float = 5.2, height: float = 3.2, **kwargs):
    """A matplotlib figure of a size that is legible on a phone.

    Args:
        width, height: Inches.  kwargs: Passed to ``matplotlib.pyplot.subplots``.
    Returns:
        (figure, axes) as from ``subplots``.
    """
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(width, height), **kwargs)


# ---- the pipeline map

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


def pipeline_map(lit: str | None = None) -> None:
    """Show pipeline_svg(lit) in the notebook; print its title elsewhere."""
    title = "linattn_edu pipeline: gate_cumsum, solve -> wy -> state -> output -> o"
    _display(title + (f"   [here: {lit}]" if lit else ""), html_text=pipeline_svg(lit))


# ---- source listings


def show_source(fn: Callable) -> None:
    """Show the shipped source of a function, a class or a ``@triton.jit`` kernel, highlighted.

    Args:
        fn: What to show; a kernel is unwrapped.
    """
    fn = inspect.unwrap(getattr(fn, "fn", fn))
    source = inspect.getsource(fn).rstrip()
    path = "/".join(fn.__module__.split(".")) + ".py"
    _display(source, markdown=f"`{path}`\n\n```python\n{source}\n```")


# ---- measured results


def measured(name: str = "gdn_h200") -> dict:
    """The measured results ``chapters/data/<name>.json`` of ``python -m benchmarks``.

    Returns:
        {"gpu", "torch", "triton", "date", "rows": [{"case", "library", "what", "ms", "bytes",
        "flops", "floor_ms", ...}]}; "what" is "forward" or "stage:<name>".
    Raises:
        FileNotFoundError: nothing has been measured under this name.
    """
    roots = [Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents]
    for root in roots:
        path = root / "chapters" / "data" / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text())
    raise FileNotFoundError(f"chapters/data/{name}.json: not measured yet")


def measured_stage(stage: str, name: str = "gdn_h200") -> None:
    """Show what a stage takes on the GPU: a table of its cases beside their floors.

    Args:
        stage: Name of the stage.  name: Of the file of results.
    """

    def columns(row: dict) -> list[str]:
        return [
            row["case"],
            *([row["library"]] if mixed else []),
            f"{row['ms']:.3f}",
            f"{row['floor_ms']:.3f}",
            f"{row['bytes'] / row['ms'] / 1e6:.0f}",
            f"{row['flops'] / row['ms'] / 1e9:.1f}",
        ]

    data = _load(name)
    rows = [r for r in data["rows"] if r["what"] == f"stage:{stage}"] if data else []
    if not rows:
        print("not measured yet")
        return
    mixed = len({r["library"] for r in rows}) > 1
    heads = ["case", *(["library"] if mixed else []), "ms", "floor ms", "GB/s", "TFLOP/s"]
    _table(heads, [columns(r) for r in rows], f"Stage {stage}. {_provenance(data)}")


def measured_forward(name: str = "gdn_h200") -> None:
    """Show the forward pass beside other libraries, measured in one run on one GPU.

    Args:
        name: Of the file of results.
    """

    def optional(row: dict, key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else ""

    data = _load(name)
    rows = [r for r in data["rows"] if r["what"] == "forward"] if data else []
    if not rows:
        print("not measured yet")
        return
    heads = ["case", "library", "ms", "floor ms", "error", "first call s", "peak MiB"]
    cells = [
        [
            r["case"],
            r["library"],
            f"{r['ms']:.3f}",
            f"{r['floor_ms']:.3f}",
            optional(r, "error", ".1e"),
            optional(r, "first_call_s", ".1f"),
            optional(r, "peak_mib", ".0f"),
        ]
        for r in rows
    ]
    _table(heads, cells, f"Forward pass. {_provenance(data)}")


def _load(name: str) -> dict | None:
    try:
        return measured(name)
    except FileNotFoundError:
        return None


def _provenance(data: dict) -> str:
    return f"{data['gpu']}, torch {data['torch']}, Triton {data['triton']}, {data['date']}."


def _table(heads: list[str], rows: Iterable[list[str]], caption: str) -> None:
    """Show a table: HTML in a notebook, aligned text elsewhere."""
    rows = list(rows)
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]
    texts = {i for i, head in enumerate(heads) if head in ("case", "library")}

    def aligned(line: list[str]) -> str:
        cells = (
            c.ljust(w) if i in texts else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    def tagged(line: list[str], tag: str) -> str:
        sides = ("left" if i in texts else "right" for i in range(len(line)))
        cells = (
            f'<{tag} style="text-align:{side}">{html.escape(c)}</{tag}>'
            for side, c in zip(sides, line, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    plain = "\n".join([aligned(heads), *map(aligned, rows), caption])
    body = "".join(tagged(r, "td") for r in rows)
    _display(
        plain,
        html_text='<div style="overflow-x:auto"><table class="table">'
        f'<caption style="caption-side:bottom">{html.escape(caption)}</caption>'
        f"<thead>{tagged(heads, 'th')}</thead><tbody>{body}</tbody></table></div>",
    )


def _display(plain: str, *, html_text: str | None = None, markdown: str | None = None) -> None:
    """Display rich output in a notebook, print the plain text elsewhere."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        print(plain)
        return
    data = {"text/plain": plain, "text/html": html_text, "text/markdown": markdown}
    display({mime: text for mime, text in data.items() if text is not None}, raw=True)


if __name__ == "__main__":
    # the map that the book's pages include: drawn from here, so that it cannot go its own way
    figures = Path(__file__).resolve().parents[1] / "book" / "_static" / "figures"
    (figures / "pipeline.svg").write_text(pipeline_svg() + "\n")
