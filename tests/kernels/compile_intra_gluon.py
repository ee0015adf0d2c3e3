"""Compile the kernels of chunk-parallel stages in Gluon for Hopper, which need not be present.

Prints a JSON line for each of their forms. A program, because a process that interprets kernels
cannot compile them.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in conftest.py

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from linattn_edu.kernels.gluon import gdn_intra, gdn_intra_bwd, kda_intra_bwd
from linattn_edu.kernels.gluon.gdn_intra_bwd import HEAD
from linattn_edu.kernels.gluon.gdn_scan import CHUNK
from linattn_edu.kernels.routes import by_load, limits

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
STATES, KEYS = ("h", "dh"), ("q", "k", "dq", "dk")
FORMS = (("bf16", gl.bfloat16, 1), ("fp16", gl.float16, 4))
HALVES = "q", "k", "dq", "dk", "gc", "dgc"  # a half of the channels at once


def source_of(name, dtype, G):
    """The kernel for numbers of 16 bit and G value heads a q/k head."""
    constants = {"ROW": 4 * G, "H": 2, "HV": 2 * G, "K": HEAD, "V": HEAD, "BT": CHUNK}
    signature, values, attrs = {}, {}, {}
    kernel = gdn_intra_bwd.intra_chunk_bwd_gluon_kernel
    for i, argument in enumerate(kernel.arg_names):
        tensor = argument.rpartition("_")[0]
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument.endswith("_desc"):
            block = [HEAD if tensor in STATES else CHUNK, HEAD // 2 if tensor in KEYS else HEAD]
            layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
            signature[argument] = f"tensordesc<{name}{block},{layout!r}>"
        elif argument.endswith("_ptr"):
            signature[argument], attrs[(i,)] = "*fp32", [["tt.divisibility", 16]]
        else:
            signature[argument] = {"scale": "fp32", "NT": "i32"}[argument]
    return GluonASTSource(kernel, signature, values, attrs)


def channel_source():
    """kda_intra_bwd_gluon_kernel."""
    constants = {"HV": 4, "K": HEAD, "V": HEAD, "BT": CHUNK}
    signature, values, attrs = {}, {}, {}
    kernel = kda_intra_bwd.kda_intra_bwd_gluon_kernel
    for i, argument in enumerate(kernel.arg_names):
        tensor = argument.rpartition("_")[0]
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument.endswith("_desc"):
            gates = tensor in ("gc", "dgc")
            name, dtype = ("fp32", gl.float32) if gates else ("bf16", gl.bfloat16)
            block = [HEAD if tensor in STATES else CHUNK, HEAD // 2 if tensor in HALVES else HEAD]
            layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
            signature[argument] = f"tensordesc<{name}{block},{layout!r}>"
        elif argument.endswith("_ptr"):
            signature[argument] = {"dP": "*bf16", "dL": "*bf16", "near": "*i8"}.get(tensor, "*fp32")
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = {"scale": "fp32", "NT": "i32"}[argument]
    return GluonASTSource(kernel, signature, values, attrs)


def forward_source(kernel, K, H, absent):
    """A kernel of gdn_intra with these arguments None."""
    constants = {"H": H, "HV": 4, "K": K, "BT": CHUNK, "GATED": True, **dict.fromkeys(absent)}
    signature, values, attrs = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        tensor = argument.rpartition("_")[0]
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument.endswith("_desc"):
            block = [CHUNK, K if tensor in KEYS else CHUNK]
            layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
            signature[argument] = f"tensordesc<bf16{block},{layout!r}>"
        elif argument.endswith("_ptr"):
            signature[argument] = {"gc": "*fp32", "cu": "*i64", "chunks": "*i64"}.get(
                tensor, "*bf16"
            )
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = "i32"
    return GluonASTSource(kernel, signature, values, attrs)


def forward_forms():
    """Form, source and options of those in gdn_intra: forward alone, and with all they write."""
    one, chunks = gdn_intra.intra_chunk_gluon_kernel, gdn_intra.intra_chunk_ring_gluon_kernel
    for K in limits.HEADS:
        source = forward_source(one, K, 4, ("A_ptr", "cu_ptr", "chunks_ptr"))
        yield ["one", K], source, gdn_intra.OPTIONS
        for H in (4, 2):
            options = gdn_intra.OPTIONS_CHUNKS[by_load.ring_programs(K, H, 4)]
            yield [f"chunks, {H}/4", K], forward_source(chunks, K, H, ()), options
    yield ["one, packed", K], forward_source(one, K, 2, ()), gdn_intra.OPTIONS


def main():
    target = GPUTarget("cuda", 90, 32)
    forms = [([form[0], form[2]], source_of(*form), gdn_intra_bwd.OPTIONS) for form in FORMS]
    forms.append(("channel", channel_source(), kda_intra_bwd.OPTIONS))
    forms += forward_forms()
    for form, source, options in forms:
        compiled = triton.compile(source, target=target, options=options)
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            ptx.write_text(compiled.asm["ptx"])
            said = subprocess.run(
                [BIN / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
        found = {
            "spilled": int(said.split(" bytes spill stores")[0].split()[-1]),
            "serialized": "serialized" in said,
            "shared": compiled.metadata.shared,
            "products": compiled.asm["ptx"].count("wgmma.mma_async"),
        }
        print(json.dumps({"form": form} | found))


if __name__ == "__main__":
    main()
