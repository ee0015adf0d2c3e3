"""Chapter 22, stage cp_merge_bwd: a piece of a sequence as an affine map of the gradient.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 22

A piece of a sequence makes dS_in = dM dS_out + dS_ext of the gradient of the state that leaves it,
so it can be worked through before dS_out is known. q, k [B, T, H, K], w [B, T, HV, K], gc
[B, T, HV] (log2, accumulated in each chunk of C tokens), do and dv_out [B, T, HV, V], the gradient
of o and what stage output_bwd made of it for v_new: the piece; dS_out [B, HV, K, V]. Out: dS_ext
[B, HV, K, V], dM [B, HV, K, K] and dS_in [B, HV, K, V]. Value head j reads q/k head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, dot, load_gate, load_tile, store_tile
from linattn_edu.reference.tiles import pad_gate, repeat_heads, to_chunks


def cp_merge_bwd_torch(q, k, w, gc, do, dv_out, dS_out, *, scale, chunk_size):
    HV, DK = w.shape[2:]
    Q, K, W, dO, dV, gc = (
        to_chunks(x, chunk_size)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), w, do, dv_out, pad_gate(gc, chunk_size),
        )
    )  # fmt: skip
    dS_ext, dM = torch.zeros_like(dS_out), torch.eye(DK, dtype=q.dtype)
    for c in reversed(range(K.shape[2])):
        Q_c, K_c, W_c, dO_c, dV_c, gc_c = (x[:, :, c] for x in (Q, K, W, dO, dV, gc))
        last = gc_c[..., -1:]
        a, e = torch.exp2(last)[..., None], torch.exp2(gc_c)[..., None]
        K_c = torch.exp2(last - gc_c)[..., None] * K_c  # [B, HV, C, K]
        # eq:cp-ext-bwd
        dv = dV_c + K_c @ dS_ext  # blank: the whole gradient of v_new, [B, HV, C, V]
        read = scale * (e * Q_c).mT @ dO_c
        dS_ext = a * dS_ext + read - W_c.mT @ dv  # blank: [B, HV, K, V]
        # eq:cp-transition-bwd
        dM = a * dM - W_c.mT @ (K_c @ dM)  # blank: the same for a piece without outputs
    # eq:cp-merge-bwd
    dS_in = dM @ dS_out + dS_ext  # blank: [B, HV, K, V]
    return dS_ext, dM, dS_in


@triton.jit
def cp_merge_bwd_kernel(q_ptr, k_ptr, w_ptr, gc_ptr, do_ptr, dv_ptr, dS_out_ptr, dS_ext_ptr,
                        dM_ptr, dS_in_ptr, scale,
                        T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                        BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: the map of one head, from the last chunk to the first.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_state = i_b * HV + i_h
    b_dS = tl.zeros([BK, BV], tl.float32)
    b_dM = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0)  # [BK, BK]
    NT = tl.cdiv(T, BT)
    for step in range(NT):
        first = (NT - 1 - step) * BT  # blank: the first token of this step's chunk, from 0
        i, i_k = (i_b * T + first) * HV + i_h, (i_b * T + first) * H + i_h // (HV // H)
        n_t = T - first  # tokens from there on
        b_q = load_tile(q_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_w = load_tile(w_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_do = load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_dv = load_tile(dv_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        b_k *= tl.exp2(b_last - b_gc)[:, None]
        # eq:cp-ext-bwd
        b_dv += dot(b_k, b_dS)  # blank: [BT, BV]
        b_read = dot(tl.trans(b_q), scale * tl.exp2(b_gc)[:, None] * b_do)  # [BK, BV]
        b_dS = tl.exp2(b_last) * b_dS + b_read - dot(tl.trans(b_w), b_dv)
        # eq:cp-transition-bwd
        b_dM = tl.exp2(b_last) * b_dM - dot(tl.trans(b_w), dot(b_k, b_dM))  # blank: [BK, BK]
    # eq:cp-merge-bwd
    b_out = load_tile(dS_out_ptr + i_state * K * V, o_k, o_v, V, K, V)  # [BK, BV]
    b_in = dot(b_dM, b_out) + b_dS  # blank: [BK, BV]
    store_tile(dS_ext_ptr + i_state * K * V, b_dS, o_k, o_v, V, K, V)
    store_tile(dM_ptr + i_state * K * K, b_dM, o_k, o_k, K, K, K)
    store_tile(dS_in_ptr + i_state * K * V, b_in, o_k, o_v, V, K, V)


def cp_merge_bwd_triton(q, k, w, gc, do, dv_out, dS_out, *, scale, chunk_size):
    (B, T, H, K), (HV, V) = k.shape, do.shape[2:]
    dS_ext, dS_in = torch.empty_like(dS_out), torch.empty_like(dS_out)
    dM = k.new_empty(B, HV, K, K)
    cp_merge_bwd_kernel[(B * HV,)](
        q, k, w, gc, do, dv_out, dS_out, dS_ext, dM, dS_in, scale,
        T, H, HV, K, V, BT=chunk_size, BK=block(K), BV=block(V),
    )  # fmt: skip
    return dS_ext, dM, dS_in


# hint 1
# The loop is that of puzzle 09, from the last chunk to the first. What it makes of the gradient of
# the state that leaves the piece is affine: a matrix times that gradient, plus what the outputs of
# the piece say. The second comes out when the loop starts from zero. The matrix comes out when it
# starts from the identity and there are no outputs. Nothing is asked of the state itself.
#
# hint 2
# A chunk makes dv = dV_out + K dS and dS' = a dS + scale (diag(2^gc) Q)^T dO - w^T dv, with the
# decayed keys K. From zero this carries dS_ext. Without dO and dV_out it is a dM - w^T K dM, with
# dM in place of dS. The result is the transpose of the forward map M, in which K^T w stands: here w
# is transposed and the key is not. Order matters: form K dM, [C, K], first.
#
# hint 3
# PyTorch:
#     dv = dV_c + K_c @ ...
#     dS_ext = a * dS_ext + read - ... @ dv
#     dM = a * dM - W_c.mT @ (...)
#     dS_in = dM @ ... + dS_ext
# Kernel:
#     first = (NT - 1 - ...) * BT
#     b_dv += dot(b_k, ...)
#     b_dM = tl.exp2(b_last) * b_dM - dot(tl.trans(b_w), ...)
#     b_in = dot(b_dM, ...) + b_dS
