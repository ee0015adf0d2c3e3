"""The general delta rule as one kernel, and its reverse: a token at a time, S in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.recurrent import BV, BV_BWD, column_sums, load, load_state, store
from linattn_edu.kernels.tiles import (
    block,
    blocks_of,
    cast,
    cdiv,
    columns_of,
    first_state,
    load_vector,
    store_tile,
)


@triton.jit
def token(first, i, n_seq, REVERSE: tl.constexpr):
    """Token i of a sequence, in the order in which the state comes by them."""
    return first + (n_seq - 1 - i) if REVERSE else first + i


@triton.jit(do_not_specialize=["T", "rows"])
def dplr_recurrent_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, H, V]
    a_ptr, b_ptr,  # [B, T, H, K]
    gk_ptr,  # [B, T, H, K] natural log
    h0_ptr,  # [N, H, K, V]
    rows,  # how many of a state of h0 are read: K, or none
    o_ptr,  # [B, T, H, V] out
    ht_ptr,  # [N, H, K, V] out
    scale,
    cu_ptr, T,  # of columns_of
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all tokens.  Grid (N * H * V / BV).

    Reference: linattn_edu.reference.dplr.recurrent.dplr_recurrent.
    """
    i_v, i_nh, i_h, first, n_seq, _ = columns_of(tl.program_id(0), cu_ptr, None, T, H, V, 1, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    b_S = load_state(h0_ptr + i_nh * K * V, o_k, o_v, K, V, False, rows=rows)
    for i_t in range(n_seq):
        i = token(first, i_t, n_seq, REVERSE) * H + i_h
        b_q, b_k, b_v = load(q_ptr, i, o_k, K), load(k_ptr, i, o_k, K), load(v_ptr, i, o_v, V)
        b_a, b_b, b_gk = load(a_ptr, i, o_k, K), load(b_ptr, i, o_k, K), load(gk_ptr, i, o_k, K)

        b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
        b_a, b_b, b_decay = b_a.to(tl.float32), b_b.to(tl.float32), tl.exp(b_gk.to(tl.float32))
        b_qb, b_qk = tl.sum(b_q * b_b, 0), tl.sum(b_q * b_k, 0)
        # eq:delta-error   e = a S, with the S of before the decay
        b_e, b_qS = column_sums(b_a[:, None] * b_S, (b_q * b_decay)[:, None] * b_S)
        # eq:delta-write   S <- e^g S + b^T e + k^T v
        b_S = b_decay[:, None] * b_S + b_b[:, None] * b_e[None, :] + b_k[:, None] * b_v[None, :]
        # eq:delta-read   o = scale q S,  with the S of before: q e^g S + (q b^T) e + (q k^T) v
        b_o = scale * (b_qS + b_qb * b_e + b_qk * b_v)
        tl.store(o_ptr + i * V + o_v, cast(b_o, o_ptr.dtype.element_ty), mask=o_v < V)
    store_tile(ht_ptr + i_nh * K * V, b_S, o_k, o_v, V, K, V)


@triton.jit
def step(b_S, k_ptr, v_ptr, a_ptr, b_ptr, gk_ptr, i, o_k, o_v, K: tl.constexpr, V: tl.constexpr):
    """One token of the recurrence: the state after it, and what a reads of the one before."""
    b_decay, b_a = tl.exp(load_vector(gk_ptr + i * K, o_k, K)), load_vector(a_ptr + i * K, o_k, K)
    b_b, b_k = load_vector(b_ptr + i * K, o_k, K), load_vector(k_ptr + i * K, o_k, K)
    # eq:delta-error   e = a S, with the S of before the decay
    b_e = tl.sum(b_a[:, None] * b_S, 0)
    # eq:delta-write   S <- e^g S + b^T e + k^T v
    b_S = b_decay[:, None] * b_S + b_b[:, None] * b_e[None, :]
    return b_S + b_k[:, None] * load_vector(v_ptr + i * V, o_v, V)[None, :], b_e


@triton.jit(do_not_specialize=["T", "total", "BLOCK"])
def dplr_recurrent_bwd_kernel(
    q_ptr, k_ptr, v_ptr, a_ptr, b_ptr, gk_ptr, h0_ptr,  # h0 may be None
    do_ptr,  # [B, T, H, V]
    dht_ptr,  # [N, H, K, V] or None
    kept_ptr,  # [number of blocks, H, K, V]: the state before each block
    inner_ptr,  # [N, H, BLOCK, K, V]: the states of one block
    dq_ptr,  # [NV, B, T, H, K] out, as dk, da, db and dgk
    dk_ptr,
    dv_ptr,  # [B, T, H, V] out
    da_ptr, db_ptr, dgk_ptr,
    dh0_ptr,  # [N, H, K, V] out
    scale,
    cu_ptr, offsets_ptr, T,  # of columns_of
    total,  # B * T
    BLOCK,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all tokens.  Grid (N * H * V / BV).

    Reference: linattn_edu.reference.dplr.recurrent.dplr_recurrent_bwd.
    """
    i_v, i_nh, i_h, first, n_seq, i_block = columns_of(
        tl.program_id(0), cu_ptr, None, T, H, V, 1, BV
    )
    i_n = i_nh // H
    i_block = i_n * tl.cdiv(T, BLOCK) if cu_ptr is None else tl.load(offsets_ptr + i_n)
    _one, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, 1, BK, BV, False)
    kept_ptr += (i_block * H + i_h) * K * V
    inner_ptr += i_nh * BLOCK * K * V
    i_out = i_v.to(tl.int64) * total * H
    NB = tl.cdiv(n_seq, BLOCK)
    for i_b in range(NB):
        store_tile(kept_ptr, b_S, o_k, o_v, V, K, V)
        kept_ptr += H * K * V
        if i_b < NB - 1:  # the last block is run below
            for j in range(BLOCK):
                i = token(first, i_b * BLOCK + j, n_seq, REVERSE) * H + i_h
                b_S, _ = step(b_S, k_ptr, v_ptr, a_ptr, b_ptr, gk_ptr, i, o_k, o_v, K, V)

    b_dS = first_state(dht_ptr, i_nh, i_v, K, V, 1, BK, BV, False)[3]
    for r_b in range(NB):
        begin = (NB - 1 - r_b) * BLOCK
        n = tl.minimum(BLOCK, n_seq - begin)
        kept_ptr -= H * K * V
        tl.debug_barrier()  # what other threads of the program stored is read below
        b_S = load_state(kept_ptr, o_k, o_v, K, V, False)
        for j in range(n):
            store_tile(inner_ptr, b_S, o_k, o_v, V, K, V)
            inner_ptr += K * V
            i = token(first, begin + j, n_seq, REVERSE) * H + i_h
            b_S, _ = step(b_S, k_ptr, v_ptr, a_ptr, b_ptr, gk_ptr, i, o_k, o_v, K, V)
        tl.debug_barrier()
        for j in range(n):
            inner_ptr -= K * V
            i = token(first, begin + (n - 1 - j), n_seq, REVERSE) * H + i_h
            b_before = load_state(inner_ptr, o_k, o_v, K, V, False)
            b_S, b_e = step(b_before, k_ptr, v_ptr, a_ptr, b_ptr, gk_ptr, i, o_k, o_v, K, V)
            b_do = load_vector(do_ptr + i * V, o_v, V) * scale
            # eq:delta-read-bwd   dq = scale S do^T, dS <- dS + scale q^T do
            store(dq_ptr, i_out + i, tl.sum(b_S * b_do[None, :], 1), o_k, K)
            b_dS += load_vector(q_ptr + i * K, o_k, K)[:, None] * b_do[None, :]
            # eq:delta-write-bwd   dk = dS v^T, dv = k dS, db = dS e^T, de = b dS
            b_v = load_vector(v_ptr + i * V, o_v, V)
            store(dk_ptr, i_out + i, tl.sum(b_dS * b_v[None, :], 1), o_k, K)
            b_k, b_b = load_vector(k_ptr + i * K, o_k, K), load_vector(b_ptr + i * K, o_k, K)
            b_dv, b_de = column_sums(b_k[:, None] * b_dS, b_b[:, None] * b_dS)
            store(dv_ptr, i, cast(b_dv, dv_ptr.dtype.element_ty), o_v, V)
            store(db_ptr, i_out + i, tl.sum(b_dS * b_e[None, :], 1), o_k, K)
            # eq:delta-error-bwd   da = S' de^T
            store(da_ptr, i_out + i, tl.sum(b_before * b_de[None, :], 1), o_k, K)
            # eq:delta-decay-bwd   dg = e^g <dS, S'>, dS <- e^g dS + a^T de
            b_dS *= tl.exp(load_vector(gk_ptr + i * K, o_k, K))[:, None]
            store(dgk_ptr, i_out + i, tl.sum(b_dS * b_before, 1), o_k, K)
            b_dS += load_vector(a_ptr + i * K, o_k, K)[:, None] * b_de[None, :]
        tl.debug_barrier()
    store_tile(dh0_ptr + i_nh * K * V, b_dS, o_k, o_v, V, K, V)


def dplr_recurrent(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, *,
    scale: float | None = None, initial_state: Tensor | None = None, reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch dplr_recurrent_kernel; arguments and result as in the reference.

    cu_seqlens: [N + 1] int64, of sequences packed into a batch of one.
    """
    B, T, H, K = q.shape
    V, scale = v.shape[-1], K**-0.5 if scale is None else scale
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o, final_state = torch.empty_like(v), q.new_empty(N, H, K, V, dtype=torch.float32)
    width = min(block(V), BV)
    h0, rows = (final_state, 0) if initial_state is None else (initial_state, K)
    dplr_recurrent_kernel[(N * H * cdiv(V, width),)](
        q, k, v, a, b, gk, h0, rows, o, final_state, scale, cu_seqlens, T, H, K, V,
        BK=block(K), BV=width, REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return o, final_state


def dplr_recurrent_bwd(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gk: Tensor, do: Tensor,
    dht: Tensor | None = None, *, scale: float | None = None, initial_state: Tensor | None = None,
    reverse: bool = False, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch dplr_recurrent_bwd_kernel; arguments and result as in the reference.

    cu_seqlens: [N + 1] int64, of sequences packed into a batch of one.
    """
    B, T, H, K = q.shape
    V, scale = v.shape[-1], K**-0.5 if scale is None else scale
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    length, blocks, offsets = blocks_of(B, T, N, cu_seqlens)
    NV = cdiv(V, BV_BWD)

    def new(*shape: int) -> Tensor:
        return q.new_empty(*shape, dtype=torch.float32)

    sums = dq, dk, da, db, dgk = [new(NV, B, T, H, K) for _ in range(5)]
    dv, dh0 = torch.empty_like(v), new(N, H, K, V)
    kept, inner = new(blocks, H, K, V), new(N, H, length, K, V)
    dplr_recurrent_bwd_kernel[(N * H * NV,)](
        q, k, v, a, b, gk, initial_state, do, dht, kept, inner, dq, dk, dv, da, db, dgk, dh0,
        scale, cu_seqlens, offsets, T, B * T, length, H, K, V, BK=block(K), BV=BV_BWD,
        REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    dq, dk, da, db, dgk = (x.sum(0) for x in sums)
    dq, dk, da, db = (x.to(q.dtype) for x in (dq, dk, da, db))
    return dq, dk, dv, da, db, dgk, dh0
