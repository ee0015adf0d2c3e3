"""Stage ema: the exponential moving average of every channel, Mamba-2 without B and C.

A sequence is cut into pieces of PIECE chunks, counted from its first token, and the pieces
run side by side.  `ema_piece_kernel` finds first what each of them adds to the state.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import both, entry, row, sequence_args, states
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    decay_matrix,
    dot,
    load_once,
    load_tile,
    load_vector,
    mask_if,
    sequence_of,
    store_tile,
)
from linattn_edu.packing import Packing

# Chunks of a piece. One chain of 64 short steps is about as long as reading x once takes on a
# full GPU, and a sequence of up to 64 chunks is read once only. The length follows from nothing but
# chunk_size: the bits of a sequence do not depend on what is beside it.
PIECE = 64


@triton.jit
def load_gate_once(gc_ptr, o_t, stride, n_t):
    """`load_gate`, by `load_once`."""
    return load_once(gc_ptr, tl.minimum(o_t, n_t - 1) * stride)


@triton.jit
def load_last(gc_ptr, i_t, n_seq, H: tl.constexpr, BT: tl.constexpr):
    """gc of the last token of a sequence's chunk i_t; of the last or first chunk beyond its ends.

    gc_ptr: at the sequence's first token; nothing is read of a sequence without tokens.
    """
    i = tl.minimum(tl.maximum(i_t + 1, 1) * BT, n_seq) - 1
    return tl.load(gc_ptr + i * H, mask=n_seq > 0, other=0.0)


@triton.jit
def weights(g_ptr, w_ptr, start, o_t, n_t, H: tl.constexpr):
    """w [BT] of the chunk whose first number stands at `start`; 0 for missing tokens."""
    if w_ptr is not None:
        b_w = load_gate_once(w_ptr + start, o_t, H, n_t).to(tl.float32)
        return tl.where(o_t < n_t, b_w, 0.0)
    else:
        # eq:ema-weight   w = 1 - e^g
        b_g = load_gate_once(g_ptr + start, o_t, H, n_t).to(tl.float32)
        b_g = tl.where(o_t < n_t, b_g, 0.0)
        b_a = tl.exp(b_g)
        # (1 - a) g / log(a): where a is near 1, its rounding cancels
        b_in = tl.where((b_a > 0.5) & (b_a < 1.0), b_a, 0.75)
        b_w = (1.0 - b_in) * (b_g / tl.log(b_in))
        return tl.where(b_a > 0.5, tl.where(b_a < 1.0, b_w, -b_g), 1.0 - b_a)


@triton.jit
def mixed(b_M, b_x):
    """M X; float16 has no digits for small weights, and takes each row by its largest number."""
    if b_x.dtype == tl.float16:
        b_unit = tl.maximum(tl.max(tl.abs(b_M), 1), 1e-30)[:, None]
        return b_unit * dot(cast(b_M / b_unit, b_x.dtype), b_x)
    else:
        return dot(cast(b_M, b_x.dtype), b_x)


@triton.jit
def later_piece(i_w, N, T, offsets_ptr, chunks_ptr, BT: tl.constexpr, L: tl.constexpr):
    """(sequence, number in it) of the piece that begins in the i_w-th L chunks of all; number 0:
    none does, but for those at the head of a sequence.

    There cannot be two: each has L chunks of its own sequence before it.
    """
    o_c = i_w * L + tl.arange(0, L)
    if chunks_ptr is not None:
        m_c = o_c < tl.load(offsets_ptr + N)
        b_n = tl.load(chunks_ptr + 2 * o_c, mask=m_c, other=0)
        b_t = tl.load(chunks_ptr + 2 * o_c + 1, mask=m_c, other=0)
    else:
        NT = tl.cdiv(T, BT)
        m_c = o_c < N * NT
        b_n, b_t = o_c // NT, o_c % NT
    b_begins = m_c & (b_t % L == 0) & (b_t > 0)
    return tl.max(tl.where(b_begins, b_n, 0), 0), tl.max(tl.where(b_begins, b_t // L, 0), 0)


@triton.jit
def piece_of(N, T, offsets_ptr, chunks_ptr, H: tl.constexpr, D: tl.constexpr, BT: tl.constexpr,
             BD: tl.constexpr, L: tl.constexpr):  # fmt: skip
    """Tile of channels, head, sequence and number in it of this program's piece: first those at the
    head of the N sequences, then `later_piece`.  Number -1: there is none.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_d, i_h, i_s = pid % ND, pid // ND % H, (pid // (ND * H)).to(tl.int64)
    i_n, i_l = later_piece(tl.maximum(i_s - N, 0), N, T, offsets_ptr, chunks_ptr, BT, L)
    i_l = tl.where(i_l > 0, i_l, -1)
    return i_d, i_h, tl.where(i_s < N, i_s, i_n), tl.where(i_s < N, 0, i_l)


@triton.jit
def fold(b_h, s_ptr, a_ptr, i_w, n, i_h, o_d, H: tl.constexpr, D: tl.constexpr,
         REVERSE: tl.constexpr):  # fmt: skip
    """The state after n pieces, whose own parts and decays stand at i_w + 1, ..., i_w + n."""
    for j in range(n):
        i = (i_w + (n - j if REVERSE else j + 1)) * H + i_h
        b_h = tl.load(a_ptr + i) * b_h + load_vector(s_ptr + i * D, o_d, D)
    return b_h


@triton.jit(do_not_specialize=["N", "T"])
def ema_piece_kernel(
    x_ptr,  # [B, T, H, D]; backwards: dy
    g_ptr,  # [B, T, H] natural log; backwards: None
    w_ptr,  # [B, T, H] or None
    gc_ptr,  # [B, T, H] log2
    s_ptr,  # [NW, H, D] out: what a piece adds to the state
    a_ptr,  # [NW, H] out: its decay
    cu_ptr, offsets_ptr,  # of sequence_of
    chunks_ptr,  # [NT, 2] or None
    N, T,
    H: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
    L: tl.constexpr,  # chunks of a piece
    REVERSE: tl.constexpr,
):  # fmt: skip
    """One program: BD channels of one head, a piece.  Grid (NT / L * H * D / BD).

    Forwards the piece before a `later_piece`, backwards that piece itself.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    pid = tl.program_id(0)
    i_d, i_h, i_w = pid % ND, pid // ND % H, (pid // (ND * H)).to(tl.int64)
    i_n, i_l = later_piece(i_w, N, T, offsets_ptr, chunks_ptr, BT, L)
    if i_l == 0:
        return
    first, n_seq, _ = sequence_of(i_n, cu_ptr, None, T, BT)
    i_l = i_l if REVERSE else i_l - 1
    first += i_l * L * BT
    n_piece = tl.minimum(n_seq - i_l * L * BT, L * BT)
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    b_s = tl.zeros([BD], tl.float32)
    a_all = 1.0
    NT = tl.cdiv(n_piece, BT)
    piece_gc_ptr = gc_ptr + first * H + i_h
    next_last = load_last(piece_gc_ptr, NT - 1 if REVERSE else 0, n_piece, H, BT)
    for i in range(NT):
        i_t = NT - 1 - i if REVERSE else i
        last = next_last  # loaded one chunk ahead
        next_last = load_last(piece_gc_ptr, i_t - 1 if REVERSE else i_t + 1, n_piece, H, BT)
        n_t, start = n_piece - i_t * BT, (first + i_t * BT) * H + i_h
        b_x = load_tile(x_ptr + start * D, o_t, o_d, H * D, n_t, D)  # [BT, BD]
        b_gc = load_gate_once(gc_ptr + start, o_t, H, n_t)  # [BT]
        if REVERSE:
            b_r = tl.exp2(b_gc)
        else:
            b_w = weights(g_ptr, w_ptr, start, o_t, n_t, H)
            b_r = tl.exp2(last - b_gc) * b_w
        # as the last step of ema_kernel, or of ema_bwd_kernel
        b_s = tl.exp2(last) * b_s + tl.sum(b_r[:, None] * b_x.to(tl.float32), 0)
        a_all *= tl.exp2(last)
    i = i_w * H + i_h
    tl.store(s_ptr + i * D + o_d, b_s, mask=o_d < D)
    tl.store(a_ptr + i, a_all, mask=i_d == 0)


@triton.jit(do_not_specialize=["N", "T"])
def ema_kernel(
    x_ptr,  # [B, T, H, D]
    g_ptr,  # [B, T, H] natural log
    w_ptr,  # [B, T, H] or None
    gc_ptr,  # [B, T, H] log2
    h0_ptr,  # [N, H, D] or None
    s_ptr,  # [NW, H, D] of ema_piece_kernel; not read where every sequence is one piece
    a_ptr,  # [NW, H] of ema_piece_kernel
    y_ptr,  # [B, T, H, D] out
    h_ptr,  # [NT, H, D] out: state entering each chunk, or None
    ht_ptr,  # [N, H, D] out, or None
    cu_ptr, offsets_ptr,  # of sequence_of
    chunks_ptr,  # [NT, 2] or None
    N, T,
    H: tl.constexpr, D: tl.constexpr,
    BT: tl.constexpr, BD: tl.constexpr,
    L: tl.constexpr,  # chunks of a piece
):  # fmt: skip
    """One program: BD channels of one head, through a piece.  Grid ((N + NT / L) * H * D / BD).

    Reference: linattn_edu.reference.ssd.ema.
    """
    i_d, i_h, i_n, i_l = piece_of(N, T, offsets_ptr, chunks_ptr, H, D, BT, BD, L)
    if i_l < 0:
        return
    first, n_seq, i_c = sequence_of(i_n, cu_ptr, offsets_ptr, T, BT)
    o_t, o_d = tl.arange(0, BT), i_d * BD + tl.arange(0, BD)
    b_h = tl.zeros([BD], tl.float32)
    if h0_ptr is not None:
        b_h += load_vector(h0_ptr + (i_n * H + i_h) * D, o_d, D)
    b_h = fold(b_h, s_ptr, a_ptr, i_c // L, i_l, i_h, o_d, H, D, REVERSE=False)
    n_seq -= i_l * L * BT
    start = (first + i_l * L * BT) * H + i_h
    piece_gc_ptr = gc_ptr + start
    NT = tl.cdiv(tl.minimum(n_seq, L * BT), BT)
    next_last = load_last(piece_gc_ptr, 0, n_seq, H, BT)

    for i_t in range(NT):
        n_t = n_seq - i_t * BT
        last = next_last  # loaded one chunk ahead
        next_last = load_last(piece_gc_ptr, i_t + 1, n_seq, H, BT)
        b_x = load_tile(x_ptr + start * D, o_t, o_d, H * D, n_t, D)  # [BT, BD]
        b_gc = load_gate_once(gc_ptr + start, o_t, H, n_t)  # [BT]
        b_w = weights(g_ptr, w_ptr, start, o_t, n_t, H)
        if h_ptr is not None:
            i = ((i_c + i_l * L + i_t) * H + i_h) * D
            tl.store(h_ptr + i + o_d, b_h, mask=o_d < D)
        # eq:ema-output   Y = diag(e) h + (G * w) X
        b_M = decay_matrix(b_gc, o_t) * b_w[None, :]
        b_y = tl.exp2(b_gc)[:, None] * b_h[None, :] + mixed(b_M, b_x)
        store_tile(y_ptr + start * D, b_y, o_t, o_d, H * D, n_t, D)
        # eq:ema-state   h <- a h + (r * w)^T X
        b_r = tl.exp2(last - b_gc) * b_w
        b_h = tl.exp2(last) * b_h + tl.sum(b_r[:, None] * b_x.to(tl.float32), 0)
        start += BT * H

    if ht_ptr is not None:
        m_d = mask_if(o_d < D, n_seq <= L * BT)  # of the last piece
        tl.store(ht_ptr + (i_n * H + i_h) * D + o_d, b_h, mask=m_d)


# generation -> bytes of an element -> channels -> row, for these kernels and those of ema_bwd. The
# channels of a tile share G, which costs more than the product itself: so on Hopper 128 of them,
# where there are as many. Heads of fewer keep the tile, for the reason given in
# kernels/delta/wy.py.
CONFIGS = {
    "turing": {2: both(row(8, 1, BD=32)), 4: both(row(8, 1, BD=32))},
    "ampere": {2: both(row(4, 2, BD=64)), 4: both(row(4, 1, BD=32))},
    "hopper": {
        2: {64: row(4, 3, BD=64), 128: row(4, 2, BD=128)},
        4: both(row(4, 1, BD=64)),
    },
}


def width(x: Tensor) -> dict[str, int]:
    """The row for x [B, T, H, D]; it depends on D alone, and so do the parts of dg and dw."""
    return entry(CONFIGS, x)[64 if x.shape[-1] <= 64 else 128].launch()


def later_pieces(x: Tensor, chunk_size: int, packing: Packing | None) -> int:
    """How many later pieces there may be in x [B, T, ...]; 0: there are none."""
    if packing is None:
        B, NT = x.shape[0], cdiv(x.shape[1], chunk_size)
        return cdiv(B * NT, PIECE) if NT > PIECE else 0
    return cdiv(packing.chunks, PIECE) if packing.chunks > PIECE else 0


def piece_parts(
    x: Tensor, g: Tensor | None, gc: Tensor, weight: Tensor | None, *, chunk_size: int,
    packing: Packing | None, reverse: bool = False,
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Launch ema_piece_kernel where there are later pieces; return its results, and how many.

    Where there are none, other tensors stand for them: a kernel compiled without pieces need not
    have the same bits, and on Triton 3.9 has not.
    """
    H, D = x.shape[2:]
    NW = later_pieces(x, chunk_size, packing)
    if not NW:
        return gc, gc, 0
    s, a = gc.new_empty(NW, H, D), gc.new_empty(NW, H)
    config = width(x)
    N, cu_seqlens, offsets = sequence_args(x, packing)
    chunks = None if packing is None else packing.chunk_indices
    ema_piece_kernel[(NW * H * cdiv(D, config["BD"]),)](
        x, g, weight, gc, s, a, cu_seqlens, offsets, chunks, N, x.shape[1], H, D, BT=chunk_size,
        L=PIECE, REVERSE=reverse, **config,
    )  # fmt: skip
    return s, a, NW


def ema(
    x: Tensor, g: Tensor, gc: Tensor, weight: Tensor | None = None,
    initial_state: Tensor | None = None, *, chunk_size: int, output_final_state: bool = False,
    return_states: bool = True, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch ema_piece_kernel and ema_kernel; arguments and results as in the reference."""
    _, T, H, D = x.shape
    y = torch.empty_like(x)
    h = gc.new_empty(*states(x, chunk_size, packing), H, D) if return_states else None
    N, *sequences = sequence_args(x, packing)
    final_state = gc.new_empty(N, H, D) if output_final_state else None
    options = {"chunk_size": chunk_size, "packing": packing}
    s, a, NW = piece_parts(x, g, gc, weight, **options)
    config = width(x)
    chunks = None if packing is None else packing.chunk_indices
    ema_kernel[((N + NW) * H * cdiv(D, config["BD"]),)](
        x, g, weight, gc, initial_state, s, a, y, h, final_state, *sequences, chunks, N, T, H, D,
        BT=chunk_size, L=PIECE, **config,
    )  # fmt: skip
    return y, h, final_state
