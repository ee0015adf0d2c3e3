"""Chapter 13, the last stage of Mamba-2's forward pass: read the state and the chunk's own tokens.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 13

C, B [B, T, G, N], x [B, T, H, P], step [B, T, H], gc [B, T, H] (log2, accumulated in each chunk),
h [B, NT, H, N, P], the state that enters each chunk. Out: y [B, T, H, P], what token i reads with
C_i from the state after its own write; token j adds step_j B_j^T x_j to it. Head j reads group
j // (H // G). D and z are left out.
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
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def ssd_torch(C, B, x, step, gc, h, *, chunk_size):
    T, H = x.shape[1:3]
    C, B, X, step, gc = (
        to_chunks(y, chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, step, pad_gate(gc, chunk_size))
    )  # [B, H, NT, C, ...]
    S = h.transpose(1, 2)  # [B, H, NT, N, P]
    # eq:ssd-inter
    inter = torch.exp2(gc)[..., None] * (C @ S)  # blank: what is read from the incoming state
    # eq:ssd-scores
    M = (C @ B.mT) * decay_matrix(gc) * step[..., None, :]  # blank: [B, H, NT, C, C]
    # eq:ssd-output
    y = inter + M @ X  # blank: [B, H, NT, C, P]
    return from_chunks(y, T)


@triton.jit
def ssd_kernel(C_ptr, B_ptr, x_ptr, step_ptr, gc_ptr, h_ptr, y_ptr,
               T, G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
               BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * H)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    i, i_g = first * H + i_h, first * G + i_h // (H // G)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_C = load_tile(C_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_B = load_tile(B_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_h = load_tile(h_ptr + (i_c * H + i_h) * N * P, o_n, o_p, P, N, P)  # [BN, BP]
    b_gc = load_gate(gc_ptr + i, o_t, H, n_t)  # [BT]
    b_step = load_row(step_ptr + i, o_t, H, n_t)  # [BT]
    # eq:ssd-inter
    b_y = tl.exp2(b_gc)[:, None] * dot(b_C, b_h)  # blank: [BT, BP]
    # eq:ssd-scores
    b_M = dot(b_C, tl.trans(b_B)) * decay_tile(b_gc, o_t) * b_step[None, :]  # blank: [BT, BT]
    # eq:ssd-output
    b_y += dot(b_M, b_x)  # blank: [BT, BP]
    store_tile(y_ptr + i * P, b_y, o_t, o_p, H * P, n_t, P)


def ssd_triton(C, B, x, step, gc, h, *, chunk_size):
    (n, T, G, N), (H, P) = C.shape, x.shape[2:]
    y = torch.empty_like(x)
    ssd_kernel[(n * cdiv(T, chunk_size) * H,)](
        C, B, x, step, gc, h, y, T, G, H, N, P, BT=chunk_size, BN=block(N), BP=block(P)
    )
    return y


# hint 1
# This is stage output of the gated delta rule with other letters: C for q, B for k, x for v_new.
# Nothing has to be solved, since a token writes its own x whatever the state holds. The one new
# factor is the step: it belongs to the token that writes, not to the one that reads.
#
# hint 2
# The first term is C times the state, row i times 2^gc_i. The second is M times X, where M_ij = C_i
# B_j^T 2^(gc_i - gc_j) step_j for i >= j and 0 above. The step of the writing token multiplies
# column j, so it stands along the last axis.
#
# hint 3
# PyTorch:
#     inter = torch.exp2(gc)[..., None] * (...)
#     M = (C @ ...) * decay_matrix(...) * step[..., None, :]
#     y = inter + ...
# Kernel:
#     b_y = tl.exp2(b_gc)[:, None] * dot(...)
#     b_M = dot(b_C, ...) * decay_tile(b_gc, o_t) * ...
#     b_y += dot(...)
