"""The state as a memory that is written, erased and forgotten, token by token, by three rules."""

import torch
from torch import Tensor

from linattn_edu.figures.drawing import matrix, picture, text
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.reference.delta.state import state

# three keys of length 1; c has 0.6 of a in it
KEYS = {"a": (1.0, 0.0, 0.0, 0.0), "b": (0.0, 1.0, 0.0, 0.0), "c": (0.6, 0.0, 0.8, 0.0)}
VALUES = torch.eye(4, dtype=torch.float64)  # value n is the n-th row
# key, value, write strength, decay of the rule that has one, caption
TOKENS = (
    (
        "a", 1, 1.0, 0.9,
        "Value 1 is written under key a. The memory was empty, so that nothing can be in the way: "
        "all three rules write the same.",
    ),
    (
        "b", 2, 1.0, 0.9,
        "Value 2 under key b, at a right angle to a: reading a finds nothing of it. The gate has "
        "let the memory fade by a tenth before the write.",
    ),
    (
        "c", 3, 1.0, 0.9,
        "Value 3 under key c, which has 0.6 of a in it. Adding leaves 0.6 of value 1 under c. The "
        "delta rule reads c first and writes the difference, so that c reads 3 alone. Under a each "
        "rule now finds a part of 3 too: keys that overlap share room.",
    ),
    (
        "a", 4, 1.0, 0.9,
        "Key a again, with another value. Adding cannot replace: a reads 1 and 4 and a part of 3. "
        "The delta rule writes what a is missing and erases what it should not say: look at the "
        "hollow squares of the change. a reads 4 alone. c, which overlaps a, pays for it.",
    ),
    (
        "b", 2, 0.0, 0.3,
        "A token that writes nothing, with strength 0. The gate closes to 0.3: all that the third "
        "memory holds fades at once, under every key. The others have no way to forget.",
    ),
    (
        "b", 3, 0.5, 0.9,
        "Key b with value 3 and strength 0.5. Adding puts half of 3 beside all of 2. The delta "
        "rule goes half of the way from 2 to 3. In the third memory little of 2 was left.",
    ),
    (
        "b", 3, 0.5, 0.9,
        "The same token once more. Adding goes on; with each repetition b says more. The delta "
        "rule halves what is missing.",
    ),
)  # fmt: skip
RULES = ("adds", "delta rule", "delta, gate")


def states() -> dict[str, list[Tensor]]:
    """The memory before the first token and after each, by rule: [4, 4] in float64."""
    names, values, betas, alphas, _ = zip(*TOKENS, strict=True)
    k = torch.tensor([KEYS[n] for n in names], dtype=torch.float64)[None, :, None]
    v = VALUES[[n - 1 for n in values]][None, :, None]
    beta = torch.tensor(betas, dtype=torch.float64)[None, :, None]
    gates = torch.tensor(alphas, dtype=torch.float64).log()[None, :, None]
    none = torch.zeros_like(gates)
    # without a correction: the stage of Mamba-2, in chunks of one token
    h, _, last = state(k, None, beta[..., None] * v, none, chunk_size=1, output_final_state=True)
    found = {RULES[0]: [*h[0, :, 0], last[0, 0]]}
    for rule, g in ((RULES[1], none), (RULES[2], gates)):
        S = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
        found[rule] = [S[0, 0]]
        for t in range(len(TOKENS)):
            now = slice(t, t + 1)
            inputs = (x[:, now] for x in (k, k, v, g, beta))
            _, S = recurrent(*inputs, initial_state=S)
            found[rule].append(S[0, 0])
    return found


LABEL = "A memory, token by token"
_FIRST = (
    "Three empty memories with 4 rows and 4 columns. Each token brings a key and a value; "
    "value n is the row with a 1 in column n. Full squares are positive, hollow ones negative, and "
    "their area is the size. Below will stand what each key reads, and how far that is from the "
    "value last given with it."
)


def figure() -> tuple[list[tuple[str, str]], str]:
    """A frame before the first token and one after each."""
    found = states()
    shown = [(_frame(found, 0), _FIRST)]
    shown += [(_frame(found, t), token[-1]) for t, token in enumerate(TOKENS, 1)]
    return shown, LABEL


def wanted(t: int) -> dict[str, int]:
    """The value last given with each key by the first t tokens, those of strength 0 left out."""
    return {key: value for key, value, beta, *_ in TOKENS[:t] if beta}


_CELL, _PANEL = 21, 138


def _frame(found: dict[str, list[Tensor]], t: int) -> str:
    head = "before the first token"
    if t:
        key, value, beta, alpha, _ = TOKENS[t - 1]
        head = f"token {t}: key {key}, value {value}, strength {beta:g}, gate {alpha:g}"
    parts, said = [text(6, 14, head, "start", bold=True)], []
    for n, (rule, S) in enumerate(found.items()):
        x = 6 + n * _PANEL
        parts.append(text(x + 14, 36, rule, "start"))
        change = S[t] - S[max(t - 1, 0)]
        for y, name, rows in ((42, "change", change), (150, "memory", S[t])):
            parts.append(matrix(x + 14, y, rows.tolist(), _CELL, most=1.2))
            parts.append(text(x + 14, y + 4 * _CELL + 13, name, "start", small=True))
        for i, (key, value) in enumerate(wanted(t).items()):
            y = 262 + 26 * i
            reads = torch.tensor(KEYS[key], dtype=torch.float64) @ S[t]
            off = (reads - VALUES[value - 1]).norm().item()
            parts.append(text(x, y + 15, key, "start"))
            parts.append(matrix(x + 14, y, [reads.tolist()], _CELL, most=1.2))
            parts.append(text(x + 102, y + 15, f"{off:.2f}", "start", small=True))
            said.append(f"{rule}: {key} is off by {off:.2f}")
    if t:
        reads = "reads, and its distance from"
        parts.append(text(6, 350, reads, "start", small=True))
        goals = ", ".join(f"{key}: {value}" for key, value in wanted(t).items())
        parts.append(text(6, 366, f"the value last given ({goals})", "start", small=True))
    return picture(parts, 372, "; ".join([head, *said]))
