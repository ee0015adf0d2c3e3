"""Chapter 06, stage output: read the state and the chunk's own writes.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 06

q, k [B, T, H, K], v_new [B, T, HV, V] and h [B, NT, HV, K, V] of stage state, gc [B, T, HV] (log2,
accumulated in each chunk of C tokens). Out: o [B, T, HV, V]. Value head j reads q/k head
j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, chunk_of, dot, load_gate, load_tile, store_tile
from linattn_edu.kernels.tiles import decay_matrix as decay_tile
from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def output_torch(q, k, v_new, h, gc, *, scale, chunk_size):
    T, HV = gc.shape[1:]
    Q, K, V, gc = (
        to_chunks(x, chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v_new, pad_gate(gc, chunk_size))
    )  # [B, HV, NT, C, ...]
    S = h.transpose(1, 2)  # [B, HV, NT, K, V]
    # eq:delta-inter
    inter = torch.exp2(gc)[..., None] * (Q @ S)  # blank: what is read from the incoming state
    # eq:delta-intra
    P = (Q @ K.mT) * decay_matrix(gc)  # blank: [B, HV, NT, C, C], how much token i reads of token j
    # eq:delta-output
    o = scale * (inter + P @ V)  # blank: [B, HV, NT, C, V]
    return from_chunks(o, T)


@triton.jit
def output_kernel(q_ptr, k_ptr, v_new_ptr, h_ptr, gc_ptr, o_ptr, scale,
                  T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: a chunk of a head.  Grid (B * NT * HV)."""
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), None, None, T, HV, BT)
    i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    b_q = load_tile(q_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
    b_v = load_tile(v_new_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
    b_h = load_tile(h_ptr + (i_c * HV + i_h) * K * V, o_k, o_v, V, K, V)  # [BK, BV]
    b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
    # eq:delta-inter
    b_o = tl.exp2(b_gc)[:, None] * dot(b_q, b_h)  # blank: [BT, BV]
    # eq:delta-intra
    b_P = dot(b_q, tl.trans(b_k)) * decay_tile(b_gc, o_t)  # blank: [BT, BT]
    # eq:delta-output
    b_o = scale * (b_o + dot(b_P, b_v))  # blank: [BT, BV]
    store_tile(o_ptr + i * V, b_o, o_t, o_v, HV * V, n_t, V)


def output_triton(q, k, v_new, h, gc, *, scale, chunk_size):
    (B, T, H, K), (HV, V) = q.shape, v_new.shape[2:]
    o = torch.empty_like(v_new)
    output_kernel[(B * cdiv(T, chunk_size) * HV,)](
        q, k, v_new, h, gc, o, scale, T, H, HV, K, V, BT=chunk_size, BK=block(K), BV=block(V)
    )
    return o


# hint 1
# A token reads the state as it is after its own write. That state is the incoming one, decayed up
# to the token, and what each token of the chunk up to this one has written, decayed since. So there
# are two terms: one product with the state of the chunk, and attention within the chunk whose
# scores decay. The state of a single token is never formed.
#
# hint 2
# The first term is Q times h, row i times 2^gc_i. The second is P times v_new, where P is Q times K
# transposed, entry by entry times the decay matrix G. G is zero above the diagonal and one on it: a
# token reads its own write whole. The scale multiplies both terms.
#
# hint 3
# PyTorch:
#     inter = torch.exp2(gc)[..., None] * (...)
#     P = (Q @ ...) * decay_matrix(...)
#     o = scale * (inter + ...)
# Kernel:
#     b_o = tl.exp2(b_gc)[:, None] * dot(...)
#     b_P = dot(b_q, ...) * decay_tile(b_gc, o_t)
#     b_o = scale * (b_o + dot(...))
