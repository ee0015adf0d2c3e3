"""What is written from the results into the book's pages and the README, card by card."""

import inspect
from pathlib import Path

from linattn_edu import measurements, sources, tables
from linattn_edu.figures import moving, speedup
from linattn_edu.measurements import timed
from linattn_edu.pipeline import (
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

GDN = "gdn"
SCALING = (
    "One layer with 16 heads and K = V = 128, from 256 to 32768 tokens: the recurrence token by "
    "token, the chunked form, and the quadratic form that keeps no state "
    "({doc}`/chapters/06_output`)."
)
README_PART = ("<!-- measured: written by python -m linattn_edu.teaching -->", "<!-- end -->")
README_FRONT = (
    "<!-- front, measured: written by python -m linattn_edu.teaching -->",
    "<!-- end -->",
)
README_SSD = (
    "<!-- Mamba-2, measured: written by python -m linattn_edu.teaching -->",
    "<!-- end -->",
)
README_RANKS = (
    "<!-- several GPUs, measured: written by python -m linattn_edu.teaching -->",
    "<!-- end -->",
)
# files of results with several libraries -> the operator in a sentence
COMPARED = {
    GDN: "Gated DeltaNet",
    "kda": "Kimi Delta Attention",
    "gdn2": "GDN-2",
    "dplr": "the general delta rule",
}
# key of the results -> the library in a sentence
NAMES = {
    "fla": "flash-linear-attention",
    "flash_qla": "FlashQLA",
    "flashinfer": "FlashInfer",
    "cudnn": "cuDNN's KDA",
    "attn_gym": "attention-gym",
}


# ---- the front


def front() -> str:
    """In how many calls on each card no library is faster than ours, and where one is: Markdown."""
    cards = dict.fromkeys(
        data["gpu"] for name in COMPARED for data in measurements.every(name).values()
    )
    return "\n\n".join(map(_fastest, cards)) + "\n" if cards else "Nothing has been measured yet.\n"


def _fastest(gpu: str) -> str:
    slowest = {}  # call -> our time divided by that of the fastest library, and the library
    found = ratios_of(gpu)
    for peer, ratios in found.items():
        for call, ratio in ratios.items():
            slowest[call] = max(slowest.get(call, (0.0, "")), (ratio, peer))
    behind = {call: x for call, x in slowest.items() if x[0] > 1}
    ahead = len(slowest) - len(behind)
    files = [
        (name, data)
        for name in COMPARED
        for data in measurements.every(name).values()
        if data["gpu"] == gpu and data["rows"]
    ]
    *others, last = (COMPARED[name] for name, _ in files)
    operators = f"{', '.join(others)} and {last}" if others else last
    text = (
        f"**{ahead} of {len(slowest)} calls** of {operators} that were measured on an {gpu}, in "
        f"training, on prompts and in decoding, are no slower with the kernels of this book than "
        f"with the fastest of the other libraries, "
        f"{', '.join(NAMES[peer] for peer in found)}."
    )
    if behind:
        longer = ", ".join(
            f"{tables.PASSES.get(what, what)} of {case} takes {100 * (ratio - 1):.0f} % longer "
            f"than with {NAMES[peer]}"
            for (case, what, _), (ratio, peer) in behind.items()
        )
        text += f" In the rest, {longer}."
    rows = [
        {"date": data["date"], **row}
        for _, data in files
        for row in timed(data, *tables.PASSES, "decode")
        if row["library"].startswith(tables.OURS)
    ]
    return " ".join(filter(None, [text, sources.note(rows, "")]))


def readme_with_front(readme: str) -> str:
    """The README's text with `front`."""
    return _between(readme, README_FRONT, [front()])


# ---- the page on performance


def performance_page(name: str = GDN, figures: Path | None = None, under: int = 0) -> str:
    """The results as MyST text, included by the book's page on performance; a section a card.

    Args:
        name: Of the file of results, or without the card.  figures: Folder of the figures to show
            where they exist.  under: How many levels deeper the headings are than those of a
            section.
    """
    found = measurements.every(name)
    if not found:
        return "Nothing has been measured yet.\n"
    if len(found) == 1:
        return "".join(_of_card(stem, data, figures, under) for stem, data in found.items())
    heading = "##" + "#" * under
    return "\n".join(
        f"{heading} {data['gpu']}\n\n{_of_card(stem, data, figures, under + 1)}"
        for stem, data in found.items()
    )


def ladders_page() -> str:
    """The rungs of all kernel ladders as MyST text, a column a card and dtype."""
    every = list(measurements.every("rungs").values())
    told = [f"{measurements.provenance(data)}" for data in every]
    return "\n\n".join([*told, tables.markdown(*tables.ladders_cells(every))]) + "\n"


def tritons_page() -> str:
    """Whole calls with one Triton and another as MyST text, a table a card."""
    parts = []
    for data in measurements.every("tritons").values():
        parts += [measurements.provenance(data), tables.markdown(*tables.tritons_cells(data))]
    return "\n\n".join(parts) + "\n"


def _of_card(stem: str, data: dict, figures: Path | None, under: int) -> str:
    section, suffix = "##" + "#" * under, measurements.suffix(stem)

    def drawn(figure: str, alt: str) -> str:
        return _figure(figures, figure + suffix, alt)

    parts = [f"Measured on {measurements.provenance(data)}"]
    if "bytes_per_s" in data and "flops_per_s" in data:
        parts[0] += (
            f" Floors are reckoned with {data['bytes_per_s'] / 1e12:.1f} TB/s "
            f"and {data['flops_per_s'] / 1e12:.0f} TFLOP/s."
        )
    if rows := timed(data, "forward"):
        parts += [f"{section} The forward pass", drawn("forward", "Time of the forward pass")]
        parts.append(tables.markdown(*tables.forward_cells(rows)))
    if rows := timed(data, "forward_backward"):
        parts.append(f"{section} Forward and backward")
        parts.append(drawn("backward", "Time of the forward and the backward pass"))
        parts.append(tables.markdown(*tables.backward_cells(rows)))
        parts.append("Errors of the output and of each gradient:")
        parts.append(tables.markdown(*tables.gradient_cells(rows)))
        heads, lines = tables.alike_cells(rows)
        if lines:
            parts.append("The same with keys alike, by the cosine between two of them:")
            parts.append(tables.markdown(heads, lines))
    if rows := timed(data, *tables.DECODE):
        parts += [f"{section} Decoding", tables.markdown(*tables.decode_cells(rows))]
    if scaling := drawn("scaling", "Time against the length of the sequence"):
        parts += [f"{section} Three forms of one layer", SCALING, scaling]
    stages = dict.fromkeys(r["what"] for r in data["rows"] if r["what"].startswith("stage:"))
    shown = [(what.removeprefix("stage:"), timed(data, what)) for what in stages]
    if shown:
        parts += [f"{section} The stages", drawn("roofline", "Stages against the roofline")]
        there = "Stages of the backward pass against the roofline"
        parts.append(drawn("roofline_backward", there))
    for stage, rows in shown:
        parts += [f"{section}# {stage}", tables.markdown(*tables.stage_cells(rows))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _figure(figures: Path | None, name: str, alt: str) -> str:
    there = figures is not None and (figures / f"{name}.svg").is_file()
    # the class says that the drawing can be read on a dark page as it is
    image = f"```{{image}} _static/figures/{name}.svg\n:alt: {alt}\n:class: dark-light\n```"
    return image if there else ""


# ---- the README


def readme_with_results(
    readme: str,
    name: str = GDN,
    marks: tuple[str, str] = README_PART,
    libraries: dict[str, str] = tables.BESIDE,
    said: bool = False,
) -> str:
    """The README's text with our times beside other libraries', card by card, between two marks.

    Args:
        readme: The text.  name: Of the file of results, or without the card; where there is none
            there is nothing between the marks.  marks: First and last line of the part.
        libraries: As in tables.beside_cells.  said: Whether each card's table follows `speed`.
    """
    parts = []
    for data in measurements.every(name).values():
        rows = timed(data, *tables.PASSES)
        words = [f"On an {data['gpu']}:"]
        if said:
            words = speed(data["gpu"])
        shown = [r for r in rows if r["library"] in libraries]
        table = tables.markdown(*tables.beside_cells(rows, libraries))
        where = f"Inputs in bfloat16; {measurements.provenance(data, shown)}"
        parts.append("\n\n".join(["\n".join(words), table, where]) + "\n")
    return _between(readme, marks, parts)


def _between(readme: str, marks: tuple[str, str], parts: list[str]) -> str:
    """The README's text with these parts between two marks."""
    begin, end = marks
    before, rest = readme.split(begin)
    after = rest.split(end, 1)[1]
    return f"{before}{begin}\n{chr(10).join(parts)}{end}{after}"


def readme_with_ranks(readme: str, name: str = "cp") -> str:
    """The README's text with how many times as fast several GPUs are, card by card.

    Args:
        readme: The text.  name: Of the file of results, or without the card.
    """
    parts = []
    for data in measurements.every(name).values():
        shown = speedup.paired(data["rows"], "strong", "trained")
        shown = [row for row in shown if row["layout"] == "contiguous"]
        table = tables.markdown(*speedup.cells(shown, "strong", "trained"))
        where = f"Inputs in bfloat16; {measurements.provenance(data, shown)}"
        parts.append(f"{table}\n\n{where}\n")
    return _between(readme, README_RANKS, parts)


def readme_with_all(readme: str) -> str:
    """The README's text with every measured part."""
    readme = readme_with_front(readme_with_ranks(readme_with_results(readme, said=True)))
    return readme_with_results(readme, "ssd", README_SSD, tables.BESIDE_SSD)


def speed(gpu: str) -> list[str]:
    """Against each library, in how many calls on a GPU we are faster: the lines of a list."""
    lines = [f"On an {gpu}, linattn_edu is", ""]
    for peer, ratios in ratios_of(gpu).items():
        slower = {call: x for call, x in ratios.items() if x > 1}
        faster = len(ratios) - len(slower)
        many = f"{faster} of {len(ratios)}" if slower else f"all {faster}"
        line = f"- faster than {NAMES[peer]} in {many} calls that were measured"
        longer = [
            f"{tables.PASSES.get(what, what)} of {case} takes {100 * (x - 1):.0f} % longer"
            for (case, what, _), x in slower.items()
        ]
        lines.append(f"{line}{': ' if longer else ''}{', '.join(longer)}")
    return lines


def ratios_of(gpu: str) -> dict[str, dict[tuple[str, str, str], float]]:
    """Library -> call -> our time divided by theirs, over all files of a GPU.

    A call is (case, what, ours): with the promise of a bounded gate ours with it; where ours takes
    none, the faster of theirs counts.
    """
    found = {peer: {} for peer in NAMES}
    for name in COMPARED:
        for data in measurements.every(name).values():
            if data["gpu"] != gpu:
                continue
            rows = [row for row in data["rows"] if "ms" in row]
            ms = {(row["case"], row["what"], row["library"]): row["ms"] for row in rows}
            for (case, what, library), theirs in ms.items():
                peer = library.removesuffix("_safe")
                own = case, what, library.replace(peer, tables.OURS)
                own = own if own in ms else (case, what, tables.OURS)
                if peer in found and own in ms:
                    found[peer][own] = max(found[peer].get(own, 0.0), ms[own] / theirs)
    return {peer: ratios for peer, ratios in found.items() if ratios}


# ---- all that is written


def page_parts(figures: Path) -> dict[str, str]:
    """The files in `figures` that the book's pages include, by name: drawn, measured or shipped."""
    from linattn_edu.figures import roofline, whole_pass
    from linattn_edu.ops import gdn, kda, ssd

    every = measurements.every(GDN).values()
    # of some cards the calls alone were measured
    results = [x for x in every if any(row["what"].startswith("stage:") for row in x["rows"])]
    return {
        "front.html": moving.front(),
        "front.svg": moving.svg(paper=True) + "\n",
        "front.md": front(),
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
        "whole_pass.html": steps_html(*whole_pass.figure()) + "\n",
        "choose_gpu.html": steps_html(*roofline.figure(*results)) + "\n" if results else "",
        "gpus.md": roofline.table(),
        "performance.md": performance_page(figures=figures),
        "performance_kda.md": performance_page("kda", figures, under=1),
        "performance_gdn2.md": performance_page("gdn2", figures, under=1),
        "performance_dplr.md": performance_page("dplr", figures, under=1),
        "performance_ssd.md": performance_page("ssd", figures, under=1),
        "performance_ladders.md": ladders_page(),
        "tritons.md": tritons_page(),
    }


def write(root: Path) -> None:
    """Write the parts of pages, and the README's, below a folder."""
    folder = root / "book" / "_static" / "figures"
    for file, text in page_parts(folder).items():
        (folder / file).write_text(text, encoding="utf-8")
    readme = root / "README.md"
    text = readme_with_all(readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")
