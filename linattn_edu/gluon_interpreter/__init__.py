"""An interpreter for the kernels in Gluon, for tests and for the reader of chapter 24.

Triton's own interpreter knows no Gluon, and a GPU shows a mistake only sometimes. `interpreted()`
is a context in which kernels in Gluon that are launched run in Python, on tensors of the CPU,
operation by operation, with what the launcher made for the GPU:

    with interpreted(seed=0) as ran:  # another seed: other turns
        scan_gluon(given, scale, warmup, pieces)

Their results are the kernel's up to the order of sums, and an error is raised for

- a wait that nobody answers, with the barrier and who waits (Deadlock);
- shared memory that is read before its copy has landed, overwritten while it may still be read, or
  read by a copy or a product without a fence, with the name of the tile (Race);
- copies that bring other numbers of bytes than a barrier expects (ByteCount);
- a product's result that is used before a wait says that it is there (Unfinished);
- pointers beside their tensors, tiles beside their rings, tiles of another shape or dtype.

What it does not see: layouts, banks, registers, and how long anything takes. Between accesses of
the same warps through registers the compiler puts barriers itself, so that these count as in order;
between those and copies, products and other warps it puts none.

By file: `values` has numbers and blocks in registers, `memory` shared memory and the rule for
races, `machine` the parts of a program and whose turn it is, `language` the names that kernels use,
`source` how a kernel's text becomes a function.
"""

from linattn_edu.gluon_interpreter.errors import (
    ByteCount,
    Deadlock,
    KernelError,
    Race,
    Unfinished,
)
from linattn_edu.gluon_interpreter.launch import interpreted

__all__ = ["ByteCount", "Deadlock", "KernelError", "Race", "Unfinished", "interpreted"]
