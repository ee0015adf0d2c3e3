"""The forward pass of Mamba-2 in few stages: scores that heads share, a scan with the output.

Both passes share the tiles of their tokens and heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.cp_merge import FORGOTTEN
from linattn_edu.kernels.gluon.kernels import ssd_fwd as ssd_fwd_gluon
from linattn_edu.kernels.routes import by_kind, kind_of, limits
from linattn_edu.kernels.rows import chunk_args, row, whole
from linattn_edu.kernels.ssd.chunk_scan import past_state
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_of,
    documents,
    dot,
    load_gate,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit
def load_step(gs_ptr, o_t, n_t):
    """gs of the tokens o_t of a head; missing tokens write nothing."""
    return tl.load(gs_ptr + o_t, mask=o_t < n_t, other=float("inf"))


@triton.jit
def store_sums(sums_ptr, b_sums, o_t, plane, n_t, n):
    """The first n of the numbers [BT, .] of the tokens o_t, which are `plane` apart in memory.

    Each store of a vector waits for all warps, so several are stored as one.
    """
    o_n = tl.arange(0, b_sums.shape[1])
    mask = (o_t < n_t)[:, None] & (o_n < n)[None, :]
    tl.store(sums_ptr + o_t[:, None] + o_n[None, :] * plane, b_sums, mask=mask)


@triton.jit
def decay(b_gc, b_gs):
    """G * step where the row comes after the column, and elsewhere a number: scores are zero there.

    The log decays of all tokens are <= 0: `ops.ssd` takes other kernels for steps below zero.
    """
    return tl.exp2(tl.minimum(b_gc[:, None] - b_gs[None, :], 100.0))


@triton.jit
def tile_of(pid, cu_ptr, chunks_ptr, T, H: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr,
            BC: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """What program pid works on: BT tokens of a chunk of BC, and some heads of a group.

    WHOLE: every chunk has BC tokens, so that no load needs a mask.
    Returns the tile's first token in the chunk; the group, which of its SPLITS parts, the first
    head and the number of heads of the part; and, as `chunk_of`, the chunk and its tokens.
    """
    TILES: tl.constexpr = BC // BT
    HEADS: tl.constexpr = H // G
    MOST: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    i_gs, i_c, first, n_t = chunk_of(pid // TILES, cu_ptr, chunks_ptr, T, G * SPLITS, BC)
    if WHOLE:
        n_t = BC
    i_g, i_split = i_gs // SPLITS, i_gs % SPLITS
    i_0 = i_split * MOST
    n_heads = tl.minimum(MOST, HEADS - i_0)
    return pid % TILES * BT, i_g, i_split, i_g * HEADS + i_0, n_heads, i_c, first, n_t


@triton.jit
def documents_of(seq_ptr, chunks_ptr, i_c, first, T, o_t, n_t):
    """`documents` of chunk i_c.  seq_ptr: [B, T]."""
    i_t = first % T if chunks_ptr is None else tl.load(chunks_ptr + 2 * i_c + 1)
    return documents(seq_ptr + first, i_t, o_t, n_t)


@triton.jit(do_not_specialize=["T"])
def chunk_scores_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    seq_ptr,  # [B, T] or None
    S_ptr,  # [B, T, G, BT] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    G: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one group.  Grid (NT * G).

    Reference: linattn_edu.reference.fused.ssd_fwd.
    """
    i_g, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G, BT)
    i = first * G + i_g
    o_t = tl.arange(0, BT)
    b_S = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(N, BN)):
        o_n = j * BN + tl.arange(0, BN)
        b_C = load_tile(C_ptr + i * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_B = load_tile(B_ptr + i * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        # eq:ssd-cb   S = C B^T
        b_S = dot(b_C, tl.trans(b_B), b_S)
    b_S = tl.where(o_t[:, None] >= o_t[None, :], b_S, 0.0)
    if seq_ptr is not None:
        b_id = load_gate(seq_ptr + first, o_t, 1, n_t)
        b_S = tl.where(b_id[:, None] == b_id[None, :], b_S, 0.0)
    store_tile(S_ptr + i * BT, b_S, o_t, o_t, G * BT, n_t, BT)


@triton.jit
def piece_of(pid, cu_ptr, pieces_ptr, T, size, H: tl.constexpr):
    """What program pid of a scan works on: a piece of one sequence of one head.

    cu_ptr, pieces_ptr: Packing.cu_seqlens and .pieces, or None: pieces have `size` tokens.
    Returns the head, the sequence, the number of the piece (through all sequences), the pieces
    before it in its sequence, its first token (through all sequences), the tokens from there to the
    end of its sequence, and the tokens of a piece.
    """
    i_h, i_piece = pid % H, (pid // H).to(tl.int64)
    if cu_ptr is not None:
        i_n = tl.load(pieces_ptr + 3 * i_piece)
        before = tl.load(pieces_ptr + 3 * i_piece + 1)
        size = tl.load(pieces_ptr + 3 * i_piece + 2).to(tl.int32)
        first = tl.load(cu_ptr + i_n) + before * size
        n_t = (tl.load(cu_ptr + i_n + 1) - first).to(tl.int32)
    else:
        NP = tl.cdiv(T, size)
        i_n, before = i_piece // NP, i_piece % NP
        first = i_n * T + before * size
        n_t = (T - before * size).to(tl.int32)
    return i_h, i_n, i_piece, before.to(tl.int32), first, n_t, size


@triton.jit(do_not_specialize=["T", "tokens", "n_rows", "size"])
def ssd_ends_kernel(
    B_ptr,  # [B, T, G, N]; with BACK C
    x_ptr,  # [B, T, H, P]; with BACK dy
    gs_ptr,  # [H, B, T] log2; or None with BACK
    gc_ptr,  # [H, B, T] log2
    seq_ptr,  # [B, T] or None
    ends_ptr,  # [NP, H, N, P] out: the state after each piece, from zero
    kept_ptr,  # [NP, H] out: what is left of the state before the piece
    rows_ptr,  # [n_rows]: sequences whose last piece has an end too; or None: with EDGE all
    cu_ptr,  # [NS + 1] or None
    pieces_ptr,  # [NP, 3] or None
    T,
    tokens,  # B * T
    n_rows,
    size,  # tokens of a piece, where pieces_ptr does not say
    BACK: tl.constexpr,  # back in time: the gradient of the state before each piece
    EDGE: tl.constexpr,  # of a sequence's last piece, too; with BACK of its first
    WHOLE: tl.constexpr,  # every chunk that is read has BC tokens
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BC: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: a piece of one head, BT tokens at a time.  Grid (NP * H).

    With documents BT is BC.
    Reference: linattn_edu.reference.fused.ssd_fwd.
    """
    i_h, i_n, i_piece, before, first, n_t, size = piece_of(
        tl.program_id(0), cu_ptr, pieces_ptr, T, size, H
    )
    wanted = tl.where(before > 0, 1, 0) if BACK else tl.where(n_t > size, 1, 0)
    if EDGE:
        if rows_ptr is None:
            wanted = tl.where(n_t > 0, 1, 0)
        else:
            for i_row in range(n_rows):
                wanted = tl.where(tl.load(rows_ptr + i_row) == i_n, 1, wanted)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    gc_ptr += i_h.to(tl.int64) * tokens + first
    if not BACK:
        gs_ptr += i_h.to(tl.int64) * tokens + first
    b_h = tl.zeros([BN, BP], dtype=tl.float32)
    kept = 1.0
    n_tiles = size // BT
    if EDGE or BACK:  # also of pieces that are shorter
        n_tiles = tl.cdiv(tl.minimum(n_t, size), BT)
    left = tl.where(wanted > 0, n_tiles, 0)
    while left > 0:  # from where the sum needs no decay of its own, until nothing more reaches it
        i_t = n_tiles - left if BACK else left - 1
        own = first + i_t * BT
        n_own = BT if WHOLE else n_t - i_t * BT
        i, i_B = own * H + i_h, own * G + i_h // (H // G)
        start = 0 if BT == BC else i_t * BT % BC  # in the chunk
        n_c = BC if WHOLE else tl.minimum(n_own + start, BC)
        last = tl.load(gc_ptr + i_t * BT - start + n_c - 1)
        if BACK:
            b_r = tl.exp2(load_gate(gc_ptr + i_t * BT, o_t, 1, n_own))
        elif WHOLE:
            b_r = tl.exp2(last - tl.load(gs_ptr + i_t * BT + o_t))
        else:
            b_r = tl.exp2(last - load_step(gs_ptr + i_t * BT, o_t, n_own))
        b_a = tl.exp2(last)
        if seq_ptr is not None:
            b_id, old, end = documents(seq_ptr + own, before * size + i_t, o_t, BT)
            b_r = tl.where(b_id == end, b_r, 0.0)
            b_a = tl.where(end == old, b_a, 0.0)
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_B = load_tile(B_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
        # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X, with the a of all chunks after this one;
        # back in time  dh <- a dh + (diag(e) C)^T dY, with the a of all chunks before it
        b_x = cast(b_x.to(tl.float32) * (b_r * kept)[:, None], b_x.dtype)
        b_h = dot(tl.trans(b_B), b_x, b_h)
        if BT == BC:
            kept *= b_a
        elif BACK:
            kept *= tl.where(start + BT >= n_c, b_a, 1.0)
        else:
            kept *= tl.where(start == 0, b_a, 1.0)
        kept = tl.where(kept > FORGOTTEN, kept, 0.0)
        left = tl.where(kept > 0, left - 1, 0)
    i_end = i_piece * H + i_h
    store_tile(ends_ptr + i_end * N * P, b_h, o_n, o_p, P, N, P)
    tl.store(kept_ptr + i_end, kept)


@triton.jit(do_not_specialize=["T", "tokens", "size"])
def ssd_fwd_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    S_ptr,  # [B, T, G, BC]
    x_ptr,  # [B, T, H, P]
    gs_ptr,  # [H, B, T] log2
    gc_ptr,  # [H, B, T] log2
    h0_ptr,  # [NS, H, N, P] or None
    ends_ptr,  # [NP, H, N, P] of ssd_ends, or None: sequences are of one piece
    kept_ptr,  # [NP, H] of ssd_ends, or None
    D_ptr,  # [H, PER] or None
    z_ptr,  # [B, T, H, P] or None
    seq_ptr,  # [B, T] or None
    out_ptr,  # [B, T, H, P] out
    ht_ptr,  # [NS, H, N, P] out, or None
    cu_ptr,  # [NS + 1] or None
    pieces_ptr,  # [NP, 3] or None
    T,
    tokens,  # B * T
    size,  # tokens of a piece, where pieces_ptr does not say
    WHOLE: tl.constexpr,  # every chunk has as many tokens as it may
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BC: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: a piece of one head, BT tokens at a time.  Grid (NP * H).

    Reference: linattn_edu.reference.fused.ssd_fwd.
    """
    i_h, i_n, i_piece, before, first, n_t, size = piece_of(
        tl.program_id(0), cu_ptr, pieces_ptr, T, size, H
    )
    i_g = i_h // (H // G)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_h = tl.zeros([BN, BP], dtype=tl.float32)
    kept = 1.0
    if ends_ptr is not None:
        left = before
        while left > 0:  # back in time, until nothing is left of what was before
            left -= 1
            i_end = (i_piece - before + left) * H + i_h
            b_h += load_tile(ends_ptr + i_end * N * P, o_n, o_p, P, N, P) * kept
            kept *= tl.load(kept_ptr + i_end)
            kept = tl.where(kept > FORGOTTEN, kept, 0.0)
            left = tl.where(kept > 0, left, 0)
    if h0_ptr is not None:
        n_0 = tl.where(kept > 0, N, 0)
        b_h0 = load_tile(h0_ptr + (i_n * H + i_h) * N * P, o_n, o_p, P, n_0, P)
        b_h += b_h0.to(tl.float32) * kept
    if D_ptr is not None:
        b_D = past_state(D_ptr, i_h, o_p, P, PER)

    gc_ptr += i_h.to(tl.int64) * tokens + first
    gs_ptr += i_h.to(tl.int64) * tokens + first
    before_gc = 0.0
    # gc of a tile's last token is loaded a tile ahead: nothing else hides that load
    next_gc = tl.load(gc_ptr + tl.minimum(BT, n_t) - 1, mask=n_t > 0, other=0.0)
    for i_t in range(tl.cdiv(tl.minimum(n_t, size), BT)):
        own, n_own = first + i_t * BT, n_t - i_t * BT
        if WHOLE:
            n_own = BT
        i_x, i_B = own * H + i_h, own * G + i_g
        start = tl.multiple_of(i_t * BT % BC, BT)  # in the chunk
        b_x = load_tile(x_ptr + i_x * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_C = load_tile(C_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
        b_B = load_tile(B_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
        b_S = load_tile(S_ptr + i_B * BC + start, o_t, o_t, G * BC, n_own, BT)  # [BT, BT]
        b_gc = load_gate(gc_ptr + i_t * BT, o_t, 1, n_own)
        b_gs = load_step(gs_ptr + i_t * BT, o_t, n_own)
        last_gc = next_gc
        next_gc = tl.load(gc_ptr + tl.minimum(i_t * BT + 2 * BT, n_t) - 1)
        b_e, b_r = tl.exp2(b_gc - before_gc), tl.exp2(last_gc - b_gs)
        b_a = tl.exp2(last_gc - before_gc)
        before_gc = tl.where(start + BT < BC, last_gc, 0.0)
        if seq_ptr is not None:
            b_id, old, end = documents(seq_ptr + own, before * size + i_t, o_t, n_own)
            b_e = tl.where(b_id == old, b_e, 0.0)
            b_r = tl.where(b_id == end, b_r, 0.0)
            b_a = tl.where(end == old, b_a, 0.0)
        # eq:ssd-scores   M = C B^T * G * step
        b_M = b_S.to(tl.float32) * decay(b_gc, b_gs)
        # eq:ssd-inter   inter = diag(e) C h
        b_y = dot(b_C, cast(b_h, b_C.dtype)) * b_e[:, None]
        # eq:ssd-output   y = inter + M X + D X
        b_y = dot(cast(b_M, b_x.dtype), b_x, b_y)
        # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X
        b_u = cast(b_x.to(tl.float32) * b_r[:, None], b_x.dtype)
        b_h = dot(tl.trans(b_B), b_u, b_h * b_a)
        if D_ptr is not None:
            b_y += b_x.to(tl.float32) * b_D[None, :]
        # eq:ssd-gate   out = y silu(z)
        if z_ptr is not None:
            b_z = load_tile(z_ptr + i_x * P, o_t, o_p, H * P, n_own, P).to(tl.float32)
            b_y *= b_z * tl.sigmoid(b_z)
        store_tile(out_ptr + i_x * P, b_y, o_t, o_p, H * P, n_own, P)

    if ht_ptr is not None:
        n_last = tl.where((n_t > 0) & (n_t <= size), N, 0)
        store_tile(ht_ptr + (i_n * H + i_h) * N * P, b_h, o_n, o_p, P, n_last, P)


ENDS, FWD = row(4, 3), row(4, 2)
TOKENS = 64  # of a tile of ssd_fwd, and of dx and da; of ends over ranks, three a multiprocessor


def _widths(N: int) -> tuple[int, int]:
    """BN and BP: whole heads."""
    return 128 if N > 64 else 64, 64


def by_head(gc: Tensor) -> Tensor:
    """gc [B, T, H] with the tokens of a head side by side in memory; a copy unless it is so."""
    return gc.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def chunk_scores(
    C: Tensor, B: Tensor, seq_idx: Tensor | None = None, *, chunk_size: int,
    packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch chunk_scores_kernel; arguments and result as in the reference."""
    _, T, G, N = C.shape
    S = C.new_empty(*C.shape[:3], chunk_size)
    NT, *chunks = chunk_args(C, chunk_size, packing)
    chunk_scores_kernel[(NT * G,)](
        C, B, seq_idx, S, *chunks, T, G, N, BT=chunk_size, BN=64, num_warps=8, num_stages=2
    )
    return S


def ssd_ends(
    B: Tensor, x: Tensor, gs: Tensor | None, gc: Tensor, *, chunk_size: int,
    piece: int | None = None, packing: Packing | None = None,
    rows: Tensor | tuple[()] | None = None, back: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch ssd_ends_kernel, 64 tokens at a time; arguments and result as in the reference.

    piece: None: over ranks, by the sequences' kind. rows: the sequences [n] whose last piece is
    wanted; None: all; (): none. What it is of others is not said. back: as ssd_ends_bwd, of C, dy
    and no gs.
    """
    n, T, H, P = x.shape
    G, N = B.shape[2:]
    if piece is None:
        kind = kind_of(B, H, P, chunk_size, packing)
        piece = (by_kind.ssd_piece_bwd(kind) if back else by_kind.ssd_piece(kind, True)).takes
    NP, sequences, offsets = n * cdiv(T, piece), (None, None), None
    if packing is not None:
        pieces, offsets = packing.pieces(piece, T), packing.piece_offsets(piece)
        NP, sequences = len(pieces), (packing.cu_seqlens, pieces)
    ends, kept = gc.new_empty(n, NP // n, H, N, P), gc.new_empty(n, NP // n, H)
    n_rows = 0 if rows is None else len(rows)
    ssd_ends_kernel[(NP * H,)](
        B, x.contiguous(), gs if gs is None else by_head(gs), by_head(gc), None, ends, kept,
        rows if n_rows else None, *sequences, T, n * T, n_rows, piece, back,
        rows is None or n_rows > 0, whole(x, chunk_size, packing), G, H, N, P, chunk_size,
        min(chunk_size, TOKENS), *_widths(N), **ENDS.launch(),
    )  # fmt: skip
    return ends, kept, offsets


def ssd_fwd(
    C: Tensor, B: Tensor, S: Tensor, x: Tensor, gs: Tensor, gc: Tensor,
    initial_state: Tensor | None = None, D: Tensor | None = None, z: Tensor | None = None,
    seq_idx: Tensor | None = None, *, output_final_state: bool = False,
    packing: Packing | None = None, maps: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Launch ssd_ends_kernel, where a sequence has several pieces, and ssd_fwd_kernel.

    Arguments and results as in the reference. maps: of ssd_ends, where they are made already.
    """
    n, T, H, P = x.shape
    G, N = B.shape[2:]
    gs, gc = by_head(gs), by_head(gc)
    BC, widths = S.shape[3], _widths(N)
    kind = kind_of(B, H, P, BC, packing, (C, B, S, x))
    piece = by_kind.ssd_piece(kind, maps is not None).takes
    NP, sequences = n * cdiv(T, piece), (None, None)
    if packing is not None:
        n, cut = packing.sequences, (piece, T)
        if maps is None:  # each by its own length
            piece = limits.SSD_PIECE
            cut = by_kind.ssd_least(), T, by_kind.ssd_pieces(kind).takes, piece
        pieces = packing.pieces(*cut)
        NP, sequences = len(pieces), (packing.cu_seqlens, pieces)
    out, last = torch.empty_like(x), None
    ends, kept = (None, None) if maps is None or piece >= T else maps
    if output_final_state:
        last = gc.new_empty(n, H, N, P)
        if packing is not None:  # a sequence without tokens has no program
            last.zero_() if initial_state is None else last.copy_(initial_state)
    if piece < T and maps is None:
        ends, kept = gc.new_empty(NP, H, N, P), gc.new_empty(NP, H)
        ssd_ends_kernel[(NP * H,)](
            B, x.contiguous(), gs, gc, seq_idx, ends, kept, None, *sequences, T, gc.numel() // H,
            0, piece, False, False, True, G, H, N, P, BC, BC, *widths, **ENDS.launch(),
        )  # fmt: skip
    given = C, B, S, x, out, gs, gc, initial_state, ends, kept, D, last
    gluon = by_kind.ssd_fwd(kind, seq_idx is not None, z is not None).takes == "gluon"
    if gluon and ssd_fwd_gluon.ssd_fwd_gluon(given, piece):
        return out, last
    ssd_fwd_kernel[(NP * H,)](
        C, B, S, x.contiguous(), gs, gc, initial_state, ends, kept, D, z, seq_idx, out, last,
        *sequences, T, gc.numel() // H, piece, whole(x, BC, packing),
        1 if D is None else D.numel() // H, G, H, N, P, BC, min(BC, TOKENS), *widths,
        **FWD.launch(),
    )  # fmt: skip
    return out, last
