"""Chapter 25, stage state in pieces: a sequence cut into parts that run side by side.

Fill in every `...`, in the PyTorch stage first, then in the kernels, and check with

    python -m linattn_edu puzzle 25

A sequence is cut every L tokens, at borders of chunks; its last piece may be shorter. The maps of
all pieces, S_out = M S_in + S_ext, come first, then the states that enter, one after the other,
then every piece again, from its state. k [B, T, H, K], w [B, T, HV, K], u [B, T, HV, V], gc
[B, T, HV] (log2, accumulated in each chunk of C tokens), initial_state [B, HV, K, V]. Out, with NP
pieces: S_ext and S_in [B, NP, HV, K, V], M [B, NP, HV, K, K]; v_new [B, T, HV, V] and the final
state [B, HV, K, V]. Value head j reads key head j // (HV // H).
"""

import torch
import triton
import triton.language as tl

from linattn_edu.kernels.tiles import block, cdiv, dot, load_gate, load_tile, store_tile
from linattn_edu.reference.tiles import from_chunks, pad_gate, repeat_heads, to_chunks


def pieces(x, n):
    """[B, HV, NT, C, ...] -> [B, HV, NP, n, C, ...]; chunks that are missing are zero."""
    missing = x.new_zeros(*x.shape[:2], -x.shape[2] % n, *x.shape[3:])
    return torch.cat([x, missing], 2).unflatten(2, (-1, n))


def scan(S, K, W, U, gc):
    """What all pieces make of the states S [B, HV, NP, K, V], and their v_new, chunk by chunk."""
    v_new = []
    for c in range(K.shape[3]):
        K_c, W_c, U_c, gc_c = (x[:, :, :, c] for x in (K, W, U, gc))
        last = gc_c[..., -1:]  # [B, HV, NP, 1]; 0 in a missing chunk, which changes nothing
        v_new.append(U_c - W_c @ S)
        K_c = torch.exp2(last - gc_c)[..., None] * K_c
        S = torch.exp2(last)[..., None] * S + K_c.mT @ v_new[-1]
    return S, torch.stack(v_new, 3)


def few_heads_torch(k, w, u, gc, initial_state, *, chunk_size, L):
    T, HV, DK = w.shape[1:]
    K, W, U, gc = (
        pieces(to_chunks(x, chunk_size), L // chunk_size)
        for x in (repeat_heads(k, HV), w, u, pad_gate(gc, chunk_size))
    )  # [B, HV, NP, chunks of a piece, C, ...]
    B, _, NP = K.shape[:3]
    zero = k.new_zeros(B, HV, NP, DK, u.shape[-1])
    eye = torch.eye(DK, dtype=k.dtype).expand(B, HV, NP, -1, -1)
    no_u = torch.zeros_like(W)  # of K columns, for the states of K columns
    # eq:cp-ext
    S_ext, _ = scan(zero, K, W, U, gc)  # blank: [B, HV, NP, K, V]; what else comes nobody reads
    # eq:cp-transition
    M, _ = scan(eye, K, W, no_u, gc)  # blank: [B, HV, NP, K, K]
    S, S_in = initial_state, []
    for p in range(NP):
        S_in.append(S)
        # eq:cp-merge
        S = M[:, :, p] @ S + S_ext[:, :, p]  # blank: the state that enters the next piece
    # eq:25-passes
    S_in = torch.stack(S_in, 2)
    _, v_new = scan(S_in, K, W, U, gc)  # blank: all pieces again
    v_new = from_chunks(v_new.flatten(2, 3), T)
    return S_ext.transpose(1, 2), M.transpose(1, 2), S_in.transpose(1, 2), v_new, S


@triton.jit
def scan_kernel(k_ptr, w_ptr, u_ptr, gc_ptr, S_in_ptr, S_ext_ptr, M_ptr, v_ptr,
                NP, T, L: tl.constexpr, H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr,
                V: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: a piece of a head, its map, or from S_in its v_new.  Grid (B * NP * HV)."""
    i_h, i_p, i_b = tl.program_id(0) % HV, tl.program_id(0) // HV % NP, tl.program_id(0) // HV // NP
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), tl.arange(0, BV)
    i_state = (i_b * NP + i_p) * HV + i_h  # blank: which of the states [B, NP, HV] is the piece's
    b_S = tl.zeros([BK, BV], tl.float32)
    if S_in_ptr is not None:
        b_S = load_tile(S_in_ptr + i_state * K * V, o_k, o_v, V, K, V)  # [BK, BV]
    b_M = tl.where(o_k[:, None] == o_k[None, :], 1.0, 0.0)  # [BK, BK]
    begin = i_p * (L // BT)  # blank: the piece's first chunk
    end = tl.minimum(begin + L // BT, tl.cdiv(T, BT))  # blank: the chunk after its last
    for i_t in range(begin, end):
        first, n_t = i_b * T + i_t * BT, T - i_t * BT  # first token; tokens from there on
        i, i_k = first * HV + i_h, first * H + i_h // (HV // H)
        b_k = load_tile(k_ptr + i_k * K, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_w = load_tile(w_ptr + i * K, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
        b_u = load_tile(u_ptr + i * V, o_t, o_v, HV * V, n_t, V)  # [BT, BV]
        b_gc = load_gate(gc_ptr + i, o_t, HV, n_t)  # [BT]
        b_last = tl.load(gc_ptr + i + (tl.minimum(BT, n_t) - 1) * HV)
        b_kT = tl.trans(b_k * tl.exp2(b_last - b_gc)[:, None])  # [BK, BT]
        # eq:cp-ext
        b_v = b_u - dot(b_w, b_S)
        b_S = tl.exp2(b_last) * b_S + dot(b_kT, b_v)
        # eq:cp-transition
        if S_in_ptr is None:
            b_M = tl.exp2(b_last) * b_M - dot(b_kT, dot(b_w, b_M))
        else:
            store_tile(v_ptr + i * V, b_v, o_t, o_v, HV * V, n_t, V)
    if S_in_ptr is None:
        store_tile(S_ext_ptr + i_state * K * V, b_S, o_k, o_v, V, K, V)
        store_tile(M_ptr + i_state * K * K, b_M, o_k, o_k, K, K, K)


@triton.jit
def merge_kernel(S_ext_ptr, M_ptr, S_0_ptr, S_in_ptr, S_out_ptr,
                 NP, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
                 BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """One program: the states of a head, from piece to piece.  Grid (B * HV)."""
    i_b, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)
    b_S = load_tile(S_0_ptr + (i_b * HV + i_h) * K * V, o_k, o_v, V, K, V)  # [BK, BV]
    for i_p in range(NP):
        i_state = (i_b * NP + i_p) * HV + i_h
        store_tile(S_in_ptr + i_state * K * V, b_S, o_k, o_v, V, K, V)
        b_M = load_tile(M_ptr + i_state * K * K, o_k, o_k, K, K, K)  # [BK, BK]
        b_ext = load_tile(S_ext_ptr + i_state * K * V, o_k, o_v, V, K, V)  # [BK, BV]
        # eq:cp-merge
        b_S = dot(b_M, b_S) + b_ext  # blank: [BK, BV]
    store_tile(S_out_ptr + (i_b * HV + i_h) * K * V, b_S, o_k, o_v, V, K, V)


def few_heads_triton(k, w, u, gc, initial_state, *, chunk_size, L):
    (B, T, H, K), (HV, V) = k.shape, u.shape[2:]
    NP = cdiv(T, L)
    S_ext, S_in = k.new_empty(B, NP, HV, K, V), k.new_empty(B, NP, HV, K, V)
    M, v_new, S_out = (
        k.new_empty(B, NP, HV, K, K), torch.empty_like(u), torch.empty_like(initial_state),
    )  # fmt: skip
    tiles = {"BK": block(K), "BV": block(V)}
    sizes = {"L": L, "H": H, "HV": HV, "K": K, "V": V, "BT": chunk_size, **tiles}
    # eq:25-passes
    grid = (B * NP * HV,)
    scan_kernel[grid](k, w, u, gc, None, S_ext, M, None, NP, T, **sizes)
    merge_kernel[(B * HV,)](S_ext, M, initial_state, S_in, S_out, NP, HV, K, V, **tiles)
    scan_kernel[grid](k, w, u, gc, S_in, None, None, v_new, NP, T, **sizes)
    return S_ext, M, S_in, v_new, S_out


# hint 1
# A scan of few heads has few programs, and each goes through all chunks. Cut the sequence, and
# there are NP times as many, each with its share of the chunks. What a piece makes of the state
# that enters is a matrix times that state, plus the state that it makes of zero. So run every piece
# twice: first without knowing what enters, for its map, then from the state that the chain of maps
# gives it. The first run starts from zero with the values, and from the identity without them.
#
# hint 2
# S_ext is the state of scan from zero. M is that of scan from the identity, with zeros of K columns
# in the place of U. Both runs have all pieces at once. The merge goes through the pieces: S' = M S
# + S_ext, from the initial state; what is stored before is the state that enters. The second run is
# scan from these states, with the values. In the kernel piece p has the chunks from p L / C on, L /
# C of them, but none past the last chunk of the sequence: the last piece may have fewer. States lie
# as [B, NP, HV, K, V].
#
# hint 3
# PyTorch:
#     S_ext, _ = scan(zero, ...)
#     M, _ = scan(eye, K, W, ...)
#     S = M[:, :, p] @ ... + ...
#     _, v_new = scan(S_in, ...)
# Kernel:
#     i_state = (i_b * NP + ...) * HV + ...
#     begin = i_p * ...
#     end = tl.minimum(begin + ..., tl.cdiv(T, BT))
#     b_S = dot(b_M, ...) + ...
