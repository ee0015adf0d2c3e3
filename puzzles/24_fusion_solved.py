"""Chapter 24, stage scan_bwd of the fused set: the gradient of the state, with no w made for it.

Fill in every `...`, in the PyTorch stage first, then in the kernel, and check with

    python -m linattn_edu puzzle 24

The forward pass of a chunk, which starts from the state S, is

    v_new = AG diag(beta) (V - diag(2^gc) K S)
    o     = scale (diag(2^gc) Q S + P v_new)
    S'    = 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new

q, k [B, T, H, K]; beta, gc [B, T, HV] (gc log2, accumulated in each chunk of C tokens); P and AG
[B, T, HV, C], the matrices Q K^T * G and A * G of each chunk; do [B, T, HV, V], the gradient of o;
dht [B, HV, K, V], that of the final state. Out: dh [B, NT, HV, K, V], the gradient of the state
that leaves each chunk; Z [B, T, HV, V], what AG makes of the gradient of v_new, and from it dv
[B, T, HV, V]; dh0 [B, HV, K, V]. Value head j reads q/k head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, dot, load_gate, load_row, load_tile, store_tile
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def fusion_torch(q, k, beta, gc, P, AG, do, dht, *, scale):
    (T, HV), C = gc.shape[1:], P.shape[-1]
    Q, K, b, gc, P, AG, dO = (
        to_chunks(x, C)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), beta[..., None], pad_gate(gc, C), P, AG, do,
        )
    )  # fmt: skip
    dS, dh, Z, dV = dht, [], [], []
    for c in reversed(range(K.shape[2])):
        Q_c, K_c, b_c, P_c, AG_c, dO_c, gc_c = (x[:, :, c] for x in (Q, K, b, P, AG, dO, gc))
        last = gc_c[..., -1:]  # [B, HV, 1]
        a, e = torch.exp2(last)[..., None], torch.exp2(gc_c)[..., None]
        r = torch.exp2(last - gc_c)[..., None]  # decay from each token to the chunk's end
        dh.append(dS)
        # eq:delta-dv-new
        dv_new = scale * P_c.mT @ dO_c + r * (K_c @ dS)  # blank: [B, HV, C, V]
        # eq:delta-z
        Z_c = AG_c.mT @ dv_new  # blank: [B, HV, C, V]
        Z.append(Z_c)
        # eq:delta-dv
        dV_c = b_c * Z_c  # blank: [B, HV, C, V]
        dV.append(dV_c)
        # eq:fused-ds
        read = scale * (e * Q_c).mT @ dO_c
        dS = a * dS + read - (e * K_c).mT @ dV_c  # blank: of the state that enters the chunk
    Z, dv = (from_chunks(torch.stack(x[::-1], 2), T) for x in (Z, dV))
    return torch.stack(dh[::-1], 1), Z, dv, dS


@triton.jit
def fusion_kernel(q_ptr, k_ptr, beta_ptr, gc_ptr, P_ptr, AG_ptr, do_ptr, dht_ptr,
                  dh_ptr, Z_ptr, dv_ptr, dh0_ptr, scale,
                  T, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                  BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: BV columns of dS of one head, from the last chunk.  Grid (B * HV * NV)."""
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_bh = tl.program_id(0) % NV, tl.program_id(0) // NV
    i_b, i_h = i_bh // HV, i_bh % HV
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    b_dS = load_tile(dht_ptr + i_bh * K * V, o_k, o_v, V, K, V)  # [BK, BV]
    NT = tl.cdiv(T, BT)
    for step in range(NT):
        i_t = NT - 1 - step
        first, n_t = i_b * T + i_t * BT, T - i_t * BT  # first token; tokens from there on
        i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
        store_tile(dh_ptr + ((i_b * NT + i_t) * HV + i_h) * K * V, b_dS, o_k, o_v, V, K, V)
        b_q = load_tile(q_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_P = load_tile(P_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_AG = load_tile(AG_ptr + i * BT, o_t, o_t, HV * BT, n_t, BT)  # [BT, BT]
        b_do = scale * load_tile(do_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV], scaled
        b_beta = load_row(beta_ptr + i, o_t, HV, n_t)  # [BT]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        b_e = tl.exp2(b_gc)[:, None]
        # eq:delta-dv-new
        b_dv = tl.exp2(b_last - b_gc)[:, None] * dot(b_k, b_dS)
        b_dv += dot(tl.trans(b_P), b_do)  # blank: what the outputs of the chunk say, [BT, BV]
        # eq:delta-z
        b_Z = dot(tl.trans(b_AG), b_dv)  # blank: [BT, BV]
        store_tile(Z_ptr + i * V, b_Z, o_t, o_v, HV * V, n_t, V)
        # eq:delta-dv
        b_dv = b_beta[:, None] * b_Z  # blank: [BT, BV]
        store_tile(dv_ptr + i * V, b_dv, o_t, o_v, HV * V, n_t, V)
        # eq:fused-ds
        b_read = dot(tl.trans(b_q), b_e * b_do)  # [BK, BV]
        b_dS = tl.exp2(b_last) * b_dS + b_read - dot(tl.trans(b_k), b_e * b_dv)  # blank: [BK, BV]
    store_tile(dh0_ptr + i_bh * K * V, b_dS, o_k, o_v, V, K, V)


def fusion_triton(q, k, beta, gc, P, AG, do, dht, *, scale, BV=32):
    (B, T, H, K), (HV, V), C = k.shape, do.shape[2:], P.shape[-1]
    dh = k.new_empty(B, cdiv(T, C), HV, K, V)
    Z, dv, dh0 = torch.empty_like(do), torch.empty_like(do), torch.empty_like(dht)
    fusion_kernel[(B * HV * cdiv(V, BV),)](
        q, k, beta, gc, P, AG, do, dht, dh, Z, dv, dh0, scale,
        T, H, HV, K, V, BT=C, BK=block(K), BV=BV,
    )  # fmt: skip
    return dh, Z, dv, dh0


# hint 1
# Read the three lines of the forward pass from the last to the first. v_new went into the next
# state and into the outputs. It was made by AG and beta from values and from what the keys read, so
# its gradient goes back through the transpose of AG, then through beta: that is the gradient of the
# value. The state was used three times: it decayed, the queries read it, the keys read it with a
# minus. What the keys read has the gradient of the value, so there is nothing that w would be
# needed for.
#
# hint 2
# dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS. Z = AG^T dv_new, without beta. dV =
# diag(beta) Z. dS' = 2^gc_last dS + scale (diag(2^gc) Q)^T dO - (diag(2^gc) K)^T dV, with the dS of
# before on the right of both. In the kernel do is scaled when it is loaded, and a decay of the rows
# of K or Q may stand at the other factor, which is summed over the same tokens.
#
# hint 3
# PyTorch:
#     dv_new = scale * P_c.mT @ dO_c + r * (...)
#     Z_c = ... @ dv_new
#     dV_c = ... * Z_c
#     dS = a * dS + read - (e * ...).mT @ ...
# Kernel:
#     b_dv += dot(tl.trans(...), b_do)
#     b_Z = dot(tl.trans(...), b_dv)
#     b_dv = b_beta[:, None] * ...
#     b_dS = tl.exp2(b_last) * b_dS + b_read - dot(tl.trans(...), b_e * ...)
