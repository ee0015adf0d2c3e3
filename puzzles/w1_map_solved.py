"""Warm-up w1, map: y_i = 2 x_i + 1.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w1

    place      0    1    2    3    4    5    6    7
    x        | 3  | 1  | 4  | 1  | 5  | 9  | 2  | 6  |     at x_ptr + place
               |    |    |    |    |    |    |    |         all places at once
    y        | 7  | 3  | 9  | 3  | 11 | 19 | 5  | 13 |     at y_ptr + place

x [N], N a power of two. Out: y [N].

A kernel gets addresses, not tensors: the number at place i of x is at x_ptr + i. `tl.arange(0, N)`
is a tile of the places 0 to N - 1, so x_ptr + that tile is N addresses, `tl.load` reads a tile of
N numbers from them, and `tl.store` writes one. Sums and products of tiles go place by place. N is a
`tl.constexpr`: the compiler knows it, as it must the size of a tile, which is a power of two.
"""

import torch
import triton
import triton.language as tl


def map_torch(x):
    return 2 * x + 1


@triton.jit
def map_kernel(x_ptr, y_ptr, N: tl.constexpr):
    """One program: all of x.  Grid (1)."""
    o = tl.arange(0, N)  # blank: [N], the places
    b_x = tl.load(x_ptr + o)  # blank: [N], the numbers of x at these places
    b_y = 2 * b_x + 1  # blank: [N]
    tl.store(y_ptr + o, b_y)


def map_triton(x):
    y = torch.empty_like(x)
    map_kernel[(1,)](x, y, N=x.numel())
    return y


# hint 1
# Three steps, as in every kernel: which places, what stands there, what is made of it. No loop over
# places: a line works on the whole tile.
#
# hint 2
# The places are the tile that tl.arange makes. The tile of numbers is tl.load of the address of x
# plus the places. Arithmetic on a tile is written as on a number.
#
# hint 3
# Kernel:
#     o = tl.arange(...)
#     b_x = tl.load(...)
#     b_y = 2 * ...
