"""Chapter 09, stage state_bwd: carry the gradient of the state back through the chunks.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 09

q, k [B, T, H, K], w [B, T, HV, K], gc [B, T, HV] (log2, accumulated in each chunk of C tokens), do
[B, T, HV, V], the gradient of o; dv_out [B, T, HV, V], the part of the gradient of v_new that stage
output_bwd found; dht [B, HV, K, V], the gradient of the final state. Out: dh [B, NT, HV, K, V], the
gradient of the state that leaves each chunk; dv_new [B, T, HV, V], whole; dh0 [B, HV, K, V], the
gradient of the initial state. Value head j reads q/k head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cast, cdiv, dot, load_gate, load_tile, store_tile
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def state_bwd_torch(q, k, w, gc, do, dv_out, dht, *, scale, chunk_size):
    T, HV = gc.shape[1:]
    Q, K, W, dO, dV, gc = (
        to_chunks(x, chunk_size)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), w, do, dv_out, pad_gate(gc, chunk_size),
        )
    )  # fmt: skip
    dS, dh, dv_new = dht, [], []
    for c in reversed(range(K.shape[2])):
        Q_c, K_c, W_c, dO_c, dV_c, gc_c = (x[:, :, c] for x in (Q, K, W, dO, dV, gc))
        last = gc_c[..., -1:]  # [B, HV, 1]
        dh.append(dS)
        # eq:delta-dv-new
        r = torch.exp2(last - gc_c)[..., None]  # decay from each token to the chunk's end
        dv = dV_c + r * (K_c @ dS)  # blank: [B, HV, C, V]
        dv_new.append(dv)
        # eq:delta-ds
        a, e = torch.exp2(last)[..., None], torch.exp2(gc_c)[..., None]
        read = scale * (e * Q_c).mT @ dO_c  # blank: what the outputs say about the state they read
        dS = a * dS + read - W_c.mT @ dv  # blank: the gradient of the state that enters the chunk
    return torch.stack(dh[::-1], 1), from_chunks(torch.stack(dv_new[::-1], 2), T), dS


@triton.jit
def state_bwd_kernel(q_ptr, k_ptr, w_ptr, gc_ptr, do_ptr, dv_out_ptr, dht_ptr, dh_ptr, dv_ptr,
                     dh0_ptr, scale,
                     T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                     BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: dS of one head, from the last chunk to the first.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_state = (i_b * HV + i_h) * K * V
    b_dS = load_tile(dht_ptr + i_state, o_k, o_v, V, K, V)  # [BK, BV]
    NT = tl.cdiv(T, BT)
    for step in range(NT):
        i_t = NT - 1 - step  # blank: the chunk of this step
        first, n_t = i_b * T + i_t * BT, T - i_t * BT  # first token; tokens from there on
        i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
        store_tile(dh_ptr + ((i_b * NT + i_t) * HV + i_h) * K * V, b_dS, o_k, o_v, V, K, V)
        b_q = load_tile(q_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_w = load_tile(w_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_dv = load_tile(dv_out_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        # eq:delta-dv-new
        b_h = cast(b_dS, b_k.dtype)
        b_dv += tl.exp2(b_last - b_gc)[:, None] * dot(b_k, b_h)  # blank: [BT, BV]
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
        # eq:delta-ds
        b_do = cast(scale * tl.exp2(b_gc)[:, None] * b_do, b_q.dtype)  # blank: [BT, BV]
        b_read, b_dv = dot(tl.trans(b_q), b_do), cast(b_dv, b_w.dtype)  # [BK, BV], [BT, BV]
        b_dS = tl.exp2(b_last) * b_dS + b_read - dot(tl.trans(b_w), b_dv)  # blank: [BK, BV]
    store_tile(dh0_ptr + i_state, b_dS, o_k, o_v, V, K, V)


def state_bwd_triton(q, k, w, gc, do, dv_out, dht, *, scale, chunk_size):
    (B, T, H, K), (HV, V) = k.shape, do.shape[2:]
    dh = k.new_empty(B, cdiv(T, chunk_size), HV, K, V)
    dv_new, dh0 = torch.empty_like(do), torch.empty_like(dht)
    state_bwd_kernel[(B * HV,)](
        q, k, w, gc, do, dv_out, dht, dh, dv_new, dh0, scale,
        T, H, HV, K, V, BT=chunk_size, BK=block(K), BV=block(V), num_stages=1,
    )  # fmt: skip
    return dh, dv_new, dh0


# hint 1
# The loop of the forward pass, read from its end. The state that leaves a chunk has one gradient,
# dS. What the chunk wrote went into that state, so dv_new gets a part from it, beside the part that
# the outputs gave. The state that enters the chunk was used three times: it decayed into the one
# that leaves, the outputs read it, and v_new = u - w S took from it. Its gradient is the sum of
# three terms.
#
# hint 2
# S' = a S + K^T diag(r) v_new gives diag(r) K dS to v_new: row i times 2^(gc_last - gc_i). To S it
# gives a dS. The outputs scale diag(2^gc) Q S give scale (diag(2^gc) Q)^T dO, and v_new = u - w S
# gives - w^T dv_new, with the whole dv_new, not the part that came in. In the kernel the decay of a
# row of Q may stand at the row of dO as well: both are summed over tokens.
#
# hint 3
# PyTorch:
#     dv = dV_c + r * (...)
#     read = scale * (...).mT @ dO_c
#     dS = a * dS + read - ...
# Kernel:
#     i_t = NT - 1 - ...
#     b_dv += tl.exp2(...)[:, None] * dot(b_k, ...)
#     b_do = cast(scale * ... * b_do, b_q.dtype)
#     b_dS = tl.exp2(b_last) * b_dS + b_read - dot(tl.trans(...), ...)
