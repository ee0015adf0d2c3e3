"""Decoding that does not write its state: a checkpoint is read, a ring of inputs beside it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import log_decay
from linattn_edu.kernels.delta.l2norm import reciprocal_lengths
from linattn_edu.kernels.delta.recurrent import (
    column_sums,
    load,
    load_number,
    load_state,
    slot_of,
    store_state,
)
from linattn_edu.kernels.tiles import block, cast, cdiv, columns_of, load_vector, mask_if


@triton.jit
def entries(counts_ptr, accepted_ptr, i_n):
    """The first entry of a ring, and how many there are without the tokens that were wrong."""
    begin, count, last = tl.load(counts_ptr), tl.load(counts_ptr + 1), tl.load(counts_ptr + 2)
    if accepted_ptr is not None:
        last = tl.minimum(last, tl.maximum(tl.load(accepted_ptr + i_n), 0)).to(tl.int32)
    return begin, count + last


@triton.jit
def keep_entries(counts_ptr, begin, count, last):
    """What `entries` reads: count entries, and those of the last call."""
    tl.store(counts_ptr, begin)
    tl.store(counts_ptr + 1, count)
    tl.store(counts_ptr + 2, last)


@triton.jit
def fold(b_S, keys_ptr, writes_ptr, decays_ptr, begin, count, o_k, o_v, o_g, K: tl.constexpr,
         V: tl.constexpr, G: tl.constexpr, R: tl.constexpr):  # fmt: skip
    """The state after the entries of a ring, one after the other, the next ones on their way."""
    for j in tl.range(0, count, num_stages=8):
        i = (begin + j) % R
        b_k, b_u = load_vector(keys_ptr + i * K, o_k, K), load_vector(writes_ptr + i * V, o_v, V)
        # eq:delta-decay   S <- a S
        b_S *= tl.exp(load_vector(decays_ptr + i * G, o_g, G))[:, None]
        # eq:delta-write   S <- S + k^T u
        b_S += b_k[:, None] * b_u[None, :]
    return b_S


@triton.jit
def opened(state_ptr, keys_ptr, writes_ptr, decays_ptr, counts_ptr, accepted_ptr, i_n, T, o_k, o_v,
           o_g, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, L: tl.constexpr,
           R: tl.constexpr, V_FIRST: tl.constexpr):  # fmt: skip
    """S_0, the first entry of its ring and how many there are, once T more have their places."""
    # read once in a call: the rings, read by several programs and again soon, stay in the L2
    b_S = load_state(state_ptr, o_k, o_v, K, V, V_FIRST, "evict_first")
    begin, count = entries(counts_ptr, accepted_ptr, i_n)
    if count + T > L:
        b_S = fold(b_S, keys_ptr, writes_ptr, decays_ptr, begin, count, o_k, o_v, o_g, K, V, G, R)
        store_state(state_ptr, b_S, o_k, o_v, K, V, V_FIRST)
        begin, count = (begin + count) % R, 0
    keep_entries(counts_ptr, begin, count, T)
    return b_S, begin, count


@triton.jit
def load_entries(x_ptr, begin, count, o_r, o_x, n: tl.constexpr, R: tl.constexpr):
    """The entries of a ring [BR, BX], oldest first, and 0 where there are none."""
    mask = (o_r < count)[:, None] & (o_x < n)[None, :]
    return tl.load(x_ptr + ((begin + o_r) % R)[:, None] * n + o_x[None, :], mask=mask, other=0.0)


@triton.jit
def decays_since(decays_ptr, begin, count, o_r, o_g, G: tl.constexpr, R: tl.constexpr):
    """e^(sum of the log decays) since the checkpoint [BG], and since each entry [BR, BG].

    Sums of what came after, not differences of sums: a strong decay costs the others no bits. One
    thread adds each up: for a scan along the entries warps would wait for each other.
    """
    b_g = load_entries(decays_ptr, begin, count, o_r, o_g, G, R)
    later = o_r[:, None] < o_r[None, :]
    b_after = tl.sum(tl.where(later[:, :, None], b_g[None, :, :], 0.0), 1)
    return tl.exp(tl.sum(b_g, 0)), tl.exp(b_after)


@triton.jit
def log_gate(b_g, b_A_log, b_bias, A_log_ptr, bias_ptr, lower_bound):
    """The log decay, of itself or of the raw gate of a layer."""
    b_g = b_g.to(tl.float32)
    if A_log_ptr is not None or lower_bound is not None:
        if bias_ptr is not None:
            b_g += b_bias.to(tl.float32)
        b_rate = 1.0
        if A_log_ptr is not None:
            b_rate = tl.exp(b_A_log.to(tl.float32))
        b_g = log_decay(b_g, b_rate, lower_bound)
    return b_g


@triton.jit
def load_token(q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t, end, i_h, o_k, o_v, o_g, H: tl.constexpr,
               HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr):  # fmt: skip
    """q, k, v, g, beta of token t, if it is before the end."""
    i_qk, i, there = t * H + i_h // (HV // H), t * HV + i_h, t < end
    m_k = mask_if(o_k < K, there)
    b_q = tl.load(q_ptr + i_qk * K + o_k, mask=m_k, other=0.0)
    b_k = tl.load(k_ptr + i_qk * K + o_k, mask=m_k, other=0.0)
    b_v = tl.load(v_ptr + i * V + o_v, mask=mask_if(o_v < V, there), other=0.0)
    b_g = tl.load(g_ptr + i * G + o_g, mask=mask_if(o_g < G, there), other=0.0)
    return b_q, b_k, b_v, b_g, tl.load(beta_ptr + i, mask=there, other=0.0)


@triton.jit(do_not_specialize=["T", "pool_slots"])
def replay_kernel(
    q_ptr, k_ptr,  # [N, T, H, K]
    v_ptr,  # [N, T, HV, V]
    g_ptr,  # [N, T, HV, G] natural log; with A_log or lower_bound, the raw gate
    beta_ptr,  # [N, T, HV]
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [HV, G] or None
    lower_bound,  # or None
    state_ptr,  # [slots, HV, K, V] in and out
    keys_ptr,  # [slots, H, R, K] in and out
    writes_ptr,  # [slots, HV, R, V] in and out
    decays_ptr,  # [slots, HV, R, G] in and out
    counts_ptr,  # [slots, HV, NV, 3] in and out: a program has its own, and waits for no other
    o_ptr,  # [N, T, HV, V] out
    indices_ptr,  # [N] or None
    accepted_ptr,  # [N] or None
    slot_stride,  # from one slot of the pool to the next
    pool_slots,  # how many there are
    scale, T,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    G: tl.constexpr,  # gates of a head: 1 or K
    L: tl.constexpr, R: tl.constexpr,  # entries in use at most, and entries: T more at least
    BR: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr,
    NORM: tl.constexpr,  # divide q and k by their length
    SIGMOID: tl.constexpr,  # beta is SIGMOID times the sigmoid of what is stored; 0: it is stored
    V_FIRST: tl.constexpr,  # states are [V, K]
    ONE: tl.constexpr,  # there is one token
):  # fmt: skip
    """One program: S[:, v-tile] of one head, through all tokens.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.replay.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh, i_h, first, _, _ = columns_of(tl.program_id(0), None, None, T, HV, V, 1, BV)
    i_n, h = i_nh // HV, i_h // (HV // H)
    o_r, o_g, o_k = tl.arange(0, BR), tl.arange(0, BG), tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    end = first + (1 if ONE else T)
    # what waits for nothing comes first
    b_query, b_key, b_value, b_gate, b_strength = load_token(
        q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, first, end, i_h, o_k, o_v, o_g, H, HV, K, V, G
    )
    b_A_log, b_bias = load_number(A_log_ptr, i_h), load(bias_ptr, i_h, o_g, G)
    slot = i_n if indices_ptr is None else slot_of(indices_ptr, i_n, 0, pool_slots, 1)
    if slot < 0:  # no sequence: zeros come out
        for t in range(first, end):
            o_i = (t * HV + i_h) * V + o_v
            tl.store(o_ptr + o_i, tl.zeros([BV], tl.float32), mask=o_v < V)
    else:
        state_ptr += slot * slot_stride + i_h * K * V
        keys_ptr += (slot * H + h) * R * K
        writes_ptr += (slot * HV + i_h) * R * V
        decays_ptr += (slot * HV + i_h) * R * G
        counts_ptr += ((slot * HV + i_h) * NV + i_v) * 3
        b_S, begin, count = opened(state_ptr, keys_ptr, writes_ptr, decays_ptr, counts_ptr,
                                   accepted_ptr, i_n, T, o_k, o_v, o_g, K, V, G, L, R,
                                   V_FIRST)  # fmt: skip
        b_keys = load_entries(keys_ptr, begin, count, o_r, o_k, K, R)
        b_writes = load_entries(writes_ptr, begin, count, o_r, o_v, V, R).to(tl.float32)
        b_a, b_w = decays_since(decays_ptr, begin, count, o_r, o_g, G, R)
        for t in range(first, end):
            b_q, b_k = b_query.to(tl.float32), b_key.to(tl.float32)
            b_v, b_beta = b_value.to(tl.float32), b_strength.to(tl.float32)
            b_rk = 1.0
            if NORM:
                b_rq, b_rk = reciprocal_lengths(b_q, b_k)
                b_q *= b_rq
                b_k *= b_rk
            if SIGMOID:
                b_beta = SIGMOID * tl.sigmoid(b_beta)
            b_log = log_gate(b_gate, b_A_log, b_bias, A_log_ptr, bias_ptr, lower_bound)
            # eq:delta-decay   S <- a S
            b_a *= tl.exp(b_log)
            b_w *= tl.exp(b_log)[None, :]
            # eq:delta-error   e = v - k S
            b_kept = b_w * b_keys.to(tl.float32)
            b_ks = tl.sum(b_kept * b_k[None, :], 1)[:, None]
            b_qs = tl.sum(b_kept * b_q[None, :], 1)[:, None]
            b_ku, b_qu = column_sums(b_ks * b_writes, b_qs * b_writes)
            b_kS, b_qS = column_sums((b_a * b_k)[:, None] * b_S, (b_a * b_q)[:, None] * b_S)
            b_u = b_beta * (b_v - (b_kS + b_ku))
            # eq:delta-write   S <- S + k^T beta e
            b_write = cast(b_rk * b_u, writes_ptr.dtype.element_ty)
            new = (begin + count) % R
            tl.store(writes_ptr + new * V + o_v, b_write, mask=o_v < V)
            if i_v == 0:
                tl.store(decays_ptr + new * G + o_g, b_log, mask=o_g < G)
                if i_h % (HV // H) == 0:
                    tl.store(keys_ptr + new * K + o_k, b_key, mask=o_k < K)
            # eq:delta-read   o = scale q S,  with the S of before: scale (q S + (q k^T) beta e)
            b_o = scale * (b_qS + b_qu + tl.sum(b_q * b_k, 0) * b_u)
            o_i = (t * HV + i_h) * V + o_v
            tl.store(o_ptr + o_i, cast(b_o, o_ptr.dtype.element_ty), mask=o_v < V)
            if not ONE:
                here = (o_r == count)[:, None]
                b_keys = tl.where(here, b_key[None, :], b_keys)
                b_writes = tl.where(here, b_write.to(tl.float32)[None, :], b_writes)
                b_w = tl.where(here, 1.0, b_w)
                count += 1
                b_query, b_key, b_value, b_gate, b_strength = load_token(
                    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, t + 1, end, i_h, o_k, o_v, o_g, H, HV,
                    K, V, G)  # fmt: skip


@triton.jit(do_not_specialize=["pool_slots"])
def commit_kernel(
    state_ptr,  # [slots, HV, K, V] in and out
    keys_ptr,  # [slots, H, R, K]
    writes_ptr,  # [slots, HV, R, V]
    decays_ptr,  # [slots, HV, R, G]
    counts_ptr,  # [slots, HV, NV, 3] in and out
    folded_ptr,  # [N] out
    indices_ptr,  # [N]
    accepted_ptr,  # [N] or None
    slot_stride, pool_slots,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BG: tl.constexpr, V_FIRST: tl.constexpr,
):  # fmt: skip
    """One program: S[:, v-tile] of one head.  Grid (N * HV * V / BV).

    Reference: linattn_edu.reference.delta.replay.commit.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    i_v, i_nh, i_h, _, _, _ = columns_of(tl.program_id(0), None, None, 0, HV, V, 1, BV)
    i_n, h = i_nh // HV, i_h // (HV // H)
    o_g, o_k, o_v = tl.arange(0, BG), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    slot, folded = slot_of(indices_ptr, i_n, 0, pool_slots, 1), 0
    if slot >= 0:
        state_ptr += slot * slot_stride + i_h * K * V
        counts_ptr += ((slot * HV + i_h) * NV + i_v) * 3
        begin, count = entries(counts_ptr, accepted_ptr, i_n)
        b_S = load_state(state_ptr, o_k, o_v, K, V, V_FIRST)
        b_S = fold(b_S, keys_ptr + (slot * H + h) * R * K, writes_ptr + (slot * HV + i_h) * R * V,
                   decays_ptr + (slot * HV + i_h) * R * G, begin, count, o_k, o_v, o_g, K, V, G,
                   R)  # fmt: skip
        store_state(state_ptr, b_S, o_k, o_v, K, V, V_FIRST)
        keep_entries(counts_ptr, (begin + count) % R, 0, 0)
        folded = count
    if (i_h == 0) & (i_v == 0):
        tl.store(folded_ptr + i_n, folded)


# Registers of a thread for one token with one gate: a fifth program fits a multiprocessor. The
# compiler would take 250; where there is more to hold it needs them.
REGISTERS = 200


def limits(tile: int, G: int = 0, T: int = 0) -> dict[str, int]:
    """How programs are compiled, by the numbers of a tile, the gates of a head and the tokens.

    Two warps hold 64 columns of a state in half their registers; more wait longer for each other.
    """
    few = {"maxnreg": REGISTERS} if G == 1 and T == 1 and tile == 1 << 13 else {}
    return {"num_warps": max(2, tile >> 12)} | few


def _sizes(keys: Tensor, writes: Tensor, decays: Tensor, counts: Tensor) -> dict[str, int]:
    """What both kernels are compiled for."""
    (H, R, K), (HV, _, V) = keys.shape[1:], writes.shape[1:]
    G = decays.shape[3]
    tiles = {"BK": block(K), "BV": block(cdiv(V, counts.shape[2])), "BG": 1 if G == 1 else block(G)}
    return {"H": H, "HV": HV, "K": K, "V": V, "G": G, "R": R, **tiles}


def replay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, state: Tensor, keys: Tensor,
    writes: Tensor, decays: Tensor, counts: Tensor, indices: Tensor | None = None,
    accepted: Tensor | None = None, *, length: int, gk: Tensor | None = None,
    A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float | None = None,
    scale: float | None = None, normalise: bool = False, sigmoid: int = 0, v_first: bool = False,
) -> Tensor:  # fmt: skip
    """Launch replay_kernel; arguments and result as in the reference, and in the kernel:

    A_log, dt_bias, lower_bound, sigmoid, v_first: as in recurrent.
    """
    N, T, _, K = q.shape
    sizes, o = _sizes(keys, writes, decays, counts), torch.empty_like(v)
    replay_kernel[(N * sizes["HV"] * counts.shape[2],)](
        q, k, v, g if gk is None else gk, beta, A_log, dt_bias, lower_bound,
        state, keys, writes, decays, counts, o, indices, accepted, state.stride(0),
        state.shape[0], K**-0.5 if scale is None else scale, T,
        L=length, BR=1 << (length - 1).bit_length(), NORM=normalise, SIGMOID=sigmoid,
        V_FIRST=v_first, ONE=T == 1, **sizes,
        **limits(sizes["BK"] * sizes["BV"], sizes["G"], T),
    )  # fmt: skip
    return o


def commit(
    state: Tensor, keys: Tensor, writes: Tensor, decays: Tensor, counts: Tensor, indices: Tensor,
    accepted: Tensor | None = None, *, v_first: bool = False,
) -> Tensor:  # fmt: skip
    """Launch commit_kernel; arguments as in the reference, v_first as in replay."""
    sizes, folded = _sizes(keys, writes, decays, counts), counts.new_empty(len(indices))
    commit_kernel[(len(indices) * sizes["HV"] * counts.shape[2],)](
        state, keys, writes, decays, counts, folded, indices, accepted, state.stride(0),
        state.shape[0], V_FIRST=v_first, **sizes, **limits(sizes["BK"] * sizes["BV"]),
    )  # fmt: skip
    return folded
