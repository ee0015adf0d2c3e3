"""Warm-up w5, matrix_product: P = A B.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w5

          A tile [16, 16]           B tile [16, 16]           P tile [16, 16]
        K columns                  N columns                  N columns
      M | 3 1 4 | 0 ..           K | 4 1 5 9 | 0 ..         M | 34 41 56 58 | 0 ..
        | 1 5 9 | 0 ..             | 2 6 5 3 | 0 ..    =      | 59 ..       | 0 ..
        | 2 6 5 | 0 ..             | 5 8 9 7 | 0 ..           | ..          | 0 ..
        | 3 5 8 | 0 ..             | 0 0 0 0   0 ..           | ..          | 0 ..
        | 0 0 0   0 ..             | 0 0 0 0   0 ..           | 0  0  0  0    0 ..

A [M, K], B [K, N], none above 16. Out: P [M, N].

A product of tiles is one operation, whose tiles have 16 rows and columns or more: smaller matrices
stand in the corner of a tile of zeros. Three helpers of `linattn_edu/kernels/tiles.py`, which the
stages use too, say so in a line each:

    load_tile(ptr, rows, columns, stride, n_row, n_col)         0 outside of [n_row, n_col]
    store_tile(ptr, tile, rows, columns, stride, n_row, n_col)  writes nothing outside of it
    dot(a, b)                                                   the product of two tiles

`rows` and `columns` are tl.arange, as in w4; `stride` is the length of a row in memory.
"""

import triton
import triton.language as tl

from linattn_edu.kernels.tiles import dot, load_tile, store_tile


def matrix_product_torch(A, B):
    return A @ B


@triton.jit
def matrix_product_kernel(A_ptr, B_ptr, P_ptr, M, N, K, BLOCK: tl.constexpr):
    """One program: all of P.  Grid (1)."""
    o = tl.arange(0, BLOCK)  # rows, and columns
    b_A = load_tile(A_ptr, o, o, K, M, K)  # [BLOCK, BLOCK]
    b_B = load_tile(B_ptr, o, o, N, K, N)  # blank: [BLOCK, BLOCK]
    b_P = dot(b_A, b_B)  # blank: [BLOCK, BLOCK]
    store_tile(P_ptr, b_P, o, o, N, M, N)


def matrix_product_triton(A, B):
    (M, K), N = A.shape, B.shape[1]
    P = A.new_empty(M, N)
    matrix_product_kernel[(1,)](A, B, P, M, N, K, BLOCK=16)
    return P


# hint 1
# The zeros around A and B add nothing to a product, so only loads and the store know that the
# matrices are smaller than the tiles.
#
# hint 2
# B has K rows of N numbers. The line above, for A, which has M rows of K numbers, has the order of
# the arguments.
#
# hint 3
# Kernel:
#     b_B = load_tile(B_ptr, o, o, ...)
#     b_P = dot(...)
