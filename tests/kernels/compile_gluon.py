"""Compile scan_gluon_kernel for Hopper, which need not be present.

Prints a JSON line for each of its forms. A program, because a process that interprets kernels
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

from linattn_edu.kernels import scan_gluon

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
HEAD, CHUNK, BV = scan_gluon.HEAD, scan_gluon.CHUNK, scan_gluon.TILES["BV"]
WIDTHS = {"q": HEAD, "k": HEAD, "v": BV, "P": CHUNK, "R": CHUNK, "o": BV}
FORMS = (("bf16", gl.bfloat16, False), ("fp16", gl.float16, True))


def source_of(name, dtype, states):
    """The kernel for numbers of 16 bit, with both states or with neither."""
    constants = {"H": 2, "HV": 4, "K": HEAD, "V": HEAD, **scan_gluon.TILES}
    if not states:
        constants |= {"h0_ptr": None, "ht_ptr": None}
    signature, values, attrs = {"scale": "fp32", "T": "i32"}, {}, {}
    arguments = scan_gluon.scan_gluon_kernel.arg_names
    for i, argument in enumerate(arguments):
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument.endswith("_desc"):
            block = [CHUNK, WIDTHS[argument.removesuffix("_desc")]]
            layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
            signature[argument] = f"tensordesc<{name}{block},{layout!r}>"
        elif argument.endswith("_ptr"):
            signature[argument], attrs[(i,)] = "*fp32", [["tt.divisibility", 16]]
    ordered = {argument: signature[argument] for argument in arguments}
    return GluonASTSource(scan_gluon.scan_gluon_kernel, ordered, values, attrs)


def main():
    target = GPUTarget("cuda", 90, 32)
    for form in FORMS:
        compiled = triton.compile(source_of(*form), target=target, options=scan_gluon.OPTIONS)
        with tempfile.TemporaryDirectory() as folder:
            ptx, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            ptx.write_text(compiled.asm["ptx"])
            said = subprocess.run(
                [BIN / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin],
                capture_output=True, text=True, check=True,
            ).stderr  # fmt: skip
        found = {
            "spilled": "0 bytes spill stores, 0 bytes spill loads" not in said,
            "serialized": "serialized" in said,
            "shared": compiled.metadata.shared,
            "from_registers": compiled.asm["ptx"].count("wgmma.mma_async"),
        }
        print(json.dumps({"form": form[0]} | found))


if __name__ == "__main__":
    main()
