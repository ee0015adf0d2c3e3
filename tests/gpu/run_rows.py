"""Run every row of the configuration tables of this GPU's generation against float64.

As a program: `run_rows.py` lists the rows; `run_rows.py N` runs row N in this process and prints
its largest error. A miscompiled row can end the CUDA context, so each runs in a process of its own.
"""

import itertools
import sys

import torch

from linattn_edu.kernels.delta import (
    fused,
    kda_bwd,
    kda_intra,
    kda_intra_bwd,
    output,
    output_bwd,
    solve,
    state,
    state_bwd,
    wy,
    wy_bwd,
)
from linattn_edu.kernels.ssd import ema as ema_kernels
from linattn_edu.kernels.ssd import ema_bwd as ema_bwd_kernels
from linattn_edu.kernels.tiles import UNPIPELINED, chunk_limit, device_of, of_generation
from linattn_edu.ops import ema, kda
from linattn_edu.ops.gdn import backward, forward, fused_stages, stages
from linattn_edu.testing import gdn_inputs, poison, relative_rms

TABLES = (
    ("solve", solve, "CONFIGS"),
    ("wy", wy, "CONFIGS"),
    ("state", state, "CONFIGS"),
    ("output", output, "CONFIGS"),
    ("scores", fused, "SCORES_CONFIGS"),
    ("resolvent", fused, "RESOLVENT_CONFIGS"),
    ("scan", fused, "SCAN_CONFIGS"),
    ("output_bwd", output_bwd, "CONFIGS"),
    ("state_bwd", state_bwd, "CONFIGS"),
    ("wy_bwd", wy_bwd, "CONFIGS"),
    # with a gate for each channel
    ("kda_intra", kda_intra, "CONFIGS"),
    ("kda_wy", wy, "CHANNEL_CONFIGS"),
    ("kda_state", state, "CONFIGS"),
    ("kda_output", output, "CONFIGS"),
    ("kda_bwd", kda_bwd, "CONFIGS"),
    ("kda_state_bwd", state_bwd, "CONFIGS"),
    ("kda_intra_bwd", kda_intra_bwd, "CONFIGS"),
)
FUSED = ("scores", "resolvent", "scan")
BACKWARD = ("output_bwd", "state_bwd", "wy_bwd", "kda_bwd", "kda_state_bwd", "kda_intra_bwd")
BY_DIM = ("state", "scan", "state_bwd", "kda_state", "kda_state_bwd")
BY_VALUE = ("output_bwd", "wy_bwd", "kda_bwd")  # rows for values up to a width


def rows():
    """(stage, dtype, (K, V), row) of every table; a K below the tile too, and one that is odd."""
    generation = device_of(torch.empty(0, device="cuda"))[0]
    for stage, module, table in TABLES:
        # where a table says nothing, the module's first one holds
        by_size = module.CONFIGS[generation] if stage not in FUSED else {}
        by_size = by_size | getattr(module, table).get(generation, {})
        for size, by_case in by_size.items():
            for dtype, (sizes, entry) in itertools.product(DTYPES[size], cases(stage, by_case)):
                yield stage, dtype, sizes, entry
    for size, by_channels in of_generation(ema_kernels.CONFIGS, generation).items():
        for (limit, entry), dtype in itertools.product(by_channels.items(), DTYPES[size]):
            for D in {64: (1, 33, 64), 128: (100, 128, 300)}[limit]:
                yield "ema", dtype, D, entry


def cases(stage, by_case):
    """((K, V), row) of a table's part for one generation and element size."""
    if stage in BY_DIM:
        for limit, entries in by_case.items():
            sizes = (*equal(256, 200), WIDE) if limit == 256 else equal(limit, 64)
            yield from itertools.product(sizes, entries)
        yield from itertools.product(equal(33, 201, 255), [UNPIPELINED])
    elif stage in BY_VALUE:
        sizes = {64: equal(33, 64), 128: equal(100, 128), 256: equal(33, 128, 200, 256)}
        sizes[512] = (*sizes[256], (64, 300), WIDE)
        for limit, entry in by_case.items():
            yield from itertools.product(sizes[limit], [entry])
    else:
        entries = by_case.values() if isinstance(by_case, dict) else [by_case]
        yield from itertools.product((*equal(33, 64, 128, 200, 256), WIDE), entries)


WIDE = (256, 512)  # K, V


def equal(*sizes):
    return tuple((size, size) for size in sizes)


DTYPES = {2: (torch.bfloat16, torch.float16), 4: (torch.float32,)}
# the largest relative error of o, the final state and the gradients
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def run(stage, dtype, sizes, entry):
    """The forward or the backward pass with this row in place of its table, against float64."""
    if stage == "ema":  # both passes; the channels choose the row
        return max(
            run_ema(dtype, sizes, *case) for case in ((500, 64, 2), (129, 16, 2), (65, 32, 64))
        )
    ((module, table),) = [(m, t) for s, m, t in TABLES if s == stage]
    only = {64: entry, 128: entry} if stage.endswith("output") else entry
    only = {128: [entry], 256: [entry]} if stage in BY_DIM else only
    only = {512: entry} if stage in BY_VALUE else only
    tables = {g: {2: only, 4: only} for g in ("turing", "ampere", "hopper")}
    kept = getattr(module, table)
    worst = 0.0
    for T, chunk_size, seed, H in ((500, 64, 0, 2), (129, 32, 1, 4), (65, 16, 2, 2)):
        x = gdn_inputs(
            2, T, H, 4, *sizes, dtype=dtype, device="cuda", initial_state=True, seed=seed
        )
        chunk_size = min(chunk_size, chunk_limit(x.k))
        if stage.startswith("kda_"):
            generator = torch.Generator("cuda").manual_seed(seed)
            g = torch.randn(*x.g.shape, sizes[0], device="cuda", generator=generator)
            x.g = -(2 * g - 3).exp().clamp(max=5)
            # in one head the last rows of each chunk's first block are far from its first row
            x.g[:, torch.arange(T, device="cuda") % chunk_size < 16, 0] = -4.9
        # with a promise other products are made, on tiles of the same size
        for safe in (None, -5.0) if stage.startswith("kda_intra") else (None,):
            exact = results(x.double(), "reference", stage, chunk_size, safe)
            setattr(module, table, tables)
            try:
                with poison():
                    got = results(x, "triton", stage, chunk_size, safe)
            finally:
                setattr(module, table, kept)
            worst = max(worst, *(relative_rms(a, b) for a, b in zip(got, exact, strict=True)))
    return worst


def results(x, impl, stage, chunk_size, safe):
    """o and the final state, or all gradients of a fixed linear function of the two."""
    gradients = stage in BACKWARD
    options = {"scale": 0.3, "chunk_size": chunk_size}
    if stage.startswith("kda_"):
        return channel_results(x, impl, gradients, options, safe)
    used = fused_stages(impl) if stage in FUSED else stages(impl)
    o, final_state, residuals = forward(used, **x.asdict(), output_final_state=True, **options)
    if not gradients:
        return o, final_state
    got = backward(
        stages(impl), x.q, x.k, x.v, x.g, x.beta, residuals, *cotangents(o, final_state),
        scale=0.3, initial_state=x.initial_state,
    )  # fmt: skip
    return [dx for dx in got if dx is not None]


def run_ema(dtype, D, T, chunk_size, segment):
    """The largest error of ema_scan's outputs and gradients, in segments of so many chunks."""
    generator = torch.Generator("cuda").manual_seed(T)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    x = {"x": randn(2, T, 3, D).to(dtype), "g": -(randn(2, T, 3) - 2).exp()}
    x |= {"weight": randn(2, T, 3) if T % 2 else None, "initial_state": randn(2, 3, D)}
    dy, dht = randn(2, T, 3, D).to(dtype), randn(2, 3, D)
    kept = ema_kernels.SEGMENT
    ema_kernels.SEGMENT = ema_bwd_kernels.SEGMENT = segment
    found = []
    try:
        for impl, to in (("triton", lambda t: t), ("reference", torch.Tensor.double)):
            given = {n: t if t is None else to(t) for n, t in x.items()}
            options, stages = {"chunk_size": chunk_size}, ema.stages(impl)
            with poison():
                *outputs, residuals = ema.forward(
                    stages, **given, output_final_state=True, **options
                )
                gradients = ema.backward(
                    stages, **given, residuals=residuals, dy=to(dy), dht=to(dht), **options
                )
            found.append([t for t in (*outputs, *gradients) if t is not None])
    finally:
        ema_kernels.SEGMENT = ema_bwd_kernels.SEGMENT = kept
    return max(relative_rms(a, b) for a, b in zip(*found, strict=True))


def channel_results(x, impl, gradients, options, safe):
    """The same of Kimi Delta Attention."""
    used, tensors = kda.stages(impl), (x.q, x.k, x.v, x.g, x.beta)
    o, final_state, residuals = kda.forward(
        used, *tensors, initial_state=x.initial_state, output_final_state=True, safe_bound=safe,
        **options,
    )  # fmt: skip
    if not gradients:
        return o, final_state
    got = kda.backward(
        used, *tensors, residuals._replace(gc=None), *cotangents(o, final_state),
        scale=0.3, initial_state=x.initial_state,
    )  # fmt: skip
    return [dx for dx in got if dx is not None]


def cotangents(o, final_state):
    """Gradients of the two: the same values in both precisions, and those of the input dtype."""
    generator = torch.Generator("cuda").manual_seed(1)
    do, dht = (torch.randn(y.shape, device="cuda", generator=generator) for y in (o, final_state))
    return do.bfloat16().to(o.dtype), dht.to(final_state.dtype)


if __name__ == "__main__":
    every = list(rows())
    if len(sys.argv) == 1:
        for n, r in enumerate(every):
            print(n, *r)
    for n in map(int, sys.argv[1:]):
        error = run(*every[n])
        verdict = "OK" if error <= TOLERANCE[every[n][1]] else "WRONG"
        print(verdict, f"{error:.2e}", n, *every[n], flush=True)
