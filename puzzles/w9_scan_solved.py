"""Warm-up w9, scan: a state that decays and is written, S_t = a_t S_(t-1) + x_t.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w9

    token t        0             1             2             3
    a_t            1             2             0             1
    x_t            3 1 4 1       5 9 2 6       5 3 5 8       9 7 9 3
                   |             |             |             |
    S = 0 0 0 0 -> 3 1 4 1    -> 11 11 10 8 -> 5 3 5 8    -> 14 10 14 11
                   |             |             |             |
    y_t            y_0           y_1           y_2           y_3

a [T], x [T, D], D a power of two. Out: y [T, D], the state after each token.

The state stays in the registers of one program, from token to token; only x is read and y written.
Chapter 01 makes a matrix of this vector, and the rest of the book makes it fast.
"""

import torch
import triton
import triton.language as tl


def scan_torch(a, x):
    S, y = torch.zeros_like(x[0]), []
    for t in range(len(a)):
        S = a[t] * S + x[t]
        y.append(S)
    return torch.stack(y)


@triton.jit
def scan_kernel(a_ptr, x_ptr, y_ptr, T, D: tl.constexpr):
    """One program: all channels, token by token.  Grid (1)."""
    o = tl.arange(0, D)
    b_S = tl.zeros([D], tl.float32)
    for t in range(T):
        a = tl.load(a_ptr + t)  # a number
        b_x = tl.load(x_ptr + t * D + o)  # blank: [D], row t of x
        b_S = a * b_S + b_x  # blank: [D], the state after token t
        tl.store(y_ptr + t * D + o, b_S)


def scan_triton(a, x):
    T, D = x.shape
    y = torch.empty_like(x)
    scan_kernel[(1,)](a, x, y, T, D=D)
    return y


# hint 1
# The loop is PyTorch's, with a tile for the state. It has one state at a time, and writes each.
#
# hint 2
# Row t of x begins at t * D. What was in the state is multiplied by a, then x_t is added.
#
# hint 3
# Kernel:
#     b_x = tl.load(x_ptr + ...)
#     b_S = a * ... + b_x
