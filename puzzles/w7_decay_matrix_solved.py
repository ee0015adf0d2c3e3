"""Warm-up w7, decay_matrix: G_ij = 2^(gc_i - gc_j) for j <= i, and 0 for j > i.

Fill in every `...` in the kernel, and check with

    python -m linattn_edu puzzle w7

                 from token j
                   0      1      2      3
    gc             0     -1     -1     -3
    to       0   | 1                        |      what token j wrote has decayed
    token i  1   | 1/2    1                 |      by G_ij when token i reads it;
             2   | 1/2    1      1          |      token i reads nothing of later
             3   | 1/8    1/4    1/4    1   |      tokens: 0 above the diagonal

gc [C], the log2 of the decay up to each token, which falls; C a power of two. Out: G [C, C].

One of the checks has a gc of -300: above the diagonal 2^300 is infinite in float32, and infinite
times 0 is not 0. `tl.where(condition, a, b)` picks from a or b, place by place.
"""

import torch
import triton
import triton.language as tl


def decay_matrix_torch(gc):
    exponent = gc[:, None] - gc[None, :]
    future = torch.ones_like(exponent, dtype=torch.bool).triu(1)
    return torch.exp2(exponent.masked_fill(future, -torch.inf))


@triton.jit
def decay_matrix_kernel(gc_ptr, G_ptr, C: tl.constexpr):
    """One program: all of G.  Grid (1)."""
    o = tl.arange(0, C)
    b_gc = tl.load(gc_ptr + o)  # [C]
    # eq:delta-decay-matrix
    exponent = b_gc[:, None] - b_gc[None, :]  # blank: [C, C], row i, column j
    causal = o[:, None] >= o[None, :]  # blank: [C, C], true for j <= i
    b_G = tl.exp2(tl.where(causal, exponent, float("-inf")))  # blank: [C, C], 0 where not causal
    tl.store(G_ptr + o[:, None] * C + o[None, :], b_G)


def decay_matrix_triton(gc):
    C = len(gc)
    G = gc.new_empty(C, C)
    decay_matrix_kernel[(1,)](gc, G, C=C)
    return G


# hint 1
# Differences and comparisons of a column and a row are matrices, as products were in w4. What may
# overflow is made harmless before the power is taken.
#
# hint 2
# Row i goes with [:, None], column j with [None, :]. 2 to the power of minus infinity is exactly 0,
# so the exponent is set to float("-inf") where j > i.
#
# hint 3
# Kernel:
#     exponent = b_gc[:, None] - ...
#     causal = o[:, None] >= ...
#     b_G = tl.exp2(tl.where(causal, ..., ...))
