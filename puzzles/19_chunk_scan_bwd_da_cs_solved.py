"""Chapter 19, stage chunk_scan_bwd_da_cs: the adjoint of the scores by the decay.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 19

The scores of a chunk are M_ij = C_i B_j^T 2^(gc_i - gc_j) step_j for i >= j, and its outputs read
M X. C, B [B, T, G, N], x [B, T, H, P], step, gc [B, T, H] (log2, accumulated in each chunk), dy
[B, T, H, P]. Out: dgc [B, T, H], the gradient of gc in M, in natural units. Head j reads group
j // (H // G).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, chunk_of, dot, load_gate, load_row, load_tile
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def chunk_scan_bwd_da_cs_torch(C, B, x, step, gc, dy, *, chunk_size):
    T, H = x.shape[1:3]
    C, B, X, dY, step, gc = (
        to_chunks(y, chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step, pad_gate(gc, chunk_size))
    )  # [B, H, NT, C, ...]
    M = (C @ B.mT) * decay_matrix(gc) * step[..., None, :]
    # eq:ssd-dgc-scores
    dM = dY @ X.mT  # blank: [B, H, NT, C, C]
    W = (M * dM).tril(-1)  # blank: the gradient of the exponent gc_i - gc_j, for i > j
    dgc = W.sum(-1) - W.sum(-2)  # blank: [B, H, NT, C]
    return from_chunks(dgc, T)


@triton.jit
def chunk_scan_bwd_da_cs_kernel(C_ptr, B_ptr, x_ptr, step_ptr, gc_ptr, dy_ptr, dgc_ptr,
                                T, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
                                P: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                                BP: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * H)."""
    i_h, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    i, i_g = first * H + i_h, first * G + i_h // (H // G)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_C = load_tile(C_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_B = load_tile(B_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_gc = load_gate(gc_ptr + i, o_t, H, n_t)  # [BT]
    b_step = load_row(step_ptr + i, o_t, H, n_t)  # [BT]
    b_M = dot(b_C, tl.trans(b_B)) * decay_tile(b_gc, o_t) * b_step[None, :]
    # eq:ssd-dgc-scores
    b_W = b_M * dot(b_dy, tl.trans(b_x))  # blank: [BT, BT]
    b_W = tl.where(o_t[:, None] > o_t[None, :], b_W, 0.0)  # blank: below the diagonal
    b_dgc = tl.sum(b_W, 1) - tl.sum(b_W, 0)  # blank: [BT]
    tl.store(dgc_ptr + i + o_t * H, b_dgc, mask=o_t < n_t)


def chunk_scan_bwd_da_cs_triton(C, B, x, step, gc, dy, *, chunk_size):
    (n, T, G, N), (H, P) = B.shape, x.shape[2:]
    dgc = torch.empty_like(gc)
    chunk_scan_bwd_da_cs_kernel[(n * cdiv(T, chunk_size) * H,)](
        C, B, x, step, gc, dy, dgc, T, G, H, N, P, BT=chunk_size, BN=block(N), BP=block(P)
    )
    return dgc


# hint 1
# Each entry of the scores holds the gate in one place, the exponent gc_i - gc_j, and an exponential
# is its own derivative. So the gradient of the exponent is the entry times its gradient. gc_i
# stands with a plus in row i and with a minus in column i. On the diagonal the exponent is zero
# whatever the gate: what stands there would be added and taken away.
#
# hint 2
# dM = dY X^T, [C, P] times [P, C]. W is M times dM, entry by entry, kept where i > j. dgc is the
# sum of each row of W less the sum of each column. In PyTorch a row's sum runs over the last axis;
# in the kernel over axis 1.
#
# hint 3
# PyTorch:
#     dM = dY @ ...
#     W = (M * ...).tril(...)
#     dgc = W.sum(-1) - ...
# Kernel:
#     b_W = b_M * dot(b_dy, ...)
#     b_W = tl.where(o_t[:, None] > ..., b_W, 0.0)
#     b_dgc = tl.sum(b_W, 1) - ...
