"""Chapter 04, stage wy: what each chunk would write, and how that depends on the incoming state.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 04

k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV], gc [B, T, HV] (log2, accumulated in each chunk of
C tokens), A [B, T, HV, C] of stage solve, without the gate. Out: w [B, T, HV, K] and
u [B, T, HV, V], such that the chunk writes the values u - w S. Value head j reads key head
j // (HV // H).
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


def wy_torch(k, v, beta, gc, A):
    T, HV, C = A.shape[1:]
    K, V, b, gc, A = (
        to_chunks(x, C) for x in (repeat_heads(k, HV), v, beta[..., None], pad_gate(gc, C), A)
    )  # [B, HV, NT, C, ...]; b has a last axis of one
    # eq:delta-w
    e = torch.exp2(gc)[..., None]  # blank: decay from the incoming state to each token
    w = e * (A @ (b * K))  # blank: [B, HV, NT, C, K]
    # eq:delta-u
    u = (A * decay_matrix(gc)) @ (b * V)  # blank: [B, HV, NT, C, V]
    return from_chunks(w, T), from_chunks(u, T)


@triton.jit
def wy_kernel(k_ptr, v_ptr, beta_ptr, gc_ptr, A_ptr, w_ptr, u_ptr,
              T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
              BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * HV)."""
    i_h, _, first, n_t = chunk_of(tl.program_id(0), None, None, T, HV, BT)
    i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_v = load_tile(v_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_A = load_tile(A_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
    b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
    b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
    b_Ab = b_A * b_beta[None, :]  # blank: A diag(beta), [BT, BT]
    # eq:delta-w
    b_w = tl.exp2(b_gc)[:, None] * dot(b_Ab, b_k)  # blank: [BT, BK]
    store_tile(w_ptr + i * K, b_w, o_t, o_k, HV * K, n_t, K)
    # eq:delta-u
    b_u = dot(b_Ab * decay_tile(b_gc, o_t), b_v)  # blank: [BT, BV]
    store_tile(u_ptr + i * V, b_u, o_t, o_v, HV * V, n_t, V)


def wy_triton(k, v, beta, gc, A):
    (B, T, H, K), (HV, V), C = k.shape, v.shape[2:], A.shape[3]
    w, u = k.new_empty(B, T, HV, K), torch.empty_like(v)
    wy_kernel[(B * cdiv(T, C) * HV,)](
        k, v, beta, gc, A, w, u, T, H, HV, K, V, BT=C, BK=block(K), BV=block(V)
    )
    return w, u


# hint 1
# What the tokens of a chunk write solves a triangular system whose right-hand side is diag(beta) (V
# - diag(2^gc) K S): each token's value less what the decayed incoming state holds under its key.
# The matrix of the system with its gate has the inverse A * G. The right-hand side has a part that
# is known, V, and a part with S. So has the solution: u and w S.
#
# hint 2
# u = (A * G) diag(beta) V. For w the gate of the system and the decay of the state meet: (A * G)
# diag(2^gc) = diag(2^gc) A, since G_ij 2^gc_j = 2^gc_i for i >= j. So w = diag(2^gc) A diag(beta)
# K, with no G in it. A diagonal matrix on the left multiplies rows, on the right columns: A
# diag(beta) is column j of A times beta_j, or A times rows of K times beta_j.
#
# hint 3
# PyTorch:
#     e = torch.exp2(...)[..., None]
#     w = e * (A @ ...)
#     u = (A * decay_matrix(...)) @ ...
# Kernel:
#     b_Ab = b_A * b_beta[...]
#     b_w = tl.exp2(b_gc)[:, None] * dot(b_Ab, ...)
#     b_u = dot(b_Ab * decay_tile(...), ...)
