"""Chapter 26, a step of a server: a few tokens of each sequence, with states in a pool of slots.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 26

q, k [N, T, H, K], v [N, T, HV, V], g [N, T, HV] (the natural log of the decay, <= 0), beta
[N, T, HV]: T tokens of each of N sequences, all but the first of them guesses; pool
[slots, HV, K, V]. slots [N, T] names a slot for the state after each token; a row of -1 is a place
without a sequence: its o is 0, and it reads and writes no state. accepted [N], 1 to T: how many
tokens of the last call were right, so that a sequence starts from the state after the last of them,
which the last call left by the same row of slots. Out: o [N, T, HV, V], and pool, changed in place.
Value head j reads q/k head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, load_vector, mask_if
from linattn_edu.reference.tiles import repeat_heads


def decoding_torch(q, k, v, g, beta, pool, slots, accepted, *, scale):
    N, T, HV = g.shape
    # rows of length K and V, and numbers: matrices of one row, for the products with S
    q, k, v, a, beta = (
        x[..., None, :]
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v, g.exp()[..., None], beta[..., None])
    )
    start = slots[torch.arange(N), accepted - 1]  # blank: the slot that each sequence starts from
    live = start >= 0
    S, o = pool[start.clamp(min=0)], torch.zeros_like(v)
    for t in range(T):
        # eq:delta-decay
        S = a[:, t] * S
        # eq:delta-error
        e = beta[:, t] * (v[:, t] - k[:, t] @ S)  # blank: what is written at the key, times beta
        # eq:delta-read
        qk = q[:, t] @ k[:, t].mT
        o_t = scale * (q[:, t] @ S + qk * e)  # blank: the read, from S before the write
        o[live, t] = o_t[live]
        # eq:delta-write
        S = S + k[:, t].mT * e
        at = slots[live, t]  # blank: the slots in which the states after token t are kept
        pool[at] = S[live]
    return o.squeeze(-2), pool


@triton.jit
def decoding_kernel(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, pool_ptr, slots_ptr, accepted_ptr, o_ptr,
                    scale, n_slots,
                    T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                    BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: BV columns of the state of a head of a sequence.  Grid (N * HV * NV)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_n, i_h = tl.program_id(0) % NV, tl.program_id(0) // NV // HV, tl.program_id(0) // NV % HV
    o_k, o_v = tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    i_S = i_h * K * V + o_k[:, None] * V + o_v[None, :]  # in a slot
    m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
    place = i_n * T + tl.load(accepted_ptr + i_n) - 1  # blank: in slots, of the state to start from
    slot = tl.load(slots_ptr + place).to(tl.int64)
    live = (slot >= 0) & (slot < n_slots)
    b_S = tl.load(pool_ptr + slot * HV * K * V + i_S, mask=mask_if(m_S, live), other=0.0)
    for t in range(T):
        i = (i_n * T + t) * HV + i_h
        i_k = (i_n * T + t) * H + i_h // (HV // H)
        b_q, b_k = load_vector(q_ptr + i_k * K, o_k, K), load_vector(k_ptr + i_k * K, o_k, K)
        b_v = load_vector(v_ptr + i * V, o_v, V)  # [BV]
        b_beta = tl.load(beta_ptr + i)
        # eq:delta-decay
        b_S *= tl.exp(tl.load(g_ptr + i))
        b_kS = tl.sum(b_k[:, None] * b_S, 0)  # both sums before the write, neither waits for it
        b_qS = tl.sum(b_q[:, None] * b_S, 0)
        # eq:delta-error
        b_e = b_beta * (b_v - b_kS)  # blank: [BV]
        # eq:delta-read
        b_o = scale * (b_qS + tl.sum(b_q * b_k) * b_e)  # blank: [BV]
        tl.store(o_ptr + i * V + o_v, tl.where(live, b_o, 0.0), mask=o_v < V)
        # eq:delta-write
        b_S += b_k[:, None] * b_e[None, :]  # blank: [BK, BV]
        place_t = i_n * T + t  # blank: in slots, of the state after token t
        slot_t = tl.load(slots_ptr + place_t).to(tl.int64)
        kept = live & (slot_t >= 0) & (slot_t < n_slots)
        tl.store(pool_ptr + slot_t * HV * K * V + i_S, b_S, mask=mask_if(m_S, kept))


def decoding_triton(q, k, v, g, beta, pool, slots, accepted, *, scale, BV=16):
    (N, T, H, K), (HV, V), o = q.shape, v.shape[2:], torch.empty_like(v)
    decoding_kernel[(N * HV * cdiv(V, BV),)](
        q, k, v, g, beta, pool, slots, accepted, o, scale, len(pool),
        T, H, HV, K, V, BK=block(K), BV=BV,
    )  # fmt: skip
    return o, pool


# hint 1
# Nothing of the recurrence is new: puzzle 01 with two indices. The state stays where it is computed
# from the first token to the last, and a copy goes to a slot after each. Which of the copies of the
# last call counts is known only now, from accepted: the rejected tokens are taken back by starting
# from another slot. The read need not wait for the write: what the write adds to the state is
# known, and so is what the query reads of it.
#
# hint 2
# With n tokens accepted, the last right one is token n - 1 of the last call, and slots[., n - 1]
# has the state after it. With S decayed already: e = beta (v - k S), o = scale (q S + (q k^T) e),
# where q k^T is a number, and S + k^T e is the new state: its read would be q S + q k^T e. In the
# kernel slots is a matrix of T columns, row after row: entry [n, t] stands at n T + t.
#
# hint 3
# PyTorch:
#     start = slots[torch.arange(N), ...]
#     e = beta[:, t] * (v[:, t] - ...)
#     o_t = scale * (q[:, t] @ S + ...)
#     at = slots[live, ...]
# Kernel:
#     place = i_n * T + tl.load(...) - 1
#     b_e = b_beta * (...)
#     b_o = scale * (b_qS + tl.sum(...) * b_e)
#     b_S += b_k[:, None] * ...
#     place_t = i_n * T + ...
