"""python -m benchmarks plot: draw the figures of the book from chapters/data/*.json.

The same results give the same files, byte for byte, with the same matplotlib.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import results
from benchmarks.adapters import NAMES, refusal
from benchmarks.cases import (
    ADJOINT_STAGES,
    CASES,
    COPY_RATE,
    FORWARD_STAGES,
    OPERATORS,
    PRODUCT_RATE,
    SCALING_FORMS,
    TRAINING,
)
from benchmarks.progress import fail
from linattn_edu import measurements, sources

FIGURES = results.DATA.parents[1] / "book" / "_static" / "figures"

# readable on a white and on a black page
INK = "#767676"
FLOOR = "#d9822b"
# a library has one colour in all figures; two share one that have no operator in common
LIBRARIES = {
    "linattn_edu": "#1f8fd1", "linattn_edu_safe": "#7fbde6", "fla": "#a0a0a0",
    "mamba_ssm": "#a0a0a0", "fla_safe": "#6f6f6f", "flash_qla": "#6f6f6f", "attn_gym": "#8c78a8",
    "flashinfer": "#b59a6a", "cudnn": "#b59a6a",
}  # fmt: skip
COLOURS = (
    "#1f8fd1", "#d9822b", "#2e9e5b", "#c2557f", "#8a6fd1",
    "#a08a2e", "#3aa6a6", "#b5483a", "#767676",
)  # fmt: skip
MARKERS = "osD^vP*Xp"
WIDTH = 4.4  # inches: shown at 360 px on a phone the letters still have 11 px
STYLE = {
    "svg.hashsalt": "linattn_edu",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def bars(data: dict, plt, what: str, axis: str):
    """Bars of a call of each library, a group a case, with the floor as a line across it."""
    shown = grid(data["rows"], what)
    if not shown:
        return None
    libraries = list(next(iter(shown.values())))
    height = 0.8 / len(libraries)
    fig, ax = plt.subplots(figsize=(WIDTH, 1.0 + len(shown) * (0.25 + 0.22 * len(libraries))))
    longest = max(row["ms"] for here in shown.values() for row in here.values() if "ms" in row)
    for n, here in enumerate(shown.values()):
        for j, (library, row) in enumerate(here.items()):
            y = n + (j - (len(libraries) - 1) / 2) * height
            if "ms" not in row:
                text = f"{library}: {row['absent']}"
                ax.text(0.12 * longest, y, text, va="center", fontsize=8)
                continue
            ax.barh(y, row["ms"], 0.92 * height, color=LIBRARIES[library])
            text = sources.marked(f"{row['ms']:.2f}", row)
            ax.text(row["ms"] + 0.01 * longest, y, text, va="center", fontsize=9)
        floor = next(row["floor_ms"] for row in here.values() if "ms" in row)
        ax.plot([floor, floor], [n - 0.45, n + 0.45], color=FLOOR, lw=1.4)
    handles = [plt.Rectangle((0, 0), 1, 1, color=LIBRARIES[name]) for name in libraries]
    handles.append(plt.Line2D([], [], color=FLOOR, lw=1.4))
    _legend(ax, handles, [*libraries, "floor"], columns=4)
    ax.set_yticks(range(len(shown)), list(shown))
    ax.invert_yaxis()
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, 1.12 * longest)
    ax.set_xlabel(axis)
    _note(ax, data, [row for here in shown.values() for row in here.values() if "ms" in row])
    return fig


def grid(rows: list[dict], what: str) -> dict[str, dict[str, dict]]:
    """Case -> library -> its row of a call, for every case and library that have one.

    In place of a row that is not there {"absent": why}: the library refuses the case, it came to
    nothing, or nobody has measured it.
    """
    refused = {
        (r["case"], r["library"]): r["refused"]
        for r in rows
        if r["what"] == what and "refused" in r
    }
    timed = {(r["case"], r["library"]): r for r in rows if r["what"] == what and "ms" in r}
    cases, libraries = ({key[n] for key in timed} for n in range(2))

    def absent(case: str, library: str) -> dict:
        why = refusal(CASES[case], what, library) or refused.get((case, library))
        return {"absent": why or "not measured"}

    return {
        case: {x: timed.get((case, x)) or absent(case, x) for x in NAMES if x in libraries}
        for case in CASES
        if case in cases
    }


def roofline(data: dict, plt, call: str, stages: dict[str, tuple[str, ...]]):
    """Operations a second against operations a byte: stages and the whole call under the roof."""
    names = dict.fromkeys(name for op in _operators(data) for name in stages.get(op, ()))
    whats = {call: call, **{f"stage:{name}": name for name in names}}
    points = {}
    for row in data["rows"]:
        if row["what"] in whats and row["library"] == "linattn_edu":
            points.setdefault(whats[row["what"]], []).append(row)
    if not points:
        return None
    copy = data.get("bytes_per_s", COPY_RATE)
    product = data.get("flops_per_s", PRODUCT_RATE)
    fig, ax = plt.subplots(figsize=(WIDTH, 4.4))
    shown = [row for rows in points.values() for row in rows]
    left = 0.5 * min(row["flops"] / row["bytes"] for row in shown)
    right = 3 * max(product / copy, *(row["flops"] / row["bytes"] for row in shown))
    ax.plot([left, product / copy, right], [left * copy / 1e12, *[product / 1e12] * 2], color=INK)
    names = [name for name in whats.values() if name in points]
    for n, name in enumerate(names):
        x = [row["flops"] / row["bytes"] for row in points[name]]
        y = [row["flops"] / row["ms"] / 1e9 for row in points[name]]
        ax.plot(
            x, y, ls="", marker=MARKERS[(n + n // len(COLOURS)) % len(MARKERS)], ms=6,
            alpha=0.85, mew=0,
            color=COLOURS[n % len(COLOURS)],
            label=_marked(name.replace("_backward", " + backward"), points[name]),
        )  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(left, right)
    ax.set_ylim(top=2.5 * product / 1e12)
    ax.set_xlabel("operations a byte")
    ax.set_ylabel("TFLOP/s")
    text = {"fontsize": 8.5, "ha": "right"}
    ax.text(right, product / 1e12 * 1.15, f"{product / 1e12:.0f} TFLOP/s", **text)
    x = left * 4
    text = {"fontsize": 8.5, "ha": "right", "va": "bottom"}
    ax.text(x, x * copy / 1e12 * 1.2, f"{copy / 1e12:.1f} TB/s", **text)
    handles, labels = ax.get_legend_handles_labels()
    _legend(ax, handles, labels, columns=2 if max(map(len, labels)) > 20 else 3)
    _note(ax, data, shown)
    return fig


def _operators(data: dict) -> list[str]:
    """The operators whose cases have rows."""
    cases = {row["case"] for row in data["rows"]}
    here = {case.operator for case in CASES.values() if case.name in cases}
    return [op for op in OPERATORS if op in here]


def scaling(data: dict, plt):
    """Time of the three forms against the length of the sequence."""
    rows = {form: [row for row in data["rows"] if row["what"] == form] for form in SCALING_FORMS}
    rows = {form: sorted(found, key=lambda r: r["T"]) for form, found in rows.items() if found}
    series = {form: [(row["T"], row["ms"]) for row in found] for form, found in rows.items()}
    if not series:
        return None
    fig, ax = plt.subplots(figsize=(WIDTH, 3.4))
    for n, (form, points) in enumerate(series.items()):
        x, y = zip(*points, strict=True)
        label = _marked(form, rows[form])
        ax.plot(x, y, color=COLOURS[n], marker=MARKERS[n], ms=4.5, mew=0, label=label)
    lengths = sorted({T for points in series.values() for T, _ in points})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(lengths, [f"{T // 1024}k" if T >= 1024 else str(T) for T in lengths])
    ax.set_xlabel("tokens")
    ax.set_ylabel("ms")
    _legend(ax, *ax.get_legend_handles_labels())
    _note(ax, data, [row for found in rows.values() for row in found])
    return fig


def _marked(name: str, rows: list[dict]) -> str:
    """The name of a series, with the mark if one of its rows has it."""
    return next((text for row in rows if (text := sources.marked(name, row)) != name), name)


def _note(ax, data: dict, rows: list[dict]) -> None:
    """Below the axes, what the marks say; nothing where there are none."""
    text = sources.note(rows, data["date"]).replace(", or with ", ",\nor with ")
    if text:
        place = {"xycoords": "axes fraction", "textcoords": "offset points"}
        ax.annotate(text, (-0.12, 0), (0, -34), va="top", fontsize=8, **place)


def _legend(ax, handles: list, labels: list[str], columns: int = 3) -> None:
    """Above the axes."""
    ax.legend(
        handles, labels, ncols=columns, loc="lower left", bbox_to_anchor=(-0.12, 1.0),
        fontsize=9, handlelength=1.4, columnspacing=1.1, handletextpad=0.5,
    )  # fmt: skip


DRAWINGS: dict[str, Callable] = {
    "forward": lambda data, plt: bars(data, plt, "forward", "forward, ms"),
    "backward": lambda data, plt: bars(data, plt, TRAINING, "forward and backward, ms"),
    "roofline": lambda data, plt: roofline(data, plt, "forward", FORWARD_STAGES),
    "roofline_backward": lambda data, plt: roofline(data, plt, TRAINING, ADJOINT_STAGES),
    "scaling": scaling,
}


def draw(data: dict, folder: Path, suffix: str = "") -> list[Path]:
    """Draw what the results hold; the files written."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    written = []
    data = {**data, "rows": [row for row in data["rows"] if "ms" in row]}
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        for name, drawing in DRAWINGS.items():
            fig = drawing(data, plt)
            if fig is None:
                continue
            path = folder / f"{name}{suffix}.svg"
            fig.savefig(path, metadata={"Date": None, "Creator": None}, bbox_inches="tight")
            plt.close(fig)
            written.append(path)
    return written


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks plot", description=__doc__)
    p.add_argument("--data", type=Path, default=results.DATA, help="folder of the results")
    p.add_argument("--out", type=Path, default=FIGURES, help="folder of the figures")
    args = p.parse_args(argv)
    suffixes = {p: measurements.suffix(p.stem, args.data) for p in results.of_operators(args.data)}
    files = sorted(suffixes, key=lambda path: bool(suffixes[path]))  # the plain names first
    if not files:
        return fail(f"{args.data} holds no results: run python -m benchmarks")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return fail("matplotlib is missing: pip install 'linattn_edu[bench]'")
    for path in files:
        data = results.load(path)
        print(f"{path.name}: {data['gpu']}, torch {data['torch']}, {data['date']}")
        for file in draw(data, args.out, suffixes[path]):
            print(f"  {file}")
    return 0
