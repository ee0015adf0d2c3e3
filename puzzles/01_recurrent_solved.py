"""Chapter 01, stage recurrent: the gated delta rule, one token at a time.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 01

q, k [B, T, H, K], v [B, T, HV, V], g [B, T, HV] (the natural log of the decay, <= 0), beta
[B, T, HV], initial_state [B, HV, K, V]. Out: o [B, T, HV, V] and the final state [B, HV, K, V].
Value head j reads q/k head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, load_tile, load_vector, store_tile
from linattn_edu.reference.tiles import repeat_heads


def recurrent_torch(q, k, v, g, beta, initial_state, *, scale):
    HV = v.shape[2]
    # rows of length K and V, and numbers: matrices of one row, for the products with S
    q, k, v, a, beta = (
        x[..., None, :]
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v, g.exp()[..., None], beta[..., None])
    )
    S, o = initial_state, []
    for t in range(q.shape[1]):
        # eq:delta-decay
        S = a[:, t] * S  # blank: the decayed state, [B, HV, K, V]
        # eq:delta-error
        e = v[:, t] - k[:, t] @ S  # blank: the value less what the state holds, [B, HV, 1, V]
        # eq:delta-write
        S = S + k[:, t].mT * (beta[:, t] * e)  # blank: the state after the write
        # eq:delta-read
        o.append(scale * (q[:, t] @ S))
    return torch.stack(o, 1).squeeze(-2), S


@triton.jit
def recurrent_kernel(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, h0_ptr, o_ptr, ht_ptr, scale,
                     T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                     BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: S of one head, through all tokens.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    i_state = (i_b * HV + i_h) * K * V
    b_S = load_tile(h0_ptr + i_state, o_k, o_v, V, K, V)  # [BK, BV]
    for t in range(T):
        i = (i_b * T + t) * HV + i_h
        i_k = (i_b * T + t) * H + i_h // (HV // H)
        b_q, b_k = load_vector(q_ptr + i_k * K, o_k, K), load_vector(k_ptr + i_k * K, o_k, K)
        b_v = load_vector(v_ptr + i * V, o_v, V)  # [BV]
        # eq:delta-decay
        b_S *= tl.exp(tl.load(g_ptr + i))
        # eq:delta-error
        b_e = b_v - tl.sum(b_k[:, None] * b_S, 0)  # blank: [BV]
        # eq:delta-write
        b_S += b_k[:, None] * (tl.load(beta_ptr + i) * b_e)[None, :]  # blank: [BK, BV]
        # eq:delta-read
        b_o = scale * tl.sum(b_q[:, None] * b_S, 0)  # blank: [BV]
        tl.store(o_ptr + i * V + o_v, b_o, mask=o_v < V)
    store_tile(ht_ptr + i_state, b_S, o_k, o_v, V, K, V)


def recurrent_triton(q, k, v, g, beta, initial_state, *, scale):
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    o, last = torch.empty_like(v), torch.empty_like(initial_state)
    recurrent_kernel[(B * HV,)](
        q, k, v, g, beta, initial_state, o, last, scale, T, H, HV, K, V, BK=block(K), BV=block(V)
    )
    return o, last


# hint 1
# The state is a memory: K keys' worth of rows, each with a value of length V. A token lets the
# memory fade, asks it what it holds under the token's key, and writes the difference between its
# value and that answer under the key, times beta. It reads after it has written.
#
# hint 2
# k S, a row of length V, is what the faded state holds. The error e is v less that row. The write
# is an outer product: the key as a column times beta times the error as a row. The read is the
# query as a row times the new state, times scale. In the kernel a row times S is a sum over the
# rows of S, each times one entry of the vector.
#
# hint 3
# PyTorch:
#     S = a[:, t] * ...
#     e = v[:, t] - k[:, t] @ ...
#     S = S + k[:, t].mT * (...)
# Kernel:
#     b_e = b_v - tl.sum(b_k[:, None] * ..., 0)
#     b_S += b_k[:, None] * (...)[None, :]
#     b_o = scale * tl.sum(..., 0)
