"""What the chapters share: set-up, the pipeline map, source listings and measured tables."""

import html
import importlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from linattn_edu import tables
from linattn_edu.pipeline import (
    BACKWARD,
    CP_BACKWARD,
    CP_STAGES,
    KDA_BACKWARD,
    KDA_STAGES,
    SSD_BACKWARD,
    SSD_STAGES,
    STAGES,
    backward_svg,
    cp_backward_svg,
    cp_svg,
    kda_backward_svg,
    kda_svg,
    pipeline_svg,
    ssd_backward_svg,
    ssd_svg,
)
from linattn_edu.steps import steps_html

HASH_SALT = "linattn_edu"
# chapters/data/<name>.json
RESULTS, KDA_RESULTS, SSD_RESULTS = "gdn_h200", "kda_h200", "ssd_h200"
LADDERS = "rungs_h200"
# key of the results -> distribution
PEERS = {
    "fla": "fla-core",
    "flash_qla": "flash-qla",
    "flashinfer": "flashinfer-python",
    "attn_gym": "attn_gym",
    "cudnn": "nvidia-cudnn-frontend",
    "mamba_ssm": "mamba_ssm",
}
SCALING = (
    "One layer with 16 heads and K = V = 128, from 256 to 32768 tokens: the recurrence token by "
    "token, the chunked form, and the quadratic form that keeps no state "
    "({doc}`/chapters/06_output`)."
)


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

    Returns:
        {"gpu", "torch", "triton", "date", "rows": [{"case", "library", "what", "ms", "bytes",
        "flops", "floor_ms", ...}]}; "what" is "forward", "forward_backward", "decode",
        "decode_inplace", "decode_graph" or "stage:<name>".
    Raises:
        FileNotFoundError: nothing has been measured under this name.
    """
    roots = [Path.cwd(), *Path.cwd().parents, *Path(__file__).resolve().parents]
    for root in roots:
        path = root / "chapters" / "data" / f"{name}.json"
        if path.is_file():
            return json.loads(path.read_text())
    raise FileNotFoundError(f"chapters/data/{name}.json: not measured yet")


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
    data = _load(name)
    rows = _rows(data, f"stage:{stage}")
    if rows:
        _table(*tables.stage_cells(rows), f"Stage {stage}. {_provenance(data)}")
    else:
        print("not measured yet")


def measured_ladder(chapter: str, name: str = LADDERS) -> None:
    """Show what each rung of a chapter's kernel ladder takes on the GPU.

    Args:
        chapter: Its file's name.  name: Of the file of results.
    """
    data = _load(name)
    rows = [r for r in data["rows"] if r.get("chapter") == chapter] if data else []
    if rows:
        _table(*tables.ladder_cells(rows), f"{_ladder_notes(rows)} {_provenance(data)}")
    else:
        print("not measured yet")


def _ladder_notes(rows: list[dict]) -> str:
    """Sizes in words, those of each dtype or of its rungs; then why rungs were refused."""
    sizes, rungs, reasons = {}, {}, {}
    for row in sorted(rows, key=lambda row: (row["dtype"], row["order"])):
        if "shape" in row:
            short, size = tables.SHORT[row["dtype"]], _sizes(row["shape"])
            sizes.setdefault(size, {})[short] = None
            rungs.setdefault(short, {}).setdefault(size, []).append(row["rung"])
        else:
            why = row["refused"].split(": ", 1)[-1]  # without the class of the error
            reasons.setdefault(why, {})[row["rung"]] = None

    def named(short: str, size: str) -> str:
        return short if len(rungs[short]) == 1 else f"{short} of {', '.join(rungs[short][size])}"

    notes = [
        f"{' and '.join(named(short, size) for short in dtypes)}: {size}."
        for size, dtypes in sizes.items()
    ]
    notes += [f"Triton refuses {', '.join(rungs)}: {why}." for why, rungs in reasons.items()]
    return " ".join(notes)


def _sizes(shape: dict[str, int]) -> str:
    """Letters and numbers, K and V together where they are equal."""
    pairs = dict(shape)
    if "K" in pairs and pairs["K"] == pairs.get("V"):
        pairs = {"K = V" if k == "K" else k: n for k, n in pairs.items() if k != "V"}
    texts = (f"{names} = {n}" for names, n in pairs.items())
    return ", ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in texts)


def measured_forward(name: str = RESULTS) -> None:
    """Show the forward pass beside other libraries, measured in one run on one GPU.

    Args:
        name: Of the file of results.
    """
    _measured_calls(("forward",), tables.forward_cells, "Forward pass.", name)


def measured_backward(name: str = RESULTS) -> None:
    """Show forward and backward pass together, as measured_forward.

    Args:
        name: Of the file of results.
    """
    whats = ("forward_backward",)
    _measured_calls(whats, tables.backward_cells, "Forward and backward pass.", name)


def measured_decode(name: str = RESULTS) -> None:
    """Show the decoding of one token of many sequences, as measured_forward.

    Args:
        name: Of the file of results.
    """
    _measured_calls(tables.DECODE, tables.decode_cells, "One token of each sequence.", name)


def _measured_calls(whats: Iterable[str], cells: Callable, caption: str, name: str) -> None:
    data = _load(name)
    rows = _rows(data, *whats)
    if rows:
        _table(*cells(rows), f"{caption} {_provenance(data)}")
    else:
        print("not measured yet")


def _rows(data: dict | None, *whats: str) -> list[dict]:
    """The timed rows of `whats`; of some calls only the first may have been measured."""
    return [row for row in data["rows"] if row["what"] in whats and "ms" in row] if data else []


def performance_page(name: str = RESULTS, figures: Path | None = None, under: int = 0) -> str:
    """The results as MyST text, included by the book's page on performance.

    Args:
        name: Of the file of results.  figures: Folder of the figures to show where they exist.
        under: How many levels deeper the headings are than those of a section.
    """
    section, suffix = "##" + "#" * under, "" if name == RESULTS else f"_{name}"
    data = _load(name)

    def drawn(figure: str, alt: str) -> str:
        return _figure(figures, figure + suffix, alt)

    if data is None:
        return "Nothing has been measured yet.\n"
    parts = [f"Measured on {_provenance(data)}"]
    if "bytes_per_s" in data and "flops_per_s" in data:
        parts[0] += (
            f" Floors are reckoned with {data['bytes_per_s'] / 1e12:.1f} TB/s "
            f"and {data['flops_per_s'] / 1e12:.0f} TFLOP/s."
        )
    if rows := _rows(data, "forward"):
        parts += [f"{section} The forward pass", drawn("forward", "Time of the forward pass")]
        parts.append(tables.markdown(*tables.forward_cells(rows)))
    if rows := _rows(data, "forward_backward"):
        parts.append(f"{section} Forward and backward")
        parts.append(drawn("backward", "Time of the forward and the backward pass"))
        parts.append(tables.markdown(*tables.backward_cells(rows)))
        parts.append("Errors of the output and of each gradient:")
        parts.append(tables.markdown(*tables.gradient_cells(rows)))
    if rows := _rows(data, *tables.DECODE):
        parts += [f"{section} Decoding", tables.markdown(*tables.decode_cells(rows))]
    if scaling := drawn("scaling", "Time against the length of the sequence"):
        parts += [f"{section} Three forms of one layer", SCALING, scaling]
    stages = dict.fromkeys(r["what"] for r in data["rows"] if r["what"].startswith("stage:"))
    shown = [(what.removeprefix("stage:"), _rows(data, what)) for what in stages]
    if shown:
        parts += [f"{section} The stages", drawn("roofline", "Stages against the roofline")]
        there = "Stages of the backward pass against the roofline"
        parts.append(drawn("roofline_backward", there))
    for stage, rows in shown:
        parts += [f"{section}# {stage}", tables.markdown(*tables.stage_cells(rows))]
    return "\n\n".join(filter(None, parts)) + "\n"


README_PART = ("<!-- measured: written by python -m linattn_edu.teaching -->", "<!-- end -->")
README_SSD = (
    "<!-- Mamba-2, measured: written by python -m linattn_edu.teaching -->",
    "<!-- end -->",
)


def readme_with_results(
    readme: str,
    name: str = RESULTS,
    marks: tuple[str, str] = README_PART,
    libraries: dict[str, str] = tables.BESIDE,
) -> str:
    """The README's text with our times beside other libraries' between two marks.

    Args:
        readme: The text.  name: Of the file of results; without it there is nothing between them.
        marks: First and last line of the part.  libraries: As in tables.beside_cells.
    """
    data, (begin, end), part = _load(name), marks, ""
    if data is not None:
        table = tables.markdown(*tables.beside_cells(_rows(data, *tables.PASSES), libraries))
        part = f"{table}\n\nInputs in bfloat16; {_provenance(data)}\n"
    before, rest = readme.split(begin)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n{part}{end}{after}"


def readme_with_all(readme: str) -> str:
    """The README's text with every measured part."""
    readme = readme_with_results(readme)
    return readme_with_results(readme, SSD_RESULTS, README_SSD, tables.BESIDE_SSD)


def _figure(figures: Path | None, name: str, alt: str) -> str:
    there = figures is not None and (figures / f"{name}.svg").is_file()
    # the class says that the drawing can be read on a dark page as it is
    image = f"```{{image}} _static/figures/{name}.svg\n:alt: {alt}\n:class: dark-light\n```"
    return image if there else ""


def _load(name: str) -> dict | None:
    try:
        return measured(name)
    except FileNotFoundError:
        return None


def _provenance(data: dict) -> str:
    versions = [f"torch {data['torch']}", f"Triton {data['triton']}"]
    versions += [f"{name} {data[key]}" for key, name in PEERS.items() if data.get(key)]
    return f"{data['gpu']}, {', '.join(versions)}, {data['date']}."


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


def page_parts(figures: Path) -> dict[str, str]:
    """The files in `figures` that the book's pages include, by name: drawn, measured or shipped."""
    from linattn_edu.figures import roofline
    from linattn_edu.ops import gdn, kda, ssd

    results = _load(RESULTS)
    return {
        "pipeline.svg": pipeline_svg() + "\n",
        "pipeline_bwd.svg": backward_svg() + "\n",
        "kda_pipeline.svg": kda_svg() + "\n",
        "kda_pipeline_bwd.svg": kda_backward_svg() + "\n",
        "ssd_pipeline.svg": ssd_svg() + "\n",
        "ssd_pipeline_bwd.svg": ssd_backward_svg() + "\n",
        "cp_pipeline.svg": cp_svg() + "\n",
        "cp_pipeline_bwd.svg": cp_backward_svg() + "\n",
        "composition.txt": inspect.getsource(gdn.forward),
        "composition_bwd.txt": inspect.getsource(gdn.backward),
        "kda_composition.txt": inspect.getsource(kda.forward),
        "kda_composition_bwd.txt": inspect.getsource(kda.backward),
        "ssd_composition.txt": inspect.getsource(ssd.forward),
        "ssd_composition_bwd.txt": inspect.getsource(ssd.backward),
        "whole_pass.html": steps_html(*_figure_of("whole_pass")()) + "\n",
        "choose_gpu.html": steps_html(*roofline.figure(results)) + "\n" if results else "",
        "gpus.md": roofline.table(),
        "performance.md": performance_page(figures=figures),
        "performance_kda.md": performance_page(KDA_RESULTS, figures, under=1),
        "performance_ssd.md": performance_page(SSD_RESULTS, figures, under=1),
    }


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    folder = root / "book" / "_static" / "figures"
    for file, text in page_parts(folder).items():
        (folder / file).write_text(text, encoding="utf-8")
    readme = root / "README.md"
    text = readme_with_all(readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
