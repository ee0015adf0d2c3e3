"""Chapter 21, stage cp_merge: a piece of a sequence as an affine map of the state.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 21

A piece of a sequence makes S_out = M S_in + S_ext of the state that enters it, so it can be worked
through before S_in is known. k [B, T, H, K], w [B, T, HV, K], u [B, T, HV, V], gc [B, T, HV] (log2,
accumulated in each chunk of C tokens): the piece; S_in [B, HV, K, V]. Out: S_ext [B, HV, K, V],
M [B, HV, K, K] and S_out [B, HV, K, V]. Value head j reads key head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, dot, load_gate, load_tile, store_tile
from linattn_edu.reference.tiles import pad_gate, repeat_heads, to_chunks


def cp_merge_torch(k, w, u, gc, S_in, *, chunk_size):
    HV, DK = w.shape[2:]
    K, W, U, gc = (
        to_chunks(x, chunk_size) for x in (repeat_heads(k, HV), w, u, pad_gate(gc, chunk_size))
    )  # [B, HV, NT, C, ...]
    S_ext = torch.zeros_like(S_in)
    M = torch.eye(DK, dtype=k.dtype)  # blank: what a piece without tokens does to a state
    for c in range(K.shape[2]):
        W_c, U_c, gc_c = (x[:, :, c] for x in (W, U, gc))
        last = gc_c[..., -1:]
        a, r = torch.exp2(last)[..., None], torch.exp2(last - gc_c)[..., None]
        K_c = r * K[:, :, c]  # [B, HV, C, K]
        # eq:cp-ext
        S_ext = a * S_ext + K_c.mT @ (U_c - W_c @ S_ext)  # blank: [B, HV, K, V]
        # eq:cp-transition
        M = a * M - K_c.mT @ (W_c @ M)  # blank: [B, HV, K, K]
    # eq:cp-merge
    S_out = M @ S_in + S_ext  # blank: [B, HV, K, V]
    return S_ext, M, S_out


@triton.jit
def cp_merge_kernel(k_ptr, w_ptr, u_ptr, gc_ptr, S_in_ptr, S_ext_ptr, M_ptr, S_out_ptr,
                    T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: the map of one head, through all chunks.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_state = i_b * HV + i_h
    b_S = tl.zeros([BK, BV], tl.float32)
    b_M = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0)  # [BK, BK]
    for i_t in range(tl.cdiv(T, BT)):
        first, n_t = i_b * T + i_t * BT, T - i_t * BT  # first token; tokens from there on
        i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
        b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_w = load_tile(w_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_u = load_tile(u_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        b_kT = tl.trans(b_k * tl.exp2(b_last - b_gc)[:, None])  # [BK, BT]
        # eq:cp-ext
        b_v = b_u - dot(b_w, b_S)  # blank: what the chunk writes, [BT, BV]
        b_S = tl.exp2(b_last) * b_S + dot(b_kT, b_v)
        # eq:cp-transition
        b_M = tl.exp2(b_last) * b_M - dot(b_kT, dot(b_w, b_M))  # blank: [BK, BK]
    # eq:cp-merge
    b_in = load_tile(S_in_ptr + i_state * K * V, o_k, o_v, V, K, V)  # [BK, BV]
    b_out = dot(b_M, b_in) + b_S  # blank: [BK, BV]
    store_tile(S_ext_ptr + i_state * K * V, b_S, o_k, o_v, V, K, V)
    store_tile(M_ptr + i_state * K * K, b_M, o_k, o_k, K, K, K)
    store_tile(S_out_ptr + i_state * K * V, b_out, o_k, o_v, V, K, V)


def cp_merge_triton(k, w, u, gc, S_in, *, chunk_size):
    (B, T, H, K), (HV, V) = k.shape, u.shape[2:]
    S_ext, M, S_out = torch.empty_like(S_in), k.new_empty(B, HV, K, K), torch.empty_like(S_in)
    cp_merge_kernel[(B * HV,)](
        k, w, u, gc, S_in, S_ext, M, S_out,
        T, H, HV, K, V, BT=chunk_size, BK=block(K), BV=block(V),
    )  # fmt: skip
    return S_ext, M, S_out


# hint 1
# A chunk does to the state something affine: a matrix times the state plus something that does not
# depend on it. A chain of chunks does too. The part without the state comes out when the piece is
# run from zero. The matrix comes out when the piece is run with no values to write from the
# identity: then each column shows what becomes of a unit state.
#
# hint 2
# A chunk makes S' = a S + K^T diag(r) (u - w S). From zero this carries S_ext. Without u it is a M
# - K^T diag(r) w M, with M in place of S, from I. When S_in arrives, one product of [K, K] and [K,
# V] and one sum give S_out. Order matters: form w M, [C, K], first, not K^T w, [K, K].
#
# hint 3
# PyTorch:
#     M = torch.eye(...)
#     S_ext = a * S_ext + K_c.mT @ (U_c - ...)
#     M = a * M - K_c.mT @ (...)
#     S_out = M @ ... + S_ext
# Kernel:
#     b_v = b_u - dot(...)
#     b_M = tl.exp2(b_last) * b_M - dot(b_kT, ...)
#     b_out = dot(b_M, ...) + b_S
