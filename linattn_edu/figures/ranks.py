"""A sequence on four ranks: maps of its pieces, sent to all, merged by each, and the scans."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.figures.drawing import GRAY, LIT, ON_LIT, matrix, picture, rect, text
from linattn_edu.ops import gdn
from linattn_edu.reference.delta.cp_merge import cp_merge, piece_map
from linattn_edu.testing import GDNInputs, gdn_inputs

RANKS, TOKENS, CHUNK, K = 4, 8, 4, 3  # tokens of a piece and of a chunk; K = V


class Pieces(NamedTuple):
    """What the ranks compute, a matrix [K, K] each."""

    x: GDNInputs  # the whole sequence
    S_ext: list[Tensor]
    M: list[Tensor]
    S_in: list[Tensor]
    S_out: list[Tensor]  # of the scan of each piece from its S_in


@cache
def pieces() -> Pieces:
    """The reference stages on the pieces of one head, in float64."""
    x = gdn_inputs(
        1, RANKS * TOKENS, 1, 1, K, K, dtype=torch.float64, seed=6, initial_state=True
    )  # fmt: skip
    stages, given = gdn.stages("reference"), []
    x = replace(x, g=x.g.clamp(min=-0.2), v=x.v / x.v.norm(dim=-1, keepdim=True))
    for r in range(RANKS):
        part = slice(r * TOKENS, (r + 1) * TOKENS)
        k, v, g, beta = (y[:, part] for y in (x.k, x.v, x.g, x.beta))
        gc = stages.gate_cumsum(g, chunk_size=CHUNK)
        A = stages.solve(k, beta, chunk_size=CHUNK)
        given.append((k, *stages.wy(k, v, beta, gc, A), gc))
    maps = [piece_map(*y, chunk_size=CHUNK) for y in given]
    S_ext, M = (torch.stack(y, 1) for y in zip(*maps, strict=True))
    # rank 0 knows what enters: eq:21-known
    S_ext[:, 0], _ = piece_map(*given[0], x.initial_state, chunk_size=CHUNK, transition=False)
    M[:, 0] = 0
    S_in, _ = cp_merge(S_ext, M)
    S_in[:, 0] = x.initial_state
    options = {"chunk_size": CHUNK, "output_final_state": True}
    S_out = [stages.state(*y, S_in[:, r], **options)[2] for r, y in enumerate(given)]
    flat = ([y[0, r, 0] for r in range(RANKS)] for y in (S_ext, M, S_in))
    return Pieces(x, *flat, [y[0, 0] for y in S_out])


LABEL = "A sequence on four ranks"
_CHUNKS = TOKENS // CHUNK
CAPTIONS = (
    f"Each rank holds {TOKENS} tokens of one sequence, {_CHUNKS} chunks. To begin, a rank needs "
    "the state that enters its piece. Only rank 0 knows it: it is the initial state, S₀. "
    "Full squares are positive, hollow ones negative, and their area is the size.",
    "Nobody waits. Ranks 1 and 2 run their tokens from an empty state: S_ext, what they leave "
    "there. Rank 0 runs them from S₀, and what leaves its piece is known at once. Rank 3 has "
    "nobody after it and needs no map.",
    "And once more from the identity, without values: M, what the tokens let through of any "
    "state. The two runs are one, of twice as many columns. Rank 0 needs none: its M is 0.",
    "One message each: every rank sends its map, M and S_ext, to all; that of rank 3 is empty. "
    "A rank uses those of the ranks before it.",
    "The first merge, on ranks 1 to 3 at the same time: S = M S + S_ext with the map of rank 0, "
    "from nothing. Rank 1 has the state that enters its piece.",
    "The second merge, on ranks 2 and 3, with the map of rank 1. Rank 2 has its state.",
    "The third, on rank 3. Each merge is a product of small matrices; there are no tokens in it.",
    "Each rank runs its piece as on one device, from the state that enters. What leaves a piece is "
    "what the next one has merged for itself: compare S_out of rank 0 with S of rank 1. In a row "
    f"stood {_CHUNKS} chunks, 3 merges and {_CHUNKS} chunks, in place of {RANKS * _CHUNKS} chunks.",
)
GATHER, FIRST_MERGE, SCAN = 3, 4, 7  # frames


def figure() -> tuple[list[tuple[str, str]], str]:
    """A frame for each moment."""
    return [(_frame(now), caption) for now, caption in enumerate(CAPTIONS)], LABEL


_CELL, _LEFT, _COLUMN = 21, 66, 90
_ROWS = {"S_ext": 50, "M": 126, "maps": 202, "S": 240, "S_out": 330}


def merged(rank: int, now: int) -> int:
    """How many merges a rank has made at a moment."""
    return max(0, min(rank, now - FIRST_MERGE + 1))


def _frame(now: int) -> str:
    found = pieces()
    labels = {"S_ext": ("S_ext",), "M": ("M",), "maps": ("has maps",)}
    labels |= {"S": ("S", "merged"), "S_out": ("S_out", "by scan")}
    parts, said = [], []
    for name, words in labels.items():
        for i, word in enumerate(words):
            at = _ROWS[name] + (14 if name == "maps" else 34) + 16 * i
            parts.append(text(6, at, word, "start", small=True))
    for r in range(RANKS):
        x = _LEFT + r * _COLUMN
        parts.append(text(x + 32, 14, f"rank {r}", bold=True))
        parts.append(text(x + 32, 32, f"{r * TOKENS}..{(r + 1) * TOKENS - 1}", small=True))
        done = merged(r, now)
        knows = r == 0 or done > 0
        goes_on = r < RANKS - 1  # to a later rank, which needs a map
        shown = {
            "S_ext": found.S_ext[r] if now >= 1 and goes_on else None,
            "M": found.M[r] if now >= 2 and goes_on else None,
            "S": found.S_in[done] if knows else None,
            "S_out": found.S_out[r] if now >= SCAN else None,
        }
        new = {
            "S_ext": now == 1,
            "M": now == 2,
            "S": (now == 0 and r == 0) or done > merged(r, now - 1),
            "S_out": now == SCAN,
        }
        for name, S in shown.items():
            side = _CELL * K
            if S is not None:
                if new[name]:
                    more = f' stroke="{LIT}" stroke-width="5"'
                    parts.append(rect(x - 2, _ROWS[name] - 2, side + 4, side + 4, "none", more))
                parts.append(matrix(x, _ROWS[name], S.tolist(), _CELL))
            else:
                more = f' stroke="{GRAY}" stroke-dasharray="3 3"'
                parts.append(rect(x, _ROWS[name], side, side, "none", more))
        if knows:
            by = f"map {done - 1}" if done else "S₀"
            ready = " ready" if done == r else ""
            parts.append(text(x + 32, _ROWS["S"] + 78, by + ready, small=True))
            said.append(f"rank {r} has made {done} merges")
        if now >= GATHER and r:
            names = " ".join(str(i) for i in range(r))
            if now == GATHER:
                parts.append(rect(x - 2, 203, 68, 19, LIT, ' rx="4"'))
            ink = ON_LIT if now == GATHER else None
            parts.append(text(x + 32, 217, names, small=True, fill=ink))
    return picture(parts, 404, f"{LABEL}, moment {now}. {'; '.join(said)}")
