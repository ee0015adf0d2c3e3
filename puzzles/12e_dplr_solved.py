"""Chapter 12e, DPLR: what the states at both ends of a chunk say about its rows and its gate.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 12e

q and a read the state S that enters a chunk, k and b write into the one that leaves it, S':

    O  = scale ((2^gc * Q) S + what queries read of the chunk's own tokens)
    X  = (2^gp * A) S + what a reads of them
    S' = diag(2^gc_last) S + (2^(gc_last - gc) * K)^T V + (2^(gc_last - gc) * B)^T E

gp is gc of the token before, and 0 for a chunk's first: a reads before its token's decay. What the
words stand for, the four scores, is not asked for.

q, k, a, b, gc [B, T, H, K] (gc log2, accumulated in each chunk of C tokens); v [B, T, H, V]; e
[B, T, H, V], what each a reads; do, dx [B, T, H, V], the gradients of O and X; h [B, NT, H, K, V],
the states that enter the chunks; dh [B, NT, H, K, V], the gradients of those that leave them. Out:
dq, dk, da, db [B, T, H, K], and dgc [B, T, H, K] in natural units. Some channels of the check
forget everything at one token.
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import (
    block,
    cdiv,
    chunk_of,
    dot,
    load_gates,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.reference.delta.wy_bwd import last_tokens
from linattn_edu.reference.tiles import from_chunks, pad_gate, to_chunks


def dplr_torch(q, k, a, b, gc, v, e, do, dx, h, dh, *, scale, chunk_size):
    T = q.shape[1]
    Q, K, A, B, gc, V, E, dO, dX = (
        to_chunks(x, chunk_size) for x in (q, k, a, b, pad_gate(gc, chunk_size), v, e, do, dx)
    )  # [B, H, NT, C, ...]
    h, dh = h.transpose(1, 2), dh.transpose(1, 2)  # [B, H, NT, K, V]
    zero, last = torch.zeros_like(gc[..., :1, :]), gc[..., -1:, :]
    gp = torch.cat([zero, gc[..., :-1, :]], -2)  # blank: row i is gc of the token before
    # eq:dplr-drows
    # eq:dplr-outer
    dQ = scale * torch.exp2(gc) * (dO @ h.mT)
    dA = torch.exp2(gp) * (dX @ h.mT)  # blank: [B, H, NT, C, K]
    dK, dB = (torch.exp2(last - gc) * (x @ dh.mT) for x in (V, E))  # blank: [B, H, NT, C, K] both
    # eq:dplr-dgc
    writes = K * dK + B * dB
    dgc = Q * dQ - writes
    dgc[..., :-1, :] += (A * dA)[..., 1:, :]  # blank: of the a that reads with gc_i
    # eq:dplr-dgc-last
    end = writes.sum(-2) + torch.exp2(gc[..., -1, :]) * (h * dh).sum(-1)  # blank: [B, H, NT, K]
    dgc += last_tokens(T, chunk_size, q.device)[..., None] * end[..., None, :]
    return tuple(from_chunks(x, T) for x in (dQ, dK, dA, dB, dgc))


@triton.jit
def dplr_kernel(q_ptr, k_ptr, a_ptr, b_ptr, gc_ptr, v_ptr, e_ptr, do_ptr, dx_ptr, h_ptr, dh_ptr,
                dq_ptr, dk_ptr, da_ptr, db_ptr, dgc_ptr, scale,
                T, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * H)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, H, BT)
    n_t = tl.minimum(n_t, BT)  # tokens of the chunk
    i, i_S = first * H + i_h, (i_c * H + i_h) * K * V
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    b_q = load_tile(q_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_k = load_tile(k_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_b = load_tile(b_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
    b_e = load_tile(e_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
    b_do = load_tile(do_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
    b_dx = load_tile(dx_ptr + i * V, o_t, o_v, H * V, n_t, V)  # [BT, BV]
    b_h = tl.trans(load_tile(h_ptr + i_S, o_k, o_v, V, K, V))  # [BV, BK]
    b_dh = tl.trans(load_tile(dh_ptr + i_S, o_k, o_v, V, K, V))  # [BV, BK]
    b_gc = load_gates(gc_ptr + i * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_last = load_vector(gc_ptr + i * K + (n_t - 1) * H * K, o_k, K)  # [BK]
    b_gp = load_gates(gc_ptr + i * K, tl.maximum(o_t - 1, 0), o_k, H * K, n_t, K)
    b_gp = tl.where(o_t[:, None] > 0, b_gp, 0.0)  # [BT, BK], gc of the token before
    # eq:dplr-drows
    # eq:dplr-outer
    b_dq = scale * tl.exp2(b_gc) * dot(b_do, b_h)  # [BT, BK]
    b_da = tl.exp2(b_gp) * dot(b_dx, b_h)  # blank: [BT, BK]
    b_r = tl.exp2(b_last[None, :] - b_gc)  # blank: what is left at the chunk's end, [BT, BK]
    b_dk, b_db = b_r * dot(b_v, b_dh), b_r * dot(b_e, b_dh)  # blank: [BT, BK] both
    store_tile(dq_ptr + i * K, b_dq, o_t, o_k, H * K, n_t, K)
    store_tile(dk_ptr + i * K, b_dk, o_t, o_k, H * K, n_t, K)
    store_tile(da_ptr + i * K, b_da, o_t, o_k, H * K, n_t, K)
    store_tile(db_ptr + i * K, b_db, o_t, o_k, H * K, n_t, K)
    # eq:dplr-dgc
    b_a = load_tile(a_ptr + (i + H) * K, o_t, o_k, H * K, n_t - 1, K)  # rows of o_t + 1
    b_dx = load_tile(dx_ptr + (i + H) * V, o_t, o_v, H * V, n_t - 1, V)
    b_writes = b_k * b_dk + b_b * b_db
    b_dgc = b_q * b_dq - b_writes
    b_dgc += b_a * tl.exp2(b_gc) * dot(b_dx, b_h)  # blank: of the a that reads with gc_i, [BT, BK]
    # eq:dplr-dgc-last
    b_end = tl.sum(b_writes, 0) + tl.exp2(b_last) * tl.sum(b_h * b_dh, 0)  # blank: [BK]
    b_dgc += tl.where(o_t[:, None] == n_t - 1, b_end[None, :], 0.0)
    store_tile(dgc_ptr + i * K, b_dgc, o_t, o_k, H * K, n_t, K)


def dplr_triton(q, k, a, b, gc, v, e, do, dx, h, dh, *, scale, chunk_size):
    (B, T, H, K), V = q.shape, v.shape[-1]
    dq, dk, da, db, dgc = (torch.empty_like(x) for x in (q, k, a, b, gc))
    dplr_kernel[(B * cdiv(T, chunk_size) * H,)](
        q, k, a, b, gc, v, e, do, dx, h, dh, dq, dk, da, db, dgc, scale,
        T, H, K, V, BT=chunk_size, BK=block(K), BV=block(V),
    )  # fmt: skip
    return dq, dk, da, db, dgc


# hint 1
# Four rows, two that read and two that write. Each stands in one product, with the state that
# enters or beside a row of what is written, and in front of it a power of two. So its gradient is
# the gradient of the product's result times the other factor, times the same power. The gate costs
# nothing more: where a row is multiplied by its gradient, what stands in the exponent with a plus
# gains that and what stands with a minus loses it. The row of a that has gc_i in its exponent is
# not a_i.
#
# hint 2
# dQ = scale 2^gc * (dO S^T), dA = 2^gp * (dX S^T), dK = 2^(gc_last - gc) * (V dS'^T), dB with E in
# place of V. gp_i = gc_(i-1), so that a_(i+1) * da_(i+1) belongs to dgc_i, and 2^gp_(i+1) is
# 2^gc_i; a chunk's last token has none. gc_last stands with a plus in all rows that write, a sum
# over the tokens of K * dK + B * dB, and before S: 2^gc_last times the sum over the columns of
# S * dS'. The kernel has both states transposed, so that it sums over rows.
#
# hint 3
# PyTorch:
#     gp = torch.cat([zero, ...], -2)
#     dA = torch.exp2(...) * (dX @ ...)
#     dK, dB = (torch.exp2(...) * (x @ ...) for x in (V, E))
#     dgc[..., :-1, :] += (...)[..., 1:, :]
#     end = writes.sum(-2) + torch.exp2(...) * (...).sum(-1)
# Kernel:
#     b_da = tl.exp2(...) * dot(...)
#     b_r = tl.exp2(b_last[None, :] - ...)
#     b_dk, b_db = b_r * dot(...), b_r * dot(...)
#     b_dgc += b_a * tl.exp2(...) * dot(...)
#     b_end = tl.sum(b_writes, 0) + tl.exp2(...) * tl.sum(..., 0)
