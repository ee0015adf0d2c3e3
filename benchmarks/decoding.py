"""python -m benchmarks.decoding: a token of few and of many sequences, and a few tokens at once.

Gated DeltaNet with states in a pool. "graph": the call as a CUDA graph, median of replays, L2
emptied before each. "plain": calls one after the other by the host's clock, which has the host's
time in it where the GPU is faster.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks import measure
from benchmarks.progress import fail
from benchmarks.ranks import heading
from benchmarks.results import default_path, differences, load, save
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


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.decoding", description=__doc__)
    p.add_argument("--sequences", type=int, nargs="+", default=SEQUENCES)
    p.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try it")
    p.add_argument("--out", type=Path, help="file of results (chapters/data/decoding_<gpu>.json)")
    args = p.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and (reason := measure.usable_gpu()):
        return fail(f"benchmarks run on a CUDA GPU: {reason}")
    gpu = "cpu" if device.type == "cpu" else measure.gpu_name()
    out, rows, top = args.out or default_path(gpu, "decoding"), {}, heading(device)
    old = load(out)
    kept = list(old["rows"]) if old and not differences(old, top) else []
    for N in args.sequences:
        for T in args.tokens if N >= DRAFTS or device.type == "cpu" else args.tokens[:1]:
            kept += rows_of(N, T, device)
            print(json.dumps(kept[-1]), flush=True)
            rows = {(r["op"], r["sequences"], r["tokens"], r["what"]): r for r in kept}
            save(out, {**top, "rows": [rows[key] for key in sorted(rows)]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
