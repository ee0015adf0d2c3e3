"""Warm-up w2, mask: y_i = x_i + z_i, four places a program.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w2

    program    |       0       |       1       |       2       |
    place      | 0   1   2   3 | 4   5   6   7 | 8   9   10  11|
    x          | 3   1   4   1 | 5   9   2   6 | 5   3 |            N = 10: x and z end here
    mask       | 1   1   1   1 | 1   1   1   1 | 1   1   0   0 |
    y          | x_i + z_i                             | -1  -1|    not yours: leave them

x, z [N], any N. Out: y, which has room for whole programs and -1 in every place before the kernel
runs; what lies beyond N must stay as it was.

Each program runs the same kernel; `tl.program_id(0)` is its number. The last one has a tile that is
larger than what is left. A mask is a tile of true and false: where it is false, `tl.load` does not
read but takes `other`, and `tl.store` does not write.
"""

import triton
import triton.language as tl
from torch.nn import functional as F

from linattn_edu.kernels.tiles import cdiv

BN = 4  # places of a program


def mask_torch(x, z):
    return F.pad(x + z, (0, -len(x) % BN), value=-1)


@triton.jit
def mask_kernel(x_ptr, z_ptr, y_ptr, N, BN: tl.constexpr):
    """One program: BN places.  Grid (ceil(N / BN))."""
    o = tl.program_id(0) * BN + tl.arange(0, BN)  # blank: [BN], the places of this program
    m = o < N  # blank: [BN], true where there is such a place
    b_x = tl.load(x_ptr + o, mask=m, other=0.0)
    b_z = tl.load(z_ptr + o, mask=m, other=0.0)  # blank: [BN]
    tl.store(y_ptr + o, b_x + b_z, mask=m)


def mask_triton(x, z):
    programs = cdiv(len(x), BN)
    y = x.new_full((programs * BN,), -1)
    mask_kernel[(programs,)](x, z, y, len(x), BN=BN)
    return y


# hint 1
# Program 2 has the places 8 to 11, of which 8 and 9 exist. Places first, then which of them count,
# then loads and a store that both respect it.
#
# hint 2
# The first place of a program is its number times BN; the others follow. A comparison of a tile
# with a number is a tile of true and false. z is read as x is.
#
# hint 3
# Kernel:
#     o = tl.program_id(0) * ... + tl.arange(0, BN)
#     m = o < ...
#     b_z = tl.load(..., mask=m, other=0.0)
