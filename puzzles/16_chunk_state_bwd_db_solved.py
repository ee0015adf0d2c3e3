"""Chapter 16, stage chunk_state_bwd_db: the adjoint of chunk_state by B, and by its decay.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 16

A chunk adds s = (diag(r * step) B)^T X to the state, r_j = 2^(gc_last - gc_j). B [B, T, G, N],
x [B, T, H, P], step, gc [B, T, H] (log2, accumulated in each chunk), ds [B, NT, H, N, P], the
gradient of s. Out: dB_state [B, T, G, N], summed over the heads of a group; dgc [B, T, H] and dlast
[B, NT, H], the gradients of gc_j and gc_last in r, in natural units. Head j reads group
j // (H // G).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    chunk_of,
    dot,
    load_gate,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, sum_heads, to_chunks


def chunk_state_bwd_db_torch(B, x, step, gc, ds, *, chunk_size):
    (T, H), G = x.shape[1:3], B.shape[2]
    B, X, step, gc = (
        to_chunks(y, chunk_size) for y in (repeat_heads(B, H), x, step, pad_gate(gc, chunk_size))
    )  # [B, H, NT, C, ...]
    dS = ds.transpose(1, 2)  # [B, H, NT, N, P]
    r = torch.exp2(gc[..., -1:] - gc)  # blank: decay from each token to the chunk's end
    # eq:ssd-db-state
    dB = (r * step)[..., None] * (X @ dS.mT)  # blank: of each head, [B, H, NT, C, N]
    # eq:ssd-dgc-state
    m = (B * dB).sum(-1)  # blank: the gradient of the log of r, [B, H, NT, C]
    return sum_heads(from_chunks(dB, T), G), from_chunks(-m, T), m.sum(-1).transpose(1, 2)


@triton.jit
def chunk_state_bwd_db_kernel(B_ptr, x_ptr, step_ptr, gc_ptr, ds_ptr, dB_ptr, dgc_ptr, dlast_ptr,
                              T, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr,
                              P: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
                              BP: tl.constexpr):  # fmt: skip
    """One program: a chunk of a group, head after head.  Grid (B * NT * G)."""
    i_g, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, G, BT)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    i_B = (first * G + i_g) * N
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_sum = tl.zeros([BT, BN], tl.float32)
    for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
        i = first * H + i_h
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_ds = load_tile(ds_ptr + (i_c * H + i_h) * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        b_gc = load_gate(gc_ptr + i, o_t, H, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * H)
        b_r = tl.exp2(b_last - b_gc) * load_row(step_ptr + i, o_t, H, n_t)  # [BT]
        # eq:ssd-db-state
        b_dB = b_r[:, None] * dot(b_x, tl.trans(b_ds))  # blank: of this head, [BT, BN]
        b_sum += b_dB
        # eq:ssd-dgc-state
        b_m = tl.sum(b_B * b_dB, 1)  # blank: [BT]
        tl.store(dgc_ptr + i + o_t * H, -b_m, mask=o_t < n_t)
        b_dlast = tl.sum(b_m, 0)  # blank: a number
        tl.store(dlast_ptr + i_c * H + i_h, b_dlast)
    store_tile(dB_ptr + i_B, b_sum, o_t, o_n, G * N, n_t, N)


def chunk_state_bwd_db_triton(B, x, step, gc, ds, *, chunk_size):
    (n, T, G, N), (H, P) = B.shape, x.shape[2:]
    NT = cdiv(T, chunk_size)
    dB, dgc, dlast = torch.empty_like(B), torch.empty_like(gc), gc.new_empty(n, NT, H)
    chunk_state_bwd_db_kernel[(n * NT * G,)](
        B, x, step, gc, ds, dB, dgc, dlast, T, G, H, N, P, BT=chunk_size, BN=block(N), BP=block(P)
    )
    return dB, dgc, dlast


# hint 1
# The chunk's sum is a product of two matrices, so B gets the other factor times the gradient. The
# weight r * step of a token multiplies its row of B, so it multiplies that row of the gradient. The
# weight is an exponential: its gradient by its own log is the row of B, with its weight, times the
# gradient of the product. That number is the inner product of the row of B and the row of its
# gradient.
#
# hint 2
# From s = (diag(r * step) B)^T X: dB = diag(r * step) X ds^T, [C, P] times [P, N]. With m_j = B_j .
# dB_j: the log of r_j is gc_last - gc_j, so gc_j gets -m_j, and gc_last the sum of all m_j of the
# chunk. dB is summed over the heads of a group, m is not.
#
# hint 3
# PyTorch:
#     r = torch.exp2(gc[..., -1:] - ...)
#     dB = (r * step)[..., None] * (X @ ...)
#     m = (B * ...).sum(-1)
# Kernel:
#     b_dB = b_r[:, None] * dot(b_x, ...)
#     b_m = tl.sum(..., 1)
#     b_dlast = tl.sum(..., 0)
