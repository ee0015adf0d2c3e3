"""Warm-up w6, cumsum: running sums that start anew in each chunk.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w6

    program    |       0       |       1       |       2       |
    token      | 0   1   2   3 | 4   5   6   7 | 8   9   10  11|
    x          | 3   1   4   1 | 5   9   2   6 | 5   3   5   8 |
    y          | 3   4   8   9 | 5   14  16  22| 5   8   13  21|

x [T], chunks of C tokens, C a power of two; the last chunk may be short. Out: y [T].

A model's decay is a running product, and its logarithm a running sum: this is chapter 02's stage
for one head. `tl.cumsum(b_x, axis=0)` is the running sum of a tile.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import cdiv


def cumsum_torch(x, *, chunk_size):
    return torch.cat([chunk.cumsum(0) for chunk in x.split(chunk_size)])


@triton.jit
def cumsum_kernel(x_ptr, y_ptr, T, BT: tl.constexpr):
    """One program: a chunk.  Grid (ceil(T / BT))."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)  # blank: [BT], the tokens of this chunk
    m = t < T
    b_x = tl.load(x_ptr + t, mask=m, other=0.0)
    # eq:delta-gate-cumsum
    b_y = tl.cumsum(b_x, axis=0)  # blank: [BT]
    tl.store(y_ptr + t, b_y, mask=m)


def cumsum_triton(x, *, chunk_size):
    y = torch.empty_like(x)
    cumsum_kernel[(cdiv(len(x), chunk_size),)](x, y, len(x), BT=chunk_size)
    return y


# hint 1
# A chunk is a program, and programs know nothing of each other: sums start anew by themselves.
#
# hint 2
# The tokens are those of w2's places: the program's number times the size of a chunk, and on. The
# running sum is along the only axis of the tile.
#
# hint 3
# Kernel:
#     t = tl.program_id(0) * ... + tl.arange(0, BT)
#     b_y = tl.cumsum(...)
