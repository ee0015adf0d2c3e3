"""Stage cp_merge: a piece of a sequence as an affine map of the state, and a chain of such maps."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.pieces import Pieces
from linattn_edu.kernels.routes import scan_launch, widest_launch
from linattn_edu.kernels.rows import THREE, entry, row, scan_table, sequence_args
from linattn_edu.kernels.tiles import (
    block,
    cast,
    cdiv,
    dot,
    first_state,
    load_gate,
    load_tile,
    load_vector,
    sequence_of,
    store_tile,
)
from linattn_edu.packing import Packing

FORGOTTEN = tl.constexpr(2.0**-32)  # of a state: no sum in fp32 holds it
NEAR = 16  # chunks from which a map is made first, where what was before them may be forgotten


@triton.jit
def piece_of(pid, rows_ptr, cu_ptr, T, HV: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
             BV: tl.constexpr):  # fmt: skip
    """What program pid works on: BV of the W columns of the map of a piece, for one head.

    rows_ptr: the sequences of cu_ptr that are the pieces, or None: all.
    Returns which columns, the number of the map, the head, and the piece's first token and tokens.
    """
    NW: tl.constexpr = (W + BV - 1) // BV
    i_v, i_ph = pid % NW, (pid // NW).to(tl.int64)
    i_n = i_ph // HV
    if rows_ptr is not None:
        i_n = tl.load(rows_ptr + i_n)
    first, n_seq, _ = sequence_of(i_n, cu_ptr, None, T, BT)
    return i_v, i_ph, i_ph % HV, first, n_seq


@triton.jit
def new_map(x_ptr, i_v, i_ph, n_k, K: tl.constexpr, V: tl.constexpr, BT: tl.constexpr,
            BK: tl.constexpr, BV: tl.constexpr):  # fmt: skip
    """The ranges of a tile, and the columns of [S_ext | M] before the first chunk, [BK, BV].

    x_ptr: [NP, HV, K, V], the state before the piece, of which n_k rows are read; or None: zero.
    """
    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    b_S = tl.where(o_k[:, None] + V == o_v[None, :], 1.0, 0.0)
    if x_ptr is not None:
        b_S += load_tile(x_ptr + i_ph * K * V, o_k, o_v, V, n_k, V).to(tl.float32)
    return o_t, o_k, o_v, b_S


@triton.jit
def span_of(x_ptr, left_ptr, rows_ptr, cu_ptr, T, HV: tl.constexpr, K: tl.constexpr,
            V: tl.constexpr, W: tl.constexpr, NEAR: tl.constexpr, NW: tl.constexpr,
            BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
            BACK: tl.constexpr):  # fmt: skip
    """As piece_of, of the chunks that the map of the piece is made of: with NEAR that many at its
    end, with BACK at its beginning; else all, or none where those left 2^-32 of a state or less.

    x_ptr: the state that the map is applied to, [NP, HV, K, V], or None.
    left_ptr: [NP, HV, NW] of store_map, or None: all.
    Returns also whether to store the map: 0 or 1, or 2, and the piece has more chunks; the ranges
    of a tile; and the columns of the map before the first chunk, [BK, BV], with BACK transposed.
    """
    pid = tl.program_id(0)
    i_v, i_ph, i_h, first, n_seq = piece_of(pid, rows_ptr, cu_ptr, T, HV, W, BT, BV)
    made = 1
    if NEAR > 0:
        n_near = tl.minimum(n_seq, NEAR * BT)
        made = tl.where(n_near < n_seq, 2, 1)
        if not BACK:
            n_far = tl.maximum(tl.cdiv(n_seq, BT) - NEAR, 0) * BT
            first += n_far
            n_near = n_seq - n_far
        n_seq = n_near
    elif left_ptr is not None:
        left = 0.0
        for i in tl.static_range(NW):
            left = tl.maximum(left, tl.load(left_ptr + i_ph * NW + i))
        # |M S| <= K max |M| |S|
        made = tl.where(left * K > FORGOTTEN, 1, 0)
        n_seq *= made
    n_k = tl.where(made > 1, 0, K)
    o_t, o_k, o_v, b_S = new_map(x_ptr, i_v, i_ph, n_k, K, V, BT, BK, BV)
    return i_v, i_ph, i_h, first, n_seq, made, o_t, o_k, o_v, tl.trans(b_S) if BACK else b_S


@triton.jit
def store_map(map_ptr, left_ptr, b_S, i_v, i_ph, o_k, o_v, made, K: tl.constexpr,
              V: tl.constexpr, W: tl.constexpr, ROW: tl.constexpr, NEAR: tl.constexpr,
              NW: tl.constexpr):  # fmt: skip
    """Columns o_v of [S_ext | M], and with NEAR the largest number of M among them; 0 if the piece
    has no more chunks.
    """
    n_k = tl.where(made > 0, K, 0)
    store_tile(map_ptr + i_ph * K * ROW, b_S, o_k, o_v, ROW, n_k, min(W, ROW))
    if NEAR > 0:
        b_M = tl.where(o_v[None, :] >= V, tl.abs(b_S), 0.0)
        b_M = tl.where(b_M == b_M, b_M, float("inf"))  # NaN is not forgotten
        left = tl.max(tl.max(b_M, 1), 0)
        tl.store(left_ptr + i_ph * NW + i_v, tl.where(made > 1, left, 0.0))


@triton.jit(do_not_specialize=["T"])
def piece_map_kernel(
    k_ptr,  # [B, T, H, K]
    w_ptr,  # [B, T, HV, K], or None
    u_ptr,  # [B, T, HV, V]
    gc_ptr,  # [B, T, HV] log2; or [B, T, HV, K], and k has HV heads and is decayed already
    h0_ptr,  # [NP, HV, K, V] or None
    gs_ptr,  # [B, T, HV] log2, or None: gc
    map_ptr,  # [NP, HV, K, W] out: S_ext, and M where W is V + K
    number_ptr,  # [NP, HV] out: M without w; or None
    rows_ptr,  # [NP] or None
    cu_ptr,  # [N + 1] or None
    T,
    stride_t,  # of gc and gs, between tokens
    stride_h,  # and between heads
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of map_ptr
    BT: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CHANNEL: tl.constexpr,  # a gate for each row of S
):  # fmt: skip
    """One program: BV columns of [S_ext | M] of one head, through a piece.

    Grid (NP * HV * W / BV).  Reference: linattn_edu.reference.delta.cp_merge.piece_map.
    """
    i_v, i_ph, i_h, first, n_seq = piece_of(tl.program_id(0), rows_ptr, cu_ptr, T, HV, W, BT, BV)
    k_ptr += (first * H + i_h // (HV // H)) * K
    u_ptr += (first * HV + i_h) * V
    if w_ptr is not None:
        w_ptr += (first * HV + i_h) * K
    if gs_ptr is not None:
        gs_ptr += first * stride_t + i_h * stride_h
    gc_ptr += first * stride_t + i_h * stride_h

    # eq:cp-ext   S_ext: the state after the piece, from zero
    # eq:cp-transition   M: the same without values, from I
    o_t, o_k, o_v, b_S = new_map(h0_ptr, i_v, i_ph, K, K, V, BT, BK, BV)
    number = 1.0
    for i_t in range(tl.cdiv(n_seq, BT)):
        n_t = n_seq - i_t * BT
        b_v = load_tile(u_ptr, o_t, o_v, HV * V, n_t, V).to(tl.float32)  # [BT, BV]
        if w_ptr is not None:
            b_w = load_tile(w_ptr, o_t, o_k, HV * K, n_t, K)  # [BT, BK]
            b_v -= dot(b_w, cast(b_S, b_w.dtype))
            w_ptr += BT * HV * K
        if CHANNEL:
            b_last = load_vector(gc_ptr + (tl.minimum(BT, n_t) - 1) * stride_t, o_k, K)
            b_a = tl.exp2(b_last)[:, None]
        else:
            b_last = tl.load(gc_ptr + (tl.minimum(BT, n_t) - 1) * stride_t)
            b_a = tl.exp2(b_last)
            if gs_ptr is None:
                b_r = tl.exp2(b_last - load_gate(gc_ptr, o_t, stride_t, n_t))  # [BT]
            else:
                b_r = tl.exp2(b_last - load_gate(gs_ptr, o_t, stride_t, n_t))  # [BT]
                gs_ptr += BT * stride_t
            b_v *= b_r[:, None]
            # eq:cp-number   M = 2^(sum of gc_last)
            number *= b_a
        b_k = load_tile(k_ptr, o_t, o_k, H * K, n_t, K)  # [BT, BK]
        b_S = dot(tl.trans(b_k), cast(b_v, b_k.dtype), b_S * b_a)
        k_ptr += BT * H * K
        u_ptr += BT * HV * V
        gc_ptr += BT * stride_t

    store_tile(map_ptr + i_ph * K * ROW, b_S, o_k, o_v, ROW, K, min(W, ROW))
    if number_ptr is not None:
        tl.store(number_ptr + i_ph, number, mask=i_v == 0)


@triton.jit
def chain_of(i_n, offsets_ptr, NP):
    """The number of the first piece of sequence i_n, and how many it has."""
    if offsets_ptr is None:
        start, n = i_n * NP, NP
    else:
        start = tl.load(offsets_ptr + i_n)
        n = (tl.load(offsets_ptr + i_n + 1) - start).to(tl.int32)
    return start, n


@triton.jit(do_not_specialize=["NP"])
def merge_kernel(
    ext_ptr,  # [B, NP, H, K, V]
    M_ptr,  # [B, NP, H, K, K] or, of numbers, [B, NP, H]
    h0_ptr,  # [N, H, K, V] or None
    in_ptr,  # [B, NP, H, K, V] out: what enters each piece
    out_ptr,  # [N, H, K, V] out: what leaves the last
    offsets_ptr,  # [N + 1]: number of the first piece of each sequence; or None
    NP,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ROW_EXT: tl.constexpr, ROW_M: tl.constexpr,  # from row to row of S_ext and M
    NUMBERS: tl.constexpr, REVERSE: tl.constexpr,
    BK: tl.constexpr, BJ: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of the state of one head, through a sequence's pieces.

    Grid (N * H * V / BV).  Where M is wider than BJ, a product reads the state back from memory,
    BJ rows at a time.
    Reference: linattn_edu.reference.delta.cp_merge.cp_merge.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v, i_h, i_n = pid % NV, pid // NV % H, (pid // (NV * H)).to(tl.int64)
    start, n = chain_of(i_n, offsets_ptr, NP)
    _, o_k, o_v, b_S = first_state(h0_ptr, i_n * H + i_h, i_v, K, V, 1, BK, BV, False)
    for i in range(n):
        i_p = (start + (n - 1 - i if REVERSE else i)) * H + i_h
        store_tile(in_ptr + i_p * K * V, b_S, o_k, o_v, V, K, V)
        b_ext = load_tile(ext_ptr + i_p * K * ROW_EXT, o_k, o_v, ROW_EXT, K, V)
        # eq:cp-merge   S <- M S + S_ext
        if NUMBERS:
            b_S = tl.load(M_ptr + i_p) * b_S + b_ext
        elif BJ >= BK:
            b_M = load_tile(M_ptr + i_p * K * ROW_M, o_k, o_k, ROW_M, K, K)  # [BK, BK]
            b_S = dot(b_M, b_S, b_ext)
        else:
            tl.debug_barrier()  # what one thread stored another loads
            b_S = b_ext.to(tl.float32)
            for i_j in range(tl.cdiv(K, BJ)):
                o_j = i_j * BJ + tl.arange(0, BJ)
                b_M = load_tile(M_ptr + i_p * K * ROW_M, o_k, o_j, ROW_M, K, K)  # [BK, BJ]
                b_j = load_tile(in_ptr + i_p * K * V, o_j, o_v, V, K, V)  # [BJ, BV]
                b_S = dot(b_M, b_j, b_S)
    store_tile(out_ptr + (i_n * H + i_h) * K * V, b_S, o_k, o_v, V, K, V)


@triton.jit(do_not_specialize=["NP"])
def join_kernel(
    ext_ptr,  # [B, NP, H, K, V]
    M_ptr,  # [B, NP, H]
    h0_ptr,  # [R, H, K, V] or None
    map_ptr,  # [R, H, K, V] out
    number_ptr,  # [R, H] out
    rows_ptr,  # [R]: the sequences that are joined; or None: all
    offsets_ptr,  # [N + 1]: number of the first piece of each sequence; or None
    NP,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    ROW: tl.constexpr,  # from row to row of map_ptr
    STEP: tl.constexpr,  # from number to number
    REVERSE: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program: BV columns of the map of one head, through a sequence's pieces.

    Grid (R * H * V / BV).  Reference: linattn_edu.reference.delta.cp_merge.cp_join.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    i_v, i_r, i_h = pid % NV, (pid // NV).to(tl.int64), pid // NV % H
    i_n = i_r // H if rows_ptr is None else tl.load(rows_ptr + i_r // H)
    start, n = chain_of(i_n, offsets_ptr, NP)
    _, o_k, o_v, b_S = first_state(h0_ptr, i_r, i_v, K, V, 1, BK, BV, False)
    number = 1.0
    for i in tl.range(0, n, num_stages=3):
        i_p = (start + (n - 1 - i if REVERSE else i)) * H + i_h
        # eq:cp-merge   S <- M S + S_ext
        M = tl.load(M_ptr + i_p)
        b_S = M * b_S + load_tile(ext_ptr + i_p * K * V, o_k, o_v, V, K, V)
        number *= M
    store_tile(map_ptr + i_r * K * ROW, b_S, o_k, o_v, ROW, K, V)
    tl.store(number_ptr + i_r * STEP, number, mask=i_v == 0)


MAP_CONFIGS = scan_table(
    ampere={128: [row(4, 2, BV=32)], 256: [row(4, 1, BV=32)]},
    hopper={128: THREE, 256: [row(4, 2, BV=32), row(4, 2, BV=16)]},
)
# generation -> bytes of an element -> rows of M up to -> rows, widest BV first: fp32 whatever the
# inputs. One stage where the state is read back: a load ahead of its time would read it before it
# is stored
MERGE_CONFIGS = {
    "turing": {4: {256: [row(4, 1, BJ=16, BV=16)]}},
    "ampere": {4: {256: [row(4, 1, BJ=32, BV=16)]}},
    "hopper": {
        4: {128: [row(8, 3, BJ=128, BV=BV) for BV in (32, 16, 8)], 256: [row(8, 1, BJ=32, BV=16)]}
    },
}
JOIN = row(4, 3, BV=16)


def piece_map(
    k: Tensor, w: Tensor | None, u: Tensor, gc: Tensor, initial_state: Tensor | None = None,
    gs: Tensor | None = None, *, chunk_size: int, **which,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch piece_map_kernel; arguments and result as in the reference; which: of launch_map."""
    given, sizes = (k, w, u, gc, initial_state, gs), (k.shape[2], *u.shape[2:])
    return launch_map(
        piece_map_kernel, MAP_CONFIGS, given, sizes, *gc.stride()[1:3], x=k, numbers=w is None,
        constants={"BT": chunk_size, "CHANNEL": gc.ndim == 4}, **which,
    )  # fmt: skip


def launch_map(
    kernel, table: dict | tuple, given: tuple, sizes: tuple[int, ...], *strides: int, x: Tensor,
    constants: dict, after: tuple = (), numbers: bool | None = None, transition: bool = True,
    packing: Packing | None = None, rows: Tensor | None = None, out: Tensor | None = None,
    pieces: Pieces | None = None, between: Callable = lambda left: None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch a kernel that makes maps of pieces; return S_ext [NP, HV, K, V] and M [NP, HV, K, K].

    Over ranks, where there is `out`, a kernel of a fused stage is launched twice: for NEAR chunks
    of each piece at the end where the state leaves it, and for all chunks of those heads whose
    transition through these is more than 2^-32. Of the others M is that of these chunks.

    Args:
        given: what the kernel reads, in its order. after: what comes after its outputs.
        sizes: H, where keys have heads of their own, HV and V. x: the keys [B, T, .., K].
        numbers: whether M is a number [NP, HV]; None: the kernel has no place for one.
        transition: whether to make M, which else is None.
        packing, rows: the pieces are all its sequences, or those of these numbers [NP].
        out: [NP, HV, K, V + K], into which both are written, side by side; or [NP, HV, K, V].
        pieces: or they are these.
        between: what the second launch reads is made by it, from left of span_of.
    """
    K, (*H, HV, V) = x.shape[-1], sizes
    if pieces is None:
        NP, cu_seqlens, _ = sequence_args(x, packing)
        NP, T = NP if rows is None else len(rows), x.shape[1]
    else:
        NP, cu_seqlens, T = pieces.N, pieces.cu_seqlens, pieces.T
    W = V + K if transition and not numbers else V
    maps = x.new_empty(NP, HV, K, W, dtype=torch.float32) if out is None else out
    number = maps.new_empty(NP, HV) if transition and numbers else None

    def launch(W: int, other: Tensor | None, **near) -> None:
        grid, config = scan_launch(table, x, NP * HV, W)
        kernel[grid](
            *given, maps, other, *after, rows, cu_seqlens, T, *strides, *H, HV, K, V, W,
            maps.shape[-1], **near, **constants, **config,
        )  # fmt: skip

    if numbers is not None:
        if maps.shape[-1] > W and not numbers:
            maps[..., V:].zero_()  # which is read, and multiplied by zero
        launch(W, number)
    elif out is None:
        launch(W, None, NEAR=0, NW=1)
    else:
        tiles = cdiv(V + K, scan_launch(table, x, NP * HV, V + K)[1]["BV"])
        left = maps.new_empty(NP, HV, tiles)
        launch(V + K, left, NEAR=NEAR, NW=tiles)
        between(left)
        launch(W, left, NEAR=0, NW=tiles)
    return maps[..., :V], maps[..., V:] if maps.shape[-1] > V else number


def cp_merge(
    S_ext: Tensor, M: Tensor, initial_state: Tensor | None = None, *, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Launch merge_kernel; arguments and result as in the reference.

    offsets: [N + 1], the number of the first piece of each of N sequences, which are one after the
    other in a batch of one.
    """
    return launch_merge(S_ext, M, initial_state, offsets, reverse=False)


def cp_join(
    S_ext: Tensor, M: Tensor, initial_state: Tensor | None = None, *, reverse: bool = False,
    offsets: Tensor | None = None, rows: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch join_kernel; arguments and result as in the reference, and:

    Args:
        initial_state: [R, H, K, V], of the sequences that are joined.
        reverse: from the last piece of a sequence.
        offsets: as in cp_merge.  rows: [R], the sequences that are joined; None: all.
        out: ([R, H, K, V], [R, H]), of which maps, rows and numbers are evenly spaced.
    """
    B, NP, H, K, V = S_ext.shape
    R = len(rows) if rows is not None else B if offsets is None else len(offsets) - 1
    if out is None:
        out = S_ext.new_empty(R, H, K, V), S_ext.new_empty(R, H)
    config = JOIN.launch(V=V)
    join_kernel[(R * H * cdiv(V, config["BV"]),)](
        S_ext, M, initial_state, *out, rows, offsets, NP, H, K, V, out[0].stride(2),
        out[1].stride(1), reverse, BK=block(K), **config,
    )  # fmt: skip
    return out


def launch_merge(
    S_ext: Tensor, M: Tensor, initial_state: Tensor | None, offsets: Tensor | None, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Launch merge_kernel, from the first piece of a sequence or from the last."""
    B, NP, H, K, V = S_ext.shape
    N = B if offsets is None else len(offsets) - 1
    numbers = M.ndim == 3
    ext, row_ext = _rows(S_ext)
    M, row_M = (M.contiguous(), 0) if numbers else _rows(M)
    # a scan reads the state of pieces that no sequence has, too
    S_in = S_ext.new_empty(S_ext.shape) if offsets is None else S_ext.new_zeros(S_ext.shape)
    S_out = S_ext.new_empty(N, H, K, V)
    table = entry(MERGE_CONFIGS, S_ext)
    rows = table[min(most for most in table if most >= K)]
    grid, config = widest_launch(rows, S_ext, N * H, V)
    merge_kernel[grid](
        ext, M, initial_state, S_in, S_out, offsets, NP, H, K, V, row_ext, row_M,
        NUMBERS=numbers, REVERSE=reverse, BK=block(K), **config,
    )  # fmt: skip
    return S_in, S_out


def _rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, NP, H, K, D] and how far apart its rows are; a copy unless all are equally far."""
    B, NP, H, K, D = x.shape
    row = x.stride(3)
    even = (x.stride(0) if B == 1 else NP * H * K * row, H * K * row, K * row, row, 1)
    return (x, row) if x.stride() == even else (x.contiguous(), D)
