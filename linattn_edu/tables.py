"""Tables of measured results: rows of the file of results -> heads and lines of text."""

import re
from collections.abc import Callable, Iterable

from linattn_edu.sources import MARK, changed, marked

TEXTS = (
    "case",
    "passes",
    "layer",
    "library",
    "state",
    "step",
    "kernel",
    "why",
)  # columns of words, aligned to the left
INPUTS = ("q", "k", "v", "x", "dt", "A", "B", "C", "D", "g", "beta")  # of any operator
GRADIENTS = {f"d{x}": f"error_d{x}" for x in INPUTS}  # -> key of a row
PASSES = {"forward": "forward", "forward_backward": "forward and backward"}  # "what" -> name
OURS = "linattn_edu"
# library -> head of its column; our times are divided by those of the last
BESIDE = {OURS: "linattn_edu ms", "fla": "fla ms", "flash_qla": "FlashQLA ms"}
BESIDE_SSD = {OURS: "linattn_edu ms", "mamba_ssm": "mamba_ssm ms"}
# "what" -> the final state
DECODE = {"decode": "new", "decode_inplace": "in place", "decode_graph": "in place, CUDA graph"}
SHORT = {"bfloat16": "bf16", "float32": "fp32"}
Cells = tuple[list[str], list[list[str]]]  # heads, lines


def stage_cells(rows: list[dict]) -> Cells:
    """Heads and lines of a stage's table; the library is named where there are several."""
    several = len({row["library"] for row in rows}) > 1
    heads = ["case", *(["library"] if several else []), "ms", "floor ms", "GB/s", "TFLOP/s"]
    lines = [
        [
            row["case"],
            *([row["library"]] if several else []),
            _ms(row),
            f"{row['floor_ms']:.3f}",
            f"{row['bytes'] / row['ms'] / 1e6:.0f}",
            f"{row['flops'] / row['ms'] / 1e9:.1f}",
        ]
        for row in rows
    ]
    return heads, lines


def ladder_cells(rows: list[dict], whys: Iterable[dict[str, str]]) -> Cells:
    """Heads and lines of a kernel ladder: a line a rung, a column a dtype.

    whys: Of each rung, in a clause, why it is faster or slower; several for a ladder of several
    tasks. A time has its gain over the first rung of its task that has one. Below a task's rungs
    stands what other libraries have for one of them.
    """
    dtypes = [name for name in SHORT if any(row["dtype"] == name for row in rows)]
    found = {(row["rung"], row["dtype"]): row for row in rows}
    steps = {row["rung"]: str(row["step"]) for row in rows}
    old, lines = {row["rung"] for row in rows if changed(row)}, []
    others = {row["rung"]: row for row in rows if "library" in row}
    for why in whys:
        firsts = {}
        beside = {r: _functions(row) for r, row in others.items() if row["of"] in why}
        for rung, reason in (why | beside).items():
            times = []
            for dtype in dtypes:
                row = found.get((rung, dtype))
                if row is None:  # not in this dtype, or not measured yet
                    times.append("")
                elif "ms" in row:
                    gain = firsts.setdefault(dtype, row["ms"]) / row["ms"]
                    text = marked(_three_digits(row["ms"]), row)
                    times.append(f"{text} ({gain:.2g}\N{MULTIPLICATION SIGN})")
                else:  # its code is not recorded, but that of its times in other dtypes is
                    times.append("refused" + (MARK if rung in old else ""))
            first = ["", peer(others[rung])] if rung in others else [steps.get(rung, ""), rung]
            lines.append([*first, *times, reason])
    return ["step", "kernel", *(f"{SHORT[name]} ms (gain)" for name in dtypes), "why"], lines


def peer(row: dict) -> str:
    """Another library and its version, as a table's name of its row; 2.3.2.post1 is 2.3.2."""
    return f"{row['library']} {row['version'].split('.post')[0]}"


def tritons_cells(data: dict) -> Cells:
    """Heads and lines of whole calls: a line a call, a column a Triton, with its ptxas; how much
    longer a call takes than with the first of them.
    """
    found = {(r["case"], r["what"], r["triton"]): r for r in data["rows"]}
    heads = {r["triton"]: f"Triton {r['triton']}, ptxas {r['ptxas']}" for r in data["rows"]}
    ordered = sorted(heads, key=lambda x: [int(n) for n in re.findall(r"\d+", x)])
    lines = []
    for case, what in dict.fromkeys(key[:2] for key in found):
        cells = []
        first = found.get((case, what, ordered[0]))
        for triton in ordered:
            row = found.get((case, what, triton))
            text = marked(_three_digits(row["ms"]), row) if row else ""
            if row and first and row is not first:
                text += f" ({100 * (row['ms'] / first['ms'] - 1):+.0f} %)"
            cells.append(text)
        lines.append([case, PASSES[what], *cells])
    return ["case", "passes", *(f"{heads[x]}: ms" for x in ordered)], lines


def _functions(row: dict) -> str:
    """Those of another library; a name that is the rung's is not said twice."""
    names = row["functions"].split(", ")
    return ", ".join("of this name" if x.strip("_") == row["of"] else x for x in names)


def ladders_cells(every: Iterable[dict]) -> Cells:
    """Heads and lines of all ladders, of files of several cards: a line a rung, a column a card and
    dtype; empty where nothing was measured.
    """
    every = list(every)
    columns = [(data, dtype) for data in every for dtype in SHORT]
    times, places, names = {}, {}, {}
    for data in every:
        for row in data["rows"]:
            rung = row["chapter"], row["rung"]
            if "library" in row:
                names[rung] = peer(row)
            if "ms" in row or rung not in names:
                place = row["chapter"], row["step"], row["order"], row.get("library", "")
                places.setdefault(rung, place)
            if "ms" in row:
                times[(data["gpu"], row["dtype"], *rung)] = marked(_three_digits(row["ms"]), row)
    lines, named = [], set()
    for chapter, name in sorted(places, key=places.get):
        number = chapter.split("_")[0].lstrip("0")
        first = "" if chapter in named else f"{{doc}}`{number} </chapters/{chapter}>`"
        named.add(chapter)
        cells = (times.get((data["gpu"], dtype, chapter, name), "") for data, dtype in columns)
        lines.append([first, names.get((chapter, name), name), *cells])
    shown = [f"{data['gpu'].split()[1]} {SHORT[dtype]}" for data, dtype in columns]
    used = [i for i in range(len(shown)) if any(line[2 + i] for line in lines)]
    return (
        ["chapter", "kernel", *(shown[i] for i in used)],
        [[*line[:2], *(line[2 + i] for i in used)] for line in lines],
    )


def _ms(row: dict) -> str:
    return marked(f"{row['ms']:.3f}", row)


def _three_digits(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 100 else f"{ms:#.3g}"


def _optional(x: float | None, form: str) -> str:
    """A number as text; what was not measured stays empty."""
    return "" if x is None else format(x, form)


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:.2g}"


def _call_cells(rows: list[dict], errors: dict[str, Callable[[dict], float | None]]) -> Cells:
    """Heads and lines of a table of calls; `errors` makes its columns of errors."""
    heads = ["case", "library", "ms", "floor ms", *errors, "first s", "MiB"]
    lines = [
        [
            row["case"],
            row["library"],
            _ms(row),
            f"{row['floor_ms']:.3f}",
            *(_percent(error(row)) for error in errors.values()),
            _optional(row.get("first_call_s"), ".1f"),
            _optional(row.get("peak_mib"), ".0f"),
        ]
        for row in rows
    ]
    return heads, lines


def forward_cells(rows: list[dict]) -> Cells:
    """Heads and lines of the forward table."""
    return _call_cells(rows, {"error %": lambda row: row.get("error")})


def backward_cells(rows: list[dict]) -> Cells:
    """Heads and lines of the table of both passes, with the largest error of a gradient."""

    def worst(row: dict) -> float | None:
        return max((row[key] for key in GRADIENTS.values() if key in row), default=None)

    return _call_cells(rows, {"grad %": worst})


def gradient_cells(rows: list[dict]) -> Cells:
    """Heads and lines of the errors of the output and of each gradient that there is."""
    there = {key for row in rows for key in row}
    keys = {"o": "error", **{name: key for name, key in GRADIENTS.items() if key in there}}
    heads = ["case", "library", *(f"{name} %" for name in keys)]
    lines = [
        [row["case"], row["library"], *(_percent(row.get(key)) for key in keys.values())]
        for row in rows
    ]
    return heads, lines


def alike_cells(rows: list[dict]) -> Cells:
    """The same with keys alike, a line for each cosine between them; none where none was
    measured.
    """
    cosines = sorted({key.split("_")[0] for row in rows for key in row if key.startswith("rho")})
    names = [
        "o",
        *(name for name in GRADIENTS if any(f"{c}_{name}" in row for c in cosines for row in rows)),
    ]
    lines = [
        [row["case"], row["library"], f"0.{cosine[3:]}".rstrip("0"),
         *(_percent(row.get(f"{cosine}_{name}")) for name in names)]
        for row in rows for cosine in cosines if any(key.startswith(cosine) for key in row)
    ]  # fmt: skip
    return ["case", "library", "cosine", *(f"{name} %" for name in names)], lines


def decode_cells(rows: list[dict]) -> Cells:
    """Heads and lines of the decoding table; the library is named where there are several."""
    several = len({row["library"] for row in rows}) > 1
    heads = ["case", *(["library"] if several else []), "state", "ms", "floor ms", "GB/s"]
    shares = any("state_share" in row for row in rows)
    heads += [*(["state's %"] if shares else []), "o %", "S %", "MiB"]
    lines = [
        [
            row["case"],
            *([row["library"]] if several else []),
            DECODE[row["what"]],
            _ms(row),
            f"{row['floor_ms']:.3f}",
            f"{row['bytes'] / row['ms'] / 1e6:.0f}",
            *([f"{100 * row['state_share']:.0f}"] if shares else []),
            _percent(row.get("error")),
            _percent(row.get("error_state")),
            _optional(row.get("peak_mib"), ".0f"),
        ]
        for row in rows
    ]
    return heads, lines


def step_cells(rows: list[dict]) -> Cells:
    """Heads and lines of a token called and as a captured step, of calls of as many guesses."""
    found = {(row["case"], row["batch"], row["how"]): row for row in rows}
    lines = []
    for case, batch in dict.fromkeys(key[:2] for key in found):
        call, step = (found[case, batch, how] for how in ("call", "step"))
        lines.append([case, str(batch), _ms(call), _ms(step), f"{call['ms'] / step['ms']:.1f}"])
    return ["layer", "sequences", "call ms", "step ms", "times"], lines


def beside_cells(rows: list[dict], libraries: dict[str, str] = BESIDE) -> Cells:
    """Heads and lines of our times beside those of `libraries`, wherever we and the last were
    measured.

    "ratio" is our time divided by that of the last.
    """
    *_, last = libraries
    there = {(row["case"], row["what"], row["library"]): row for row in rows}
    both = [key[:2] for key in there if key[2] == OURS and (*key[:2], last) in there]
    lines = [
        [
            case,
            PASSES[what],
            *(_ms(there[x]) if (x := (case, what, name)) in there else "" for name in libraries),
            f"{there[case, what, OURS]['ms'] / there[case, what, last]['ms']:.2f}",
        ]
        for case, what in both
        if what in PASSES
    ]
    return ["case", "passes", *libraries.values(), "ratio"], lines


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """The table in Markdown."""
    rule = ["---" if head in TEXTS else "---:" for head in heads]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, rule, *rows])
