"""python -m benchmarks.decoding: a token of few and of many sequences, and a few tokens at once.

Gated DeltaNet with states in a pool. "graph": the call as a CUDA graph, median of replays, L2
emptied before each. "plain": calls one after the other by the host's clock, which has the host's
time in it where the GPU is faster.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks import measure, tables
from benchmarks.cases import FUNCTIONS
from benchmarks.progress import EXIT_USAGE
from linattn_edu import fused_recurrent_gated_delta_rule
from linattn_edu.testing import gdn_inputs

# H, HV, K, V
SHAPE = {"cuda": (16, 32, 128, 128), "cpu": (1, 2, 16, 16)}
SEQUENCES, TOKENS, CALLS = (1, 2, 4, 8, 16, 32, 64, 128, 256), (1, 2, 4, 8), 100
DRAFTS = 8  # sequences of a call with several tokens, at least


def step(N: int, T: int, device: torch.device) -> Callable[[], object]:
    """A call of T tokens of N sequences in place, with a slot for the state after each."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = gdn_inputs(N, T, *SHAPE[device.type], dtype=dtype, device=device)
    slots = torch.randperm(N * T, device=device).view(N, T)
    pool = torch.zeros(N * T, *x.v.shape[2:3], x.k.shape[3], x.v.shape[3], device=device)
    accepted = torch.ones(N, dtype=torch.int64, device=device)

    @torch.no_grad()
    def call():
        return fused_recurrent_gated_delta_rule(
            x.q, x.k, x.v, x.g, beta=x.beta, initial_state=pool, inplace_final_state=True,
            ssm_state_indices=slots, num_accepted_tokens=accepted, impl="triton",
        )[0]  # fmt: skip

    return call


def plain_ms(call: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call among others."""
    calls = CALLS if device.type == "cuda" else 1
    for timed in (False, True):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls if timed else 3):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / calls


def rows_of(N: int, T: int, device: torch.device) -> Iterator[dict]:
    """A row for each way to call it; on a CPU the plain one alone."""
    call = step(N, T, device)
    row = {"op": "gdn", "sequences": N, "tokens": T}
    yield row | {"what": "plain", "ms": round(plain_ms(call, device), 5)}
    if device.type == "cuda":
        yield row | {"what": "graph", "ms": round(measure.time_ms(measure.captured(call)), 5)}


def opened(args):
    """The table of this command."""
    key = "op", "sequences", "tokens", "what"
    return tables.opened(args, "decoding", *key, ran=lambda row: (FUNCTIONS["gdn_decode"],))


def main(argv: list[str]) -> int:
    args = tables.parser("decoding", __doc__, sequences=SEQUENCES, tokens=TOKENS).parse_args(argv)
    if (table := opened(args)) is None:
        return EXIT_USAGE
    for N in args.sequences:
        for T in args.tokens if N >= DRAFTS or args.device == "cpu" else args.tokens[:1]:
            for row in rows_of(N, T, table.device):
                table.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
