"""Compile every kernel for GPUs that need not be present, once for each row its launcher picks.

    python tests/kernels/compile_rows.py             compile what is not kept, and a sample
    python tests/kernels/compile_rows.py --all       compile every row
    python tests/kernels/compile_rows.py --write     (`make compile`) and keep the results

Prints a JSON line a row. The sample is another thirtieth of the rows every day. A program, because
a process that interprets kernels cannot compile them.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in conftest.py

import kept
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from linattn_edu.kernels import tiles
from linattn_edu.kernels.delta import (
    causal_conv1d,
    causal_conv1d_update,
    cp_merge,
    cp_merge_bwd,
    cumsum,
    gate,
    gate_bwd,
    gate_cumsum,
    kda_bwd,
    kda_intra,
    kda_intra_bwd,
    kda_scan,
    kda_scans,
    l2norm,
    output,
    output_bwd,
    recurrent,
    rms_norm_gated,
    solve,
    state,
    state_bwd,
    wy,
    wy_bwd,
)
from linattn_edu.kernels.fused import (
    gdn_bwd,
    gdn_fwd,
    gdn_intra,
    gdn_scans,
    kda_fwd,
    ssd_bwd,
    ssd_fwd,
)
from linattn_edu.kernels.fused import kda_bwd as kda_fused_bwd
from linattn_edu.kernels.fused import kda_scans as kda_fused_scans
from linattn_edu.kernels.routes import by_kind, forced, kind_of, limits
from linattn_edu.kernels.ssd import (
    chunk_cumsum,
    chunk_cumsum_bwd,
    chunk_scan,
    chunk_scan_bwd_da_cs,
    chunk_scan_bwd_dc,
    chunk_scan_bwd_dstates,
    chunk_scan_chunk_state_bwd_dx,
    chunk_state,
    chunk_state_bwd_db,
    ema,
    ema_bwd,
    selective_state_update,
    state_passing,
    state_passing_bwd,
)

CAPABILITIES = (75, 80, 89, 90, 100)
SAMPLES = 60  # parts of the rows, of which a day's sample is one
# head sizes; heads of odd size and fp16 take rows of their own on Hopper alone, or none
SIZES = (
    (torch.bfloat16, (33, 64, 128, 255, 256)),
    (torch.float16, (128,)),
    (torch.float32, (64, 128, 256)),
)
SIZES_ELSEWHERE = ((torch.bfloat16, (64, 128, 256)), (torch.float32, (128, 256)))
WIDE = 512  # values beside 256 keys; and keys of the recurrence
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int8: "*i8",
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def holds(q, v):
    """Whether the fused stages of the delta rule hold such heads."""
    return by_kind.gdn_backward_stages(kind_of(q, *v.shape[2:], 64, None)).takes == "fused"


def launches(K, V, dtype, chunk_size, heads):
    """Call every launcher on empty CPU tensors; the patched run() below records the launches."""
    B, T, H, HV = heads, chunk_size, 1, 1
    qk = torch.empty(B, T, H, K, dtype=dtype)
    v = torch.empty(B, T, HV, V, dtype=dtype)
    g = torch.empty(B, T, HV)
    A = torch.empty(B, T, HV, chunk_size, dtype=dtype)
    h0 = torch.empty(B, HV, K, V)
    h = torch.empty(B, 1, HV, K, V, dtype=dtype)
    gate_cumsum.gate_cumsum(g, chunk_size=chunk_size)
    recurrences(qk, v, g, h0)
    solve.solve(qk, g, chunk_size=chunk_size)
    wy.wy(qk, v, g, g, A)
    state.state(qk, qk, v, g, h0, chunk_size=chunk_size, output_final_state=True)
    output.output(qk, qk, v, h, g, scale=1.0, chunk_size=chunk_size)
    P, R, _ = gdn_intra.intra_chunk(qk, qk, g, g, chunk_size=chunk_size, return_inverse=True)
    if holds(qk, v):
        fused_launches(qk, v, g, A, h0, h, chunk_size)
    warm_up_launches(K, V, dtype, chunk_size, heads)
    gdn_fwd.scan(qk, qk, v, g, P, R, h0, scale=1.0, output_final_state=True)
    gdn_fwd.scan_map(qk, v, g, R, h0)
    S, M = cp_merge.piece_map(qk, qk, v, g, h0, chunk_size=chunk_size)
    for numbers in (M[None], M[None, :, :, 0, 0]):
        cp_merge.cp_merge(S[None], numbers)
        cp_merge_bwd.cp_merge_bwd(S[None], numbers)
    options = {"scale": 1.0, "chunk_size": chunk_size}
    output_bwd.output_bwd(qk, qk, v, h, g, v, **options)
    state_bwd.state_bwd(qk, qk, qk, g, v, v, h0, **options)
    cp_merge_bwd.piece_map_bwd(qk, qk, qk, g, v, v, h0, **options)
    wy_bwd.wy_bwd(qk, v, g, g, A, h, v, h, v, qk.clone(), g.clone())
    gate_bwd.gate_bwd(g, g, one := torch.empty(1), one, chunk_size=chunk_size)
    gate.gate(g, one, one)
    gate.layer_gate_bwd(g, g, one, one)
    solve.solve_tril(A)
    for size in (1, chunk_size, 512):
        cumsum.cumsum(g, chunk_size=size)
    for reverse in (False, True):
        cumsum.global_cumsum(g, reverse=reverse)
    y, rstd = l2norm.l2norm(qk)
    l2norm.l2norm_bwd(qk, rstd, y)
    channel_launches(qk, v, g, qk.float(), A, h0, h, chunk_size)


def recurrences(qk, v, g, h0):
    """The recurrence with one gate, with the gates of a layer, from a pool; backward with all."""
    channels, one, bias = qk.expand(*g.shape, -1), torch.empty(1), torch.empty(qk.shape[-1])
    slots = torch.empty(len(qk), 2, dtype=torch.int32)
    recurrent.recurrent(qk, qk, v, g, g, initial_state=h0)
    recurrent.recurrent(qk, qk, v, None, g, gk=channels, initial_state=h0, A_log=one, dt_bias=bias)
    recurrent.recurrent(
        qk, qk, v, None, g, gk=channels, initial_state=h0, A_log=one, dt_bias=bias,
        lower_bound=-5.0, normalise=True, v_first=True, inplace=True, indices=slots,
        accepted=slots[:, 0],
    )  # fmt: skip
    recurrent.recurrent_bwd(qk, qk, v, g, g, v, h0, gk=qk.float(), gv=v.float(), initial_state=h0)


def channel_launches(qk, v, beta, g, A, h0, h, chunk_size):
    """The same with a gate for each row of the state: every stage of Kimi Delta Attention."""
    options = {"chunk_size": chunk_size}
    one, bias = torch.empty(1), torch.empty(g.shape[-1])
    for given in (
        {},
        {"A_log": one, "dt_bias": bias},
        {"A_log": one, "dt_bias": bias, "lower_bound": -5.0},
        {"dt_bias": bias, "lower_bound": -5.0},
    ):
        gate_cumsum.gate_cumsum(g, **given, **options)
        gate_bwd.gate_bwd(g, g, **given, **options)
        if holds(qk, v):
            kda_fused_scans.kda_gates(qk, qk, g, **given, **options)
        if given:
            gate.gate(g, **{"A_log": None, **given})
            gate.layer_gate_bwd(g, g, **{"A_log": None, **given})
    for lower_bound in (None, -5.0):
        kda_intra.kda_intra(qk, qk, beta, g, lower_bound=lower_bound, **options)
    wy.wy(qk, v, beta, g, A, qk)
    state.state(qk, qk, v, g, h0, output_final_state=True, **options)
    cp_merge.piece_map(qk, qk, v, g, h0, **options)
    output.output(qk, qk, v, h, g, A, scale=1.0, **options)
    kda_scan.kda_scan(qk, qk, qk, v, g, A, h0, scale=1.0, output_final_state=True)
    kda_scans.kda_scans(qk, qk, qk, v, g, A, v, h0, h0, scale=1.0)
    kda_bwd.kda_output_bwd(v, h, v, scale=1.0, **options)
    state_bwd.state_bwd(qk, qk, qk, g, v, None, h0, P=A, scale=1.0, **options)
    cp_merge_bwd.piece_map_bwd(qk, qk, qk, g, v, None, h0, A, scale=1.0, **options)
    kda_bwd.kda_wy_bwd(v, beta, A, h, v, h, v)
    dgl = h[..., 0].float()
    kda_intra_bwd.kda_intra_bwd(qk, qk, beta, g, A, A, qk, qk, qk, dgl, beta)
    two = [torch.cat([x, x], 2) for x in (beta, g, A, A, qk, qk, qk, dgl, beta)]
    kda_intra_bwd.kda_intra_bwd(qk, qk, *two)
    if holds(qk, v):
        fused_kda_launches(qk, v, beta, g, A, h0, h, options)


def fused_kda_launches(qk, v, beta, g, A, h0, h, options):
    """The fused stages of Kimi Delta Attention, the last with a value head for each q/k head and
    with two.
    """
    for lower_bound in (None, -5.0):
        kda_fwd.kda_prepare(qk, qk, beta, g, lower_bound=lower_bound, **options)
    gated = qk, qk, qk, v, beta, g, A, A
    kda_fwd.kda_fused_scan(*gated, h0, scale=1.0, output_final_state=True)
    kda_fwd.kda_fused_scan_map(*gated[1:-1], h0)
    kda_fused_scans.kda_fused_scans(*gated, v, h0, h0, scale=1.0)
    kda_fused_scans.kda_fused_scan_map_bwd(*gated[:3], *gated[4:], v, h0, scale=1.0)
    options["scale"] = 1.0
    if qk.dtype != torch.bfloat16:
        return
    given = v, beta, g, h, v, v, h, v
    kda_fused_bwd.kda_fused_intra_bwd(qk, qk, *given, **options)
    two = [torch.cat([x, x], -2 if x.ndim == 4 else -1) for x in (v, beta, g)]
    states = torch.cat([h, h], 2)
    given = *two, states, two[0], two[0], states, two[0]
    kda_fused_bwd.kda_fused_intra_bwd(qk, qk, *given, **options)


def ssd_launches(N, P, dtype, chunk_size):
    """Every stage of Mamba-2: two heads on a group, with all that may be given and with nothing."""
    T, H = chunk_size, 2
    x, BC = torch.empty(1, T, H, P, dtype=dtype), torch.empty(1, T, 1, N, dtype=dtype)
    dt, step, A = torch.empty(1, T, H, dtype=dtype), torch.empty(1, T, H), torch.empty(H)
    h, dlast = torch.empty(1, 1, H, N, P), torch.empty(1, 1, H)
    ids, D = torch.empty(1, T, dtype=torch.int32), torch.empty(H, P)
    options = {"chunk_size": chunk_size}
    for bias, softplus in ((A, True), (None, False)):
        chunk_cumsum.chunk_cumsum(dt, A, bias, softplus=softplus, **options)
        chunk_cumsum_bwd.chunk_cumsum_bwd(
            step, dlast, step, dt, A, bias, softplus=softplus, **options
        )
    for seq_idx in (None, ids):
        chunk_state.chunk_state(BC, x, step, step, seq_idx, **options)
        state_passing.state_passing(h, step, h[0], seq_idx, output_final_state=True, **options)
    for given in ((None, None, None), (A, x, ids), (D, None, None)):
        chunk_scan.chunk_scan(BC, BC, x, step, step, h, *given, **options)
    for given in ((None, None), (A, ids), (D, None)):
        chunk_scan_chunk_state_bwd_dx.chunk_scan_chunk_state_bwd_dx(
            BC, BC, x, step, step, h, x, *given, **options
        )
    for seq_idx in (None, ids):
        chunk_scan_bwd_da_cs.chunk_scan_bwd_da_cs(BC, BC, x, step, step, x, seq_idx, **options)
        chunk_scan_bwd_dstates.chunk_scan_bwd_dstates(BC, step, x, seq_idx, **options)
        dB, _, _ = chunk_state_bwd_db.chunk_state_bwd_db(BC, x, step, step, h, seq_idx, **options)
        given = BC, BC, x, step, step, h, x, dB, seq_idx
        chunk_scan_bwd_dc.chunk_scan_bwd_dc(*given, **options)
    for given in ((h[0], ids), (None, None)):
        state_passing_bwd.state_passing_bwd(h, step, h, *given, **options)
    updates(x[0], dt[0], BC[0], A, D)


def fused_launches(qk, v, g, A, h0, h, chunk_size):
    """The fused backward pass of Gated DeltaNet, with a value head for each q/k head and with two,
    and what the forward pass does for it."""
    gdn_intra.intra_chunk(qk, qk, g, g, chunk_size=chunk_size, return_inverse=True, gated=True)
    gdn_fwd.scan_map(qk, v, g, A, h0, g)
    gdn_scans.scan_states(qk, v, g, g, A, h0)
    gdn_scans.scan_bwd(qk, qk, g, g, A, A, v, h0, scale=1.0)
    gdn_scans.scans(qk, qk, v, g, g, A, A, v, h0, h0, scale=1.0)
    gdn_scans.scan_map_bwd(qk, qk, g, g, A, A, v, h0, scale=1.0)
    options = {"scale": 1.0, "chunk_size": chunk_size}
    gdn_bwd.intra_chunk_bwd(qk, qk, v, g, g, h, v, v, h, v, **options)
    v, g, h = (x.expand(*x.shape[:2], 2, *x.shape[3:]) for x in (v, g, h))
    gdn_bwd.intra_chunk_bwd(qk, qk, v, g, g, h, v, v, h, v, **options)


def warm_up_launches(K, V, dtype, chunk_size, heads):
    """The scans of Gated DeltaNet in pieces that begin where the state is forgotten."""
    B, T, HV = heads, 4 * chunk_size * tiles.cdiv(V, 64), 1
    qk, v = (torch.empty(B, T, HV, D, dtype=dtype) for D in (K, V))
    g, A, h0 = torch.empty(B, T, HV), qk.new_empty(B, T, HV, chunk_size), torch.empty(B, HV, K, V)
    small = {"PROGRAMS": 0, "PER_PROGRAM": chunk_size, "MULTIPROCESSORS": 0}
    with forced(**small):
        gdn_fwd.scan(qk, qk, v, g, A, A, h0, scale=1.0, output_final_state=True)
        if holds(qk, v):
            gdn_scans.scan_states(qk, v, g, g, A, h0)
            gdn_scans.scan_bwd(qk, qk, g, g, A, A, v, h0, scale=1.0)
            gdn_scans.scans(qk, qk, v, g, g, A, A, v, h0, h0, scale=1.0)


def fused_ssd_launches(N, P, dtype):
    """The fused stages of Mamba-2, where they hold the heads: chunks of two tiles, and of one."""
    for T in (128, 64):
        x, BC = torch.empty(1, T, 2, P, dtype=dtype), torch.empty(1, T, 1, N, dtype=dtype)
        if by_kind.ssd_stages(kind_of(BC, 2, P, T, None)).takes == "staged":
            return
        step, A, D = torch.empty(1, T, 2), torch.empty(2), torch.empty(2, P)
        h, dht = torch.empty(1, 1, 2, N, P, dtype=dtype), torch.empty(1, 2, N, P)
        ids, options = torch.empty(1, T, dtype=torch.int32), {"chunk_size": T}
        chunk_cumsum.chunk_cumsum_log(step, A, A, softplus=True, **options)
        S = ssd_fwd.chunk_scores(BC, BC, **options)
        ssd_fwd.chunk_scores(BC, BC, ids, **options)
        whole = torch.empty(1, limits.SSD_PIECE + T, 2, max(N, P), dtype=dtype)
        long, rates = whole[..., :P], whole[..., 0].float()
        for seq_idx, D_, z in ((None, A, None), (ids, D, x), (ids, None, None)):
            state.state(BC, None, x, step, dht, step, seq_idx, output_final_state=True, **options)
            ssd_fwd.ssd_fwd(BC, BC, S, x, step, step, None, D_, z, seq_idx)
            ssd_fwd.ssd_fwd(
                whole[..., :N],
                whole[..., :N],
                S,
                long,
                rates,
                rates,
                dht,
                D_,
                z,
                seq_idx,
                output_final_state=True,
            )
            state_bwd.state_bwd(
                BC, None, None, step, x, None, dht, seq_idx, h, scale=1.0, **options
            )
            cp_merge.piece_map(BC, None, x, step, dht, step, **options)
            cp_merge_bwd.piece_map_bwd(BC, None, None, step, x, None, dht, scale=1.0, **options)
            given = BC, BC, x, step, step
            ssd_bwd.ssd_bwd_bc(*given, h, h, x, seq_idx, **options)
            ssd_bwd.ssd_bwd_dx(*given, h, x, step, step, D_, seq_idx, **options)
        chunk_cumsum_bwd.chunk_cumsum_bwd(
            step, torch.empty(1, 1, 2), step, step, A, A, step, softplus=True, **options
        )


def updates(x, dt, BC, A, D):
    """One token of Mamba-2: with one number a head; with one for each row and entry, in a pool."""
    (B, H, P), N = x.shape, BC.shape[2]
    state, rates = torch.empty(B, H, P, N), torch.empty(H, P, N)
    slots = torch.empty(B, dtype=torch.int32)
    update = selective_state_update.selective_state_update
    one = dt[..., None], A[:, None, None], BC, BC, D[:, :1], x, A[:, None]
    update(state, x, *one, softplus=True)
    update(state.to(x.dtype), x, x, rates, BC, BC, indices=slots)


def averages(D, dtype):
    """Exponential moving averages: short and with nothing given; long and with everything."""
    for T, given in ((64, False), (64 * (ema.PIECE + 1), True)):
        x, g = torch.empty(1, T, 1, D, dtype=dtype), torch.empty(1, T, 1)
        weight, state = (g, torch.empty(1, 1, D)) if given else (None, None)
        options = {"chunk_size": 64, "output_final_state": given, "return_states": given}
        ema.ema(x, g, g, weight, state, **options)
        h = torch.empty(1, T // 64, 1, D)
        ema_bwd.ema_bwd(x, g, g, weight, h, x, state, chunk_size=64)


def convolutions(D, dtype):
    """Short convolutions: of 3 tokens with nothing given; of 4, and of 8, with everything."""
    for W, given in ((3, False), (4, True), (8, True)):
        x, weight = torch.empty(1, 64, D, dtype=dtype), torch.empty(D, W, dtype=dtype)
        bias, state = (weight[:, 0], torch.empty(1, D, W, dtype=dtype)) if given else (None, None)
        options = {"activation": "silu" if given else None}
        causal_conv1d.causal_conv1d(x, weight, bias, state, output_final_state=given, **options)
        causal_conv1d.causal_conv1d_bwd(x, weight, bias, state, x, state, **options)
        if W < 8:
            ids = torch.empty(1, 64, dtype=torch.int32)
            causal_conv1d.causal_conv1d(
                x, weight, bias, state, ids, output_final_state=given, **options
            )
            causal_conv1d.causal_conv1d_bwd(x, weight, bias, state, x, state, ids, **options)
            pool = torch.empty(2, D, W, dtype=dtype)
            slots = ids[0, :1] if given else None
            causal_conv1d_update.causal_conv1d_update(pool[:1], x, weight, bias, slots, **options)
            causal_conv1d_update.causal_conv1d_update(pool, x, weight, bias, None, slots, **options)


def norms(D, dtype):
    """Gated norms: of one group with nothing given; of two with everything, in both orders."""
    for G, given in ((1, False), (2, True)):
        x, weight = torch.empty(1, G, D, dtype=dtype), torch.empty(G, D)
        args = (x, weight, weight, x) if given else (x, None, None, None)
        for kinds in ((True, "silu"), (False, "sigmoid")) if given else ((True, "silu"),):
            options = dict(zip(("norm_before_gate", "activation"), kinds, strict=True))
            _, rstd = rms_norm_gated.rms_norm_gated(*args, **options)
            rms_norm_gated.rms_norm_gated_bwd(*args, rstd, x, **options)


def record(cc):
    """Every distinct (kernel, arguments) the launchers ask for on a GPU of capability cc."""
    seen = {}

    def run(self, *args, grid, warmup, **kwargs):
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        key = [self.fn.__name__]
        key += [f"{n}={x.dtype if isinstance(x, torch.Tensor) else x}" for n, x in bound.items()]
        seen[" ".join(key)] = (self, bound)

    original, JITFunction.run = JITFunction.run, run
    device = tiles.device_of
    ours = [m for n, m in sys.modules.items() if n.startswith("linattn_edu.kernels.")]
    modules = [m for m in ours if hasattr(m, "device_of")]
    try:
        for processors in (1, 2, 5, 10, 10**6):  # so that every row of a list is the choice once
            for module in modules:
                module.device_of = lambda x, n=processors: (tiles.generation(divmod(cc, 10)), n)
            for dtype, sizes in SIZES if cc == 90 else SIZES_ELSEWHERE:
                for K, V in [(n, n) for n in sizes] + [(256, WIDE)] * (256 in sizes):
                    k = torch.empty(1, 1, 1, K, dtype=dtype)
                    limit = by_kind.chunk_limit(kind_of(k, 1, V, 64, None)).takes
                    launches(K, V, dtype, limit, heads=1)
                    if V <= 256:
                        ssd_launches(K, V, dtype, limit)
                        fused_ssd_launches(K, V, dtype)
                    if V <= 128:
                        averages(V, dtype)
                        convolutions(V, dtype)
                        norms(V, dtype)
                norms(8192, dtype)
                if 256 in sizes:
                    qk = torch.empty(1, 1, 1, WIDE, dtype=dtype)
                    recurrences(qk, qk, torch.empty(1, 1, 1), torch.empty(1, 1, WIDE, WIDE))
    finally:
        JITFunction.run = original
        for module in modules:
            module.device_of = device
    return seen


def source_of(kernel, bound):
    """(what is compiled, launch options) of one launch."""
    signature, constants, attrs = {}, {}, {}
    for i, p in enumerate(kernel.params):
        x = bound[p.name]
        if p.is_constexpr or x is None:
            signature[p.name], constants[(i,)] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[p.name], attrs[(i,)] = TYPES[x.dtype], [["tt.divisibility", 16]]
        else:
            signature[p.name] = "fp32" if isinstance(x, float) else "i32"
    options = {n: x for n, x in bound.items() if n not in kernel.arg_names}
    return ASTSource(kernel, signature, constants, attrs), options


def all_rows():
    """kept.Row -> (name in words, source, options) of every compilation."""
    found = {}
    for cc in CAPABILITIES:
        for name, (kernel, bound) in record(cc).items():
            source, options = source_of(kernel, bound)
            parts = source.signature, source.constants, source.attrs, sorted(options.items())
            row = kept.Row(cc, kernel.fn.__name__, kept.key(kernel, *map(repr, parts)))
            found[row] = name, source, options
    return found


def compile_row(cc, source, options, anew):
    """Compile one launch, or with anew=False take it from Triton's cache; return what it needs."""
    triton.knobs.compilation.always_compile = anew
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return kept.Result(
        registers=int(numbers["REG"]),
        stack=int(numbers["STACK"]),
        shared=compiled.metadata.shared,
        mma=bool(re.search(r"\bw?g?mma\.|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])),
    )


def compile_rows(rows, anew):
    """kept.Row -> kept.Result, on every core."""
    tasks = [(row.cc, *launch, row in anew) for row, (_, *launch) in rows.items()]
    # a fork has the kernels already; they cannot be sent
    with multiprocessing.get_context("fork").Pool(initializer=TASKS.extend, initargs=(tasks,)) as p:
        return dict(zip(rows, p.map(compile_task, range(len(tasks)), chunksize=1), strict=True))


TASKS = []  # of a process of the pool


def compile_task(i):
    return compile_row(*TASKS[i])


def main():
    parser = argparse.ArgumentParser(description="compile the rows of every kernel")
    parser.add_argument("--all", action="store_true", help="also rows whose results are kept")
    parser.add_argument("--write", action="store_true", help="keep the results")
    args = parser.parse_args()
    rows, results = all_rows(), kept.read(triton.__version__)
    today = datetime.date.today().toordinal() % SAMPLES
    again = {row for i, row in enumerate(sorted(rows)) if args.all or i % SAMPLES == today}
    wanted = {row: launch for row, launch in rows.items() if row in again or row not in results}
    compiled = compile_rows(wanted, again)
    for row in rows | results:
        name = rows[row][0] if row in rows else None  # None: no launcher picks it any more
        line = {"cc": row.cc, "kernel": row.kernel, "name": name}
        print(json.dumps(line | {"kept": results.get(row), "compiled": compiled.get(row)}))
    if args.write:
        kept.write(triton.__version__, {row: compiled.get(row, results.get(row)) for row in rows})


if __name__ == "__main__":
    main()
