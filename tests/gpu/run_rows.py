"""Run every row of every configuration table against float64 on the GPU.

As a program: `run_rows.py` lists the rows; `run_rows.py N` runs row N in this process and prints
its largest error. A miscompiled row can end the CUDA context, so each runs in a process of its own.
"""

import itertools
import sys

import torch

from linattn_edu.kernels.delta import fused, output, solve, state, wy
from linattn_edu.ops.gdn import forward, fused_stages, stages
from linattn_edu.testing import gdn_inputs, poison, relative_rms

TABLES = (
    ("solve", solve, "CONFIGS"),
    ("wy", wy, "CONFIGS"),
    ("state", state, "CONFIGS"),
    ("output", output, "CONFIGS"),
    ("intra", fused, "INTRA_CONFIGS"),
    ("scan", fused, "SCAN_CONFIGS"),
)


def rows():
    """(stage, dtype, K, generation, bytes, row) of every table; all run on whatever GPU is here."""
    for stage, module, table in TABLES:
        for generation, by_size in getattr(module, table).items():
            for size, entry in by_size.items():
                by_dim = entry if isinstance(entry, dict) else {128: [entry], 256: [entry]}
                for (limit, entries), dtype in itertools.product(by_dim.items(), DTYPES[size]):
                    for K in (limit // 2 if limit == 128 else 200, limit):
                        for entry in entries:
                            yield stage, dtype, K, generation, size, entry


DTYPES = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(stage, dtype, K, generation, size, entry):
    """The forward pass with this row in place of its table, against the float64 reference."""
    ((module, table),) = [(m, t) for s, m, t in TABLES if s == stage]
    only = [entry] if stage in ("state", "scan") else entry
    only = {128: only, 256: only} if stage in ("state", "scan") else only
    tables = {g: {2: only, 4: only} for g in ("turing", "ampere", "hopper")}
    worst = 0.0
    for T, chunk_size, seed in ((500, 64, 0), (129, 32, 1), (65, 16, 2)):
        x = gdn_inputs(2, T, 2, 4, K, K, dtype=dtype, device="cuda", initial_state=True, seed=seed)
        options = {"scale": 0.3, "output_final_state": True, "chunk_size": chunk_size}
        exact = forward(stages("reference"), **x.double().asdict(), **options)
        kernels = fused_stages("triton") if stage in ("intra", "scan") else stages("triton")
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
            print(n, *r[:4], r[5])
    for n in map(int, sys.argv[1:]):
        error = run(*every[n])
        verdict = "OK" if error <= TOLERANCE[every[n][1]] else "WRONG"
        print(verdict, f"{error:.2e}", n, *every[n][:4], every[n][5], flush=True)
