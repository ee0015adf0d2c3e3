"""Run every row of the configuration tables of this GPU's generation against float64.

As a program: `run_rows.py` lists the rows; `run_rows.py N` runs row N in this process and prints
its largest error. A miscompiled row can end the CUDA context, so each runs in a process of its own.
"""

import itertools
import sys
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[1]))
import gdn_checks
from dplr import dplr_checks
from stages import STAGES

from linattn_edu import chunk_dplr_delta_rule
from linattn_edu.kernels import rows as tables
from linattn_edu.kernels.delta import causal_conv1d as convolution
from linattn_edu.kernels.delta import causal_conv1d_update as convolution_update
from linattn_edu.kernels.delta import rms_norm_gated as norm
from linattn_edu.kernels.delta import state, state_bwd
from linattn_edu.kernels.routes import by_kind, choosing, forced, kind_of
from linattn_edu.kernels.rows import UNPIPELINED, device_of, of_generation
from linattn_edu.kernels.ssd import ema as ema_kernels
from linattn_edu.kernels.ssd import ema_bwd as ema_bwd_kernels
from linattn_edu.kernels.ssd import selective_state_update as update
from linattn_edu.kernels.tiles import block
from linattn_edu.ops import ema, kda, ssd
from linattn_edu.ops.gdn import backward, forward, fused_stages, stages
from linattn_edu.reference.delta import causal_conv1d as convolution_reference
from linattn_edu.reference.delta import rms_norm_gated as norm_reference
from linattn_edu.reference.delta.causal_conv1d_update import (
    causal_conv1d_update as convolution_update_reference,
)
from linattn_edu.reference.delta.state import state as state_reference
from linattn_edu.reference.delta.state_bwd import state_bwd as state_bwd_reference
from linattn_edu.reference.ssd.selective_state_update import selective_state_update
from linattn_edu.testing import gdn_inputs, poison, relative_rms, ssd_inputs

TABLES = {t.name: (s.module, t) for s in STAGES for t in s.tables}


def limit_of(k):
    """The longest chunk for k."""
    return by_kind.chunk_limit(kind_of(k, 1, 1, 64, None)).takes


def rows():
    """(stage, dtype, (K, V), row) of every table; a K below the tile too, and one that is odd."""
    generation = device_of(torch.empty(0, device="cuda"))[0]
    for stage, (module, of) in TABLES.items():
        # where a table says nothing, the module's first one holds
        first = {} if "fused" in of.run else getattr(module, "CONFIGS", {})
        by_size = first.get(generation, {}) | getattr(module, of.table).get(generation, {})
        for size, by_case in by_size.items():
            for dtype, (sizes, entry) in itertools.product(DTYPES[size], cases(of.by, by_case)):
                yield stage, dtype, sizes, entry
    # the fused backward passes have no table; of Kimi Delta Attention the forward pass is with it
    for dtype, size in itertools.product(
        DTYPES[2], (*equal(16, 64, 100, 128), (128, 33), (64, 128))
    ):
        q = torch.empty(1, 1, 1, size[0], dtype=dtype, device="cuda")
        if by_kind.gdn_backward_stages(kind_of(q, 1, size[1], 64, None)).takes == "fused":
            yield "fused_bwd", dtype, size, "shipped"
            yield "kda_fused", dtype, size, "shipped"
    for size, by_channels in of_generation(ema_kernels.CONFIGS, generation).items():
        for (limit, entry), dtype in itertools.product(by_channels.items(), DTYPES[size]):
            for D in {64: (1, 33, 64), 128: (100, 128, 300)}[limit]:
                yield "ema", dtype, D, entry
    yield from ssd_rows(generation)
    for dtype in itertools.chain(*DTYPES.values()):
        for W, D in itertools.product((1, 3, 4, 8), (1, 33, 200, 1024)):
            yield "convolution", dtype, (D, W), "shipped"
            yield "convolution_update", dtype, (D, W), "shipped"
        for G, D in ((1, 1), (1, 33), (3, 128), (2, 1000), (1, 8192), (1, 30000)):
            yield "rms_norm_gated", dtype, (G, D), "shipped"


def ssd_rows(generation):
    """(stage, dtype, (N, P), row) of Mamba-2, whose tables have one row for a dtype each.

    "ssd" are the rows of all its stages, taken together; "ssd_fused" those of the fused ones.
    """
    sizes = (*equal(16, 33, 64, 100, 128, 201, 256), (128, 64), (256, 40))
    for dtype, size in itertools.product(itertools.chain(*DTYPES.values()), sizes):
        yield "ssd", dtype, size, "shipped"
    for stage, module in (("free_state", state), ("free_state_bwd", state_bwd)):
        for size, by_dim in of_generation(module.FREE, generation).items():
            for dtype, sides in itertools.product(DTYPES[size], (*sizes, WIDE)):
                for entry in by_dim[max(128, block(sides[0]))]:
                    yield stage, dtype, sides, entry
    for dtype, size in itertools.product(DTYPES[2], (*equal(16, 33, 64), (128, 64), (100, 40))):
        B = torch.empty(1, 1, 1, size[0], dtype=dtype, device="cuda")
        if by_kind.ssd_stages(kind_of(B, 1, size[1], 64, None)).takes == "fused":
            yield "ssd_fused", dtype, size, "shipped"
    for dtype, size in itertools.product(itertools.chain(*DTYPES.values()), sizes):
        for entry in of_generation(update.TILES, generation):
            yield "selective_state_update", dtype, size, entry


def cases(by, by_case):
    """((K, V), row) of a table's part for one generation and element size."""
    if by == "dim":
        for limit, entries in by_case.items():
            sizes = (*equal(256, 200), WIDE) if limit == 256 else equal(limit, 64)
            yield from itertools.product(sizes, entries)
        yield from itertools.product(equal(33, 201, 255), [UNPIPELINED])
    elif by == "value":
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
    if stage == "fused_bwd":
        return run_fused_bwd(dtype, *sizes)
    if stage == "kda_fused":
        return run_kda_fused(dtype, *sizes)
    if stage in LAYER_RUNS:
        return LAYER_RUNS[stage](dtype, *sizes)
    if stage in SSD_RUNS:
        return SSD_RUNS[stage](dtype, *sizes, entry)
    module, (_, table, by, how) = TABLES[stage]
    only = {64: entry, 128: entry} if stage.endswith("output") else entry
    only = {128: [entry], 256: [entry]} if by == "dim" else only
    only = {512: entry} if by == "value" else only
    tables = {g: {2: only, 4: only} for g in ("turing", "ampere", "hopper")}
    if "rank one" in how:
        with patch.object(module, table, tables):
            return run_rank_one(dtype, *sizes)
    kept = getattr(module, table)
    worst = 0.0
    for T, chunk_size, seed, H in ((500, 64, 0, 2), (129, 32, 1, 4), (65, 16, 2, 2)):
        x = gdn_inputs(
            2, T, H, 4, *sizes, dtype=dtype, device="cuda", initial_state=True, seed=seed
        )
        chunk_size = min(chunk_size, limit_of(x.k))
        if stage.startswith("kda_"):
            generator = torch.Generator("cuda").manual_seed(seed)
            g = torch.randn(*x.g.shape, sizes[0], device="cuda", generator=generator)
            x.g = -(2 * g - 3).exp().clamp(max=5)
            # in one head the last rows of each chunk's first block are far from its first row
            x.g[:, torch.arange(T, device="cuda") % chunk_size < 16, 0] = -4.9
        # with a promise other products are made, on tiles of the same size, and with GDN-2's gates
        promises = (None, -5.0) if stage.startswith("kda_intra") else (None,)
        for safe, gates in itertools.product(
            promises, (False, True) if stage in GATED else (False,)
        ):
            exact = results(x.double(), "reference", stage, chunk_size, safe, gates)
            setattr(module, table, tables)
            rule = {"LENGTH": 64, "LEAST": 1, "PROGRAMS": 1024} if "pieces" in how else {}
            try:
                with poison(), forced(**rule):
                    got = results(x, "triton", stage, chunk_size, safe, gates)
            finally:
                setattr(module, table, kept)
            worst = max(worst, *(relative_rms(a, b) for a, b in zip(got, exact, strict=True)))
    return worst


# tables of kernels that take GDN-2's gates in the place of beta
GATED = ("kda_intra", "kda_wy", "kda_bwd", "kda_intra_bwd")


def results(x, impl, stage, chunk_size, safe, gates):
    """o and the final state, or all gradients of a fixed linear function of the two."""
    (*_, how) = TABLES[stage][1]
    gradients = "backward" in how
    options = {"scale": 0.3, "chunk_size": chunk_size}
    if stage.startswith("kda_"):
        if stage == "kda_scan":
            options["keep"] = ()
        again = ("gc", "h", "v_new") if stage == "kda_scans" else ("gc",)
        again = dict.fromkeys(again)
        return channel_results(x, impl, gradients, options, safe, again, gates)
    used = fused_stages(impl) if "fused" in how else stages(impl)
    o, final_state, residuals = forward(used, **x.asdict(), output_final_state=True, **options)
    if not gradients:
        return o, final_state
    got = backward(
        stages(impl), x.q, x.k, x.v, x.g, x.beta, residuals, *cotangents(o, final_state),
        scale=0.3, initial_state=x.initial_state,
    )  # fmt: skip
    return [dx for dx in got if dx is not None]


def run_rank_one(dtype, K, V):
    """Both passes of the general delta rule in chunks."""
    worst = 0.0
    for T, chunk_size in ((500, 64), (129, 32), (65, 16)):
        x = dplr_checks.inputs(2, T, 2, K, V, dtype, "cuda", seed=T)
        do, dht = gdn_checks.cotangents(x)
        given = {"output_final_state": True, "chunk_size": min(chunk_size, limit_of(x["k"]))}
        with poison():
            got = gdn_checks.run(x, do, dht, chunk_dplr_delta_rule, impl="triton", **given)
        ends = do.double(), dht.double()
        x = {n: t.double() for n, t in x.items()}
        exact = gdn_checks.run(x, *ends, chunk_dplr_delta_rule, impl="reference", **given)
        worst = max(worst, *(relative_rms(got[n], exact[n]) for n in exact))
    return worst


def run_fused_bwd(dtype, K, V):
    """The gradients of Gated DeltaNet in fused kernels, of whole sequences and in pieces."""
    worst = 0.0
    for T, chunk_size, H in ((500, 64, 2), (129, 32, 4), (65, 16, 2)):
        x = gdn_inputs(2, T, H, 4, K, V, dtype=dtype, device="cuda", initial_state=True, seed=T)
        exact = fused_gradients(x.double(), "reference", chunk_size)
        cut = {"LENGTH": 64, "LEAST": 1, "PROGRAMS": 1024}
        # the two scans in two launches, or as suits the GPU
        for rule, way in itertools.product(({}, cut), ({"together": 0}, {})):
            with poison(), forced(**rule, **way):
                got = fused_gradients(x, "triton", chunk_size)
            worst = max(worst, *(relative_rms(a, b) for a, b in zip(got, exact, strict=True)))
    return worst


def fused_gradients(x, impl, chunk_size):
    """All gradients of a fixed linear function of o and the final state, from the fused stages."""
    options = {"scale": 0.3, "chunk_size": chunk_size, "keep": ("gc", "P", "AG")}
    used = fused_stages(impl)
    o, final_state, residuals = forward(used, **x.asdict(), output_final_state=True, **options)
    got = backward(
        used, x.q, x.k, x.v, x.g, x.beta, residuals, *cotangents(o, final_state),
        scale=0.3, initial_state=x.initial_state,
    )  # fmt: skip
    return [dx for dx in got if dx is not None]


def run_kda_fused(dtype, K, V):
    """Both passes of Kimi Delta Attention in fused kernels, of whole sequences and in pieces, with
    every width of tiles.
    """
    worst = 0.0
    for T, chunk_size, H in ((500, 64, 2), (129, 32, 4), (65, 16, 2)):
        x = gdn_inputs(2, T, H, 4, K, V, dtype=dtype, device="cuda", initial_state=True, seed=T)
        generator = torch.Generator("cuda").manual_seed(T)
        g = torch.randn(*x.g.shape, K, device="cuda", generator=generator)
        x.g = -(2 * g - 3).exp().clamp(max=5)
        exact = fused_kda_results(x.double(), "reference", chunk_size)
        cut = {"LENGTH": 64, "LEAST": 1, "PROGRAMS": 1024, "MULTIPROCESSORS": 1}
        sizes = [(device_of(x.q)[0], n) for n in (1, 20, 10**6)]  # multiprocessors
        for rule, size in itertools.product(({}, cut), sizes):
            has = {"device_of": lambda _, size=size: size}
            known = patch.multiple(tables, **has), patch.multiple(choosing, **has)
            with poison(), forced(**rule), known[0], known[1]:
                got = fused_kda_results(x, "triton", chunk_size)
            worst = max(worst, *(relative_rms(a, b) for a, b in zip(got, exact, strict=True)))
    return worst


def fused_kda_results(x, impl, chunk_size):
    """o, the final state and all gradients of a fixed linear function of the two.

    The fused backward pass is for bfloat16 and rows of whole words.
    """
    used, tensors = kda.fused_stages(impl), (x.q, x.k, x.v, x.g, x.beta)
    given = {"scale": 0.3, "initial_state": x.initial_state}
    o, final_state, residuals = kda.forward(
        used, *tensors, output_final_state=True, chunk_size=chunk_size, **given
    )
    ends = cotangents(o, final_state)
    if x.v.dtype != torch.bfloat16 or x.v.shape[-1] % 2:
        used = kda.stages(impl)
    got = kda.backward(used, *tensors, residuals, *ends, **given)
    return [o, final_state, *(dx for dx in got if dx is not None)]


def run_ema(dtype, D, T, chunk_size, piece):
    """The largest error of ema_scan's outputs and gradients, in pieces of so many chunks."""
    generator = torch.Generator("cuda").manual_seed(T)

    def randn(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    x = {"x": randn(2, T, 3, D).to(dtype), "g": -(randn(2, T, 3) - 2).exp()}
    x |= {"weight": randn(2, T, 3) if T % 2 else None, "initial_state": randn(2, 3, D)}
    dy, dht = randn(2, T, 3, D).to(dtype), randn(2, 3, D)
    kept = ema_kernels.PIECE
    ema_kernels.PIECE = ema_bwd_kernels.PIECE = piece
    found = []
    try:
        for impl, to in (("triton", same), ("reference", torch.Tensor.double)):
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
        ema_kernels.PIECE = ema_bwd_kernels.PIECE = kept
    return max(relative_rms(a, b) for a, b in zip(*found, strict=True))


def run_ssd(dtype, N, P, stages, chunks):
    """The largest error of the outputs and the gradients of Mamba-2, from `stages`.

    chunks: (tokens, of a chunk, what is given). Many heads: dA of a few may cancel.
    """
    worst = 0.0
    for T, chunk_size, given in chunks:
        x = ssd_inputs(2, T, 32, 2, P, N, dtype=dtype, device="cuda", seed=T)
        tensors = {n: getattr(x, n) for n in ("x", "dt", "A", "B", "C")}
        if given != "nothing":
            D = x.D[:, None] if given == "documents" else x.z[0, 0].to(x.D.dtype)
            states = x.initial_states.mT.contiguous()
            tensors |= {"D": D, "dt_bias": x.dt_bias, "initial_state": states}
        ids = {}
        if given == "documents":
            tensors["z"], ids["seq_idx"] = x.z, x.seq_idx
        found = []
        for used, to in ((stages, same), (ssd.stages("reference"), torch.Tensor.double)):
            arguments = {n: to(t) for n, t in tensors.items()} | ids
            options = {"softplus": True, "chunk_size": chunk_size}
            with poison():
                *outputs, _ = ssd.forward(used, **arguments, output_final_state=True, **options)
                dout, dht = (to(y) for y in cotangents(x.x, outputs[1].float()))
                gradients = ssd.backward(used, **arguments, dout=dout, dht=dht, **options)
            found.append([*outputs, *(y for y in gradients if y is not None)])
        worst = max(worst, *map(relative_rms, *found))
    return worst


def same(t):
    return t


def run_staged(dtype, N, P, entry):
    """Both passes in stages."""
    B = torch.empty(1, 1, 1, N, dtype=dtype, device="cuda")
    chunks = ((500, 64, "documents"), (129, 32, "channels"), (65, 16, "nothing"))
    chunks = [(T, min(C, limit_of(B)), given) for T, C, given in chunks]
    return run_ssd(dtype, N, P, ssd.stages("triton"), chunks)


def run_fused(dtype, N, P, entry):
    """Both passes in few stages: chunks of two tiles, and of one; sequences of several pieces."""
    chunks = ((500, 128, "documents"), (300, 128, "channels"), (129, 64, "nothing"))
    worst = run_ssd(dtype, N, P, ssd.fused_stages("triton"), chunks)
    with forced(SSD_PIECE=128):
        return max(worst, run_ssd(dtype, N, P, ssd.fused_stages("triton"), chunks))


def run_free(dtype, N, P, entry, backwards):
    """state, or state_bwd, where nothing is corrected, with this row in place of its table."""
    module, worst = state_bwd if backwards else state, 0.0
    by_dim = {128: [entry], 256: [entry]}
    tables = {g: {2: by_dim, 4: by_dim} for g in ("turing", "ampere", "hopper")}
    kept = module.FREE
    for T, chunk_size, documents in ((500, 64, True), (65, 16, False)):
        x = ssd_inputs(2, T, 4, 2, P, N, dtype=dtype, device="cuda", seed=T)
        chunk_size = min(chunk_size, limit_of(x.B))
        gs, gc = ssd.fused_stages("reference").chunk_cumsum_log(
            x.dt, x.A, x.dt_bias, softplus=True, chunk_size=chunk_size
        )
        S, ids = x.initial_states.mT.contiguous(), x.seq_idx if documents else None
        if backwards:
            args = (x.C, None, None, gc, x.x, None, S, ids)
            options = {"scale": 1.0, "chunk_size": chunk_size}
            reference, kernel = state_bwd_reference, state_bwd.state_bwd
        else:
            args = (x.B, None, x.x, gc, S, gs, ids)
            options = {"chunk_size": chunk_size, "output_final_state": True}
            reference, kernel = state_reference, state.state
        exact = reference(*(widened(y) for y in args), **options)
        module.FREE = tables
        try:
            with poison():
                got = kernel(*args, **options)
        finally:
            module.FREE = kept
        pairs = [(a, b) for a, b in zip(got, exact, strict=True) if b is not None]
        worst = max(worst, *(relative_rms(a, b) for a, b in pairs))
    return worst


def widened(y):
    """Numbers in float64; what is none, or counts, as it is."""
    return y.double() if isinstance(y, torch.Tensor) and y.is_floating_point() else y


def run_update(dtype, N, P, entry):
    """A token of many sequences, or few, with tiles of `entry` bytes."""
    kept, worst = update.TILES, 0.0
    for sequences, slots in ((1, None), (40, 50)):
        x = ssd_inputs(sequences, 1, 4, 2, P, N, dtype=dtype, device="cuda", seed=sequences)
        indices = None if slots is None else torch.randperm(slots, device="cuda")[:sequences]
        states = torch.randn(slots or sequences, 4, P, N, device="cuda")
        tokens = (x.x[:, 0], x.dt[:, 0, :, None], x.A[:, None, None], x.B[:, 0], x.C[:, 0])
        args = (*tokens, x.D[:, None], x.z[:, 0], x.dt_bias[:, None])
        S = states.double()
        out = selective_state_update(S, *map(widened, args), indices, softplus=True)
        update.TILES = dict.fromkeys(("turing", "ampere", "hopper"), (entry,))
        try:
            with poison():
                got = update.selective_state_update(states, *args, indices, softplus=True)
        finally:
            update.TILES = kept
        worst = max(worst, relative_rms(got, out), relative_rms(states, S))
    return worst


SSD_RUNS = {
    "ssd": run_staged,
    "ssd_fused": run_fused,
    "free_state": lambda *row: run_free(*row, backwards=False),
    "free_state_bwd": lambda *row: run_free(*row, backwards=True),
    "selective_state_update": run_update,
}


def compared(kernel, reference, args, **options):
    """The largest error of the outputs of a stage, against float64."""
    with poison():
        got = kernel(*args, **options)
    exact = reference(*map(widened, args), **options)
    pairs = (y if isinstance(y, tuple) else (y,) for y in (got, exact))
    pairs = [(a, b) for a, b in zip(*pairs, strict=True) if b is not None]
    return max(relative_rms(a, b) for a, b in pairs)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def run_convolution(dtype, D, W):
    """Both passes: with nothing given, and of sequences that begin anywhere with everything."""
    worst = 0.0
    for T, given in ((300, False), (129, True), (500, True)):
        x = randn(3, T, D, dtype=dtype, seed=T)
        dy = (randn(3, T, D, seed=1) + x + 1).to(dtype)  # no sum of dy, or of dy times x, cancels
        states = randn(2, 3, D, W, dtype=dtype, seed=2)
        weight, bias = randn(D, W, seed=3), randn(D, seed=4) if given else None
        state, dht = states if given else (None, None)
        numbers = (randn(3, T, seed=5) > 1.2).cumsum(1).int()
        numbers = torch.where(randn(3, T, seed=6) > 2, -1, numbers) if given else None
        options = {"activation": "silu" if given else None}
        args = x, weight, bias, state
        rooms = convolution.causal_conv1d, convolution_reference.causal_conv1d
        error = compared(*rooms, (*args, numbers), **options, output_final_state=given)
        rooms = convolution.causal_conv1d_bwd, convolution_reference.causal_conv1d_bwd
        worst = max(worst, error, compared(*rooms, (*args, dy, dht, numbers), **options))
    return worst


def run_convolution_update(dtype, D, W):
    """Tokens into states of every length and order, rings and slots of a pool."""
    worst = 0.0
    for T, more, ring, slots in ((1, 1, False, None), (1, 0, True, 90), (5, 2, True, None),
                                 (3, 90, False, 90), (7, 0, False, None)):  # fmt: skip
        S = max(W - 1, 1) + more
        x, states = randn(40, T, D, dtype=dtype), randn(slots or 40, D, S, dtype=dtype, seed=1)
        lengths = torch.arange(40, device="cuda") * 3 if ring else None
        indices = None if slots is None else torch.randperm(slots, device="cuda")[:40]
        args = x, randn(D, W, seed=2), randn(D, seed=3), lengths, indices
        S_got, S_exact = states.clone(), states.double()
        if more == 2:  # tokens before channels
            S_got = S_got.mT.contiguous().mT
        with poison():
            got = convolution_update.causal_conv1d_update(S_got, *args, activation="silu")
        exact = convolution_update_reference(S_exact, *map(widened, args), activation="silu")
        worst = max(worst, relative_rms(got, exact), relative_rms(S_got, S_exact))
    return worst


def run_norm(dtype, G, D):
    """Both passes, the gate behind and in front, in one part and in several."""
    worst = 0.0
    for n, given, before, activation in ((70, False, True, "silu"), (3001, True, True, "sigmoid"),
                                         (3001, True, False, "silu")):  # fmt: skip
        n = min(n, 2**24 // (G * D))
        x, z, dy = (randn(n, G, D, dtype=dtype, seed=i) for i in range(3))
        weight, bias = randn(G, D, seed=3), randn(G, D, seed=4)
        args = (x, weight, bias, z) if given else (x, None, None, None)
        options = {"norm_before_gate": before, "activation": activation}
        rooms = norm.rms_norm_gated, norm_reference.rms_norm_gated
        error = compared(*rooms, args, **options, eps=0.1)  # of one number something is left
        _, rstd = norm.rms_norm_gated(*args, **options, eps=0.1)
        rooms = norm.rms_norm_gated_bwd, norm_reference.rms_norm_gated_bwd
        kept, norm.PARTS = norm.PARTS, 100
        try:
            worst = max(worst, error, compared(*rooms, (*args, rstd, dy), **options))
        finally:
            norm.PARTS = kept
    return worst


LAYER_RUNS = {
    "convolution": run_convolution,
    "convolution_update": run_convolution_update,
    "rms_norm_gated": run_norm,
}


def channel_results(x, impl, gradients, options, safe, again, gates=False):
    """The same of Kimi Delta Attention; again: the residuals that the backward pass makes anew.

    gates: of GDN-2, whose gates follow from q and v.
    """
    used, beta, write = kda.stages(impl), x.beta, None
    if gates:
        n = x.v.shape[2] // x.q.shape[2]
        beta, write = x.q.abs().repeat_interleave(n, 2), x.v.abs().clamp(max=1)
    tensors = x.q, x.k, x.v, x.g, beta
    o, final_state, residuals = kda.forward(
        used, *tensors, write=write, initial_state=x.initial_state, output_final_state=True,
        safe_bound=safe, **options,
    )  # fmt: skip
    if not gradients:
        return o, final_state
    got = kda.backward(
        used, *tensors, residuals._replace(**again), *cotangents(o, final_state),
        write=write, scale=0.3, initial_state=x.initial_state,
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
