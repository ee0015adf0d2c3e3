"""Chapter 14, stage chunk_scan_bwd_dstates: the gradient of the states that the outputs read.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 14

Token i of a chunk reads 2^gc_i C_i h from the state h [N, P] that enters the chunk. C [B, T, G, N],
gc [B, T, H] (log2, accumulated in each chunk), dy [B, T, H, P], the gradient of y. Out: dh_out
[B, NT, H, N, P], the gradient of h through these reads alone. Head j reads group j // (H // G).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.reference.tiles import repeat_heads, to_chunks


def chunk_scan_bwd_dstates_torch(C, gc, dy, *, chunk_size):
    H = dy.shape[2]
    C, dY, gc = (to_chunks(x, chunk_size) for x in (repeat_heads(C, H), dy, gc))
    # [B, H, NT, C, ...]; missing tokens have C = 0 and dY = 0
    # eq:ssd-dstates
    e = torch.exp2(gc)[..., None]  # blank: decay from the incoming state to each token
    dh_out = (e * C).mT @ dY  # blank: [B, H, NT, N, P]
    return dh_out.transpose(1, 2)


@triton.jit
def chunk_scan_bwd_dstates_kernel(C_ptr, gc_ptr, dy_ptr, dh_ptr, T, G: tl.constexpr,
                                  H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
                                  BT: tl.constexpr, BN: tl.constexpr,
                                  BP: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * H)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    i_g = i_h // (H // G)  # blank: the group of head i_h
    i = first * H + i_h
    b_C = load_tile(C_ptr + (first * G + i_g) * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_gc = load_row(gc_ptr + i, o_t, H, n_t)  # [BT]
    # eq:ssd-dstates
    b_read = tl.exp2(b_gc)[:, None] * b_C  # blank: what each token reads h with, [BT, BN]
    b_dh = dot(tl.trans(b_read), b_dy)  # blank: [BN, BP]
    store_tile(dh_ptr + (i_c * H + i_h) * N * P, b_dh, o_n, o_p, P, N, P)


def chunk_scan_bwd_dstates_triton(C, gc, dy, *, chunk_size):
    (B, T, G, N), (H, P) = C.shape, dy.shape[2:]
    NT = cdiv(T, chunk_size)
    dh_out = C.new_empty(B, NT, H, N, P)
    chunk_scan_bwd_dstates_kernel[(B * NT * H,)](
        C, gc, dy, dh_out, T, G, H, N, P, BT=chunk_size, BN=block(N), BP=block(P)
    )
    return dh_out


# hint 1
# All tokens of a chunk read the same state, so its gradient is a sum over them. Each token adds an
# outer product: the row it reads with, as a column, times the gradient of what it read. A sum of
# outer products is one product of matrices.
#
# hint 2
# Y = R h with R = diag(2^gc) C, [C, N]; so dh = R^T dY, [N, C] times [C, P]. The decay multiplies
# row i of C. It could as well multiply row i of dY.
#
# hint 3
# PyTorch:
#     e = torch.exp2(...)[..., None]
#     dh_out = (...).mT @ dY
# Kernel:
#     i_g = i_h // (...)
#     b_read = tl.exp2(...)[:, None] * ...
#     b_dh = dot(tl.trans(...), b_dy)
