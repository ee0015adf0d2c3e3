"""The recurrence as one kernel, and its reverse: a token at a time, the state in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import log_decay
from linattn_edu.kernels.delta.l2norm import reciprocal_lengths
from linattn_edu.kernels.tiles import (
    INTERPRETED,
    block,
    blocks_of,
    cast,
    cdiv,
    columns_of,
    first_state,
    load_vector,
    store_tile,
)

NORMALLY = tl.constexpr("")


@triton.jit
def load_state(x_ptr, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
               EVICT: tl.constexpr = NORMALLY, rows=None):  # fmt: skip
    """A tile of a state [K, V], or [V, K] if V_FIRST, in fp32 and as [BK, BV]; 0 from `rows` on."""
    o = o_k[:, None] + o_v[None, :] * K if V_FIRST else o_k[:, None] * V + o_v[None, :]
    mask = (o_k[:, None] < (K if rows is None else rows)) & (o_v[None, :] < V)
    return tl.load(x_ptr + o, mask=mask, other=0.0, eviction_policy=EVICT).to(tl.float32)


@triton.jit
def store_state(x_ptr, b_S, o_k, o_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """The inverse of `load_state`."""
    o = o_k[:, None] + o_v[None, :] * K if V_FIRST else o_k[:, None] * V + o_v[None, :]
    mask = (o_k[:, None] < K) & (o_v[None, :] < V)
    tl.store(x_ptr + o, cast(b_S, x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load(x_ptr, i, o, n):
    """Numbers o, below n, of row i, in the dtype of the tensor; 0 without a tensor.

    A change of dtype is where Triton changes a layout, and there it waits for the load: a token's
    loads are all issued before the first change.
    """
    if x_ptr is None:
        return 0.0
    else:
        return tl.load(x_ptr + i * n + o, mask=o < n, other=0.0)


@triton.jit
def store(x_ptr, i, b_x, o, n):
    """Numbers o, below n, of row i; nothing without a tensor."""
    if x_ptr is not None:
        tl.store(x_ptr + i * n + o, b_x, mask=o < n)


@triton.jit
def load_number(x_ptr, i):
    """Number i in the dtype of the tensor; 0 without a tensor."""
    if x_ptr is None:
        return 0.0
    else:
        return tl.load(x_ptr + i)


@triton.jit
def decay(b_S, g_ptr, gk_ptr, gv_ptr, b_g, b_gk, b_gv):
    """S times e^(g + gk + gv), for the gates that are given."""
    if g_ptr is not None:
        b_S *= tl.exp(b_g.to(tl.float32))
    if gk_ptr is not None:
        b_S *= tl.exp(b_gk.to(tl.float32))[:, None]
    if gv_ptr is not None:
        b_S *= tl.exp(b_gv.to(tl.float32))[None, :]
    return b_S


@triton.jit
def layer_decay(b_a, b_rate, b_bias, lower_bound):
    """e^g of the raw gate of a layer, from the log of its rate."""
    b_a = b_a.to(tl.float32) + b_bias.to(tl.float32)
    b_rate = tl.exp(b_rate.to(tl.float32))
    return tl.exp(log_decay(b_a, b_rate, lower_bound))


@triton.jit
def slot_of(indices_ptr, i_n, column, pool_slots, SLOTS: tl.constexpr):
    """Where sequence i_n has its state of this column in the pool; negative: nowhere.

    Nothing outside of the pool is read or written, whatever the indices and counts are.
    """
    there = (column >= 0) & (column < SLOTS)
    slot = tl.load(indices_ptr + i_n * SLOTS + column, mask=there, other=-1).to(tl.int64)
    return tl.where(slot < pool_slots, slot, -1)


@triton.jit
def keep(b_S, pool_ptr, slot_stride, pool_slots, indices_ptr, i_n, t, n_seq, o_k, o_v,
         K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr,
         SLOTS: tl.constexpr):  # fmt: skip
    """Store the state after token t in its slot; past the last column, that of the last token."""
    if (t < SLOTS - 1) | (t == n_seq - 1):
        slot = slot_of(indices_ptr, i_n, tl.minimum(t, SLOTS - 1), pool_slots, SLOTS)
        if slot >= 0:
            store_state(pool_ptr + slot * slot_stride, b_S, o_k, o_v, K, V, V_FIRST)


@triton.jit
def add_pairs(x, y, x_other, y_other):
    return x + x_other, y + y_other


@triton.jit
def column_sums(x, y):
    """The sums of the columns of x and of y."""
    if INTERPRETED:  # where tl.reduce goes from element to element
        return tl.sum(x, 0), tl.sum(y, 0)
    else:  # in one reduction: its threads meet once
        return tl.reduce((x, y), 0, add_pairs)


@triton.jit(do_not_specialize=["T", "pool_slots", "rows"])
def recurrent_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV] natural log, or None; with A_log, the raw gate
    gk_ptr,  # [B, T, HV, K] natural log, or None; with A_log or lower_bound, but no g, raw
    gv_ptr,  # [B, T, HV, V] natural log, or None
    beta_ptr,  # [B, T, HV] or None: 1; with write [B, T, HV, K]
    write_ptr,  # [B, T, HV, V] or None
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [HV], of gk [HV, K], or None
    lower_bound,  # or None
    h0_ptr,  # [N, HV, K, V]; with indices, the pool [slots, HV, K, V]
    rows,  # how many of a state of h0 are read: K, or none
    o_ptr,  # [B, T, HV, V] out
    ht_ptr,  # [N, HV, K, V] out, or None; may be h0
    indices_ptr,  # [N, SLOTS] or None
    accepted_ptr,  # [N] or None
    slot_stride,  # from one slot of the pool to the next
    pool_slots,  # how many there are
    scale,
    cu_ptr, T,  # of columns_of
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
    NORM: tl.constexpr,  # divide q and k by their length
    SIGMOID: tl.constexpr,  # beta is SIGMOID times the sigmoid of what is stored; 0: it is stored
    V_FIRST: tl.constexpr,  # states are [V, K]
    SLOTS: tl.constexpr,  # columns of indices
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all tokens.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.recurrent.
    """
    i_v, i_nh, i_h, first, n_seq, _ = columns_of(tl.program_id(0), cu_ptr, None, T, HV, V, 1, BV)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    i_qk, i = first * H + i_h // (HV // H), first * HV + i_h
    # of a state, nothing is computed yet: that would wait, and the token's loads with it
    if indices_ptr is not None:
        h0_ptr += i_h * K * V
        before = 0 if accepted_ptr is None else tl.load(accepted_ptr + i_nh // HV) - 1
        slot = slot_of(indices_ptr, i_nh // HV, before, pool_slots, SLOTS)
        b_S = load_state(h0_ptr + tl.maximum(slot, 0) * slot_stride, o_k, o_v, K, V, V_FIRST,
                         rows=tl.where(slot < 0, 0, K))  # fmt: skip
        if slot < 0:  # no sequence: zeros come out
            for t in range(n_seq):
                tl.store(o_ptr + (i + t * HV) * V + o_v, tl.zeros([BV], tl.float32), mask=o_v < V)
            n_seq *= 0
    else:  # with a state and without, one program: another may sum in another order
        b_S = load_state(h0_ptr + i_nh * K * V, o_k, o_v, K, V, V_FIRST, rows=rows)

    for t in range(n_seq):
        b_q, b_k = load(q_ptr, i_qk, o_k, K), load(k_ptr, i_qk, o_k, K)
        b_v, b_w = load(v_ptr, i, o_v, V), load(write_ptr, i, o_v, V)
        b_beta = load_number(beta_ptr, i) if write_ptr is None else load(beta_ptr, i, o_k, K)
        b_g, b_gk, b_gv = load_number(g_ptr, i), load(gk_ptr, i, o_k, K), load(gv_ptr, i, o_v, V)
        b_A_log = load_number(A_log_ptr, i_h)
        b_bias = load(bias_ptr, i_h, o_k, K) if g_ptr is None else load_number(bias_ptr, i_h)

        b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
        if NORM:
            b_rq, b_rk = reciprocal_lengths(b_q, b_k)
            b_q, b_k = b_q * b_rq, b_k * b_rk
        if beta_ptr is None:
            b_beta = 1.0
        else:
            b_beta = b_beta.to(tl.float32)
            if SIGMOID:
                b_beta = SIGMOID * tl.sigmoid(b_beta)
        # eq:delta-decay   S <- a S
        if A_log_ptr is None and lower_bound is None:
            b_S = decay(b_S, g_ptr, gk_ptr, gv_ptr, b_g, b_gk, b_gv)
        elif g_ptr is not None:
            b_S *= layer_decay(b_g, b_A_log, b_bias, lower_bound)
            b_S = decay(b_S, None, gk_ptr, gv_ptr, b_g, b_gk, b_gv)
        else:
            b_S *= layer_decay(b_gk, b_A_log, b_bias, lower_bound)[:, None]
            b_S = decay(b_S, None, None, gv_ptr, b_g, b_gk, b_gv)
        b_qk = tl.sum(b_q * b_k, 0)  # further up, ptxas would begin v's loads after it
        # eq:delta-error   e = v - k S
        b_r = b_k if write_ptr is None else b_beta * b_k
        b_kS, b_qS = column_sums(b_r[:, None] * b_S, b_q[:, None] * b_S)
        if write_ptr is None:
            b_e = b_beta * (b_v - b_kS)
        else:
            b_e = b_w.to(tl.float32) * b_v - b_kS
        # eq:delta-write   S <- S + k^T beta e
        b_S += b_k[:, None] * b_e[None, :]
        # eq:delta-read   o = scale q S,  with the S of before: scale (q S + (q k^T) beta e)
        b_o = scale * (b_qS + b_qk * b_e)
        tl.store(o_ptr + i * V + o_v, cast(b_o, o_ptr.dtype.element_ty), mask=o_v < V)
        i_qk, i = i_qk + H, i + HV
        if indices_ptr is not None:
            keep(b_S, h0_ptr, slot_stride, pool_slots, indices_ptr, i_nh // HV, t, n_seq, o_k, o_v,
                 K, V, V_FIRST, SLOTS)  # fmt: skip

    if ht_ptr is not None:
        store_state(ht_ptr + i_nh * K * V, b_S, o_k, o_v, K, V, V_FIRST)


@triton.jit
def step(b_S, k_ptr, v_ptr, g_ptr, gk_ptr, gv_ptr, beta_ptr, write_ptr, i_qk, i, o_k, o_v,
         K: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """One token of the recurrence: the state after it, the decayed state before it, e, beta.

    With write, e is all that is written.
    """
    b_k, b_v, b_w = load(k_ptr, i_qk, o_k, K), load(v_ptr, i, o_v, V), load(write_ptr, i, o_v, V)
    b_beta = load_number(beta_ptr, i) if write_ptr is None else load(beta_ptr, i, o_k, K)
    b_g, b_gk, b_gv = load_number(g_ptr, i), load(gk_ptr, i, o_k, K), load(gv_ptr, i, o_v, V)
    b_decayed = decay(b_S, g_ptr, gk_ptr, gv_ptr, b_g, b_gk, b_gv)
    b_k, b_beta = b_k.to(tl.float32), b_beta.to(tl.float32)
    if write_ptr is None:
        b_e = b_v.to(tl.float32) - tl.sum(b_k[:, None] * b_decayed, 0)
        b_S = b_decayed + b_k[:, None] * (b_beta * b_e)[None, :]
    else:
        b_e = b_w.to(tl.float32) * b_v.to(tl.float32)
        b_e -= tl.sum((b_beta * b_k)[:, None] * b_decayed, 0)
        b_S = b_decayed + b_k[:, None] * b_e[None, :]
    return b_S, b_decayed, b_e, b_beta


@triton.jit
def gates_bwd(b_dS, b_decayed, b_e, b_beta, b_k, b_de, v_ptr, write_ptr, dk_ptr, dv_ptr, dbeta_ptr,
              dwrite_ptr, i_out, i, o_k, o_v, K: tl.constexpr, V: tl.constexpr):  # fmt: skip
    """The adjoint of k^T e, e = write v - (beta k) S', with gates of channels; de = k dS.

    Returns dS after it.
    """
    b_w, b_v = load_vector(write_ptr + i * V, o_v, V), load_vector(v_ptr + i * V, o_v, V)
    store(dwrite_ptr, i, b_v * b_de, o_v, V)
    store(dv_ptr, i, cast(b_w * b_de, dv_ptr.dtype.element_ty), o_v, V)
    b_dr = -tl.sum(b_decayed * b_de[None, :], 1)  # of beta k
    store(dbeta_ptr, i_out + i, b_k * b_dr, o_k, K)
    store(dk_ptr, i_out + i, tl.sum(b_dS * b_e[None, :], 1) + b_beta * b_dr, o_k, K)
    return b_dS - (b_beta * b_k)[:, None] * b_de[None, :]


@triton.jit(do_not_specialize=["T", "total", "BLOCK"])
def recurrent_bwd_kernel(
    q_ptr, k_ptr,  # [B, T, H, K]
    v_ptr,  # [B, T, HV, V]
    g_ptr,  # [B, T, HV] natural log, or None
    gk_ptr,  # [B, T, HV, K] natural log, or None
    gv_ptr,  # [B, T, HV, V] natural log, or None
    beta_ptr,  # [B, T, HV]; with write [B, T, HV, K]
    write_ptr,  # [B, T, HV, V] or None
    h0_ptr,  # [N, HV, K, V] or None
    do_ptr,  # [B, T, HV, V]
    dht_ptr,  # [N, HV, K, V] or None
    kept_ptr,  # [number of blocks, HV, K, V]: the state before each block
    inner_ptr,  # [N, HV, BLOCK, K, V]: the states of one block
    dq_ptr, dk_ptr,  # [NV, B, T, HV, K] out
    dv_ptr,  # [B, T, HV, V] out
    dg_ptr,  # [NV, B, T, HV] out
    dbeta_ptr,  # [NV, B, T, HV] out; with write [NV, B, T, HV, K]
    dwrite_ptr,  # [B, T, HV, V] out, or None
    dgk_ptr,  # [NV, B, T, HV, K] out, or None
    dgv_ptr,  # [B, T, HV, V] out, or None
    dh0_ptr,  # [N, HV, K, V] out
    scale,
    cu_ptr, offsets_ptr, T,  # of columns_of
    total,  # B * T
    BLOCK,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: dS[:, v-tile] of one head, back through all tokens.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.recurrent.recurrent_bwd.
    """
    i_v, i_nh, i_h, first, n_seq, i_block = columns_of(
        tl.program_id(0), cu_ptr, None, T, HV, V, 1, BV
    )
    i_n = i_nh // HV
    i_block = i_n * tl.cdiv(T, BLOCK) if cu_ptr is None else tl.load(offsets_ptr + i_n)
    _one, o_k, o_v, b_S = first_state(h0_ptr, i_nh, i_v, K, V, 1, BK, BV, False)
    kept_ptr += (i_block * HV + i_h) * K * V
    inner_ptr += i_nh * BLOCK * K * V
    i_out = i_v.to(tl.int64) * total * HV
    h_qk = i_h // (HV // H)
    NB = tl.cdiv(n_seq, BLOCK)
    for i_b in range(NB):
        store_tile(kept_ptr, b_S, o_k, o_v, V, K, V)
        kept_ptr += HV * K * V
        if i_b < NB - 1:  # the last block is run below
            for j in range(BLOCK):
                t = first + i_b * BLOCK + j
                b_S, _, _, _ = step(b_S, k_ptr, v_ptr, g_ptr, gk_ptr, gv_ptr, beta_ptr, write_ptr,
                                    t * H + h_qk, t * HV + i_h, o_k, o_v, K, V)  # fmt: skip

    b_dS = first_state(dht_ptr, i_nh, i_v, K, V, 1, BK, BV, False)[3]
    for r_b in range(NB):
        begin = (NB - 1 - r_b) * BLOCK
        n = tl.minimum(BLOCK, n_seq - begin)
        kept_ptr -= HV * K * V
        tl.debug_barrier()  # what other threads of the program stored is read below
        b_S = load_state(kept_ptr, o_k, o_v, K, V, False)
        for j in range(n):
            store_tile(inner_ptr, b_S, o_k, o_v, V, K, V)
            inner_ptr += K * V
            t = first + begin + j
            b_S, _, _, _ = step(b_S, k_ptr, v_ptr, g_ptr, gk_ptr, gv_ptr, beta_ptr, write_ptr,
                                t * H + h_qk, t * HV + i_h, o_k, o_v, K, V)  # fmt: skip
        tl.debug_barrier()
        for j in range(n):
            inner_ptr -= K * V
            t = first + begin + (n - 1 - j)
            i_qk, i = t * H + h_qk, t * HV + i_h
            b_S = load_state(inner_ptr, o_k, o_v, K, V, False)
            b_S, b_decayed, b_e, b_beta = step(b_S, k_ptr, v_ptr, g_ptr, gk_ptr, gv_ptr, beta_ptr,
                                               write_ptr, i_qk, i, o_k, o_v, K, V)  # fmt: skip
            b_q = load_vector(q_ptr + i_qk * K, o_k, K)
            b_k = load_vector(k_ptr + i_qk * K, o_k, K)
            b_do = load_vector(do_ptr + i * V, o_v, V) * scale
            # eq:delta-read-bwd   dq = scale S do^T, dS <- dS + scale q^T do
            tl.store(dq_ptr + (i_out + i) * K + o_k, tl.sum(b_S * b_do[None, :], 1), mask=o_k < K)
            b_dS += b_q[:, None] * b_do[None, :]
            # eq:delta-write-bwd   dbeta = <k dS, e>, de = beta k dS
            b_dr = tl.sum(b_k[:, None] * b_dS, 0)
            if write_ptr is None:
                tl.store(dbeta_ptr + i_out + i, tl.sum(b_dr * b_e, 0))
                b_de = b_beta * b_dr
                # eq:delta-error-bwd   dv = de, dk = dS (beta e)^T - S' de^T, dS <- dS - k^T de
                tl.store(dv_ptr + i * V + o_v, cast(b_de, dv_ptr.dtype.element_ty), mask=o_v < V)
                b_dk = tl.sum(b_dS * (b_beta * b_e)[None, :] - b_decayed * b_de[None, :], 1)
                tl.store(dk_ptr + (i_out + i) * K + o_k, b_dk, mask=o_k < K)
                b_dS -= b_k[:, None] * b_de[None, :]
            else:
                b_dS = gates_bwd(b_dS, b_decayed, b_e, b_beta, b_k, b_dr, v_ptr, write_ptr, dk_ptr,
                                 dv_ptr, dbeta_ptr, dwrite_ptr, i_out, i, o_k, o_v, K,
                                 V)  # fmt: skip
            # eq:delta-decay-bwd   dg = <dS, S'>, dS <- a dS
            b_product = b_dS * b_decayed
            b_rows = tl.sum(b_product, 1)
            tl.store(dg_ptr + i_out + i, tl.sum(b_rows, 0))
            store(dgk_ptr, i_out + i, b_rows, o_k, K)
            if dgv_ptr is not None:
                tl.store(dgv_ptr + i * V + o_v, tl.sum(b_product, 0), mask=o_v < V)
            b_dS = decay(b_dS, g_ptr, gk_ptr, gv_ptr, load_number(g_ptr, i),
                         load(gk_ptr, i, o_k, K), load(gv_ptr, i, o_v, V))  # fmt: skip
        tl.debug_barrier()

    store_tile(dh0_ptr + i_nh * K * V, b_dS, o_k, o_v, V, K, V)


# columns of the state a program. The same for every batch: sums over other tiles round otherwise
BV = 32
BV_BWD = 16


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, *,
    gk: Tensor | None = None, gv: Tensor | None = None, write: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, A_log: Tensor | None = None,
    dt_bias: Tensor | None = None, lower_bound: float | None = None, normalise: bool = False,
    sigmoid: int = 0, v_first: bool = False, inplace: bool = False, output_final_state: bool = True,
    cu_seqlens: Tensor | None = None, indices: Tensor | None = None, accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch recurrent_kernel; arguments and result as in the reference, and in the kernel:

    A_log, dt_bias: [HV]; g is then the raw gate. Without g it is gk, dt_bias is [HV * K], and with
    lower_bound the gate is a sigmoid, A_log may be None. normalise: divide q and k by their length.
    sigmoid: beta is this factor times the sigmoid of what is given; 0: as given. v_first: states
    are [V, K]. inplace: the final state is written to initial_state. cu_seqlens: [N + 1] int64.
    indices, accepted: as in the reference recurrent_pool; initial_state is the pool, and what is
    between its slots does not matter.
    """
    _, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    o = torch.empty_like(v)
    stride, pool_slots, slots = None, None, 0
    if indices is not None:
        pool_slots, stride = initial_state.shape[0], initial_state.stride(0)
        slots = indices.shape[1] if indices.ndim == 2 else 1
    final_state = initial_state if inplace and indices is None else None
    if output_final_state and not inplace:
        final_state = q.new_empty(N, HV, *((V, K) if v_first else (K, V)), dtype=torch.float32)
    width, none = min(block(V), BV), initial_state is None
    h0, rows = (q.new_empty(1, dtype=torch.float32), 0) if none else (initial_state, K)
    recurrent_kernel[(N * HV * cdiv(V, width),)](
        q, k, v, g, gk, gv, beta, write, A_log, dt_bias, lower_bound, h0, rows, o, final_state,
        indices, accepted, stride, pool_slots, scale, cu_seqlens, T, H, HV, K, V, BK=block(K),
        BV=width, NORM=normalise, SIGMOID=sigmoid, V_FIRST=v_first, SLOTS=slots, num_warps=4,
    )  # fmt: skip
    return o, final_state


def recurrent_bwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, do: Tensor,
    dht: Tensor | None = None, *, gk: Tensor | None = None, gv: Tensor | None = None,
    write: Tensor | None = None, scale: float | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Launch recurrent_bwd_kernel; arguments and result as in the reference.

    cu_seqlens: [N + 1] int64, of sequences packed into a batch of one.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    length, blocks, offsets = blocks_of(B, T, N, cu_seqlens)
    NV = cdiv(V, BV_BWD)

    def new(*shape: int) -> Tensor:
        return q.new_empty(*shape, dtype=torch.float32)

    kept, inner = new(blocks, HV, K, V), new(N, HV, length, K, V)
    dq, dk = (new(NV, B, T, HV, K) for _ in range(2))
    dg, dbeta = new(NV, B, T, HV), new(NV, *beta.shape)
    dwrite = None if write is None else new(B, T, HV, V)
    dv, dh0 = torch.empty_like(v), new(N, HV, K, V)
    dgk = None if gk is None else new(NV, B, T, HV, K)
    dgv = None if gv is None else new(B, T, HV, V)
    recurrent_bwd_kernel[(N * HV * NV,)](
        q, k, v, g, gk, gv, beta, write, initial_state, do, dht, kept, inner, dq, dk, dv, dg, dbeta,
        dwrite, dgk, dgv, dh0, scale, cu_seqlens, offsets, T, B * T, length, H, HV, K, V,
        BK=block(K), BV=BV_BWD, num_warps=4,
    )  # fmt: skip
    dq, dk = (x.sum(0).unflatten(2, (H, -1)).sum(3).to(q.dtype) for x in (dq, dk))
    dgk = None if gk is None else dgk.sum(0)
    results = dq, dk, dv, None if g is None else dg.sum(0), dbeta.sum(0), dgk, dgv, dh0
    return results if write is None else (*results, dwrite)
