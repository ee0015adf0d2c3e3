"""Mamba-2 in few stages: the output from shared scores, and every gradient of a chunk at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.ssd.chunk_cumsum import decays
from linattn_edu.kernels.ssd.chunk_scan import past_state
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_args,
    chunk_of,
    decay_matrix,
    decay_matrix_transposed,
    device_of,
    dot,
    load_gate,
    load_row,
    load_tile,
    row,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def chunk_scores_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    S_ptr,  # [B, T, G, BT] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    G: tl.constexpr, N: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one group.  Grid (NT * G).

    Reference: linattn_edu.reference.ssd.fused.
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
    store_tile(S_ptr + i * BT, b_S, o_t, o_t, G * BT, n_t, BT)


@triton.jit
def tile_decays(gc_ptr, start, o_t, n_t, H: tl.constexpr):
    """gc, e, r, a of the tokens start + o_t of a chunk with n_t tokens, as of a chunk of their own.

    gc_ptr: at the chunk's first token and the head.
    """
    b_gc = tl.load(gc_ptr + tl.minimum(start + o_t, n_t - 1) * H)
    b_last = tl.load(gc_ptr + (tl.minimum(start + o_t.shape[0], n_t) - 1) * H)
    b_first = tl.load(gc_ptr + (tl.maximum(tl.minimum(start, n_t), 1) - 1) * H)
    b_first = tl.where(start > 0, b_first, 0.0)
    return b_gc, tl.exp2(b_gc - b_first), tl.exp2(b_last - b_gc), tl.exp2(b_last - b_first)


@triton.jit
def tile_documents(seq_ptr, i_t, start, o_t, n_t):
    """Documents of those tokens, of the state before them, of the state after them.

    seq_ptr: at the chunk's first token.  i_t: the chunk's number in its sequence.
    """
    b_id = tl.load(seq_ptr + tl.minimum(start + o_t, n_t - 1))
    before = tl.load(seq_ptr + tl.minimum(start, n_t) - tl.minimum(start + i_t, 1))
    end = tl.load(seq_ptr + tl.minimum(start + o_t.shape[0], n_t) - 1)
    return b_id, before, end


@triton.jit
def part_of(pid, cu_ptr, parts_ptr, offsets_ptr, T, H: tl.constexpr, PART: tl.constexpr,
            BC: tl.constexpr):  # fmt: skip
    """What program pid of a scan works on: PART tokens of one sequence of one head.

    cu_ptr, parts_ptr, offsets_ptr: Packing.cu_seqlens, .parts(PART) and .chunk_offsets, or None.
    Returns the head, the sequence, the number of the part (through all sequences) and of its first
    chunk, the parts and chunks before it in its sequence, and, as `chunk_of`, its tokens.
    """
    i_h, i_part, first, n_t = chunk_of(pid, cu_ptr, parts_ptr, T, H, PART)
    if cu_ptr is not None:
        i_n = tl.load(parts_ptr + 2 * i_part)
        before = tl.load(parts_ptr + 2 * i_part + 1).to(tl.int32)
        i_c = tl.load(offsets_ptr + i_n)
    else:
        NP = tl.cdiv(T, PART)
        i_n, before = i_part // NP, (i_part % NP).to(tl.int32)
        i_c = i_n * tl.cdiv(T, BC)
    return i_h, i_n, i_part, i_c + before * (PART // BC), before, before * (PART // BC), first, n_t


@triton.jit(do_not_specialize=["T"])
def ssd_ends_kernel(
    B_ptr,  # [B, T, G, N]; in reverse C
    x_ptr,  # [B, T, H, P]; in reverse dy
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    seq_ptr,  # [B, T] or None
    ends_ptr,  # [NP, H, N, P] out: the state after each part that began at zero
    kept_ptr,  # [NP, H] out: what is left of the state before the part
    cu_ptr,  # [N + 1] or None
    parts_ptr,  # [NP, 2] or None
    offsets_ptr,  # [N + 1] or None
    T,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, REVERSE: tl.constexpr,
    PART: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: PART tokens of one head.  Grid (NP * H).

    Reference: linattn_edu.reference.ssd.fused.
    """
    i_h, _, i_part, _, before, c_0, first, n_t = part_of(
        tl.program_id(0), cu_ptr, parts_ptr, offsets_ptr, T, H, PART, BT
    )
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_h = tl.zeros([BN, BP], dtype=tl.float32)
    kept = 1.0
    if REVERSE:  # nothing reads the end of a sequence's first part
        n_chunks = tl.where(before > 0, tl.cdiv(tl.minimum(n_t, PART), BT), 0)
    else:  # nor that of its last
        n_chunks = tl.where(n_t > PART, PART // BT, 0)
    for i in range(n_chunks):
        i_t = n_chunks - 1 - i if REVERSE else i
        own, n_own = first + i_t * BT, n_t - i_t * BT
        i_gc = own * H + i_h
        b_x = load_tile(x_ptr + i_gc * P, o_t, o_p, H * P, n_own, P).to(tl.float32)  # [BT, BP]
        i_B = (own * G + i_h // (H // G)) * N
        b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_own, N)  # [BT, BN]
        _gc, b_e, b_r, b_a = tile_decays(gc_ptr + i_gc, 0, o_t, n_own, H)
        if not REVERSE:
            b_r *= load_row(step_ptr + i_gc, o_t, H, n_own)
        if seq_ptr is not None:
            b_id, start, end = tile_documents(seq_ptr + own, c_0 + i_t, 0, o_t, n_own)
            b_e = tl.where(b_id == start, b_e, 0.0)
            b_r = tl.where(b_id == end, b_r, 0.0)
            b_a = tl.where(end == start, b_a, 0.0)
        # eq:ssd-state   h <- a h + (diag(r * step) B)^T X, and in reverse ds <- a ds + (diag(e) C)^T dY
        b_w = b_e if REVERSE else b_r
        b_h = dot(tl.trans(b_B), cast(b_x * b_w[:, None], b_B.dtype), b_h * b_a)
        kept *= b_a
    i_end = i_part * H + i_h
    store_tile(ends_ptr + i_end * N * P, b_h, o_n, o_p, P, N, P)
    tl.store(kept_ptr + i_end, kept)


@triton.jit(do_not_specialize=["T"])
def ssd_scan_kernel(
    C_ptr,  # [B, T, G, N]: what reads the state; in reverse B
    B_ptr,  # [B, T, G, N]: what writes it; in reverse C
    S_ptr,  # [B, T, G, BC]
    x_ptr,  # [B, T, H, P]; in reverse dy
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h0_ptr,  # [NS, H, N, P] or None; in reverse the gradient of the final state
    ends_ptr,  # [NP, H, N, P] of ssd_ends, or None: sequences are of one part
    kept_ptr,  # [NP, H] of ssd_ends, or None
    D_ptr,  # [H, PER] or None
    z_ptr,  # [B, T, H, P] or None; in reverse None
    seq_ptr,  # [B, T] or None
    h_ptr,  # [B, NT, H, N, P]: state entering each chunk; forward None
    out_ptr,  # [B, T, H, P] out; in reverse dx
    ht_ptr,  # [NS, H, N, P] out, or None; in reverse the gradient of the initial state
    dh_ptr,  # [B, NT, H, N, P] out: gradient of the state leaving each chunk; forward None
    dlast_ptr,  # [B, NT, H] out; forward None
    cu_ptr,  # [NS + 1] or None
    parts_ptr,  # [NP, 2] or None
    offsets_ptr,  # [NS + 1] or None
    T,
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, REVERSE: tl.constexpr,
    PART: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: PART tokens of one head, BT at a time.  Grid (NP * H).

    The adjoint is the same scan read backwards: C and B change places, e and r, G and G^T.
    Reference: linattn_edu.reference.ssd.fused.
    """
    i_h, i_n, i_part, i_c, before, c_0, first, n_t = part_of(
        tl.program_id(0), cu_ptr, parts_ptr, offsets_ptr, T, H, PART, BC
    )
    i_g = i_h // (H // G)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_h = tl.zeros([BN, BP], dtype=tl.float32)
    if h0_ptr is not None:
        b_h += load_tile(h0_ptr + (i_n * H + i_h) * N * P, o_n, o_p, P, N, P).to(tl.float32)
    if ends_ptr is not None:
        n_ends = tl.cdiv(n_t, PART) - 1 if REVERSE else before
        for j in range(n_ends):
            i_end = (i_part + n_ends - j if REVERSE else i_part - n_ends + j) * H + i_h
            b_h *= tl.load(kept_ptr + i_end)
            b_h += load_tile(ends_ptr + i_end * N * P, o_n, o_p, P, N, P)
    if D_ptr is not None:
        b_D = past_state(D_ptr, i_h, o_p, P, PER)

    n_tiles = tl.cdiv(tl.minimum(n_t, PART), BT)
    for i in range(n_tiles):
        i_tile = n_tiles - 1 - i if REVERSE else i
        i_t, start = i_tile * BT // BC, i_tile * BT % BC
        chunk, n_chunk = first + i_t * BC, n_t - i_t * BC
        own, n_own = chunk + start, n_chunk - start
        i_x, i_B = own * H + i_h, own * G + i_g
        b_x = load_tile(x_ptr + i_x * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_C = load_tile(C_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
        b_B = load_tile(B_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
        b_S = load_tile(S_ptr + i_B * BC + start, o_t, o_t, G * BC, n_own, BT)  # [BT, BT]
        b_step = load_row(step_ptr + i_x, o_t, H, n_own)
        b_gc, b_e, b_r, b_a = tile_decays(gc_ptr + chunk * H + i_h, start, o_t, n_chunk, H)
        if REVERSE:
            b_M = tl.trans(b_S).to(tl.float32) * decay_matrix_transposed(b_gc, o_t)
        else:
            b_M = b_S.to(tl.float32) * (decay_matrix(b_gc, o_t) * b_step[None, :])
        if seq_ptr is not None:
            b_id, old, end = tile_documents(seq_ptr + chunk, c_0 + i_t, start, o_t, n_chunk)
            b_e = tl.where(b_id == old, b_e, 0.0)
            b_r = tl.where(b_id == end, b_r, 0.0)
            b_a = tl.where(end == old, b_a, 0.0)
            b_M = tl.where(b_id[:, None] == b_id[None, :], b_M, 0.0)
        b_hs = cast(b_h, b_x.dtype)
        if REVERSE:
            if (i == 0) | (start == BC - BT):
                i_S = (i_c + i_t) * H + i_h
                store_tile(dh_ptr + i_S * N * P, b_hs, o_n, o_p, P, N, P)
                b_h0 = load_tile(h_ptr + i_S * N * P, o_n, o_p, P, N, P)
                # eq:ssd-dlast   dlast = a <h, ds>
                n_last = tl.minimum(BC, n_chunk)
                last = tl.exp2(tl.load(gc_ptr + (chunk + n_last - 1) * H + i_h))
                if seq_ptr is not None:
                    old = tl.load(seq_ptr + chunk - tl.minimum(c_0 + i_t, 1))
                    last = tl.where(tl.load(seq_ptr + chunk + n_last - 1) == old, last, 0.0)
                last *= tl.sum(tl.sum(b_h0.to(tl.float32) * b_h, 1), 0)
                tl.store(dlast_ptr + i_S, last)
            b_read, b_write = b_r, b_e
        else:
            b_read, b_write = b_e, b_r * b_step
        # eq:ssd-inter   inter = diag(e) C h
        b_y = dot(b_C, b_hs) * b_read[:, None]
        # eq:ssd-output   y = inter + M X
        b_y = dot(cast(b_M, b_x.dtype), b_x, b_y)
        # eq:ssd-state   h <- a h + (diag(r * step) B)^T X
        b_u = cast(b_x.to(tl.float32) * b_write[:, None], b_x.dtype)
        b_h = dot(tl.trans(b_B), b_u, b_h * b_a)
        if REVERSE:
            # eq:ssd-dx   dX = diag(step) dXs + D dY
            b_y *= b_step[:, None]
        if D_ptr is not None:
            b_y += b_x.to(tl.float32) * b_D[None, :]
        # eq:ssd-gate   out = y silu(z)
        if z_ptr is not None:
            b_z = load_tile(z_ptr + i_x * P, o_t, o_p, H * P, n_own, P).to(tl.float32)
            b_y *= b_z * tl.sigmoid(b_z)
        store_tile(out_ptr + i_x * P, b_y, o_t, o_p, H * P, n_own, P)

    if ht_ptr is not None:
        if (before == 0) if REVERSE else ((n_t > 0) & (n_t <= PART)):
            store_tile(ht_ptr + (i_n * H + i_h) * N * P, b_h, o_n, o_p, P, N, P)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_scores_kernel(
    S_ptr,  # [B, T, G, BC]
    x_ptr,  # [B, T, H, P]
    dy_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    seq_ptr,  # [B, T] or None
    dgc_ptr,  # [2, B, T, H] out: of the blocks on the diagonal, and off it; to be added
    dstep_ptr,  # [2, B, T, H] out, likewise
    dS_ptr,  # [SPLITS, B, T, G, BC] out
    dD_ptr,  # [B, T, H] out: each token's part of D [H]; or None
    dD_channel_ptr,  # [NT, TILES, H, P] out: of D [H, P]; or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, BC: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: what some heads of a group give through a block of BT x BT scores.

    Grid (NT * G * SPLITS * BLOCKS): a chunk has one block, or two on the diagonal and one below.
    Reference: linattn_edu.reference.ssd.fused.
    """
    TILES: tl.constexpr = BC // BT
    BLOCKS: tl.constexpr = TILES * (TILES + 1) // 2
    block = tl.program_id(0) % BLOCKS
    i_gs, i_c, first, n_t = chunk_of(
        tl.program_id(0) // BLOCKS, cu_ptr, chunks_ptr, T, G * SPLITS, BC
    )
    i_g, i_split = i_gs // SPLITS, i_gs % SPLITS
    HEADS: tl.constexpr = H // G
    PART: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    far = block // 2  # 0 on the diagonal, 1 below
    row, col = tl.minimum(block, 1) * BT, block % 2 * BT
    o_t, o_p = tl.arange(0, BT), tl.arange(0, BP)
    n_row, n_col = n_t - row, n_t - col
    row += first
    col += first
    causal = (row + o_t)[:, None] >= (col + o_t)[None, :]
    diagonal = (row + o_t)[:, None] == (col + o_t)[None, :]
    i_S = (row * G + i_g) * BC + col - first
    b_S = load_tile(S_ptr + i_S, o_t, o_t, G * BC, n_row, BT)
    if seq_ptr is not None:
        b_row_id = tl.load(seq_ptr + first + tl.minimum(row - first + o_t, n_t - 1))
        b_col_id = tl.load(seq_ptr + first + tl.minimum(col - first + o_t, n_t - 1))
        causal &= b_row_id[:, None] == b_col_id[None, :]
    b_dS = tl.zeros([BT, BT], dtype=tl.float32)

    for i_s in range(i_split * PART, tl.minimum(i_split * PART + PART, HEADS)):
        i_h = i_g * HEADS + i_s
        i_row, i_col = row * H + i_h, col * H + i_h
        b_dy = load_tile(dy_ptr + i_row * P, o_t, o_p, H * P, n_row, P)  # [BT, BP]
        b_x = load_tile(x_ptr + i_col * P, o_t, o_p, H * P, n_col, P)  # [BT, BP]
        b_step = load_row(step_ptr + i_col, o_t, H, n_col)
        b_gc_row = load_gate(gc_ptr + i_row, o_t, H, n_row)
        b_gc_col = load_gate(gc_ptr + i_col, o_t, H, n_col)
        b_G = b_gc_row[:, None] - b_gc_col[None, :]
        b_G = tl.exp2(tl.where(causal, b_G, float("-inf")))
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        b_W = dot(b_dy, tl.trans(b_x)) * b_G
        b_dS += b_W * b_step[None, :]
        # eq:ssd-dd   dD = sum over tokens of dY * X
        if dD_ptr is not None:
            b_dD = tl.sum(tl.where(diagonal, b_W, 0.0), 1)
            tl.store(dD_ptr + i_row + o_t * H, b_dD, mask=(o_t < n_row) & (far == 0))
        if dD_channel_ptr is not None:
            b_dD = tl.sum(b_dy.to(tl.float32) * b_x.to(tl.float32), 0)
            i_D = ((i_c * TILES + block) * H + i_h) * P
            tl.store(dD_channel_ptr + i_D + o_p, b_dD, mask=(o_p < P) & (far == 0))
        # eq:ssd-dstep-scores   dstep_j = sum_i S_ij G_ij dY_i . x_j
        b_W *= b_S.to(tl.float32)
        b_dstep = tl.sum(b_W, 0)
        # eq:ssd-dgc-scores   dgc = rowsum(W) - colsum(W), W = M * dY X^T below the diagonal
        b_W = tl.where(diagonal, 0.0, b_W) * b_step[None, :]
        b_drow, b_dcol = tl.sum(b_W, 1), -tl.sum(b_W, 0)
        dgc, dstep = dgc_ptr + far * tokens * H, dstep_ptr + far * tokens * H
        if far == 0:
            tl.store(dgc + i_row + o_t * H, b_drow + b_dcol, mask=o_t < n_row)
        else:
            tl.store(dgc + i_row + o_t * H, b_drow, mask=o_t < n_row)
            tl.store(dgc + i_col + o_t * H, b_dcol, mask=o_t < n_col)
            tl.store(dstep + i_row + o_t * H, 0.0 * b_drow, mask=o_t < n_row)
        tl.store(dstep + i_col + o_t * H, b_dstep, mask=o_t < n_col)

    dS_ptr += i_split * tokens * G * BC + i_S
    store_tile(dS_ptr, b_dS, o_t, o_t, G * BC, n_row, BT)
    if far == 1:  # and the block above the diagonal
        dS_ptr += BT - BT * G * BC
        store_tile(dS_ptr, 0.0 * b_dS, o_t, o_t, G * BC, n_col, BT)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_states_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    dy_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, N, P]
    dh_ptr,  # [B, NT, H, N, P]
    seq_ptr,  # [B, T] or None
    parts_ptr,  # [SPLITS, 2, B, T, G, N] out: of dC and dB
    rows_ptr,  # [2, B, T, H] out: of dgc, and m / step
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: what some heads of a group give to dC, or to dB, through the states.

    Grid (NT * G * SPLITS * 2).  Reference: linattn_edu.reference.ssd.fused.
    """
    i_gs, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G * SPLITS * 2, BT)
    to_B, i_split, i_g = i_gs % 2, i_gs // 2 % SPLITS, i_gs // (2 * SPLITS)
    if to_B == 1:
        v_ptr = x_ptr
        k_ptr = B_ptr
        state_ptr = dh_ptr
    else:
        v_ptr = dy_ptr
        k_ptr = C_ptr
        state_ptr = h_ptr
    HEADS: tl.constexpr = H // G
    PART: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    i_B = first * G + i_g
    b_k = load_tile(k_ptr + i_B * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_d = tl.zeros([BT, BN], dtype=tl.float32)
    for i_s in range(i_split * PART, tl.minimum(i_split * PART + PART, HEADS)):
        i_h = i_g * HEADS + i_s
        i = first * H + i_h
        _, b_e, b_r, _, _ = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
        b_v = load_tile(v_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_state = load_tile(state_ptr + (i_c * H + i_h) * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        b_w = tl.where(to_B == 1, b_r, b_e)
        # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
        # eq:ssd-dgc-state   m_j = B_j . dB_j = step_j r_j x_j . (B ds)_j
        b_row = b_w * tl.sum(b_v.to(tl.float32) * dot(b_k, b_state), 1)
        tl.store(rows_ptr + to_B * tokens * H + i + o_t * H, b_row, mask=o_t < n_t)
        b_w *= tl.where(to_B == 1, load_row(step_ptr + i, o_t, H, n_t), 1.0)
        # eq:ssd-dc-inter   inter = diag(e) dY h^T
        # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
        b_v = cast(b_v.to(tl.float32) * b_w[:, None], b_v.dtype)
        b_d = dot(b_v, tl.trans(b_state), b_d)
    parts_ptr += ((i_split * 2 + to_B) * tokens * G + i_B) * N
    store_tile(parts_ptr, b_d, o_t, o_n, G * N, n_t, N)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_sum_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    parts_ptr,  # [SPLITS, 2, B, T, G, N]
    dS_ptr,  # [SPLITS, B, T, G, BT]
    dB_ptr,  # [B, T, G, N] out
    dC_ptr,  # [B, T, G, N] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    G: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: dC or dB of one chunk of one group, from its parts.  Grid (NT * G * 2).

    Reference: linattn_edu.reference.ssd.fused.
    """
    i_gb, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G * 2, BT)
    to_B, i_g = i_gb % 2, i_gb // 2
    i = first * G + i_g
    o_t, o_n = tl.arange(0, BT), tl.arange(0, BN)
    b_d = tl.zeros([BT, BN], dtype=tl.float32)
    b_dS = tl.zeros([BT, BT], dtype=tl.float32)
    o_r, o_c = o_t[:, None] + 0 * o_t[None, :], 0 * o_t[:, None] + o_t[None, :]
    if to_B == 1:  # dB takes the transpose of dscores
        o_r, o_c = o_c, o_r
        far_ptr = C_ptr
        d_ptr = dB_ptr
    else:
        far_ptr = B_ptr
        d_ptr = dC_ptr
    o_S = o_r * G * BT + o_c
    for i_split in range(SPLITS):
        part = parts_ptr + ((i_split * 2 + to_B) * tokens * G + i) * N
        b_d += load_tile(part, o_t, o_n, G * N, n_t, N)
        b_dS += tl.load(dS_ptr + (i_split * tokens * G + i) * BT + o_S, mask=o_r < n_t, other=0.0)
    # eq:ssd-dc   dC = inter + dscores B
    # eq:ssd-db   dB = dB_state + dscores^T C
    b_far = load_tile(far_ptr + i * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_d = dot(cast(b_dS, b_far.dtype), b_far, b_d)
    store_tile(d_ptr + i * N, b_d, o_t, o_n, G * N, n_t, N)


# chunks of more than 64 tokens -> row: 8 warps share a tile of 128 tokens
STATES = {False: row(4, 3), True: row(8, 3)}
SUM = {False: row(4, 1), True: row(8, 1)}
SCAN, SCAN_BWD, ENDS, SCORES = row(4, 2), row(4, 2), row(8, 2), row(4, 2)
TOKENS = 64  # of a tile of ssd_scan and ssd_bwd_scores
MANY = 80  # heads of a program where sums over heads are kept
PART = 4096  # tokens of a program of a scan
LARGEST = (128, 64)  # N and P of one tile


def fits(x: Tensor, B: Tensor) -> bool:
    """Whether the kernels hold x's heads and B's states: 16 bit, a Hopper or later, one tile."""
    large = device_of(x)[0] in ("hopper", "blackwell")
    return large and x.element_size() == 2 and B.shape[3] <= LARGEST[0] and x.shape[3] <= LARGEST[1]


def chunk_scores(
    C: Tensor, B: Tensor, *, chunk_size: int, packing: Packing | None = None
) -> Tensor:
    """Launch chunk_scores_kernel; arguments and result as in the reference."""
    _, T, G, N = C.shape
    S = C.new_empty(*C.shape[:3], chunk_size)
    NT, *chunks = chunk_args(C, chunk_size, packing)
    chunk_scores_kernel[(NT * G,)](
        C, B, S, *chunks, T, G, N, BT=chunk_size, BN=64, num_warps=8, num_stages=2
    )
    return S


def _scan(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    state: Tensor | None,
    D: Tensor | None,
    z: Tensor | None,
    seq_idx: Tensor | None,
    h: Tensor | None,
    last: Tensor | None,
    packing: Packing | None,
) -> tuple[Tensor, ...]:
    """Launch ssd_ends_kernel, where a sequence has parts, and ssd_scan_kernel; h: in reverse.

    last: where the state after the scan goes.
    """
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    BC, reverse = S.shape[3], h is not None
    BN, BP = _widths(N)
    out, ends, kept, dh, dlast = torch.empty_like(x), None, None, None, None
    parts = (x.shape[0] * cdiv(T, PART), None, None, None)
    if packing is not None:
        table = packing.parts(PART, T)
        parts = (len(table), packing.cu_seqlens, table, packing.chunk_offsets)
    NP, *sequences = parts
    if T > PART:
        ends, kept = gc.new_empty(NP, H, N, P), gc.new_empty(NP, H)
        ssd_ends_kernel[(NP * H,)](
            B, x, step, gc, seq_idx, ends, kept, *sequences, T, G, H, N, P, reverse, PART, BC, BN,
            BP, **ENDS.launch(),
        )  # fmt: skip
    if reverse:
        dh, dlast = torch.empty_like(h), gc.new_empty(h.shape[:3])
    ssd_scan_kernel[(NP * H,)](
        C, B, S, x, step, gc, state, ends, kept, D, z, seq_idx, h, out, last, dh, dlast, *sequences,
        T, 1 if D is None else D.numel() // H, G, H, N, P, reverse, PART, BC, min(BC, TOKENS), BN,
        BP, **(SCAN_BWD if reverse else SCAN).launch(),
    )  # fmt: skip
    return out, dh, dlast


def _last(B: Tensor, x: Tensor, state: Tensor | None, packing: Packing | None) -> Tensor:
    """Memory for the states after a scan; those of sequences without tokens are there already."""
    _, T, H, P = x.shape
    n = x.shape[0] if packing is None else packing.sequences
    last = x.new_empty(n, H, B.shape[3], P, dtype=torch.float32)
    if packing is not None or T == 0:
        last.zero_() if state is None else last.copy_(state)
    return last


def ssd_fwd(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    output_final_state: bool = False,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels of the scan; arguments and result as in the reference."""
    last = _last(B, x, initial_state, packing) if output_final_state else None
    out, *_ = _scan(C, B, S, x, step, gc, initial_state, D, z, seq_idx, None, last, packing)
    return out, last


def ssd_bwd_dx(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dy: Tensor,
    dht: Tensor | None = None,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernels of the scan in reverse; arguments and result as in the reference."""
    dh0 = _last(B, dy, dht, packing)
    dx, dh, dlast = _scan(B, C, S, dy, step, gc, dht, D, None, seq_idx, h, dh0, packing)
    return dx, dh, dh0, dlast


def _widths(N: int) -> tuple[int, int]:
    """BN and BP: whole heads."""
    return 128 if N > 64 else 64, 64


def ssd_bwd(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dh: Tensor,
    dy: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Launch ssd_bwd's kernels; arguments and result as in the reference."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    BC, tokens, splits = S.shape[3], gc.numel() // H, cdiv(H // G, MANY)
    BT, (BN, BP) = min(BC, TOKENS), _widths(N)
    NT, *chunks = chunk_args(x, BC, packing)
    dB, dC, tiles = torch.empty_like(B), torch.empty_like(C), BC // BT
    dstep = gc.new_empty(2 if tiles == 2 else 1, *gc.shape)
    dgc = torch.empty_like(dstep)
    parts, dS = gc.new_empty(splits, 2, *B.shape), gc.new_empty(splits, *S.shape)
    rows = gc.new_empty(2, *gc.shape)
    per = 1 if D is None else D.numel() // H
    dD = dD_head = dD_channel = None
    if D is not None:
        dD = gc.new_empty(tokens if per == 1 else NT * tiles, H, per)
        dD_head, dD_channel = (dD, None) if per == 1 else (None, dD)
    ssd_bwd_states_kernel[(NT * G * splits * 2,)](
        C, B, x, dy, step, gc, h, dh, seq_idx, parts, rows, *chunks, T, tokens, G, H, N, P, splits,
        BC, BN, BP, **STATES[BC > 64].launch(),
    )  # fmt: skip
    ssd_bwd_scores_kernel[(NT * G * splits * (tiles * (tiles + 1) // 2),)](
        S, x, dy, step, gc, seq_idx, dgc, dstep, dS, dD_head, dD_channel, *chunks, T, tokens, G, H,
        P, BC, splits, BT, BP, **SCORES.launch(),
    )  # fmt: skip
    ssd_bwd_sum_kernel[(NT * G * 2,)](
        C, B, parts, dS, dB, dC, *chunks, T, tokens, G, N, splits, BC, BN, **SUM[BC > 64].launch()
    )
    dD = None if dD is None else dD.sum(0).view(D.shape)
    return dB, dC, dstep.sum(0), dgc.sum(0).add_(rows[0]), rows[1], dD
