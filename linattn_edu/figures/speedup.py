"""How many times as fast several GPUs are as one, from the rows of `python -m benchmarks.ranks`.

No frames: lines in axes of matplotlib, which a chapter has, and tables.
"""

from collections.abc import Iterable

from linattn_edu import sources
from linattn_edu.figures.drawing import BLUE, GRAY, GREEN, ORANGE
from linattn_edu.tables import PASSES, Cells

STRONG, WEAK, SHORT = 65536, 16384, 4096  # tokens of all ranks; of each; of each
COLOURS = {"gdn": BLUE, "kda": ORANGE, "ssd": GREEN}
NAMES = {"gdn": "GDN", "kda": "KDA", "ssd": "Mamba-2"}
STYLES = {
    ("linattn_edu", "contiguous"): ("o-", ""),
    ("linattn_edu", "zigzag"): ("s--", ", zigzag"),
    ("fla", "contiguous"): ("x:", ", fla"),
}
Series = dict[tuple[str, str, str], dict[int, tuple[dict, dict]]]


def tokens_of(case: str, ranks: int) -> int:
    """Tokens of all ranks in "strong", "weak" or "short"."""
    return {"strong": STRONG, "weak": WEAK * ranks, "short": SHORT * ranks}[case]


def speedups(rows: list[dict], what: str, case: str = "strong", gate: str = "trained") -> Series:
    """(operator, library, layout) -> ranks -> (row, that of one GPU for the same tokens).

    A row has its pair only in one that is of the same library and, if it is ours, of the same
    sources: else what changes from one to the other would be taken for the ranks' doing.

    Args:
        rows: Of a file of measurements.
        what: "forward" or "forward_backward".
        case: "strong": the same tokens on every number of ranks; "weak" and "short": a number of
            tokens for each rank.
        gate: "trained", or "none": nothing is forgotten.
    """
    rows = [row for row in rows if (row["what"], row["gate"]) == (what, gate)]
    one = {(row["case"], row["library"]): row for row in rows if row["ranks"] == 1}
    found: Series = {}
    for row in sorted(rows, key=lambda row: row["ranks"]):
        alone = one.get((row["case"], row["library"]))
        if row["ranks"] == 1 or row["tokens"] != tokens_of(case, row["ranks"]) or alone is None:
            continue
        if sources.ours(row) and row.get("sources") != alone.get("sources"):
            continue
        key = row["case"].split("_")[0], row["library"], row["layout"]
        found.setdefault(key, {})[row["ranks"]] = row, alone
    order = [*NAMES], [*STYLES]
    return dict(
        sorted(found.items(), key=lambda x: (order[0].index(x[0][0]), order[1].index(x[0][1:])))
    )


def paired(rows: list[dict], case: str, gate: str) -> list[dict]:
    """The rows that `speedups` finds in both passes, each after that of one GPU; then messages'."""
    every = [line for what in PASSES for line in speedups(rows, what, case, gate).values()]
    pairs = [row for line in every for pair in line.values() for row in reversed(pair)]
    sent = {_wire(row) for row in pairs}
    return pairs + [row for row in rows if row["what"] == "gather" and _wire(row) in sent]


def _wire(row: dict) -> tuple:
    """What rows have in common with that of their message."""
    return tuple(row[key] for key in ("case", "library", "layout", "gate", "ranks"))


def cells(rows: list[dict], case: str, gate: str) -> Cells:
    """A line for each row of several GPUs, beside one GPU with the same tokens."""
    heads = ["case", "GPUs", "one, ms", "ms", "faster", "queued", "graph", "message", "error"]
    sent = {_wire(row): sources.marked(f"{row['ms']:.3f}", row) for row in rows
            if row["what"] == "gather"}  # fmt: skip
    lines = []
    for what, name in PASSES.items():
        for (op, library, layout), line in speedups(rows, what, case, gate).items():
            for ranks, (row, alone) in line.items():
                error = row["error" if what == "forward" else "error_gradients"]
                lines.append([
                    f"{NAMES[op]}{STYLES[library, layout][1]}: {name}", str(ranks),
                    sources.marked(f"{alone['ms']:.3f}", alone),
                    sources.marked(f"{row['ms']:.3f}", row), f"{alone['ms'] / row['ms']:.2f}",
                    *(_gain(row, alone, key) for key in ("row_ms", "graph_ms")),
                    sent.get(_wire(row), ""), f"{error:.0e}",
                ])  # fmt: skip
    return heads, lines


def _gain(row: dict, alone: dict, key: str) -> str:
    """Times as fast by another clock, "" where one of the two has none."""
    both = row.get(key), alone.get(key)
    return f"{both[1] / both[0]:.2f}" if all(both) else ""


def draw(rows: list[dict], axes: Iterable, case: str = "strong", gate: str = "trained") -> list:
    """A line for each operator, library and layout, forward and forward and backward.

    The gray line is as many times as fast as there are GPUs. A name has a dagger where a row of its
    line is of older sources.

    Args:
        rows, case, gate: As in `speedups`.
        axes: Two of matplotlib.
    Returns:
        The rows that are shown, for ``teaching.measured_where``.
    """
    shown = []
    for ax, (what, title) in zip(axes, PASSES.items(), strict=True):
        series = speedups(rows, what, case, gate)
        ranks, top = sorted({1, *(n for line in series.values() for n in line)}), 1.0
        ax.plot(ranks, ranks, color=GRAY, lw=1)
        for (op, library, layout), line in series.items():
            style, more = STYLES[library, layout]
            pairs = [row for pair in line.values() for row in pair]
            label = NAMES[op] + more
            label += sources.MARK * any(map(sources.changed, pairs))
            gains = [1.0, *(alone["ms"] / row["ms"] for row, alone in line.values())]
            top = max(top, *gains)
            ax.plot([1, *line], gains, style, color=COLOURS[op], lw=1.4, ms=4.5, label=label)
            shown += pairs
        ax.axhline(1, color=GRAY, lw=0.6)
        ax.set_xticks(ranks)
        ax.set_ylim(0, 1.05 * max(*ranks, top))
        ax.set_title(title, fontsize=10)
        ax.set_xlabel("GPUs")
    return shown
