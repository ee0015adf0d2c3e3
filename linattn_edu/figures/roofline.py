"""The stages of Gated DeltaNet under the roof of a GPU that is chosen."""

import math
from typing import NamedTuple

from linattn_edu import sources
from linattn_edu.figures.drawing import BLUE, GRAY, ORANGE, line, picture, text

_NVIDIA = "https://www.nvidia.com/"
_PAPERS = "https://images.nvidia.com/aem-dam/Solutions/geforce/"


class GPU(NamedTuple):
    """What a vendor says of a GPU."""

    name: str
    bandwidth: float  # GB/s
    products: float  # dense products of bfloat16 with float32 sums, TFLOP/s
    source: str  # of both
    dtype: str = "bf16"
    reported: str = ""  # its name in a file of results, if that is not NVIDIA and `name`

    @property
    def corner(self) -> float:
        """Operations a byte where the roof becomes flat."""
        return 1e3 * self.products / self.bandwidth


# where a data sheet gives the rate with sparsity, half of it
GPUS = (
    GPU("H200", 4800, 989, _NVIDIA + "en-us/data-center/h200/"),
    GPU(
        "H100 SXM", 3350, 989, _NVIDIA + "en-us/data-center/h100/",
        reported="NVIDIA H100 80GB HBM3",
    ),
    GPU(
        "H100 PCIe", 2000, 756,
        "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet",
    ),
    GPU("B200", 8000, 2250, "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"),
    GPU(
        "A100 80 GB SXM", 2039, 312,
        _NVIDIA + "content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "a100-80gb-datasheet-update-nvidia-us-1521051-r2-web.pdf",
    ),
    GPU(
        "A100 40 GB", 1555, 312,
        _NVIDIA + "content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "a100-80gb-datasheet-update-nvidia-us-1521051-r2-web.pdf",
    ),
    GPU("L40S", 864, 362, _NVIDIA + "en-us/data-center/l40s/"),
    GPU("L4", 300, 121, _NVIDIA + "en-us/data-center/l4/"),
    GPU(
        "A10", 600, 125,
        _NVIDIA + "content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf",
    ),
    GPU("RTX 5090", 1792, 209.5, _PAPERS + "blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"),
    GPU("RTX 4090", 1008, 165.2, _PAPERS + "ada/nvidia-ada-gpu-architecture.pdf"),
    GPU(
        "RTX 3090", 936, 71,
        _NVIDIA + "content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf",
    ),
    GPU(
        "T4", 300, 65,
        _NVIDIA + "content/dam/en-zz/Solutions/Data-Center/tesla-t4/"
        "t4-tensor-core-datasheet-951643.pdf",
        "fp16",
    ),
)  # fmt: skip
CASE = "gdn_train"
STAGES = (
    "solve", "wy", "state", "output", "intra_chunk", "scan", "output_bwd", "state_bwd", "wy_bwd",
)  # fmt: skip
LABEL = "Stages of Gated DeltaNet under a roofline"


class Bound(NamedTuple):
    """A stage on a GPU."""

    stage: str
    intensity: float  # operations a byte
    bytes_ms: float
    products_ms: float
    measured_ms: float | None


def bounds(data: dict, gpu: GPU) -> list[Bound]:
    """The two bounds of each stage, and its time where it was measured on this GPU.

    Args:
        data: Results of ``python -m benchmarks``, with the bytes and operations of each stage.
    """
    rows = {r["what"]: r for r in data["rows"] if r["case"] == CASE and "ms" in r}
    found = []
    for stage in STAGES:
        row = rows[f"stage:{stage}"]
        found.append(
            Bound(
                stage,
                row["flops"] / row["bytes"],
                row["bytes"] / gpu.bandwidth / 1e6,
                row["flops"] / gpu.products / 1e9,
                row["ms"] if data["gpu"] == (gpu.reported or f"NVIDIA {gpu.name}") else None,
            )
        )
    return found


def figure(*results: dict) -> tuple[list[tuple[str, str]], str, tuple[str, list[str]]]:
    """A frame for each GPU, with what was measured on it; results: as of `bounds`."""
    shown = []
    for gpu in GPUS:
        named = gpu.reported or f"NVIDIA {gpu.name}"
        data = next((x for x in results if x["gpu"] == named), results[0])
        found = bounds(data, gpu)
        slow = [b.stage for b in found if b.products_ms > b.bytes_ms]
        waits = f"products bound {_listed(slow)}, bytes the others" if slow else "bytes bound all"
        caption = (
            f"{gpu.bandwidth:g} GB/s and {gpu.products:g} TFLOP/s in {gpu.dtype}, as its vendor "
            f"says; the corner is at {gpu.corner:.0f} operations a byte. "
            f"Of the two bounds, {waits}."
        )
        if found[0].measured_ms is None:
            caption += " These are bounds; nothing was measured here."
        else:
            caption += (
                f" Hollow squares are measured ({data['date']}); a stage is below the roof by the "
                "factor by which it misses its bound."
            )
            rows = [r for r in data["rows"] if r["case"] == CASE and r["what"][6:] in STAGES]
            if note := sources.note(rows, data["date"]):
                caption += f" {note.removeprefix(sources.MARK).strip()}"
        shown.append((_frame(gpu, found), caption))
    return shown, LABEL, ("GPU", [gpu.name for gpu in GPUS])


def table() -> str:
    """The rates of the GPUs with their sources, as MyST text."""
    lines = ["| GPU | GB/s | TFLOP/s | corner | source |", "|---|--:|--:|--:|---|"]
    for gpu in GPUS:
        note = "" if gpu.dtype == "bf16" else f" ({gpu.dtype})"
        lines.append(
            f"| {gpu.name} | {gpu.bandwidth:g} | {gpu.products:g}{note} | {gpu.corner:.0f} | "
            f"[NVIDIA]({gpu.source}) |"
        )
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 410, 12, 216
_X, _Y = (8, 600), (1, 3000)  # operations a byte, TFLOP/s


def _x(intensity: float) -> float:
    share = math.log(intensity / _X[0]) / math.log(_X[1] / _X[0])
    return _LEFT + share * (_RIGHT - _LEFT)


def _y(rate: float) -> float:
    share = math.log(rate / _Y[0]) / math.log(_Y[1] / _Y[0])
    return _BOTTOM - share * (_BOTTOM - _TOP)


def _frame(gpu: GPU, found: list[Bound]) -> str:
    faint = ' stroke-opacity="0.3"'
    parts = []
    for rate in (1, 10, 100, 1000):
        parts.append(line([(_LEFT, _y(rate)), (_RIGHT, _y(rate))], 0.8, faint))
        parts.append(text(_LEFT - 5, _y(rate) + 4, str(rate), "end", small=True))
    for intensity in (10, 30, 100, 300):
        parts.append(line([(_x(intensity), _TOP), (_x(intensity), _BOTTOM)], 0.8, faint))
        parts.append(text(_x(intensity), _BOTTOM + 15, str(intensity), small=True))
    parts.append(text(_LEFT + 4, _TOP + 10, "TFLOP/s", "start", small=True))
    parts.append(text(_RIGHT, _BOTTOM + 29, "operations a byte", "end", small=True))
    slope = [(_x(i), _y(i * gpu.bandwidth / 1e3)) for i in (_X[0], gpu.corner)]
    parts.append(line([*slope, (_RIGHT, slope[1][1])], 2.2))
    has = found[0].measured_ms is not None
    titles = ["bound by", "bytes", "products", *(["measured"] if has else [])]
    columns = (190, 258, 330, 410)
    for x, title in zip(columns, titles, strict=False):
        parts.append(text(x, 268, title, "end", small=True))
    parts.append(text(6, 268, "ms", "start", small=True))
    for i, b in enumerate(found):
        tag = chr(ord("a") + i)
        floor = max(b.bytes_ms, b.products_ms)
        flops = b.intensity * b.bytes_ms * gpu.bandwidth / 1e3  # TFLOP/s times ms
        x, y = _x(b.intensity), _y(flops / floor)
        fill = ORANGE if b.products_ms > b.bytes_ms else BLUE
        parts.append(f'<circle cx="{x:.4g}" cy="{y:.4g}" r="4.5" fill="{fill}"/>')
        up = -9 if i % 2 else -22  # neighbours at two heights
        parts.append(text(round(x, 1), round(y + up, 1), tag, small=True))
        if has:
            y = _y(flops / b.measured_ms)
            parts.append(
                f'<rect x="{x - 4:.4g}" y="{y - 4:.4g}" width="8" height="8" fill="none" '
                f'stroke="{GRAY}" stroke-width="2"/>'
            )
        y = 286 + 17 * i
        parts.append(text(6, y, f"{tag}  {b.stage}", "start", small=True))
        by = "products" if b.products_ms > b.bytes_ms else "bytes"
        cells = [by, *(f"{ms:.3f}" for ms in b[2:] if ms is not None)]
        for at, cell in zip(columns, cells, strict=False):
            parts.append(text(at, y, cell, "end", small=True, bold=cell == by))
    said = "; ".join(f"{b.stage} {max(b.bytes_ms, b.products_ms):.3f} ms" for b in found)
    return picture(parts, 290 + 17 * len(found), f"{LABEL}, {gpu.name}. Bounds: {said}")
