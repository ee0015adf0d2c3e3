"""What the chapters share: set-up, the pipeline map, source listings and measured tables."""

import html
import importlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from linattn_edu import measurements, sources, tables
from linattn_edu.figures import speedup
from linattn_edu.measurements import timed
from linattn_edu.pipeline import (
    BACKWARD,
    CP_BACKWARD,
    CP_STAGES,
    KDA_BACKWARD,
    KDA_STAGES,
    SSD_BACKWARD,
    SSD_STAGES,
    STAGES,
    pipeline_svg,
)
from linattn_edu.steps import steps_html
from linattn_edu.testing import assert_close

HASH_SALT = "linattn_edu"
# chapters/data/<name>_<card>.json
RESULTS, KDA_RESULTS, SSD_RESULTS = "gdn", "kda", "ssd"
LADDERS = "rungs"
WIDTH = 76  # letters of a line of output that fit beside two sidebars


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
    device = choose_device()
    torch.manual_seed(seed)
    _inline_svg()
    return device


def choose_device() -> torch.device:
    """The device of `setup`, with TRITON_INTERPRET=1 set where it is the CPU.

    Raises:
        RuntimeError: as in `setup`.
    """
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (7, 5):
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    if _imported_for_compilation():
        raise RuntimeError(
            "triton was imported before teaching.setup() and without TRITON_INTERPRET=1, so "
            "its kernels need a GPU and there is none: restart the kernel of the notebook "
            "and run teaching.setup() first"
        )
    return torch.device("cpu")


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


def pipeline_map(lit: str | None = None) -> None:
    """Show pipeline_svg(lit) in the notebook; print its title elsewhere."""
    stages = "gate_cumsum, solve -> wy -> state -> output -> o"
    if lit in BACKWARD or lit in KDA_BACKWARD:
        stages = f"do -> {' -> '.join(BACKWARD if lit in BACKWARD else KDA_BACKWARD)} -> dg"
    elif lit in KDA_STAGES and lit not in STAGES:
        stages = f"g -> {' -> '.join(KDA_STAGES)} -> o"
    elif lit in SSD_BACKWARD:
        stages = f"dy -> {' -> '.join(SSD_BACKWARD)} -> ddt"
    elif lit in ("ssd", "selective_state_update", *SSD_STAGES):
        stages = f"dt -> {' -> '.join(SSD_STAGES)} -> out"
    elif lit in CP_STAGES:
        stages = "a rank of several: x -> cp_conv -> piece_map -> gather -> cp_merge -> state -> o"
    elif lit in CP_BACKWARD:
        stages = "a rank of several: do -> piece_map_bwd -> gather -> cp_merge_bwd -> state_bwd"
    title = f"linattn_edu pipeline: {stages}"
    _display(title + (f"   [here: {lit}]" if lit else ""), html_text=pipeline_svg(lit))


def steps(
    frames: Sequence[tuple[str, str]],
    label: str,
    choices: tuple[str, Sequence[str]] | None = None,
) -> None:
    """Show a figure that is gone through step by step; print its captions elsewhere.

    Args:
        frames: SVG text and caption of each step.  label: What the steps are of.
        choices: What is chosen, and its names, each of which has as many frames.
    """
    plain = [label, *(f"{i}. {caption}" for i, (_, caption) in enumerate(frames, 1))]
    _display("\n".join(plain), html_text=steps_html(frames, label, choices))


def interactive(name: str, *given) -> None:
    """Show a figure of linattn_edu.figures; print its captions elsewhere.

    Args:
        name: Of its module.  given: What its function figure takes.
    """
    steps(*_figure_of(name)(*given))


def _figure_of(name: str) -> Callable:
    return importlib.import_module(f"linattn_edu.figures.{name}").figure


# ---- checks


def agreement(checks: Iterable[tuple[str, torch.Tensor, torch.Tensor, float]]) -> None:
    """Assert that results agree, and show one line over a folded table of all of them.

    Args:
        checks: Name, result, what it should be, and the tolerance of their relative RMS error, as
            ``testing.assert_close`` takes them.
    Raises:
        AssertionError: one does not agree; the lines before it are not shown.
    """
    lines = []
    for name, got, want, tol in checks:
        assert_close(name, got, want, tol)
        lines.append(f"{name:<32} OK  <= {tol:.0e}")
    summary, table = f"{len(lines)} checks pass  OK", "\n".join(lines)
    print(summary)
    body = f"<details><summary>all of them</summary><pre>{html.escape(table)}</pre></details>"
    _display(table, html_text=body)


# ---- source listings


def show_source(fn: Callable, first: str | None = None, last: str | None = None) -> None:
    """Show the shipped source of a function, a class or a ``@triton.jit`` kernel, highlighted.

    Args:
        fn: What to show; a kernel is unwrapped.
        first, last: Text of the first and of the last line of a part, if only that is to be shown.
            The line found is the first one that has the text.
    """
    fn = inspect.unwrap(getattr(fn, "fn", fn))
    source = inspect.getsource(fn).rstrip()
    head = "`" + "/".join(fn.__module__.split(".")) + ".py`"
    if first is not None and last is not None:
        lines = source.splitlines()
        start = _line_with(first, lines)
        end = start + _line_with(last, lines[start:])
        source = textwrap.dedent("\n".join(lines[start : end + 1]))
        head += f", a part of `{fn.__name__}`"
    _display(source, markdown=f"{head}\n\n```python\n{source}\n```")


def _line_with(text: str, lines: Sequence[str]) -> int:
    for number, line in enumerate(lines):
        if text in line:
            return number
    raise ValueError(f"no line has {text!r}")


# ---- measured results


def measured(name: str = RESULTS) -> dict:
    """The measured results ``chapters/data/<name>.json`` of ``python -m benchmarks``.

    Args:
        name: Of a file; or without the card at its end: then that of the first card there is.
    Returns:
        {"gpu", "torch", "triton", "date", "rows": [{"case", "library", "what", "ms", "bytes",
        "flops", "floor_ms", "date", "sources", ...}]}; "what" is "forward", "forward_backward",
        "decode", "decode_inplace", "decode_graph" or "stage:<name>".
    Raises:
        FileNotFoundError: nothing has been measured under this name.
    """
    return measurements.load(name)


def measured_stage(stage: str, name: str | None = None) -> None:
    """Show what a stage takes on the GPU: a table of its cases beside their floors.

    Args:
        stage: Name of the stage.  name: Of the file of results; if None, that of Gated DeltaNet,
            or of Kimi Delta Attention or Mamba-2 for a stage which it alone has.
    """
    if name is None:
        shared = (*STAGES, *BACKWARD)
        only_kda = stage in (*KDA_STAGES, *KDA_BACKWARD) and stage not in shared
        only_ssd = stage in (*SSD_STAGES, *SSD_BACKWARD)
        name = KDA_RESULTS if only_kda else SSD_RESULTS if only_ssd else RESULTS
    what = f"stage:{stage}"
    _tables(name, lambda data: timed(data, what), tables.stage_cells, f"Stage {stage}.")


def measured_ladder(chapter: str, *whys: dict[str, str], name: str = LADDERS) -> None:
    """Show what each rung of a chapter's kernel ladder takes, on the GPU that it was last timed on.

    Args:
        chapter: Its file's name.  whys: Of each rung, in a clause, why it is faster or slower; one
            for each task of the ladder, whose times are followed by how many times as fast as its
            first rung they are.
        name: Of the file of results, or without the card.
    """
    named = [rung for why in whys for rung in why]
    latest = measurements.last_of_chapter(name, chapter) or name
    rows_of = lambda data: [
        row
        for row in data["rows"]
        if row.get("chapter") == chapter and row.get("of", row["rung"]) in named
    ]
    notes = lambda rows: _ladder_notes(rows, named)
    _tables(latest, rows_of, lambda rows: tables.ladder_cells(rows, whys), notes)


def _ladder_notes(rows: list[dict], shown: Iterable[str]) -> str:
    """Sizes in words, those of each dtype or of its rungs; then why rungs and other libraries were
    refused."""
    sizes, rungs, reasons, others = {}, {}, {}, []
    old = {row["rung"] for row in rows if sources.changed(row)}
    for row in sorted(rows, key=lambda row: (row["dtype"], row["order"])):
        if "library" in row:
            if "refused" in row:
                off = (
                    row["refused"].removeprefix("Wrong: ").removesuffix(" from the shipped kernel")
                )
                short = tables.SHORT[row["dtype"]]
                others.append(f"{tables.peer(row)} in {short}: {off} from ours, not timed.")
        elif "shape" in row:
            short, size = tables.SHORT[row["dtype"]], _sizes(row["shape"])
            sizes.setdefault(size, {})[short] = None
            rungs.setdefault(short, {}).setdefault(size, []).append(row["rung"])
        else:
            why = row["refused"].split(": ", 1)[-1]  # without the class of the error
            verb = "refused" if row["rung"] in old else "refuses"
            reasons.setdefault((verb, why), {})[row["rung"]] = None

    def named(short: str, size: str) -> str:
        return short if len(rungs[short]) == 1 else f"{short} of {', '.join(rungs[short][size])}"

    notes = [
        f"{' and '.join(named(short, size) for short in dtypes)}: {size}."
        for size, dtypes in sizes.items()
    ]
    notes += [f"Triton {verb} {', '.join(r)}: {why}." for (verb, why), r in reasons.items()]
    notes += others
    missing = [rung for rung in shown if all(row["rung"] != rung for row in rows)]
    notes += [f"Not measured yet: {', '.join(missing)}."] if missing else []
    return " ".join(notes)


def _sizes(shape: dict[str, int]) -> str:
    """Letters and numbers, K and V together where they are equal; tokens of a chunk are C where
    there are keys of length K, and L in Part IV."""
    pairs = {"L" if k == "C" and "K" not in shape else k: n for k, n in shape.items()}
    if "K" in pairs and pairs["K"] == pairs.get("V"):
        pairs = {"K = V" if k == "K" else k: n for k, n in pairs.items() if k != "V"}
    texts = (f"{names} = {n}" for names, n in pairs.items())
    return ", ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in texts)


def measured_forward(name: str = RESULTS) -> None:
    """Show the forward pass beside other libraries, measured in one run on one GPU.

    Cases with beta up to 2 are on the page Performance alone.

    Args:
        name: Of the file of results.
    """
    _tables(name, lambda data: _usual(data, "forward"), tables.forward_cells, "Forward pass.")


def measured_backward(name: str = RESULTS) -> None:
    """Show forward and backward pass together, as measured_forward.

    Args:
        name: Of the file of results.
    """
    both = lambda data: _usual(data, "forward_backward")
    _tables(name, both, tables.backward_cells, "Forward and backward pass.")


def _usual(data: dict, what: str) -> list[dict]:
    """The timed rows of cases whose beta is at most 1; benchmarks.cases names the others so."""
    return [row for row in timed(data, what) if "_beta2" not in row["case"]]


def measured_ranks(case: str = "strong", gate: str = "trained", name: str = "cp") -> None:
    """Show what several GPUs take beside one, and how many times as fast they are.

    Args:
        case, gate: As in linattn_edu.figures.speedup.speedups.  name: Of the file of results.
    """
    caption = {"strong": "The same tokens", "weak": f"{speedup.WEAK} tokens for each GPU"}.get(
        case, f"{speedup.SHORT} tokens for each GPU"
    )
    caption += ", no gates." if gate == "none" else "."
    caption += " faster: how many times, alone; queued in a row; in a CUDA graph. message: the"
    caption += " forward pass's, ms."
    rows_of = lambda data: speedup.paired(data["rows"], case, gate)
    _tables(name, rows_of, lambda rows: speedup.cells(rows, case, gate), caption)


def measured_decode(name: str = RESULTS) -> None:
    """Show the decoding of one token of many sequences, as measured_forward.

    Args:
        name: Of the file of results.
    """
    token = lambda data: timed(data, *tables.DECODE)
    _tables(name, token, tables.decode_cells, "One token of each sequence.")


def measured_steps(name: str = "steps", guesses: bool = False) -> None:
    """Show what a token of a layer and of a model takes, called and as a captured step.

    Args:
        name: Of the file of results, or without the card.  guesses: Whether of calls with guesses.
    """

    def rows_of(data: dict) -> list[dict]:
        return [row for row in data["rows"] if (row["guesses"] > 0) == guesses]

    def caption(rows: list[dict]) -> str:
        each = f", {rows[0]['right']} of {rows[0]['guesses']} guesses right" if guesses else ""
        return f"A token of each sequence{each}."

    _tables(name, rows_of, tables.step_cells, caption)


def _tables(name: str, rows_of: Callable, cells: Callable, caption: str | Callable) -> None:
    """A table of some rows for each card that has them, else that there are none.

    Args:
        name: Of the file of results, or without the card.  rows_of: The rows of a file.
        cells: Of a table of rows.  caption: Or what makes it of the rows; its end is
            ``measurements.provenance``.
    """
    shown = [(data, rows_of(data)) for data in measurements.every(name).values()]
    for data, rows in shown:
        if rows:
            words = caption if isinstance(caption, str) else caption(rows)
            _table(*cells(rows), f"{words} {measurements.provenance(data, rows)}")
    if not any(rows for _, rows in shown):
        print("not measured yet")


def measured_where(data: dict, rows: Iterable[dict] | None = None) -> None:
    """Print where, with what and when results were measured, and whether kernels changed since.

    For cells of a chapter that show results themselves; their output is not to be compared.

    Args:
        data: As `measured` returns.  rows: Those that are shown, if not all.
    """
    print(textwrap.fill(measurements.provenance(data, rows), WIDTH))


def _table(heads: list[str], rows: Iterable[list[str]], caption: str) -> None:
    """Show a table: HTML in a notebook, aligned text elsewhere."""
    rows = list(rows)
    widths = [max(len(line[i]) for line in [heads, *rows]) for i in range(len(heads))]
    texts = {i for i, head in enumerate(heads) if head in tables.TEXTS}

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
    from linattn_edu.pages import write

    write(Path(__file__).resolve().parents[1])
