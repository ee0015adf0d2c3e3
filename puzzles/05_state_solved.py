"""Chapter 05, stage state: carry the state S from chunk to chunk.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 05

k [B, T, H, K], w [B, T, HV, K], u [B, T, HV, V], gc [B, T, HV] (log2, accumulated in each chunk of
C tokens), initial_state [B, HV, K, V]. Out: h [B, NT, HV, K, V], the state that enters each chunk;
v_new [B, T, HV, V]; the final state [B, HV, K, V]. Value head j reads key head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, dot, load_gate, load_tile, store_tile
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def state_torch(k, w, u, gc, initial_state, *, chunk_size):
    T, HV = gc.shape[1:]
    K, W, U, gc = (
        to_chunks(x, chunk_size) for x in (repeat_heads(k, HV), w, u, pad_gate(gc, chunk_size))
    )  # [B, HV, NT, C, ...]
    S, h, v_new = initial_state, [], []
    for c in range(K.shape[2]):
        K_c, W_c, U_c, gc_c = (x[:, :, c] for x in (K, W, U, gc))  # [B, HV, C, ...]
        last = gc_c[..., -1]  # [B, HV]
        h.append(S)
        # eq:delta-v-new
        v = U_c - W_c @ S  # blank: the values that the chunk writes, [B, HV, C, V]
        v_new.append(v)
        # eq:delta-state
        r = torch.exp2(last[..., None] - gc_c)  # blank: decay from each token to the chunk's end
        a = torch.exp2(last)[..., None, None]  # decay of the whole chunk
        S = a * S + K_c.mT @ (r[..., None] * v)  # blank: the state that leaves the chunk
    return torch.stack(h, 1), from_chunks(torch.stack(v_new, 2), T), S


@triton.jit
def state_kernel(k_ptr, w_ptr, u_ptr, gc_ptr, h0_ptr, h_ptr, v_new_ptr, ht_ptr,
                 T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                 BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: S of one head, through all chunks.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_state = (i_b * HV + i_h) * K * V
    b_S = load_tile(h0_ptr + i_state, o_k, o_v, V, K, V)  # [BK, BV]
    NT = tl.cdiv(T, BT)
    for i_t in range(NT):
        first, n_t = i_b * T + i_t * BT, T - i_t * BT  # first token; tokens from there on
        store_tile(h_ptr + ((i_b * NT + i_t) * HV + i_h) * K * V, b_S, o_k, o_v, V, K, V)
        i_k = i_h // (HV // H)  # blank: the key head of value head i_h
        b_k = load_tile(k_ptr + (first * H + i_k) * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_w = load_tile(w_ptr + (first * HV + i_h) * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_u = load_tile(u_ptr + (first * HV + i_h) * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        # eq:delta-v-new
        b_v = b_u - dot(b_w, b_S)  # blank: [BT, BV]
        store_tile(v_new_ptr + (first * HV + i_h) * V, b_v, o_t, o_v, HV * V, n_t, V)
        # eq:delta-state
        b_gc = load_gate(gc_ptr + first * HV + i_h, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + (first + tl.minimum(BT, n_t) - 1) * HV + i_h)
        b_v *= tl.exp2(b_last - b_gc)[:, None]
        b_S = tl.exp2(b_last) * b_S + dot(tl.trans(b_k), b_v)  # blank: [BK, BV]
    store_tile(ht_ptr + i_state, b_S, o_k, o_v, V, K, V)


def state_triton(k, w, u, gc, initial_state, *, chunk_size):
    (B, T, H, K), (HV, V) = k.shape, u.shape[2:]
    h = k.new_empty(B, cdiv(T, chunk_size), HV, K, V)
    v_new, last = torch.empty_like(u), torch.empty_like(initial_state)
    state_kernel[(B * HV,)](
        k, w, u, gc, initial_state, h, v_new, last,
        T, H, HV, K, V, BT=chunk_size, BK=block(K), BV=block(V),
    )  # fmt: skip
    return h, v_new, last


# hint 1
# The state is the only thing that goes from one chunk to the next, so the loop reads S, says what
# the chunk writes given S, and then makes the next S. The rows of u are what the chunk would write
# into an empty state; w says how much of the incoming state they must take back. Whatever was there
# before the chunk decays over the whole chunk; what token i writes decays only from i to the
# chunk's last token.
#
# hint 2
# v' = u - w S is one product of [C, K] and [K, V]. The decay from token i to the end is a
# difference of accumulated logs in base 2: 2 to the power of the last entry of gc less gc_i. The
# new state is the decayed old one plus K transposed times the decayed v'. In the kernel HV // H
# neighbouring value heads share a key head.
#
# hint 3
# PyTorch:
#     v = U_c - W_c @ ...
#     r = torch.exp2(last[..., None] - ...)
#     S = a * S + K_c.mT @ (r[..., None] * ...)
# Kernel:
#     i_k = i_h // (...)
#     b_v = b_u - dot(b_w, ...)
#     b_S = tl.exp2(b_last) * b_S + dot(tl.trans(...), ...)
