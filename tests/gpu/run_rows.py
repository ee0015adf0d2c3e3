"""Run every row of the configuration tables of this GPU's generation against float64.

As a program: `run_rows.py` lists the rows; `run_rows.py N` runs row N in this process and prints
its largest error. A miscompiled row can end the CUDA context, so each runs in a process of its own.
"""

import itertools
import sys

import torch

from linattn_edu.kernels.delta import fused, output, solve, state, wy
from linattn_edu.kernels.tiles import UNPIPELINED, chunk_limit, device_of
from linattn_edu.ops.gdn import forward, fused_stages, stages
from linattn_edu.testing import gdn_inputs, poison, relative_rms

TABLES = (
    ("solve", solve, "CONFIGS"),
    ("wy", wy, "CONFIGS"),
    ("state", state, "CONFIGS"),
    ("output", output, "CONFIGS"),
    ("scores", fused, "SCORES_CONFIGS"),
    ("resolvent", fused, "RESOLVENT_CONFIGS"),
    ("scan", fused, "SCAN_CONFIGS"),
)
FUSED = ("scores", "resolvent", "scan")
BY_DIM = ("state", "scan")


def rows():
    """(stage, dtype, K, row) of every table; a K below the tile too, and one that is odd."""
    generation = device_of(torch.empty(0, device="cuda"))[0]
    for stage, module, table in TABLES:
        for size, by_case in getattr(module, table)[generation].items():
            for dtype, (K, entry) in itertools.product(DTYPES[size], cases(stage, by_case)):
                yield stage, dtype, K, entry


def cases(stage, by_case):
    """(K, row) of a table's part for one generation and element size."""
    if stage in BY_DIM:
        for limit, entries in by_case.items():
            yield from itertools.product((limit, 200 if limit == 256 else 64), entries)
        yield from ((K, UNPIPELINED) for K in (33, 201, 255))
    else:
        entries = by_case.values() if isinstance(by_case, dict) else [by_case]
        yield from itertools.product((33, 64, 128, 200, 256), entries)


DTYPES = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(stage, dtype, K, entry):
    """The forward pass with this row in place of its table, against the float64 reference."""
    ((module, table),) = [(m, t) for s, m, t in TABLES if s == stage]
    only = {64: entry, 128: entry} if stage == "output" else entry
    only = {128: [entry], 256: [entry]} if stage in BY_DIM else only
    tables = {g: {2: only, 4: only} for g in ("turing", "ampere", "hopper")}
    worst = 0.0
    for T, chunk_size, seed in ((500, 64, 0), (129, 32, 1), (65, 16, 2)):
        x = gdn_inputs(2, T, 2, 4, K, K, dtype=dtype, device="cuda", initial_state=True, seed=seed)
        chunk_size = min(chunk_size, chunk_limit(x.k))
        options = {"scale": 0.3, "output_final_state": True, "chunk_size": chunk_size}
        exact = forward(stages("reference"), **x.double().asdict(), **options)
        kernels = fused_stages("triton") if stage in FUSED else stages("triton")
        kept = getattr(module, table)
        setattr(module, table, tables)
        try:
            with poison():
                got = forward(kernels, **x.asdict(), **options)
        finally:
            setattr(module, table, kept)
        worst = max(worst, *(relative_rms(a, b) for a, b in zip(got, exact, strict=True)))
    return worst


if __name__ == "__main__":
    every = list(rows())
    if len(sys.argv) == 1:
        for n, r in enumerate(every):
            print(n, *r)
    for n in map(int, sys.argv[1:]):
        error = run(*every[n])
        verdict = "OK" if error <= TOLERANCE[every[n][1]] else "WRONG"
        print(verdict, f"{error:.2e}", n, *every[n], flush=True)
