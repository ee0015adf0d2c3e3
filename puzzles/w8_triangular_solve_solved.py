"""Warm-up w8, triangular_solve: x with (I + L) x = b, row by row.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w8

    | 1          |   | x_0 |   | 1 |        x_0 = 1                        = 1
    | 2  1       |   | x_1 | = | 3 |        x_1 = 3 - 2 x_0                = 1
    | 1  3  1    |   | x_2 |   | 6 |        x_2 = 6 - 1 x_0 - 3 x_1        = 2
    | 0  1  2  1 |   | x_3 |   | 9 |        x_3 = 9 - 0 x_0 - 1 x_1 - 2 x_2  = 4

L [N, N], 0 on its diagonal and above; b [N]; N a power of two. Out: x [N].

Row r needs all rows before it: a loop, the first one here. The tile b_x holds what is done in its
first places and still b in the others. A tile has no b_x[r]: what only place r shall do is said by
`tl.where(o == r, ...)`.
"""

import torch
import triton
import triton.language as tl


def triangular_solve_torch(L, b):
    x = b.clone()
    for r in range(1, len(b)):
        x[r] -= L[r, :r] @ x[:r]
    return x


@triton.jit
def triangular_solve_kernel(L_ptr, b_ptr, x_ptr, N: tl.constexpr):
    """One program: all of x.  Grid (1)."""
    o = tl.arange(0, N)
    b_x = tl.load(b_ptr + o)  # [N]
    for r in range(1, N):
        b_l = tl.load(L_ptr + r * N + o)  # blank: [N], row r of L
        # eq:delta-substitution
        s = tl.sum(b_l * b_x, 0)  # blank: a number, the sum over j < r of L_rj x_j
        b_x = tl.where(o == r, b_x - s, b_x)  # blank: [N], row r is done, the others stay
    tl.store(x_ptr + o, b_x)


def triangular_solve_triton(L, b):
    x = torch.empty_like(b)
    triangular_solve_kernel[(1,)](L, b, x, N=len(b))
    return x


# hint 1
# In step r the first r places of b_x are the solution. L_rj is 0 from j = r on, so the places that
# are not done yet do not count in a sum over all of them.
#
# hint 2
# Row r of L begins at r * N. The sum is that of w3, over the product of two tiles. Place r then has
# its b less the sum; every other place keeps what it has.
#
# hint 3
# Kernel:
#     b_l = tl.load(L_ptr + ...)
#     s = tl.sum(..., 0)
#     b_x = tl.where(o == r, ..., b_x)
