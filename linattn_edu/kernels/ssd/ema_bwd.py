"""Stage ema_bwd: the adjoint of ema, the same scan from the last token to the first."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import sequence_args
from linattn_edu.kernels.ssd.ema import (
    PIECE,
    fold,
    load_gate_once,
    load_last,
    mixed,
    piece_of,
    piece_parts,
    weights,
    width,
)
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    decay_matrix,
    decay_matrix_transposed,
    dot,
    load_tile,
    load_vector,
    sequence_of,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["N", "T"])
def ema_bwd_kernel(
    x_ptr,  # [B, T, H, D]
    g_ptr,  # [B, T, H] natural log
    w_ptr,  # [B, T, H] or None
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [NT, H, D] of ema
    dy_ptr,  # [B, T, H, D]
    dht_ptr,  # [N, H, D] or None
    s_ptr,  # [NW, H, D] of ema_piece_kernel; not read where every sequence is one piece
    a_ptr,  # [NW, H] of ema_piece_kernel
    dx_ptr,  # [B, T, H, D] out
    dg_ptr,  # [D / BD, B, T, H] out: parts of dg
    dw_ptr,  # [D / BD, B, T, H] out: parts of dw, or None
    dh0_ptr,  # [N, H, D] out
    cu_ptr, offsets_ptr,  # of sequence_of
    chunks_ptr,  # [NT, 2] or None
    N, T,
    H: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
    L: tl.constexpr,  # chunks of a piece
):  # fmt: skip
    """One program: BD channels of one head, back through a piece.  Grid as of ema_kernel.

    Reference: linattn_edu.reference.ssd.ema_bwd.
    """
    i_d, i_h, i_n, i_l = piece_of(N, T, offsets_ptr, chunks_ptr, H, D, BT, BD, L)
    if i_l < 0:
        return
    first, n_seq, i_c = sequence_of(i_n, cu_ptr, offsets_ptr, T, BT)
    o_t, o_d = tl.arange(0, BT), i_d * BD + tl.arange(0, BD)
    b_dh = tl.zeros([BD], tl.float32)
    if dht_ptr is not None:
        b_dh += load_vector(dht_ptr + (i_n * H + i_h) * D, o_d, D)
    later = tl.maximum(tl.cdiv(n_seq, L * BT) - 1 - i_l, 0)
    b_dh = fold(b_dh, s_ptr, a_ptr, i_c // L + i_l, later, i_h, o_d, H, D, REVERSE=True)
    i_p = i_d * (T if cu_ptr is not None else N.to(tl.int64) * T) * H  # this tile's parts
    n_seq -= i_l * L * BT
    NT = tl.cdiv(tl.minimum(n_seq, L * BT), BT)
    piece_gc_ptr = gc_ptr + (first + i_l * L * BT) * H + i_h
    next_last = load_last(piece_gc_ptr, NT - 1, n_seq, H, BT)

    for i in range(NT):
        i_t = NT - 1 - i
        last = next_last  # loaded one chunk ahead
        next_last = load_last(piece_gc_ptr, i_t - 1, n_seq, H, BT)
        n_t, start = n_seq - i_t * BT, (first + (i_l * L + i_t) * BT) * H + i_h
        b_dy = load_tile(dy_ptr + start * D, o_t, o_d, H * D, n_t, D)  # [BT, BD]
        b_gc = load_gate_once(gc_ptr + start, o_t, H, n_t)  # [BT]
        b_h = load_vector(h_ptr + ((i_c + i_l * L + i_t) * H + i_h) * D, o_d, D)  # [BD]
        # eq:ema-dh   dH = G^T dY + diag(r) dh
        b_dH = tl.exp2(last - b_gc)[:, None] * b_dh[None, :]
        b_dH += dot(cast(decay_matrix_transposed(b_gc, o_t), b_dy.dtype), b_dy)
        # eq:ema-dh-before   dh <- a dh + e^T dY
        b_dh = tl.exp2(last) * b_dh + tl.sum(tl.exp2(b_gc)[:, None] * b_dy.to(tl.float32), 0)
        # eq:ema-dx   dX = diag(w) dH
        b_w = weights(g_ptr, w_ptr, start, o_t, n_t, H)
        store_tile(dx_ptr + start * D, b_w[:, None] * b_dH, o_t, o_d, H * D, n_t, D)
        # eq:ema-kept   e^g h_(t-1) = diag(e) h + (G * w below the diagonal) X
        b_x = load_tile(x_ptr + start * D, o_t, o_d, H * D, n_t, D)  # [BT, BD]
        b_M = tl.where(o_t[:, None] > o_t[None, :], decay_matrix(b_gc, o_t) * b_w[None, :], 0.0)
        b_kept = tl.exp2(b_gc)[:, None] * b_h[None, :] + mixed(b_M, b_x)
        b_x = b_x.to(tl.float32)
        if w_ptr is None:
            b_g = load_gate_once(g_ptr + start, o_t, H, n_t).to(tl.float32)
            b_kept -= tl.exp(b_g)[:, None] * b_x
        # eq:ema-dg   dg = e^g (h_(t-1) [- x]) . dH
        tl.store(dg_ptr + i_p + start + o_t * H, tl.sum(b_kept * b_dH, 1), mask=o_t < n_t)
        # eq:ema-dw   dw = x . dH
        if dw_ptr is not None:
            tl.store(dw_ptr + i_p + start + o_t * H, tl.sum(b_x * b_dH, 1), mask=o_t < n_t)

    if i_l == 0:
        tl.store(dh0_ptr + (i_n * H + i_h) * D + o_d, b_dh, mask=o_d < D)


@triton.jit(do_not_specialize=["n"])
def total_kernel(
    parts_ptr,  # [ND, n]
    y_ptr,  # [n] out
    n,
    ND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK sums of ND parts, added in their order.  Grid (n / BLOCK)."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_y = tl.zeros([BLOCK], tl.float32)
    for i in range(ND):
        b_y += load_vector(parts_ptr + i * n.to(tl.int64), o, n)
    tl.store(y_ptr + o, cast(b_y, y_ptr.dtype.element_ty), mask=o < n)


BLOCK = 256  # sums a program


def total(parts: Tensor, like: Tensor) -> Tensor:
    """Launch total_kernel: the sum of the parts [ND, ...], of like's dtype.

    PyTorch's own sum adds in another order where there are more tokens.
    """
    y, n = torch.empty_like(like), like.numel()
    total_kernel[(cdiv(n, BLOCK),)](parts, y, n, len(parts), BLOCK=BLOCK, num_warps=4)
    return y


def ema_bwd(
    x: Tensor, g: Tensor, gc: Tensor, weight: Tensor | None, h: Tensor, dy: Tensor,
    dht: Tensor | None = None, *, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Launch ema_piece_kernel, ema_bwd_kernel, total_kernel; the rest as in the reference."""
    B, T, H, D = x.shape
    config = width(x)
    ND, (N, *sequences) = cdiv(D, config["BD"]), sequence_args(x, packing)
    dx, dh0 = torch.empty_like(x), gc.new_empty(N, H, D)
    dg = gc.new_empty(ND, B, T, H)
    dw = None if weight is None else torch.empty_like(dg)
    options = {"chunk_size": chunk_size, "packing": packing}
    s, a, NW = piece_parts(dy, None, gc, None, reverse=True, **options)
    chunks = None if packing is None else packing.chunk_indices
    ema_bwd_kernel[((N + NW) * H * ND,)](
        x, g, weight, gc, h, dy, dht, s, a, dx, dg, dw, dh0, *sequences, chunks,
        N, T, H, D, BT=chunk_size, L=PIECE, **config,
    )  # fmt: skip
    return dx, total(dg, g), None if dw is None else total(dw, weight), dh0
