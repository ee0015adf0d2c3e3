"""python -m benchmarks.pieces: the forward pass of few heads, by the length of a piece.

And the scans of Gated DeltaNet with more heads, whole and in pieces that begin where the state is
forgotten. Times are medians as a CUDA graph, the kernels without the host, L2 emptied before each.
"""

import sys
import time
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch

from benchmarks import measure, tables
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import EXIT_USAGE, fail
from benchmarks.ranks import OURS
from linattn_edu.kernels.delta import warm_up as warm_kernels
from linattn_edu.kernels.routes import forced, limits
from linattn_edu.kernels.tiles import cdiv
from linattn_edu.ops import gdn
from linattn_edu.testing import gdn_inputs, relative_rms

SIZE = 128  # of a key and of a value
HEADS, TOKENS, LENGTHS = (1, 2, 4, 8, 16), (8192, 16384, 32768), (512, 1024, 2048, 4096, 8192)
MOST = 64  # pieces of a sequence, in this table
PAIRS = ("16/32", "16/16", "32/64")  # heads of q and k / of v
KEY = ("op", "heads", "tokens", "gates", "piece")  # of a row
GATES = {"usual": lambda g: g, "zero": torch.zeros_like, "every third": lambda g: slow(g)}


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
        rule = {"LENGTH": length, "PROGRAMS": 1024 if length else 0, "FULL": 0}
        with forced(**rule, LEAST=1, MULTIPROCESSORS=1):
            o, _ = call()
            ms = time_ms(call, device)
        whole = o if whole is None else whole
        row = {"op": op, "heads": heads, "tokens": tokens, "piece": length, "ms": round(ms, 4)}
        yield row | {"error": relative_rms(o, whole)}


def slow(g: torch.Tensor) -> torch.Tensor:
    """The gates, those of every third head so near zero that it forgets nothing."""
    g = g.clone()
    g[..., ::3] *= 1e-3
    return g


@contextmanager
def trial(cuda: bool):
    """Without a GPU, pieces of few tokens for few heads."""
    if cuda:
        yield
        return
    rule = {"PROGRAMS": 0, "PER_PROGRAM": 64, "MULTIPROCESSORS": 1}
    with forced(**rule), patch.object(warm_kernels, "REACH", 128):
        yield


def rows_of_scans(heads: str, tokens: int, device: torch.device):
    """Two rows for each scan and kind of gates: of a sequence that is not cut, and of its pieces.

    error: of what is written for each token, against the first of the two. forgotten: at how many
    of a head's borders of pieces it has forgotten, as a share.
    """
    H, HV = map(int, heads.split("/"))
    cuda = device.type == "cuda"
    dtype, size = (torch.bfloat16, SIZE) if cuda else (torch.float32, 16)
    x = gdn_inputs(1, tokens, H, HV, size, size, dtype=dtype, device=device)
    x.g.mul_(1 if cuda else 16)  # in a trial there are few tokens to forget in
    stages, scale = gdn.fused_stages("triton"), size**-0.5
    for gates, change in GATES.items():
        gc = stages.gate_cumsum(change(x.g), chunk_size=64)
        options = {"return_inverse": True, "gated": True, "chunk_size": 64}
        P, R, AG = stages.intra_chunk(x.q, x.k, x.beta, gc, **options)
        ahead = x.q, x.k, x.v, gc, P, R
        back = x.q, x.k, x.v, x.beta, gc, P, AG, x.v  # x.v: as good a gradient as any
        calls = {
            "scan": (stages.scan, ahead, [0]),  # o
            "scans": (stages.scans, back, [1, 3, 4]),  # v_new, Z, dv
        }
        for op, (stage, tensors, written) in calls.items():
            call, whole = partial(stage, *tensors, scale=scale), None
            for full in (0, limits.FULL):
                with trial(cuda), forced(FULL=full):
                    found, starts = warm_kernels.warm_up(x.k, x.beta, gc, size, chunk_size=64)
                    out = call()
                    out = [out[i] for i in written]
                    ms = time_ms(call, device)
                    piece = limits.PER_PROGRAM * HV * cdiv(size, 64) if found.several else 0
                whole = whole or out
                row = {"op": op, "heads": HV, "qk_heads": H, "tokens": tokens, "gates": gates}
                row |= {"piece": piece, "ms": round(ms, 4)}
                row["error"] = max(map(relative_rms, out, whole))
                if piece:  # -1 in all tensors: not forgotten
                    row["forgotten"] = (torch.stack(starts).amax(0)[1:] >= 0).double().mean().item()
                yield row


def ran(row: dict) -> tuple[str, ...]:
    """What of the package a row is the time of: an operator, or one of the two scans."""
    return (FUNCTIONS.get(row["op"], f"kernels.{row['op']}"),)


def main(argv: list[str]) -> int:
    lists = {"heads": HEADS, "tokens": TOKENS, "lengths": LENGTHS}
    p = tables.parser("pieces", __doc__, **lists)
    p.add_argument("--ops", default="gdn,kda,scans", help="comma-separated (default all three)")
    p.add_argument("--pairs", nargs="+", default=PAIRS, help="heads of scans: of q, k / of v")
    args = p.parse_args(argv)
    if any(n % 64 for n in args.lengths):
        return fail(f"lengths must be whole chunks of 64 tokens, got {args.lengths}")
    if (table := tables.opened(args, "pieces", *KEY, ran=ran)) is None:
        return EXIT_USAGE
    for op in args.ops.split(","):
        if op == "scans":
            for heads in args.pairs:
                for row in rows_of_scans(heads, max(args.tokens), table.device):
                    table.add(row)
            continue
        for heads in args.heads:
            for tokens in args.tokens:
                lengths = [n for n in args.lengths if 2 * n <= tokens <= MOST * n]
                for row in rows_of(op, heads, tokens, lengths, table.device):
                    table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
