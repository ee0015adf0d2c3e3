"""chunk_gated_delta_rule stage by stage, both passes: what each reads, gives, leaves."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from linattn_edu.figures.drawing import BLUE, ORANGE, picture, rect, text
from linattn_edu.ops import gdn
from linattn_edu.pipeline import backward_svg, pipeline_svg
from linattn_edu.testing import gdn_inputs

CHUNK, K, V = 64, 128, 128  # of the numbers a token and head
TOKENS = 2 * CHUNK
_GIVES = {
    "gate_cumsum": ("gc",),
    "solve": ("A",),
    "wy": ("w", "u"),
    "state": ("h", "v_new", "final state"),
    "output": ("o",),
    "output_bwd": ("dq", "dk", "dv_new", "dgc"),
    "state_bwd": ("dh", "dv_new", "dh0"),
    "wy_bwd": ("dk", "dv", "dbeta", "dgc"),
    "gate_bwd": ("dg",),
}
_ORDER = {
    "state": "The chunks one after the other: each needs the state that the one before it left.",
    "state_bwd": "The chunks one after the other, from the last to the first.",
}
_AT_ONCE = "All chunks at the same time."
_NOTES = {
    ("wy", "backward"): "Once more, as in the forward pass, since w and u were not kept.",
    (
        "state",
        "backward",
    ): "Once more, chunk after chunk: no state lay in memory between the passes.",
    ("output_bwd", "backward"): "All chunks at the same time. dk, dv_new and dgc are parts of "
    "these gradients; later stages add the rest.",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One stage as it ran."""

    stage: str
    way: str  # "forward" or "backward"
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    left: dict[str, int]  # what is needed after it, and its numbers a token and head


def trace() -> list[Step]:
    """The two passes in reference stages, as they run on a sequence of two chunks of one head."""
    calls: list[tuple] = []  # stage, pass, tensors read, tensors given
    names: dict[int, str] = {}

    def recorded(stage: str, run: Callable, *args, **kwargs):
        given = inspect.signature(run).bind(*args, **kwargs).arguments.values()
        reads = [x for x in given if isinstance(x, Tensor)]
        out = run(*args, **kwargs)
        gives = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
        named = zip(_GIVES[stage], gives, strict=False)
        gives = [(n, x) for n, x in named if n not in ("final state", "dh0")]
        names.update({id(x): n for n, x in gives})
        calls.append((stage, way, reads, [x for _, x in gives]))
        return out

    plain = gdn.stages("reference")
    stages = dataclasses.replace(
        plain, **{name: partial(recorded, name, getattr(plain, name)) for name in _GIVES}
    )
    x = gdn_inputs(1, TOKENS, 1, 1, K, V, seed=0)
    inputs = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")}
    names.update({id(y): n for n, y in inputs.items()})
    way = "forward"
    o, _, kept = gdn.forward(stages, *inputs.values(), scale=1.0, chunk_size=CHUNK)
    do = torch.ones_like(o)
    names[id(do)] = "do"
    way = "backward"
    gradients = gdn.backward(stages, *inputs.values(), kept, do, scale=1.0)
    results = [o, *(y for y in gradients if y is not None)]

    steps = []
    for i, (stage, way, reads, gives) in enumerate(calls):
        there = [*inputs.values(), *([do] if way == "backward" else [])]
        there += [y for *_, out in calls[: i + 1] for y in out]
        later = [y for _, _, needed, _ in calls[i + 1 :] for y in needed]
        ours = results if way == "backward" else results[:1]
        needed = {id(y) for y in [*later, *ours]} - ({id(o)} if way == "backward" else set())
        left = {id(y): y for y in there if id(y) in needed}
        steps.append(
            Step(
                stage,
                way,
                tuple(names[id(y)] for y in reads),
                tuple(names[id(y)] for y in gives),
                {names[y]: tensor.numel() // TOKENS for y, tensor in left.items()},
            )
        )
    return steps


LABEL = "chunk_gated_delta_rule, stage by stage"


def figure() -> tuple[list[tuple[str, str]], str]:
    """A frame for each stage: the map with the stage lit, and what is in memory after it."""
    steps, shown = trace(), []
    for i, step in enumerate(steps):
        draw = pipeline_svg if step.way == "forward" else backward_svg
        before = steps[i - 1].left if i else {}
        way = [s for s in steps if s.way == step.way]
        note = _NOTES.get((step.stage, step.way)) or _ORDER.get(step.stage, _AT_ONCE)
        total = sum(step.left.values())
        caption = (
            f"{step.way.capitalize()}, {way.index(step) + 1} of {len(way)}: {step.stage}. {note} "
            f"Reads {_listed(step.reads)}; gives {_listed(step.gives)}. What is needed after it, "
            f"in numbers a token and head: {total}."
        )
        if step is way[-1] and step.way == "forward":
            caption += " Less o, this is what lies in memory between the passes."
        shown.append((draw(step.stage) + _memory(step, before), caption))
    return shown, LABEL


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _memory(step: Step, before: dict[str, int]) -> str:
    """Chips of what is needed after a stage: new ones are lit, those no longer needed hollow."""
    gone = [n for n in dict.fromkeys([*before, *step.reads]) if n not in step.left]
    chips = [(n, size, "+" if n in step.gives else "") for n, size in step.left.items()]
    chips += [(n, before.get(n), "no more") for n in gone]
    parts, x, y = [text(6, 16, "in memory, numbers a token and head", "start", small=True)], 6, 26
    for name, size, mark in chips:
        label = f"{mark}{name} {size}" if mark in ("", "+") else f"{name} {mark}"
        width = 7.3 * len(label) + 12
        if x + width > 414:
            x, y = 6, y + 28
        if mark == "no more":
            more = ' stroke="currentColor" stroke-dasharray="3 3" rx="4"'
            parts += [rect(x, y, width, 22, "none", more), _chip(x, y, width, label, None)]
        else:
            parts.append(rect(x, y, width, 22, ORANGE if mark else BLUE, ' rx="4"'))
            parts.append(_chip(x, y, width, label, "#fff"))
        x += width + 6
    names = ", ".join(f"{n} {size}" for n, size in step.left.items())
    return picture(parts, y + 30, f"In memory after {step.stage}: {names}")


def _chip(x: float, y: float, width: float, label: str, fill: str | None) -> str:
    return text(x + width / 2, y + 15.5, label, small=True, fill=fill)
