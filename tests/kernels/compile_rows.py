"""Compile every kernel for GPUs that need not be present, once for each row its launcher picks.

    python tests/kernels/compile_rows.py             compile what is not kept, and a sample
    python tests/kernels/compile_rows.py --all       compile every row
    python tests/kernels/compile_rows.py --sample    compile the sample alone
    python tests/kernels/compile_rows.py --write     (`make compile`) and keep the results
    python tests/kernels/compile_rows.py --all --write FILE      every result, in a file of its own

Prints a JSON line a row. The sample is another 960th of the rows every day, alone a sixtieth. A
program, because a process that interprets kernels cannot compile them.
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
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as in conftest.py

import kept
import sass
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from linattn_edu.choices import generation
from linattn_edu.kernels.routes import by_kind, forced, kind_of
from linattn_edu.kernels.rows import device_of
from linattn_edu.kernels.tiles import cdiv

sys.path.append(str(Path(__file__).parents[1]))
import blanks
from stages import STAGES

CAPABILITIES = (75, 80, 89, 90, 100)
# parts of the rows, of which a day's sample is one: beside kept results, and alone
BESIDE, ALONE = 960, 60
# head sizes; heads of odd size and fp16 take rows of their own on Hopper alone, or none
SIZES = (
    (torch.bfloat16, (33, 64, 100, 128, 255, 256)),
    (torch.float16, (128,)),
    (torch.float32, (64, 128, 256)),
)
SIZES_ELSEWHERE = ((torch.bfloat16, (64, 128, 256)), (torch.float32, (128, 256)))
WIDE = 512  # values beside 256 keys; and keys of the recurrence
TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int8: "*i8",
}  # fmt: skip
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
USAGE, CODE = (TOOLS / "cuobjdump", "--dump-resource-usage"), (TOOLS / "nvdisasm", "-c")


def launches(K, V, dtype):
    """Make every call of every stage that has such heads; the patched run() below records what
    they launch.
    """
    k = torch.empty(1, 1, 1, K, dtype=dtype)
    C = by_kind.chunk_limit(kind_of(k, 1, V, 64, None)).takes
    for family, found in blanks.of_sizes(K, V, dtype, C).items():
        for r in found:
            launch(family, r)
    # in pieces that begin where the state is forgotten
    small = {"PROGRAMS": 0, "PER_PROGRAM": C, "MULTIPROCESSORS": 0}
    with forced(**small):
        launch("gdn_fused", blanks.gated(K, V, dtype, C, chunks=4 * cdiv(V, 64)), pieces=True)


def launch(family, r, pieces=False):
    """Make the calls of a family's stages on these parts; of those alone that come in pieces."""
    for stage in STAGES:
        if stage.family == family and stage.when(r) and (stage.pieces or not pieces):
            for args, options in stage.calls(r):
                stage.kernel(*args, **options)


def record(cc):
    """Every distinct (kernel, arguments) the launchers ask for on a GPU of capability cc."""
    seen = {}

    def run(self, *args, grid, warmup, **kwargs):
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        key = [self.fn.__name__]
        key += [f"{n}={x.dtype if isinstance(x, torch.Tensor) else x}" for n, x in bound.items()]
        seen[" ".join(key)] = (self, bound)

    original, JITFunction.run = JITFunction.run, run
    assert all(stage.module for stage in STAGES)  # loaded
    ours = [m for n, m in sys.modules.items() if n.startswith("linattn_edu.kernels.")]
    modules = [m for m in ours if hasattr(m, "device_of")]
    try:
        for processors in (1, 2, 5, 10, 10**6):  # so that every row of a list is the choice once
            for module in modules:
                module.device_of = lambda x, n=processors: (generation(divmod(cc, 10)), n)
            for dtype, sizes in SIZES if cc == 90 else SIZES_ELSEWHERE:
                for K, V in [(n, n) for n in sizes] + [(256, WIDE)] * (256 in sizes):
                    launches(K, V, dtype)
                for r in blanks.norms(8192, dtype):
                    launch("norm", r)
                if 256 in sizes:
                    launch("recurrent", blanks.recurrent(WIDE, WIDE, dtype, 1))
    finally:
        JITFunction.run = original
        for module in modules:
            module.device_of = device_of
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
    """Compile one launch, or with anew=False take it from Triton's cache; return what it needs.

    Raises:
        ArithmeticError: it reads or writes beyond its shared memory.
    """
    triton.knobs.compilation.always_compile = anew
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(compiled.asm["cubin"])
        f.flush()
        usage, code = (
            subprocess.run([*command, f.name], capture_output=True, text=True, check=True).stdout
            for command in (USAGE, CODE)
        )
    metadata = compiled.metadata
    if beyond := sass.beyond(code, cc, 32 * metadata.num_warps, metadata.shared):
        raise ArithmeticError(f"beyond its shared memory: {beyond[0]}")
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return kept.Result(
        registers=int(numbers["REG"]),
        stack=int(numbers["STACK"]),
        shared=metadata.shared,
        mma=bool(re.search(r"\bw?g?mma\.|mma\.sync|tcgen05\.mma", compiled.asm["ptx"])),
    )


def compile_rows(rows, anew):
    """kept.Row -> kept.Result, on every core."""
    TASKS[:] = [(name, row.cc, *launch, row in anew) for row, (name, *launch) in rows.items()]
    # a fork has the kernels already; they cannot be sent
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        return dict(zip(rows, pool.map(compile_task, range(len(TASKS))), strict=True))


TASKS = []


def compile_task(i):
    name, cc, *launch = TASKS[i]
    try:
        return compile_row(cc, *launch)
    except Exception as error:
        raise RuntimeError(f"cc {cc} {name} does not compile") from error


def main():
    parser = argparse.ArgumentParser(description="compile the rows of every kernel")
    parser.add_argument("--all", action="store_true", help="also rows whose results are kept")
    parser.add_argument("--sample", action="store_true", help="the sample alone")
    parser.add_argument(
        "--write", nargs="?", type=Path, const=kept.FILE, metavar="FILE", help="keep the results"
    )
    args = parser.parse_args()
    if args.sample and args.write:
        parser.error("a sample is not kept")
    rows, results = all_rows(), kept.read(triton.__version__)
    samples = ALONE if args.sample else BESIDE
    today = datetime.date.today().toordinal() % samples
    again = {row for i, row in enumerate(sorted(rows)) if args.all or i % samples == today}
    missing = set() if args.sample else rows.keys() - results.keys()
    wanted = {row: launch for row, launch in rows.items() if row in again | missing}
    compiled = compile_rows(wanted, again)
    for row in rows | results:
        name = rows[row][0] if row in rows else None  # None: no launcher picks it any more
        line = {"cc": row.cc, "kernel": row.kernel, "name": name}
        print(json.dumps(line | {"kept": results.get(row), "compiled": compiled.get(row)}))
    if args.write:
        results |= compiled
        kept.write(triton.__version__, {row: results[row] for row in rows}, args.write)


if __name__ == "__main__":
    main()
