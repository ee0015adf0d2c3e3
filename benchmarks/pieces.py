"""python -m benchmarks.pieces: the forward pass of few heads, by the length of a piece.

Times are medians of the pass as a CUDA graph, the kernels without the host, L2 emptied before each.
"""

import sys
import time
from unittest.mock import patch

import torch

from benchmarks import measure, tables
from benchmarks.progress import EXIT_USAGE, fail
from benchmarks.ranks import OURS
from linattn_edu.kernels import pieces
from linattn_edu.testing import relative_rms

SIZE = 128  # of a key and of a value
HEADS, TOKENS, LENGTHS = (1, 2, 4, 8, 16), (8192, 16384, 32768), (512, 1024, 2048, 4096, 8192)
MOST = 64  # pieces of a sequence, in this table


def time_ms(f, device: torch.device) -> float:
    """Milliseconds of a call that has been made before."""
    if device.type == "cuda":
        return measure.time_ms(measure.captured(f))
    begun = time.perf_counter()
    f()
    return 1e3 * (time.perf_counter() - begun)


def rows_of(op: str, heads: int, tokens: int, lengths: list[int], device: torch.device):
    """A row for each length of a piece, and first one for a sequence that is not cut: 0.

    error is against that one.
    """
    f, inputs = OURS[op]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    size = SIZE if device.type == "cuda" else 16
    i = inputs(1, tokens, heads, heads, size, size, dtype=dtype, device=device)
    if op == "kda":
        i.g.clamp_(min=measure.SAFE_BOUND)
    call = lambda: f(i.q, i.k, i.v, i.g, i.beta, impl="triton")
    whole = None
    for length in (0, *lengths):
        rule = {"LENGTH": length, "PROGRAMS": 1024 if length else 0}
        with patch.multiple(pieces, **rule, LEAST=1, MULTIPROCESSORS=1):
            o, _ = call()
            ms = time_ms(call, device)
        whole = o if whole is None else whole
        row = {"op": op, "heads": heads, "tokens": tokens, "piece": length, "ms": round(ms, 4)}
        yield row | {"error": relative_rms(o, whole)}


def main(argv: list[str]) -> int:
    lists = {"heads": HEADS, "tokens": TOKENS, "lengths": LENGTHS}
    p = tables.parser("pieces", __doc__, **lists)
    p.add_argument("--ops", default="gdn,kda", help="comma-separated (default gdn,kda)")
    args = p.parse_args(argv)
    if any(n % 64 for n in args.lengths):
        return fail(f"lengths must be whole chunks of 64 tokens, got {args.lengths}")
    if (table := tables.opened(args, "pieces", "op", "heads", "tokens", "piece")) is None:
        return EXIT_USAGE
    for op in args.ops.split(","):
        for heads in args.heads:
            for tokens in args.tokens:
                lengths = [n for n in args.lengths if 2 * n <= tokens <= MOST * n]
                for row in rows_of(op, heads, tokens, lengths, table.device):
                    table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
