"""The short convolution of every channel over the last W tokens, and its adjoint.

A tile is a chunk of a sequence, or the chunk before its first token, of which the last W rows are
the initial state: what a tile does for its tokens it does for these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, row, sequence_args
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    load_row,
    load_tile,
    load_vector,
    sequence_of,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit
def tile_of(i_c, NT, cu_ptr, chunks_ptr, T, BT: tl.constexpr):
    """Tile i_c: the NT chunks of all sequences, then of each sequence the chunk before its first.

    Returns the sequence, the tile's first token through all sequences and in its own, which is
    negative before the first, and the tokens of the sequence.
    """
    if cu_ptr is not None:
        i_n = tl.load(chunks_ptr + 2 * i_c, mask=i_c < NT, other=0)
        i_t = tl.load(chunks_ptr + 2 * i_c + 1, mask=i_c < NT, other=-1)
    else:
        i_n, i_t = i_c // tl.cdiv(T, BT), tl.where(i_c < NT, i_c % tl.cdiv(T, BT), -1)
    i_n = tl.where(i_c < NT, i_n, i_c - NT)
    first, n, _ = sequence_of(i_n, cu_ptr, None, T, BT)
    return i_n, first + i_t * BT, (i_t * BT).to(tl.int32), n


@triton.jit
def rows_of(o_t, t0, n):
    """Rows o_t of a tile that begins with token t0 of n; where there is no token, past its end."""
    return tl.where(t0 + o_t < 0, n - t0, o_t)


@triton.jit
def load_state(s_ptr, o_w, o_d, D: tl.constexpr, W: tl.constexpr):
    """Tokens o_w of a state [D, W], a row each, in fp32; out-of-range lanes read 0."""
    mask = ((o_w >= 0) & (o_w < W))[:, None] & (o_d < D)[None, :]
    b_s = tl.load(s_ptr + o_w[:, None] + o_d[None, :] * W, mask=mask, other=0.0)
    return b_s.to(tl.float32)


@triton.jit
def store_state(s_ptr, b_s, o_w, o_d, D: tl.constexpr, W: tl.constexpr):
    """Tokens o_w of a state [D, W] = b_s, cast to its dtype; out-of-range lanes are dropped."""
    mask = ((o_w >= 0) & (o_w < W))[:, None] & (o_d < D)[None, :]
    b_s = cast(b_s, s_ptr.dtype.element_ty)
    tl.store(s_ptr + o_w[:, None] + o_d[None, :] * W, b_s, mask=mask)


@triton.jit
def load_tokens(x_ptr, o_t, o_d, t0, n, D: tl.constexpr):
    """Rows o_t of a tile that begins with token t0 of n, in fp32; 0 where there is no token."""
    return load_tile(x_ptr, rows_of(o_t, t0, n), o_d, D, n - t0, D).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "T"])
def reach_kernel(seq_ptr, n_ptr, tokens, T, W: tl.constexpr, BT: tl.constexpr):
    """One program: n_t of BT tokens of [B, T].  Grid (tokens / BT).

    Reference: linattn_edu.reference.delta.causal_conv1d.
    """
    o = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    b_number = tl.load(seq_ptr + o, mask=o < tokens, other=-1)
    b_same = b_number >= 0
    b_n = b_same.to(tl.int32) - 1
    for i in tl.static_range(1, W):
        # eq:conv-sequences   n_t = how many i in 1..W-1 have s_(t-i) = ... = s_t
        b_same &= tl.load(seq_ptr + o - tl.minimum(o % T, i), mask=o < tokens) == b_number
        b_n += b_same.to(tl.int32)
    tl.store(n_ptr + o, b_n, mask=o < tokens)


@triton.jit
def load_reach(n_ptr, o_t, t0, n):
    """n_t of the rows o_t of a tile; before the first token the first one's."""
    return tl.load(n_ptr + (tl.minimum(tl.maximum(t0 + o_t, 0), n - 1) - t0))


@triton.jit
def preactivation(x_ptr, w_ptr, b_ptr, s_ptr, n_ptr, b_n, o_t, o_d, t0, n, D: tl.constexpr,
                  W: tl.constexpr):  # fmt: skip
    """p of the rows o_t of a tile.  The oldest tokens come first, wherever they stand: a sequence
    that is split at any token gives the same bits.
    """
    b_p = tl.zeros([o_t.shape[0], o_d.shape[0]], tl.float32)
    # eq:conv-pre   p_t = b + sum_j w_j u_(t-W+1+j)
    if s_ptr is not None and t0 <= 0:
        for j in tl.static_range(W):
            o_s = 1 + j + t0 + o_t
            if n_ptr is not None:
                o_s = tl.where(b_n < W - 1 - j, -1, o_s)
            b_s = load_state(s_ptr, o_s, o_d, D, W)
            b_p += load_row(w_ptr + j, o_d, W, D)[None, :] * b_s
    for j in tl.static_range(W):
        o_u = o_t + (j + 1 - W)
        if n_ptr is not None:
            o_u = tl.where(b_n < W - 1 - j, n - t0, o_u)
        b_x = load_tokens(x_ptr, o_u, o_d, t0, n, D)
        b_p += load_row(w_ptr + j, o_d, W, D)[None, :] * b_x
    if b_ptr is not None:
        b_p += load_vector(b_ptr, o_d, D)[None, :]
    return b_p


@triton.jit
def of_last(n_ptr, o_t, t0, n):
    """Whether the rows o_t of a tile, W - 1 before the last token at most, are of its sequence."""
    return n - 1 - t0 - o_t <= tl.load(n_ptr + (n - 1 - t0))


@triton.jit(do_not_specialize=["NT", "T"])
def causal_conv1d_kernel(
    x_ptr,  # [B, T, D]
    w_ptr,  # [D, W]
    b_ptr,  # [D] or None
    s_ptr,  # [N, D, W] or None: initial state
    n_ptr,  # [B, T] or None: how many tokens before each are of its sequence
    y_ptr,  # [B, T, D] out
    ht_ptr,  # [N, D, W] out: final state, or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    NT,
    T,
    D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of a tile.  Grid ((NT + N) * D / BD), without N if ht_ptr is None.

    Reference: linattn_edu.reference.delta.causal_conv1d.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_d, i_c = pid % ND, (pid // ND).to(tl.int64)
    i_n, first, t0, n = tile_of(i_c, NT, cu_ptr, chunks_ptr, T, BT)
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    x_ptr += first * D
    if s_ptr is not None:
        s_ptr += i_n * D * W
    b_n = 0
    if n_ptr is not None:
        n_ptr += first
        b_n = load_reach(n_ptr, o_t, t0, n)
    b_p = preactivation(x_ptr, w_ptr, b_ptr, s_ptr, n_ptr, b_n, o_t, o_d, t0, n, D, W)  # [BT, BD]
    if SILU:
        # eq:conv-act   y = p sigmoid(p)
        b_p *= tl.sigmoid(b_p)
    if n_ptr is not None:
        b_p = tl.where((b_n >= 0)[:, None], b_p, 0.0)
    store_tile(y_ptr + first * D, b_p, rows_of(o_t, t0, n), o_d, D, n - t0, D)
    if ht_ptr is not None and n - t0 < BT + W:
        # eq:conv-state   s_i = u_(T-W+i)
        b_u = load_tokens(x_ptr, o_t, o_d, t0, n, D)
        if s_ptr is not None:
            b_u += load_state(s_ptr, W + t0 + o_t, o_d, D, W)
        if n_ptr is not None:
            b_u = tl.where(of_last(n_ptr, o_t, t0, n)[:, None], b_u, 0.0)
        store_state(ht_ptr + i_n * D * W, b_u, t0 + o_t - n + W, o_d, D, W)


@triton.jit
def dpreactivation(x_ptr, w_ptr, b_ptr, s_ptr, n_ptr, dy_ptr, i: tl.constexpr, o_t, o_d, t0, n,
                   D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """dp of the rows o_t of a tile; 0 where there is no token, or the token i before is not of its
    sequence.
    """
    b_n, o_dy = 0, o_t
    if n_ptr is not None:
        b_n = load_reach(n_ptr, o_t, t0, n)
        o_dy = tl.where(b_n < i, n - t0, o_t)
    b_dp = load_tokens(dy_ptr, o_dy, o_d, t0, n, D)
    if SILU:
        b_p = preactivation(x_ptr, w_ptr, b_ptr, s_ptr, n_ptr, b_n, o_t, o_d, t0, n, D, W)
        # eq:conv-dpre   dp = dy sigmoid(p) (1 + p (1 - sigmoid(p)))
        b_dp *= tl.sigmoid(b_p) * (1.0 + b_p * tl.sigmoid(-b_p))
        # no sum of theirs is an output: it may overflow, or hold the state's oldest, an inf or NaN
        b_dp = tl.where(((t0 + o_t >= 0) & (t0 + o_t < n))[:, None], b_dp, 0.0)
    return b_dp


@triton.jit(do_not_specialize=["NT", "T"])
def causal_conv1d_bwd_kernel(
    x_ptr,  # [B, T, D]
    w_ptr,  # [D, W]
    b_ptr,  # [D] or None
    s_ptr,  # [N, D, W] or None: initial state
    n_ptr,  # [B, T] or None: how many tokens before each are of its sequence
    dy_ptr,  # [B, T, D]
    dht_ptr,  # [N, D, W] or None
    dx_ptr,  # [B, T, D] out
    dw_ptr,  # [NT + N, W, D] out: parts of dweight
    db_ptr,  # [NT + N, D] out: parts of dbias, or None
    dh0_ptr,  # [N, D, W] out, or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    NT,
    T,
    D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of a tile.  Grid ((NT + N) * D / BD), without N if s_ptr is None.

    Reference: linattn_edu.reference.delta.causal_conv1d.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_d, i_c = pid % ND, (pid // ND).to(tl.int64)
    i_n, first, t0, n = tile_of(i_c, NT, cu_ptr, chunks_ptr, T, BT)
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    x_ptr += first * D
    o_u = o_t
    # what is in no sum reads as 0, for 0 times an inf or NaN is NaN
    if n_ptr is not None:
        n_ptr += first
        o_u = tl.where(load_reach(n_ptr, o_t, t0, n) < 0, n - t0, o_t)
    b_u = load_tokens(x_ptr, o_u, o_d, t0, n, D)  # [BT, BD]
    if s_ptr is not None:
        s_ptr += i_n * D * W
        if t0 < 0:
            # the state's oldest token is in no sum either
            o_s = tl.where(t0 + o_t > -W, W + t0 + o_t, -1)
            if n_ptr is not None:
                o_s = tl.where(load_reach(n_ptr, o_t, t0, n) < 0, -1, o_s)
            b_u = load_state(s_ptr, o_s, o_d, D, W)
    b_du = tl.zeros([BT, BD], tl.float32)
    for i in tl.static_range(W):
        b_dp = dpreactivation(x_ptr, w_ptr, b_ptr, s_ptr, n_ptr, dy_ptr + first * D, i, o_t + i,
                              o_d, t0, n, D, W, SILU)  # fmt: skip
        # eq:conv-dx   du_t = sum_j w_j dp_(t+W-1-j)
        b_du += load_row(w_ptr + (W - 1 - i), o_d, W, D)[None, :] * b_dp
        # eq:conv-dweight   dw_j = sum_t dp_t u_(t-W+1+j),   db = sum_t dp_t
        i_w = i_c * W + (W - 1 - i)
        tl.store(dw_ptr + i_w * D + o_d, tl.sum(b_dp * b_u, 0), mask=o_d < D)
        if i == 0 and db_ptr is not None:
            tl.store(db_ptr + i_c * D + o_d, tl.sum(b_dp, 0), mask=o_d < D)
    if dht_ptr is not None and n - t0 < BT + W:
        # eq:conv-dstate   du_t += ds_(t-T+W)
        o_s = t0 + o_t - n + W
        if n_ptr is not None:
            o_s = tl.where(of_last(n_ptr, o_t, t0, n), o_s, -1)
        b_du += load_state(dht_ptr + i_n * D * W, o_s, o_d, D, W)
    store_tile(dx_ptr + first * D, b_du, rows_of(o_t, t0, n), o_d, D, n - t0, D)
    if dh0_ptr is not None and t0 < 0:
        store_state(dh0_ptr + i_n * D * W, b_du, W + t0 + o_t, o_d, D, W)


# Both kernels are bound by memory: one row each for all GPUs; no bit of y or dx depends on it. 64
# channels are a line of 128 bytes in 16 bits. The backward pass works on 2 W - 1 shifted tiles of x
# and takes half as many channels, for with 64 its registers hold one program a multiprocessor.
FORWARD = row(8, 1, BD=64)
BACKWARD = row(8, 1, BD=32)
BT = 64  # tokens of a tile, and of a chunk of the Packing
TOKENS = 512  # of a program of reach_kernel


def reach(seq_idx: Tensor | None, W: int) -> Tensor | None:
    """Launch reach_kernel; arguments and result as in the reference, the result [B, T]."""
    if seq_idx is None:
        return None
    n = torch.empty_like(seq_idx, dtype=torch.int32)
    grid = (cdiv(n.numel(), TOKENS),)
    reach_kernel[grid](seq_idx, n, n.numel(), n.shape[1], W, TOKENS, num_warps=4)
    return n


def _grid(x: Tensor, packing: Packing | None, states: bool):
    """(tiles, chunks, cu_ptr, chunks_ptr); states: with the tiles before the first tokens."""
    NT, *sequences = chunk_args(x, BT, packing)
    return (NT + sequence_args(x, packing)[0] if states else NT), NT, *sequences


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    activation: str | None = None,
    output_final_state: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch causal_conv1d_kernel; arguments and results as in the reference.

    packing: of chunks of 64 tokens, and not together with seq_idx.
    """
    (_, T, D), W = x.shape, weight.shape[1]
    n = reach(seq_idx, W)
    tiles, NT, *sequences = _grid(x, packing, output_final_state)
    y, ht = torch.empty_like(x), None
    if output_final_state:
        ht = x.new_empty(tiles - NT, *weight.shape)
    config = FORWARD.launch()
    causal_conv1d_kernel[(tiles * cdiv(D, config["BD"]),)](
        x, weight, bias, initial_state, n, y, ht, *sequences, NT, T, D, W, BT,
        SILU=activation == "silu", **config,
    )  # fmt: skip
    return y, ht


def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    dy: Tensor,
    dht: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    activation: str | None = None,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Launch causal_conv1d_bwd_kernel and add up its parts; the rest as in the reference.

    packing: of chunks of 64 tokens, and not together with seq_idx.
    """
    (_, T, D), W = x.shape, weight.shape[1]
    n = reach(seq_idx, W)
    tiles, NT, *sequences = _grid(x, packing, initial_state is not None)
    dx = torch.empty_like(x)
    dw = x.new_empty(tiles, W, D, dtype=torch.float32)
    db = None if bias is None else x.new_empty(tiles, D, dtype=torch.float32)
    dh0 = None if initial_state is None else torch.empty_like(initial_state)
    config = BACKWARD.launch()
    causal_conv1d_bwd_kernel[(tiles * cdiv(D, config["BD"]),)](
        x, weight, bias, initial_state, n, dy, dht, dx, dw, db, dh0, *sequences, NT, T, D, W,
        BT, SILU=activation == "silu", **config,
    )  # fmt: skip
    dw = dw.sum(0).T.to(weight.dtype).contiguous()
    return dx, dw, db if db is None else db.sum(0).to(bias.dtype), dh0
