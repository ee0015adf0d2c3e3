"""Compile the kernels in Gluon for Hopper, which need not be present.

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

from linattn_edu.kernels.gluon import gdn_scan, gdn_scans, kda_scan, kda_scans

BIN = Path(triton.__file__).parent / "backends/nvidia/bin"
CHUNK, BV = gdn_scan.CHUNK, gdn_scan.BV
SCAN = gdn_scan.scan_gluon_kernel, gdn_scan.TILES
STATES = gdn_scans.scan_states_gluon_kernel, gdn_scans.TILES | {"STEP": 1, "ROW": 8}
BACK = gdn_scans.scan_bwd_gluon_kernel, gdn_scans.TILES_BACK | {"STEP": 1, "ROW": 8}
BOTH = gdn_scans.scans_gluon_kernel, gdn_scans.TILES_BOTH | {"ROW": 8}
CHANNEL, CHANNEL_2 = (
    (kda_scan.kda_scan_gluon_kernel, {"BT": CHUNK, "BV": BV, "WORKERS": n, **tiles})
    for n, tiles in kda_scan.OPTIONS.items()
)


def kda_fused_scans(kernel, stages, workers, **more):
    """A kernel of kda_scans with its tiles and options."""
    tiles = {"BT": CHUNK, "BV": BV, "STAGES": stages[workers], **more}
    return getattr(kda_scans, kernel), tiles | kda_scans.OPTIONS[workers]


FORTH, FORTH_2 = (
    kda_fused_scans(
        "kda_scan_states_gluon_kernel", kda_scans.STAGES, n, WORKERS=n, STEP=1
    )
    for n in (1, 2)
)  # fmt: skip
GRADIENTS, GRADIENTS_2 = (
    kda_fused_scans(
        "kda_scan_bwd_gluon_kernel", kda_scans.STAGES_BACK, n, WORKERS=n, STEP=1
    )
    for n in (1, 2)
)  # fmt: skip
CHANNEL_BOTH = kda_fused_scans(
    "kda_scans_gluon_kernel", kda_scans.STAGES, 1,
    STAGES_BACK=kda_scans.STAGES_BACK[1],
)  # fmt: skip
WHOLE = "warmup_ptr", "forth_ptr", "back_ptr", "cu_ptr", "offsets_ptr"
# kernel, dtype, K, the pointers that are None
FORMS = (
    (SCAN, "bf16", 128, ("h0_ptr", "ht_ptr", *WHOLE)),
    (SCAN, "fp16", 128, ()),
    (SCAN, "bf16", 64, ("cu_ptr",)),
    (STATES, "bf16", 128, ("h0_ptr", *WHOLE)),
    (STATES, "fp16", 128, ()),
    (BACK, "bf16", 128, ("dht_ptr", *WHOLE)),
    (BACK, "fp16", 128, ()),
    (BOTH, "bf16", 128, ("h0_ptr", "dht_ptr", *WHOLE)),
    (CHANNEL, "bf16", 128, ("h0_ptr", "ht_ptr", "cu_ptr")),
    (CHANNEL, "fp16", 128, ()),
    (CHANNEL_2, "bf16", 128, ("h0_ptr", "ht_ptr", "cu_ptr")),
    (FORTH, "fp16", 128, ()),
    (FORTH_2, "bf16", 128, ("h0_ptr", *WHOLE)),
    (GRADIENTS, "fp16", 128, ()),
    (GRADIENTS_2, "bf16", 128, ("dht_ptr", *WHOLE)),
    (CHANNEL_BOTH, "bf16", 128, ("h0_ptr", "dht_ptr", *WHOLE)),
)
DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
POINTERS = {name: "*i64" if name in ("cu_ptr", "offsets_ptr") else "*i32" for name in WHOLE}
SCALARS = {"scale": "fp32", "T": "i32", "N": "i32"}


def source_of(kernel, tiles, name, K, absent):
    """The kernel for numbers of 16 bit and K keys, with these arguments None."""
    widths = dict.fromkeys(("q", "k", "qg", "kg", "kd"), K)  # else BV
    widths |= dict.fromkeys(("P", "A", "R", "AG"), CHUNK) | dict.fromkeys(
        ("v", "do"), BV * tiles.get("WORKERS", 1)
    )
    constants = {"H": 2, "HV": 4, "K": K, "V": 128, **tiles, **dict.fromkeys(absent)}
    signature, values, attrs = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument], values[(i,)] = "constexpr", constants[argument]
        elif argument.endswith("_desc"):
            block = [CHUNK, widths.get(argument.removesuffix("_desc"), BV)]
            layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[name])
            signature[argument] = f"tensordesc<{name}{block},{layout!r}>"
        elif argument.endswith("_ptr"):
            signature[argument] = POINTERS.get(argument, "*fp32")
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[argument] = SCALARS[argument]
    return GluonASTSource(kernel, signature, values, attrs)


def main():
    target = GPUTarget("cuda", 90, 32)
    for (kernel, tiles), dtype, K, absent in FORMS:
        source = source_of(kernel, tiles, dtype, K, absent)
        options = {n: tiles.get(n, x) for n, x in gdn_scan.OPTIONS.items()}
        compiled = triton.compile(source, target=target, options=options)
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
        print(
            json.dumps(
                {"kernel": kernel.__name__, "K": K, "workers": tiles.get("WORKERS", 1)} | found
            )
        )


if __name__ == "__main__":
    main()
