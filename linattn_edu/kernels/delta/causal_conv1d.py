"""The short convolution of every channel over the last W tokens, and its adjoint.

A tile is a chunk of a sequence, or the chunk before its first token, of which the last W rows are
the initial state: what a tile does for its tokens it does for these. It is cut into walks of ROWS
tokens: a thread goes down all rows of one, and loads each token once for the W sums that it is in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, row, row_stride, sequence_args
from linattn_edu.kernels.tiles import (
    INTERPRETED,
    cast,
    cdiv,
    load_row,
    load_tile,
    load_vector,
    sequence_of,
    silu_derivative,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit
def tile_of(NT, cu_ptr, chunks_ptr, T, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The program's tile: the NT chunks of all sequences, then of each the chunk before its first.

    Returns its number and its channels, the sequence, the tile's first token through all sequences
    and in its own, which is negative before the first, and the tokens of the sequence.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_c = (tl.program_id(0) // ND).to(tl.int64)
    o_d = tl.program_id(0) % ND * BD + tl.arange(0, BD)
    if cu_ptr is not None:
        i_n = tl.load(chunks_ptr + 2 * i_c, mask=i_c < NT, other=0)
        i_t = tl.load(chunks_ptr + 2 * i_c + 1, mask=i_c < NT, other=-1)
    else:
        i_n, i_t = i_c // tl.cdiv(T, BT), tl.where(i_c < NT, i_c % tl.cdiv(T, BT), -1)
    i_n = tl.where(i_c < NT, i_n, i_c - NT)
    first, n, _ = sequence_of(i_n, cu_ptr, None, T, BT)
    return i_c, o_d, i_n, first + i_t * BT, (i_t * BT).to(tl.int32), n


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
def load_tokens(x_ptr, o_t, o_d, t0, n, ROW: tl.constexpr, D: tl.constexpr):
    """Rows o_t of a tile that begins with token t0 of n, in fp32; 0 where there is no token."""
    return load_tile(x_ptr, rows_of(o_t, t0, n), o_d, ROW, n - t0, D).to(tl.float32)


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
def reaches(n_ptr, o_t, t0, n, W: tl.constexpr):
    """How many tokens before those of the rows o_t of a tile are in their sums; -1: no token."""
    there = (t0 + o_t >= 0) & (t0 + o_t < n)
    return tl.where(there, W - 1, -1) if n_ptr is None else tl.load(n_ptr + o_t, there, other=-1)


@triton.jit
def own(b_x, b_n, i: tl.constexpr):
    """b_x, 0 where the token i tokens before is in no sum: 0 times an inf or NaN is NaN."""
    return tl.where((b_n >= i)[:, None], b_x, 0.0)


@triton.jit
def load_walks(x_ptr, s_ptr, w_ptr, b_ptr, o_g, o_d, i_n, first, t0, n, ROW: tl.constexpr,
               D: tl.constexpr, W: tl.constexpr, LAST: tl.constexpr):  # fmt: skip
    """u of the rows 1 - W to LAST - 1 of the walks that begin with rows o_g of a tile, where tokens
    of the state have negative numbers; the W weights of a sum, oldest first, and its bias, if any.
    """
    b_us, b_ws = (), ()
    for i in tl.static_range(1 - W, LAST):
        b_u = load_tokens(x_ptr + first * ROW, o_g + i, o_d, t0, n, ROW, D)
        if s_ptr is not None and t0 <= 0:
            b_u += load_state(s_ptr + i_n * D * W, W + t0 + o_g + i, o_d, D, W)
        b_us = b_us + (b_u,)  # noqa: RUF005  (Triton has no starred tuples)
    for j in tl.static_range(W):
        b_ws = b_ws + (load_row(w_ptr + j, o_d, W, D)[None, :],)  # noqa: RUF005
    if b_ptr is not None:
        b_ws = b_ws + (load_vector(b_ptr, o_d, D)[None, :],)  # noqa: RUF005
    return b_us, b_ws


@triton.jit
def preactivation(b_us, b_ws, n_ptr, b_n, i: tl.constexpr, W: tl.constexpr):
    """p of the rows i of the walk.  The oldest tokens come first, wherever they stand: a sequence
    that is split at any token gives the same bits.
    """
    # eq:conv-pre   p_t = b + sum_j w_j u_(t-W+1+j)
    b_p = tl.zeros(b_us[i].shape, tl.float32)
    for j in tl.static_range(W):
        b_p += b_ws[j] * (b_us[i + j] if n_ptr is None else own(b_us[i + j], b_n, W - 1 - j))
    if len(b_ws) > W:
        b_p += b_ws[W]
    return b_p


@triton.jit
def of_last(n_ptr, o_t, t0, n):
    """Whether the rows o_t of a tile, W - 1 before the last token at most, are of its sequence."""
    return n - 1 - t0 - o_t <= tl.load(n_ptr + (n - 1 - t0))


@triton.jit(do_not_specialize=["NT", "T"])
def causal_conv1d_kernel(
    x_ptr,  # [B, T, D], a token ROW numbers after the one before
    w_ptr,  # [D, W]
    b_ptr,  # [D] or None
    s_ptr,  # [N, D, W] or None: initial state
    n_ptr,  # [B, T] or None: how many tokens before each are of its sequence
    y_ptr,  # [B, T, D] out
    ht_ptr,  # [N, D, W] out: final state, or None
    cu_ptr, chunks_ptr,  # of tile_of
    NT, T,
    ROW: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of a tile.  Grid ((NT + N) * D / BD), without N if ht_ptr is None.

    Reference: linattn_edu.reference.delta.causal_conv1d.
    """
    _, o_d, i_n, first, t0, n = tile_of(NT, cu_ptr, chunks_ptr, T, D, BT, BD)
    o_g = tl.arange(0, BT // ROWS) * ROWS
    if n_ptr is not None:
        n_ptr += first
    b_us, b_ws = load_walks(
        x_ptr, s_ptr, w_ptr, b_ptr, o_g, o_d, i_n, first, t0, n, ROW, D, W, ROWS
    )
    for i in tl.static_range(ROWS):
        o_t = o_g + i
        b_n = reaches(n_ptr, o_t, t0, n, W)
        b_p = preactivation(b_us, b_ws, n_ptr, b_n, i, W)  # [BT / ROWS, BD]
        if SILU:
            # eq:conv-act   y = p sigmoid(p)
            b_p *= tl.sigmoid(b_p)
        if n_ptr is not None:
            b_p = own(b_p, b_n, 0)
        store_tile(y_ptr + first * D, b_p, rows_of(o_t, t0, n), o_d, D, n - t0, D)
        if ht_ptr is not None and n - t0 < BT + W:
            # eq:conv-state   s_i = u_(T-W+i)
            b_u = b_us[i + W - 1]
            if n_ptr is not None:
                b_u = tl.where(of_last(n_ptr, o_t, t0, n)[:, None], b_u, 0.0)
            store_state(ht_ptr + i_n * D * W, b_u, t0 + o_t - n + W, o_d, D, W)


@triton.jit
def added(b_dws, b_us, b_dp, b_n, i: tl.constexpr, W: tl.constexpr):
    """The gradients of the W weights, and of the bias, with what the rows i of the walks add."""
    b_sums = ()
    for j in tl.static_range(W):
        # eq:conv-dweight   dw_j = sum_t dp_t u_(t-W+1+j),   db = sum_t dp_t
        b_sums = b_sums + (b_dws[j] + b_dp * own(b_us[i + j], b_n, W - 1 - j),)  # noqa: RUF005
    return b_sums + (b_dws[W] + b_dp,)  # noqa: RUF005


@triton.jit(do_not_specialize=["NT", "T"])
def causal_conv1d_bwd_kernel(
    x_ptr,  # [B, T, D], a token ROW numbers after the one before
    w_ptr,  # [D, W]
    b_ptr,  # [D] or None
    s_ptr,  # [N, D, W] or None: initial state
    n_ptr,  # [B, T] or None: how many tokens before each are of its sequence
    dy_ptr,  # [B, T, D]
    dht_ptr,  # [N, D, W] or None
    dx_ptr,  # [B, T, D] out
    dw_ptr,  # [NT + N, W + 1, D] out: parts of dweight, and of dbias
    dh0_ptr,  # [N, D, W] out, or None
    cu_ptr, chunks_ptr,  # of tile_of
    NT, T,
    ROW: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr, ROWS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of a tile.  Grid ((NT + N) * D / BD), without N if s_ptr is None.

    Reference: linattn_edu.reference.delta.causal_conv1d.
    """
    i_c, o_d, i_n, first, t0, n = tile_of(NT, cu_ptr, chunks_ptr, T, D, BT, BD)
    o_g = tl.arange(0, BT // ROWS) * ROWS
    if n_ptr is not None:
        n_ptr += first
    LAST: tl.constexpr = ROWS + W - 1
    b_us, b_ws = load_walks(
        x_ptr, s_ptr, w_ptr, b_ptr, o_g, o_d, i_n, first, t0, n, ROW, D, W, LAST
    )
    b_dys, b_dps, b_dws = (), (), (tl.zeros([BT // ROWS, BD], tl.float32),) * (W + 1)
    for i in tl.static_range(LAST):
        b_dys = b_dys + (load_tokens(dy_ptr + first * D, o_g + i, o_d, t0, n, D, D),)  # noqa: RUF005
    for i in tl.static_range(LAST):
        b_n, b_dp = reaches(n_ptr, o_g + i, t0, n, W), b_dys[i]
        if SILU:
            b_p = preactivation(b_us, b_ws, n_ptr, b_n, i, W)
            # eq:conv-dpre   dp = dy sigmoid(p) (1 + p (1 - sigmoid(p)))
            b_dp *= silu_derivative(b_p)
        b_dps = b_dps + (own(b_dp, b_n, 0),)  # [BT / ROWS, BD]  # noqa: RUF005
        if i < ROWS:
            b_dws = added(b_dws, b_us, b_dps[i], b_n, i, W)
        if i >= W - 1:
            o_t = o_g + (i - (W - 1))
            # eq:conv-dx   du_t = sum_j w_j dp_(t+W-1-j)
            b_du = b_ws[W - 1] * b_dps[i - (W - 1)]
            for j in tl.static_range(1, W):
                b_dp = b_dps[i - (W - 1) + j]
                if n_ptr is not None:
                    b_dp = own(b_dp, reaches(n_ptr, o_t + j, t0, n, W), j)
                b_du += b_ws[W - 1 - j] * b_dp
            if dht_ptr is not None and n - t0 < BT + W:
                # eq:conv-dstate   du_t += ds_(t-T+W)
                o_s = t0 + o_t - n + W
                if n_ptr is not None:
                    o_s = tl.where(of_last(n_ptr, o_t, t0, n), o_s, -1)
                b_du += load_state(dht_ptr + i_n * D * W, o_s, o_d, D, W)
            store_tile(dx_ptr + first * D, b_du, rows_of(o_t, t0, n), o_d, D, n - t0, D)
            if dh0_ptr is not None and t0 < 0:
                store_state(dh0_ptr + i_n * D * W, b_du, W + t0 + o_t, o_d, D, W)
    for j in tl.static_range(W + 1):
        tl.store(dw_ptr + (i_c * (W + 1) + j) * D + o_d, tl.sum(b_dws[j], 0), mask=o_d < D)


# One row each for all GPUs; no bit of y or dx depends on it. 64 channels are a line of 128 bytes in
# 16 bits. The backward pass, which holds W - 1 more rows of x and as many of dy, takes half of it.
# The interpreter, where each operation takes as long for many walks as for few, goes down 4 rows.
FORWARD = row(4, 1, BD=64, ROWS=4 if INTERPRETED else 16)
BACKWARD = row(4, 1, BD=32, ROWS=4 if INTERPRETED else 8)
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
    x: Tensor, weight: Tensor, bias: Tensor | None = None, initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None, *, activation: str | None = None,
    output_final_state: bool = False, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch causal_conv1d_kernel; arguments and results as in the reference.

    packing: of chunks of 64 tokens, and not together with seq_idx.
    """
    (_, T, D), W = x.shape, weight.shape[1]
    n = reach(seq_idx, W)
    tiles, NT, *sequences = _grid(x, packing, output_final_state)
    ht = x.new_empty(tiles - NT, *weight.shape) if output_final_state else None
    y = torch.empty_like(x)
    config = FORWARD.launch()
    causal_conv1d_kernel[(tiles * cdiv(D, config["BD"]),)](
        x, weight, bias, initial_state, n, y, ht, *sequences, NT, T, row_stride(x, D), D, W, BT,
        SILU=activation == "silu", **config,
    )  # fmt: skip
    return y, ht


def causal_conv1d_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, dy: Tensor,
    dht: Tensor | None = None, seq_idx: Tensor | None = None, *, activation: str | None = None,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch causal_conv1d_bwd_kernel and add up its parts; the rest as in the reference.

    packing: of chunks of 64 tokens, and not together with seq_idx.
    """
    (_, T, D), W = x.shape, weight.shape[1]
    n = reach(seq_idx, W)
    tiles, NT, *sequences = _grid(x, packing, initial_state is not None)
    dx = torch.empty_like(x)
    dw = x.new_empty(tiles, W + 1, D, dtype=torch.float32)
    dh0 = None if initial_state is None else torch.empty_like(initial_state)
    config = BACKWARD.launch()
    causal_conv1d_bwd_kernel[(tiles * cdiv(D, config["BD"]),)](
        x, weight, bias, initial_state, n, dy, dht, dx, dw, dh0, *sequences, NT, T,
        row_stride(x, D), D, W, BT, SILU=activation == "silu", **config,
    )  # fmt: skip
    *dw, db = dw.sum(0)
    dw = torch.stack(dw, 1).to(weight.dtype)
    return dx, dw, None if bias is None else db.to(bias.dtype, copy=True), dh0
