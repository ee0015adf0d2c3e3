"""Compile the kernels of the puzzles' solutions for a GPU that need not be present.

    python tests/kernels/compile_puzzles.py          prints a line a kernel, fails if one does not
    python tests/kernels/compile_puzzles.py --third  of a third of the puzzles, another every day

The interpreter lets a name change its type inside a loop, or a shape from step to step; the
compiler does not. A program, because a process that interprets kernels cannot compile them.
"""

import datetime
import sys

import torch
import triton
from compile_rows import TYPES, source_of
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction

from linattn_edu import puzzles

CAPABILITY = 90


def launches(puzzle):
    """Every (kernel, arguments) that a solution asks for on the last of its cases."""
    seen = []

    def run(self, *args, grid, warmup, **kwargs):
        seen.append((self, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    case = puzzle.family.cases[-1]
    inputs = puzzle.family.inputs(case)
    tensors = [inputs[name] for name in puzzle.arguments]
    tensors = [x.float() if x.is_floating_point() else x for x in tensors]
    module = puzzles.load(puzzles.source(puzzle))
    original, JITFunction.run = JITFunction.run, run
    try:
        options = {name: inputs[name] for name in puzzle.options}
        getattr(module, f"{puzzle.stage}_triton")(*tensors, **options)
    finally:
        JITFunction.run = original
    return seen


if __name__ == "__main__":
    TYPES[torch.int64] = "*i64"  # numbers of slots
    today = datetime.date.today().toordinal() if "--third" in sys.argv else None
    for i, (number, puzzle) in enumerate(puzzles.PUZZLES.items()):
        if today is not None and (i - today) % 3:
            continue
        for kernel, bound in launches(puzzle):
            source, options = source_of(kernel, bound)
            triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)
            print(number, kernel.fn.__name__)
