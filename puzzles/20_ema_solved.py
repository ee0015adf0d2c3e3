"""Chapter 20, stage ema: the moving average of all channels of a head, which share its decay.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 20

h_t = e^g_t h_(t-1) + (1 - e^g_t) x_t, y_t = h_t. x [B, T, H, D], g [B, T, H] (natural log, <= 0),
gc [B, T, H] (g in log2, accumulated in each chunk), initial_state [B, H, D]. Out: y [B, T, H, D];
h [B, NT, H, D], the state that enters each chunk; the final state [B, H, D].
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    dot,
    load_gate,
    load_row,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, to_chunks


def ema_torch(x, g, gc, initial_state, *, chunk_size):
    T = x.shape[1]
    X, g, gc = (to_chunks(y, chunk_size) for y in (x, g, pad_gate(gc, chunk_size)))
    G = decay_matrix(gc)  # [B, H, NT, C, C]
    # eq:ema-weight
    w = -torch.expm1(g)[..., None, :]  # blank: a row of weights for each chunk, [B, H, NT, 1, C]
    S, y, h = initial_state[:, :, None], [], []  # [B, H, 1, D]
    for c in range(X.shape[2]):
        X_c, gc_c, G_c, w_c = (z[:, :, c] for z in (X, gc, G, w))
        h.append(S[:, :, 0])
        # eq:ema-output
        out = torch.exp2(gc_c)[..., None] * S + (G_c * w_c) @ X_c  # blank: [B, H, C, D]
        y.append(out)
        # eq:ema-state
        S = out[:, :, -1:]  # blank: the state that leaves the chunk, [B, H, 1, D]
    return from_chunks(torch.stack(y, 2), T), torch.stack(h, 1), S[:, :, 0]


@triton.jit
def ema_kernel(x_ptr, g_ptr, gc_ptr, h0_ptr, y_ptr, h_ptr, ht_ptr,
               T, H: tl.constexpr, D: tl.constexpr,
               BT: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    """One program: the channels of a head, through all chunks.  Grid (B * H)."""
    i_b, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    o_t, o_d = tl.arange(0, BT), tl.arange(0, BD)
    b_S = load_vector(h0_ptr + (i_b * H + i_h) * D, o_d, D)  # [BD]
    NT = tl.cdiv(T, BT)
    for i_t in range(NT):
        first, n_t = i_b * T + i_t * BT, T - i_t * BT  # first token; tokens from there on
        i = first * H + i_h
        tl.store(h_ptr + ((i_b * NT + i_t) * H + i_h) * D + o_d, b_S, mask=o_d < D)
        b_x = load_tile(x_ptr + i * D, o_t, o_d, H * D, n_t, D)  # [BT, BD]
        b_gc = load_gate(gc_ptr + i, o_t, H, n_t)  # [BT]
        # eq:ema-weight
        b_w = 1.0 - tl.exp(load_row(g_ptr + i, o_t, H, n_t))  # [BT]
        # eq:ema-output
        b_M = decay_tile(b_gc, o_t) * b_w[None, :]  # blank: [BT, BT]
        b_y = tl.exp2(b_gc)[:, None] * b_S[None, :] + dot(b_M, b_x)  # blank: [BT, BD]
        store_tile(y_ptr + i * D, b_y, o_t, o_d, H * D, n_t, D)
        # eq:ema-state
        b_S = tl.sum(tl.where(o_t[:, None] == BT - 1, b_y, 0.0), 0)  # blank: [BD]
    tl.store(ht_ptr + (i_b * H + i_h) * D + o_d, b_S, mask=o_d < D)


def ema_triton(x, g, gc, initial_state, *, chunk_size):
    B, T, H, D = x.shape
    y, last = torch.empty_like(x), torch.empty_like(initial_state)
    h = x.new_empty(B, cdiv(T, chunk_size), H, D)
    ema_kernel[(B * H,)](x, g, gc, initial_state, y, h, last, T, H, D, BT=chunk_size, BD=block(D))
    return y, h, last


# hint 1
# The state of a channel is one number, and the output is the state. A chunk turns the incoming
# state and its own tokens into outputs as in Mamba-2, with 1 in place of C and B: one small matrix,
# the same for all channels of a head. The state after the chunk is the output of its last token. A
# missing token neither decays nor writes, so the last row of a short chunk holds its last token's
# state.
#
# hint 2
# Token i gets 2^gc_i times the incoming state, and 2^(gc_i - gc_j) w_j x_j from each token j <= i,
# with w = 1 - e^g: the decay matrix, its column j times w_j, times X. expm1(g) is e^g - 1 with all
# digits of a small g. The kernel has no way to pick a row of a tile: it sets the other rows to zero
# and sums.
#
# hint 3
# PyTorch:
#     w = -torch.expm1(...)[..., None, :]
#     out = torch.exp2(gc_c)[..., None] * ... + (G_c * ...) @ X_c
#     S = out[...]
# Kernel:
#     b_M = decay_tile(b_gc, o_t) * ...
#     b_y = tl.exp2(b_gc)[:, None] * ... + dot(...)
#     b_S = tl.sum(tl.where(o_t[:, None] == ..., b_y, 0.0), 0)
