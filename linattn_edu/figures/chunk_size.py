"""The length of a chunk against bytes, products and powers of two of a forward pass."""

from collections.abc import Callable
from functools import cache

import torch
from torch.overrides import TorchFunctionMode

from linattn_edu.figures.drawing import BLUE, ORANGE, picture, rect, text
from linattn_edu.ops import gdn
from linattn_edu.testing import gdn_inputs

SIZES = (16, 32, 64, 128, 256)
SETS = {
    "staged": ("gate_cumsum", "solve", "wy", "state", "output"),
    "fused": ("gate_cumsum", "intra_chunk", "scan"),
}
TOKENS = 4096  # of the sequence whose chunks are counted


class _Powers(TorchFunctionMode):
    """Counts the numbers of which a power of two is taken."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in (torch.exp2, torch.Tensor.exp2):
            self.count += out.numel()
        return out


@cache
def powers(form: str, chunk: int) -> float:
    """Powers of two of a token and head, counted while the reference stages run."""
    stages = gdn.stages("reference") if form == "staged" else gdn.fused_stages("reference")
    x = gdn_inputs(1, max(SIZES), 1, 1, 4, 4, seed=0)
    with _Powers() as counted:
        gdn.forward(stages, x.q, x.k, x.v, x.g, x.beta, scale=1.0, chunk_size=chunk, keep=())
    return counted.count / max(SIZES)


def costs(case, work: Callable, chunk: int) -> dict[str, dict[str, float]]:
    """By quantity and form, of one token and value head.

    Args:
        case: Shapes, of benchmarks.cases.  work: Counts bytes and operations of a stage of it.
    """
    each = case.B * case.T * case.HV
    done = {f: [work(case, f"stage:{name}", chunk) for name in SETS[f]] for f in SETS}
    return {
        "bytes": {f: sum(w.bytes for w in done[f]) / each for f in SETS},
        "products, kFLOP": {f: sum(w.flops for w in done[f]) / each / 1e3 for f in SETS},
        "powers of two": {f: powers(f, chunk) for f in SETS},
    }


LABEL = "Tokens of a chunk"
_NOTES = {
    16: "Short chunks: in stages each hands on a state for every 16 tokens, and most bytes are "
    "states. Fused, no state is written.",
    32: "Half as many states. What grows are the matrices of a chunk, a row of C numbers for each "
    "token, and the products and powers of two inside it.",
    64: "The longest chunk that the library takes. Fused, bytes and products are a quarter more "
    "than with 16.",
    128: "In stages the fewest bytes of the five: C is the root of KV. The products inside a chunk "
    "are nearly as many as those with the state.",
    256: "Long chunks: the products inside a chunk are more than those with the state.",
}


def figure(case, work: Callable) -> tuple[list[tuple[str, str]], str]:
    """A frame for each length of a chunk; the arguments are those of costs."""
    found = {chunk: costs(case, work, chunk) for chunk in SIZES}
    shown = []
    for chunk in SIZES:
        units = ("bytes", "thousand operations of products", "powers of two")
        told = [
            f"{values['staged']:.0f} {unit} in stages and {values['fused']:.0f} fused"
            for unit, values in zip(units, found[chunk].values(), strict=True)
        ]
        caption = (
            f"C = {chunk}. A token and head take {'; '.join(told)}. In a sequence of {TOKENS} "
            f"tokens {TOKENS // chunk} chunks wait for one another. {_NOTES[chunk]}"
        )
        shown.append((_frame(found, chunk), caption))
    return shown, LABEL


def _frame(found: dict[int, dict], now: int) -> str:
    parts, y, said = [], 0, []
    for name in found[now]:
        most = max(v for c in found.values() for v in c[name].values())
        parts.append(text(6, y + 14, f"{name}, a token and head", "start", small=True))
        floor = y + 118
        for i, chunk in enumerate(SIZES):
            for j, (form, colour) in enumerate((("staged", BLUE), ("fused", ORANGE))):
                value = found[chunk][name][form]
                x, high = 8 + 82 * i + 37 * j, round(76 * value / most, 1)
                more = "" if chunk == now else ' fill-opacity="0.35"'
                parts.append(rect(x, round(floor - high, 1), 34, high, colour, more))
                label = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
                bold = chunk == now
                parts.append(text(x + 17, round(floor - high - 4, 1), label, small=True, bold=bold))
                if chunk == now:
                    said.append(f"{name} {form} {label}")
        y += 124
    for i, chunk in enumerate(SIZES):
        parts.append(text(44 + 82 * i, y + 10, f"C = {chunk}", small=True, bold=chunk == now))
    for x, colour, form in ((8, BLUE, "in stages"), (130, ORANGE, "fused")):
        parts.append(rect(x, y + 22, 12, 12, colour))
        parts.append(text(x + 18, y + 33, form, "start", small=True))
    return picture(parts, y + 42, f"C = {now}: {', '.join(said)}")
