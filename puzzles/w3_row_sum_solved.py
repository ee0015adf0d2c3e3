"""Warm-up w3, row_sum: s_i = the sum of row i of a matrix.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w3

    x [3, 5]    3 1 4 1 5        in memory, row after row:
                9 2 6 5 3        | 3  1  4  1  5 | 9  2  6  5  3 | 5  8  9  7  9 |
                5 8 9 7 9        x_ptr + 0        + 5             + 10

    program 0   tile  | 3 1 4 1 5 . . . |   8 places, 5 columns     sum 14
    program 1   tile  | 9 2 6 5 3 . . . |                           sum 25

x [M, N], any N. Out: s [M]. A program takes a row.

Entry (i, j) is at x_ptr + i * N + j. A tile has a power of two of places, BN >= N, and what is read
past the row's end would be the next row. `tl.sum(b_x, 0)` adds a tile along its axis 0.
"""

import triton
import triton.language as tl


def row_sum_torch(x):
    return x.sum(1)


@triton.jit
def row_sum_kernel(x_ptr, s_ptr, N, BN: tl.constexpr):
    """One program: a row.  Grid (M)."""
    i = tl.program_id(0)
    o = tl.arange(0, BN)
    place = i * N + o  # blank: [BN], where the row's entries are
    b_x = tl.load(x_ptr + place, mask=o < N, other=0.0)  # blank: [BN], 0 past the row's end
    s = tl.sum(b_x, 0)  # blank: a number
    tl.store(s_ptr + i, s)


def row_sum_triton(x):
    M, N = x.shape
    s = x.new_empty(M)
    row_sum_kernel[(M,)](x, s, N, BN=triton.next_power_of_2(N))
    return s


# hint 1
# The tile has more places than the row has columns. What fills the rest must not change a sum.
#
# hint 2
# Row i begins at i * N. The mask asks whether the column is less than N, not the place. Zeros may
# be added, so the rest of the tile is 0.
#
# hint 3
# Kernel:
#     place = i * ... + o
#     b_x = tl.load(x_ptr + place, mask=..., other=...)
#     s = tl.sum(...)
