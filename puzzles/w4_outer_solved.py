"""Warm-up w4, outer: P_ij = x_i z_j.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w4

                     z[None, :]                          x[:, None] * z[None, :]
                   | 5   9   2   6 |     [1, N]
    x[:, None]
      | 3 |        | 15  27  6   18 |                    P in memory, row after row:
      | 1 |        | 5   9   2   6  |    [M, N]          | 15 27 6 18 | 5 9 2 6 | 20 ...
      | 4 |        | 20  36  8   24 |                    P_ptr + 0     + N       + 2 N
      | 1 |        | 5   9   2   6  |
     [M, 1]

x [M], z [N], M and N powers of two. Out: P [M, N].

`b_x[:, None]` makes a column of a tile and `b_z[None, :]` a row, as in PyTorch; a column and a row
give a matrix under any operation. So does a tile of places: rows times their length plus columns.
"""

import triton
import triton.language as tl


def outer_torch(x, z):
    return x[:, None] * z[None, :]


@triton.jit
def outer_kernel(x_ptr, z_ptr, P_ptr, M: tl.constexpr, N: tl.constexpr):
    """One program: all of P.  Grid (1)."""
    o_i, o_j = tl.arange(0, M), tl.arange(0, N)
    b_x, b_z = tl.load(x_ptr + o_i), tl.load(z_ptr + o_j)  # [M], [N]
    b_P = b_x[:, None] * b_z[None, :]  # blank: [M, N]
    place = o_i[:, None] * N + o_j[None, :]  # blank: [M, N], where entry (i, j) belongs
    tl.store(P_ptr + place, b_P)


def outer_triton(x, z):
    M, N = len(x), len(z)
    P = x.new_empty(M, N)
    outer_kernel[(1,)](x, z, P, M=M, N=N)
    return P


# hint 1
# Both blanks combine something of the rows with something of the columns.
#
# hint 2
# The entry is x of its row times z of its column. Its place is its row times the length of a row,
# plus its column. Rows are a column of numbers, [:, None]; columns are a row, [None, :].
#
# hint 3
# Kernel:
#     b_P = b_x[:, None] * ...
#     place = o_i[:, None] * ... + o_j[None, :]
