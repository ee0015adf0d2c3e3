"""Chapter 12d, GDN-2: back through the tokens, with a gate that erases and a gate that writes.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 12d

A token finds the state S, what is left of h_t after its decay, and leaves S + k_t^T e_t, where

    e_t = w_t * v_t - (b_t * k_t) S

q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV, K] (the natural log of the decay, <= 0); b
[B, T, HV, K], the erase gate; w [B, T, HV, V], the write gate; h [B, T, HV, K, V], the state that
enters each token; do [B, T, HV, V], the gradient of o; dht [B, HV, K, V], that of the final state.
Out: dk [B, T, H, K], dv [B, T, HV, V], db [B, T, HV, K], dw [B, T, HV, V] and dh0 [B, HV, K, V],
the gradient of the initial state. dq and dg are made as with a beta, and not asked for. Value head
j reads q/k head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, load_tile, load_vector, store_tile
from linattn_edu.reference.tiles import repeat_heads, sum_heads


def gdn2_torch(q, k, v, g, b, w, h, do, dht, *, scale):
    H, (T, HV) = q.shape[2], v.shape[1:3]
    # rows of length K and V: matrices of one row, for the products with S and dS
    q, k, v, a, b, w, do = (
        x[..., None, :] for x in (repeat_heads(q, HV), repeat_heads(k, HV), v, g.exp(), b, w, do)
    )
    dS, found = dht, []
    for t in reversed(range(T)):
        q_t, k_t, v_t, a_t, b_t, w_t, do_t = (x[:, t] for x in (q, k, v, a, b, w, do))
        S = a_t.mT * h[:, t]  # what the token finds, [B, HV, K, V]
        # eq:delta-read-bwd
        dS = dS + scale * q_t.mT @ do_t
        # eq:12d-step
        e = w_t * v_t - (b_t * k_t) @ S  # blank: what the token writes, [B, HV, 1, V]
        # eq:12d-token-bwd
        de = k_t @ dS
        dr = -de @ S.mT  # blank: the gradient of b_t * k_t, [B, HV, 1, K]
        db_t, dv_t, dw_t = k_t * dr, w_t * de, v_t * de  # blank: of b_t, v_t and w_t
        dk_t = e @ dS.mT + b_t * dr  # blank: k_t writes, and reads what is erased
        dS = dS - (b_t * k_t).mT @ de  # blank: the gradient of S
        # eq:delta-decay-bwd
        dS = a_t.mT * dS
        found.append((dk_t, dv_t, db_t, dw_t))
    dk, dv, db, dw = (torch.stack(x[::-1], 1).squeeze(-2) for x in zip(*found, strict=True))
    return sum_heads(dk, H), dv, db, dw, dS


@triton.jit
def gdn2_kernel(q_ptr, k_ptr, v_ptr, g_ptr, b_ptr, w_ptr, h_ptr, do_ptr, dht_ptr,
                dk_ptr, dv_ptr, db_ptr, dw_ptr, dh0_ptr, scale,
                T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: dS of one value head, from the last token to the first.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    i_state = (i_b * HV + i_h) * K * V
    b_dS = load_tile(dht_ptr + i_state, o_k, o_v, V, K, V)  # [BK, BV]
    for step in range(T):
        t = T - 1 - step
        i = (i_b * T + t) * HV + i_h
        i_k = (i_b * T + t) * H + i_h // (HV // H)
        b_q, b_k = load_vector(q_ptr + i_k * K, o_k, K), load_vector(k_ptr + i_k * K, o_k, K)
        b_b, b_a = load_vector(b_ptr + i * K, o_k, K), tl.exp(load_vector(g_ptr + i * K, o_k, K))
        b_v, b_w = load_vector(v_ptr + i * V, o_v, V), load_vector(w_ptr + i * V, o_v, V)
        b_do = load_vector(do_ptr + i * V, o_v, V)  # [BV]
        b_S = b_a[:, None] * load_tile(h_ptr + i * K * V, o_k, o_v, V, K, V)  # [BK, BV]
        # eq:delta-read-bwd
        b_dS += scale * b_q[:, None] * b_do[None, :]
        # eq:12d-step
        b_e = b_w * b_v - tl.sum((b_b * b_k)[:, None] * b_S, 0)  # blank: [BV]
        # eq:12d-token-bwd
        b_de = tl.sum(b_k[:, None] * b_dS, 0)  # [BV]
        b_dr = -tl.sum(b_S * b_de[None, :], 1)  # blank: [BK]
        b_db, b_dv, b_dw = b_k * b_dr, b_w * b_de, b_v * b_de  # blank: [BK], [BV], [BV]
        b_dk = tl.sum(b_dS * b_e[None, :], 1) + b_b * b_dr  # blank: [BK]
        b_dS -= (b_b * b_k)[:, None] * b_de[None, :]  # blank: [BK, BV]
        # eq:delta-decay-bwd
        b_dS *= b_a[:, None]
        tl.store(dk_ptr + i * K + o_k, b_dk, mask=o_k < K)
        tl.store(db_ptr + i * K + o_k, b_db, mask=o_k < K)
        tl.store(dv_ptr + i * V + o_v, b_dv, mask=o_v < V)
        tl.store(dw_ptr + i * V + o_v, b_dw, mask=o_v < V)
    store_tile(dh0_ptr + i_state, b_dS, o_k, o_v, V, K, V)


def gdn2_triton(q, k, v, g, b, w, h, do, dht, *, scale):
    (B, T, H, K), (HV, V) = k.shape, v.shape[2:]
    # of each value head; those that share a key are added up behind the kernel
    dk, dv, db, dw, dh0 = (torch.empty_like(x) for x in (b, v, b, w, dht))
    gdn2_kernel[(B * HV,)](
        q, k, v, g, b, w, h, do, dht, dk, dv, db, dw, dh0, scale,
        T, H, HV, K, V, BK=block(K), BV=block(V),
    )  # fmt: skip
    return sum_heads(dk, H), dv, db, dw, dh0


# hint 1
# One gradient, dS, goes back through the tokens. A token has written k^T e, so the error's gradient
# is de = k dS. The error is a difference of two products: the value times its gate, and the key
# that reads, r = b * k, times the state that the token found. Each factor's gradient is what stands
# beside it times de. The key has two tasks, and what it gets for both is added. The state was read
# with r, not with k.
#
# hint 2
# Of w * v: dw = v de, dv = w de, entry by entry. Of r S with a minus: dr = - de S^T, a row of
# length K, and S gets - r^T de, an outer product. r = b * k shares dr: db = k dr, and b dr for the
# key, which as the key that writes also gets e dS^T, with dS before r^T de is taken from it. In the
# kernel a row times a matrix is a sum over the matrix's rows, and one times a transpose a sum over
# its columns.
#
# hint 3
# PyTorch:
#     e = w_t * v_t - (...) @ S
#     dr = -de @ ...
#     db_t, dv_t, dw_t = k_t * ..., w_t * ..., v_t * ...
#     dk_t = e @ ... + b_t * ...
#     dS = dS - (...).mT @ de
# Kernel:
#     b_e = b_w * b_v - tl.sum((...)[:, None] * b_S, 0)
#     b_dr = -tl.sum(b_S * ..., 1)
#     b_db, b_dv, b_dw = b_k * ..., b_w * ..., b_v * ...
#     b_dk = tl.sum(b_dS * ..., 1) + b_b * ...
#     b_dS -= (...)[:, None] * b_de[None, :]
