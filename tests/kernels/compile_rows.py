"""Compile every kernel for a GPU that need not be present, once for each row its launcher picks.

Run as a program: `compile_rows.py CC` prints one JSON line a compilation. It stands apart from the
tests because a process that interprets kernels cannot compile them.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from linattn_edu.kernels import tiles
from linattn_edu.kernels.delta import (
    cumsum,
    fused,
    gate_bwd,
    gate_cumsum,
    kda_bwd,
    kda_intra,
    kda_intra_bwd,
    l2norm,
    output,
    output_bwd,
    recurrent,
    solve,
    state,
    state_bwd,
    wy,
    wy_bwd,
)

# head sizes; heads of odd size and fp16 take rows of their own on Hopper alone, or none
SIZES = (
    (torch.bfloat16, (33, 64, 128, 255, 256)),
    (torch.float16, (128,)),
    (torch.float32, (64, 128, 256)),
)
SIZES_ELSEWHERE = ((torch.bfloat16, (64, 128, 256)), (torch.float32, (128, 256)))
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"
}  # fmt: skip
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


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
    recurrent.recurrent(qk, qk, v, g, g, initial_state=h0)
    channels, one = qk.expand(B, T, HV, K), torch.empty(1)
    slots = torch.empty(B, 2, dtype=torch.int32)
    recurrent.recurrent(
        qk, qk, v, None, g, gk=channels, initial_state=h0, A_log=one, dt_bias=torch.empty(K)
    )
    recurrent.recurrent(
        qk, qk, v, None, g, gk=channels, initial_state=h0, A_log=one, dt_bias=torch.empty(K),
        lower_bound=-5.0, normalise=True, v_first=True, inplace=True, indices=slots,
        accepted=slots[:, 0],
    )  # fmt: skip
    solve.solve(qk, g, chunk_size=chunk_size)
    wy.wy(qk, v, g, g, A)
    state.state(qk, qk, v, g, h0, chunk_size=chunk_size, output_final_state=True)
    output.output(qk, qk, v, h, g, scale=1.0, chunk_size=chunk_size)
    P, R, _ = fused.intra(qk, qk, g, g, chunk_size=chunk_size, return_inverse=True)
    fused.scan(qk, qk, v, g, P, R, h0, scale=1.0, output_final_state=True)
    options = {"scale": 1.0, "chunk_size": chunk_size}
    output_bwd.output_bwd(qk, qk, v, h, g, v, **options)
    state_bwd.state_bwd(qk, qk, qk, g, v, v, h0, **options)
    wy_bwd.wy_bwd(qk, v, g, g, A, h, v, h, v, qk.clone(), g.clone())
    gate_bwd.gate_bwd(g, g, one := torch.empty(1), one, chunk_size=chunk_size)
    solve.solve_tril(A)
    cumsum.cumsum(g, chunk_size=chunk_size)
    y, rstd = l2norm.l2norm(qk)
    l2norm.l2norm_bwd(qk, rstd, y)
    recurrent.recurrent_bwd(qk, qk, v, g, g, v, h0, gk=qk.float(), gv=v.float(), initial_state=h0)
    channel_launches(qk, v, g, qk.float(), A, h0, h, chunk_size)


def channel_launches(qk, v, beta, g, A, h0, h, chunk_size):
    """The same with a gate for each row of the state: every stage of Kimi Delta Attention."""
    options = {"chunk_size": chunk_size}
    one, bias = torch.empty(1), torch.empty(g.shape[-1])
    for gate in (
        {},
        {"A_log": one, "dt_bias": bias},
        {"A_log": one, "dt_bias": bias, "lower_bound": -5.0},
        {"dt_bias": bias, "lower_bound": -5.0},
    ):
        gate_cumsum.gate_cumsum(g, **gate, **options)
        gate_bwd.gate_bwd(g, g, **gate, **options)
    for lower_bound in (None, -5.0):
        kda_intra.kda_intra(qk, qk, beta, g, lower_bound=lower_bound, **options)
    wy.wy(qk, v, beta, g, A, qk)
    state.state(qk, qk, v, g, h0, output_final_state=True, **options)
    output.output(qk, qk, v, h, g, A, scale=1.0, **options)
    kda_bwd.kda_output_bwd(A, v, h, v, scale=1.0, **options)
    state_bwd.state_bwd(qk, qk, qk, g, v, v, h0, scale=1.0, **options)
    kda_bwd.kda_wy_bwd(v, beta, A, h, v, h, v)
    dgl = h[..., 0].float()
    kda_intra_bwd.kda_intra_bwd(qk, qk, beta, g, A, A, qk, qk, qk, dgl, beta)
    two = [torch.cat([x, x], 2) for x in (beta, g, A, A, qk, qk, qk, dgl, beta)]
    kda_intra_bwd.kda_intra_bwd(qk, qk, *two)


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
    modules = [
        m
        for m in (
            tiles,
            fused,
            gate_bwd,
            gate_cumsum,
            kda_bwd,
            kda_intra,
            kda_intra_bwd,
            output,
            output_bwd,
            recurrent,
            solve,
            state,
            state_bwd,
            wy,
            wy_bwd,
        )
        if hasattr(m, "device_of")
    ]
    try:
        for processors in (1, 2, 5, 10, 10**6):  # so that every row of a list is the choice once
            for module in modules:
                module.device_of = lambda x, n=processors: (tiles.generation(divmod(cc, 10)), n)
            for dtype, sizes in SIZES if cc == 90 else SIZES_ELSEWHERE:
                for size in sizes:
                    k = torch.empty(1, 1, 1, size, dtype=dtype)
                    launches(size, size, dtype, tiles.chunk_limit(k), heads=1)
    finally:
        JITFunction.run = original
        for module in modules:
            module.device_of = device
    return seen


def compile_row(kernel, bound, cc):
    """Compile one launch; return its resources, and whether it uses the tensor cores."""
    options = {n: bound.pop(n) for n in ("num_warps", "num_stages", "maxnreg") if n in bound}
    signature, constants, attrs = {}, {}, {}
    for i, p in enumerate(kernel.params):
        x = bound[p.name]
        if p.is_constexpr or x is None:
            signature[p.name], constants[(i,)] = "constexpr", x
        elif isinstance(x, torch.Tensor):
            signature[p.name], attrs[(i,)] = TYPES[x.dtype], [["tt.divisibility", 16]]
        else:
            signature[p.name] = "fp32" if isinstance(x, float) else "i32"
    source = ASTSource(kernel, signature, constants, attrs)
    start = time.perf_counter()
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", f.name], capture_output=True, text=True, check=True
        ).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return {
        "shared": compiled.metadata.shared,
        "registers": int(numbers["REG"]),
        "seconds": round(time.perf_counter() - start, 1),
        "stack": int(numbers["STACK"]),
        "mma": bool(re.search(r"\bw?g?mma\.|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])),
    }


if __name__ == "__main__":
    cc = int(sys.argv[1])
    for name, (kernel, bound) in record(cc).items():
        print(json.dumps({"row": name, **compile_row(kernel, bound, cc)}), flush=True)
