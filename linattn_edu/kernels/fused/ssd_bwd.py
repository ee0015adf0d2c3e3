"""The backward pass of Mamba-2 in few stages: every gradient of a chunk at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.fused.ssd_fwd import (
    TOKENS,
    _widths,
    by_head,
    decay,
    documents_of,
    load_step,
    ssd_ends,
    store_sums,
    tile_of,
)
from linattn_edu.kernels.gluon.kernels import ssd_bwd
from linattn_edu.kernels.routes import by_kind, kind_of
from linattn_edu.kernels.rows import chunk_args, row, whole
from linattn_edu.kernels.ssd.chunk_scan import past_state
from linattn_edu.kernels.tiles import (
    cast,
    chunk_of,
    dot,
    load_gate,
    load_tile,
    load_vector,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "tokens"])
def ssd_bwd_dx_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    gs_ptr,  # [H, B, T] log2
    gc_ptr,  # [H, B, T] log2
    dh_ptr,  # [B, NT, H, N, P]
    dy_ptr,  # [B, T, H, P]
    xdy_ptr, dgc_ptr,  # [H, B, T]
    D_ptr,  # [H, PER] or None
    seq_ptr,  # [B, T] or None
    dx_ptr,  # [B, T, H, P] out
    sums_ptr,  # [3, H, B, T] out: dgc; dstep; m
    dD_ptr,  # [NT, TILES, H, P] out: of D [H, P]; or None
    cu_ptr, chunks_ptr, T,  # of tile_of
    tokens,  # B * T
    WHOLE: tl.constexpr,  # every chunk has as many tokens as it may
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BC: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: dx of a tile of BT tokens of a chunk of BC, some heads of a group.

    Grid (NT * G * SPLITS * BC / BT).  Of two tiles the first has what the second reads of it, as a
    product of its own: there the decay is one factor a row and one a column.
    Reference: linattn_edu.reference.fused.ssd_bwd.
    """
    TILES: tl.constexpr = BC // BT
    start, i_g, _, i_h, n_heads, i_c, first, n_t = tile_of(
        tl.program_id(0), cu_ptr, chunks_ptr, T, H, G, SPLITS, BC, BT, WHOLE
    )
    own, n_own = first + start, BT if WHOLE else n_t - start
    n_far = tl.where(start == 0, n_t - BT, 0)  # tokens of the second tile, for the first
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    i_B = own * G + i_g
    b_B = load_tile(B_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    b_C = load_tile(C_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    # eq:ssd-cb   S = C B^T
    b_ST = dot(b_B, tl.trans(b_C))  # [BT, BT], of the tile's own tokens, transposed
    b_same = tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_ST, 0.0), 1)  # S_jj
    b_ST = tl.where(o_t[:, None] < o_t[None, :], b_ST, 0.0)
    if TILES == 2:
        b_C1 = load_tile(C_ptr + (i_B + BT * G) * N, o_t, o_n, G * N, n_far, N)  # [BT, BN]
        b_far = dot(b_B, tl.trans(b_C1))  # [BT, BT], of the second tile's tokens
    if seq_ptr is not None:
        _id, _before, end = documents_of(seq_ptr, chunks_ptr, i_c, first, T, tl.arange(0, BC), n_t)
        b_id = load_gate(seq_ptr + own, o_t, 1, n_own)
        b_ST = tl.where(b_id[:, None] == b_id[None, :], b_ST, 0.0)
        if TILES == 2:
            b_id1 = load_gate(seq_ptr + first, BT + o_t, 1, n_t)
            b_far = tl.where(b_id[:, None] == b_id1[None, :], b_far, 0.0)
    if TILES == 2:
        b_far = cast(b_far, b_B.dtype)

    # of the chunk's last token, and of the tile's, or of the next where no token follows
    n_last, n_mid = tl.minimum(n_t, BC) - 1, tl.minimum(start + BT, tl.minimum(n_t, BC)) - 1
    i_gate = i_h.to(tl.int64) * tokens + first
    last, mid = tl.load(gc_ptr + i_gate + n_last), tl.load(gc_ptr + i_gate + n_mid)
    b_gs = load_step(gs_ptr + i_gate + start, o_t, n_own)
    b_xdy = load_vector(xdy_ptr + i_gate + start, o_t, n_own)
    plane = H * tokens.to(tl.int64)
    for i_s in range(n_heads):
        i, i_S = own * H + i_h, (i_c * H + i_h) * N * P
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_ds = load_tile(dh_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
        i_own = i_gate + start
        b_gc = load_gate(gc_ptr + i_own, o_t, 1, n_own)
        # of a token that writes nothing, weight 1 until the end: dstep is of its write
        b_gw = tl.where(b_gs == float("inf"), b_gc, b_gs)
        b_step, b_own = tl.exp2(b_gc - b_gs), b_same * b_xdy
        b_dgc = load_vector(dgc_ptr + i_own, o_t, n_own)
        if D_ptr is not None:
            b_D = past_state(D_ptr, i_h, o_p, P, PER)
        b_r = tl.exp2(last - b_gw)
        b_w, b_on = tl.exp2(b_gc - b_gw), tl.where(b_gs == float("inf"), 0.0, 1.0)
        if TILES == 2:
            i_1 = (first + BT) * H + i_h
            b_v = load_tile(dy_ptr + i_1 * P, o_t, o_p, H * P, n_far, P)  # [BT, BP]
            b_gc1 = load_gate(gc_ptr + i_gate + BT, o_t, 1, n_t - BT)
            b_e1 = tl.exp2(tl.minimum(b_gc1 - mid, 0.0))
            b_v = cast(b_v.to(tl.float32) * b_e1[:, None], b_v.dtype)
            b_r1 = tl.exp2(mid - b_gw)
        # of the next head, one head ahead
        i_gate += tl.where(i_s + 1 < n_heads, tokens, 0)
        last, mid = tl.load(gc_ptr + i_gate + n_last), tl.load(gc_ptr + i_gate + n_mid)
        b_gs = load_step(gs_ptr + i_gate + start, o_t, n_own)
        b_xdy = load_vector(xdy_ptr + i_gate + start, o_t, n_own)
        b_dxs = dot(b_B, b_ds) * b_r[:, None]
        if seq_ptr is not None:
            b_dxs = tl.where((b_id == end)[:, None], b_dxs, 0.0)
        # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_j = step_j r_j x_j . (B ds)_j
        b_m = b_on * tl.sum(b_x.to(tl.float32) * b_dxs, 1)
        # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
        b_M = b_ST * tl.exp2(tl.minimum(b_gc[None, :] - b_gw[:, None], 100.0))
        b_M = cast(b_M, b_dy.dtype)
        if TILES == 2:
            b_dxs += dot(b_far, b_v) * b_r1[:, None]
        else:  # in registers of its own: ptxas 12.8 lets the product overwrite what m still reads
            b_dxs += 0.0 * b_r[:, None]
        b_dxs = dot(b_M, b_dy, b_dxs)
        b_cols = tl.sum(b_x.to(tl.float32) * b_dxs, 1)
        # eq:ssd-dstep   dstep_j = x_j . dXs_j
        b_dstep = b_cols / b_w + b_own
        # eq:ssd-dgc-columns   colsum(W)_j + m_j = step_j (x_j . dXs_j - S_jj x_j . dY_j)
        b_dgc -= b_on * b_cols
        b_sums = tl.join(tl.join(b_dgc, b_m), tl.join(b_dstep, b_m))  # a join's own axis is last
        store_sums(sums_ptr + i_own, tl.reshape(b_sums, [BT, 4]), o_t, plane, n_own, 3)
        # eq:ssd-dx   dX = diag(step) dXs + D dY
        b_direct = (b_step * b_same)[:, None]
        if D_ptr is not None:
            b_direct += b_D[None, :]
        b_dx = b_dxs * b_on[:, None] + b_dy.to(tl.float32) * b_direct
        if dD_ptr is not None:
            # eq:ssd-dd   dD = sum over tokens of dY * X
            b_dD = tl.sum(b_dy.to(tl.float32) * b_x.to(tl.float32), 0)
            i_D = ((i_c * TILES + start // BT) * H + i_h) * P
            tl.store(dD_ptr + i_D + o_p, b_dD, mask=o_p < P)
        store_tile(dx_ptr + i * P, b_dx, o_t, o_p, H * P, n_own, P)
        i_h += 1


@triton.jit(do_not_specialize=["T", "tokens"])
def ssd_bwd_da_kernel(
    C_ptr, B_ptr, x_ptr, gs_ptr, gc_ptr, dy_ptr, dgc_ptr, seq_ptr,
    sums_ptr,  # [2, H, B, T] out: dgc and what a token reads in its tile; x . dY
    dS_ptr,  # [SPLITS, B, T, G, BC] out: rows of dscores, on the diagonal
    cu_ptr, chunks_ptr, T, tokens,
    WHOLE: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BC: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: what a tile of BT tokens reads of itself, by the scores of some heads.

    Grid (NT * G * SPLITS * BC / BT).
    Arguments without a shape as of ssd_bwd_dx_kernel.
    Reference: linattn_edu.reference.fused.ssd_bwd.
    """
    start, i_g, i_split, i_h, n_heads, _, first, n_t = tile_of(
        tl.program_id(0), cu_ptr, chunks_ptr, T, H, G, SPLITS, BC, BT, WHOLE
    )
    own, n_own = first + start, BT if WHOLE else n_t - start
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    i_B = own * G + i_g
    b_C = load_tile(C_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    b_B = load_tile(B_ptr + i_B * N, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    seen, same = o_t[:, None] >= o_t[None, :], o_t[:, None] == o_t[None, :]
    if seq_ptr is not None:
        b_id = load_gate(seq_ptr + own, o_t, 1, n_own)
        seen &= b_id[:, None] == b_id[None, :]
    # eq:ssd-cb   S = C B^T
    b_S = tl.where(seen & ~same, dot(b_C, tl.trans(b_B)), 0.0)
    b_dS = tl.zeros([BT, BT], dtype=tl.float32)

    plane = H * tokens.to(tl.int64)
    i_gate = i_h.to(tl.int64) * tokens + own
    b_gc = load_gate(gc_ptr + i_gate, o_t, 1, n_own)
    b_gs = load_step(gs_ptr + i_gate, o_t, n_own)
    for i_s in range(n_heads):
        i = own * H + i_h
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_dgc = load_vector(dgc_ptr + i_gate, o_t, n_own)
        b_G = decay(b_gc, b_gs)
        # of the next head, one head ahead
        i_next = i_gate + tl.where(i_s + 1 < n_heads, tokens, 0)
        b_gc = load_gate(gc_ptr + i_next, o_t, 1, n_own)
        b_gs = load_step(gs_ptr + i_next, o_t, n_own)
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        b_W = dot(b_dy, tl.trans(b_x))
        b_xdy = tl.sum(tl.where(same, b_W, 0.0), 1)
        b_dS += b_W * b_G
        # eq:ssd-dgc-rows   rowsum(W)_i = dY_i . (M X)_i, with M as dx rounds it
        b_y = dot(cast(b_S * b_G, b_x.dtype), b_x)
        b_dgc += tl.sum(b_dy.to(tl.float32) * b_y, 1)
        store_sums(sums_ptr + i_gate, tl.join(b_dgc, b_xdy), o_t, plane, n_own, 2)
        i_h += 1
        i_gate = i_next

    b_dS = tl.where(seen, b_dS, 0.0)
    dS_ptr += (i_split * tokens * G + i_B) * BC
    store_tile(dS_ptr + start, b_dS, o_t, o_t, G * BC, n_own, BT)


@triton.jit(do_not_specialize=["T", "tokens"])
def ssd_bwd_far_kernel(
    C_ptr, B_ptr, x_ptr, gs_ptr, gc_ptr, dy_ptr, seq_ptr,
    dgc_ptr,  # [H, B, T] of da, to which is added what the second tile reads of the first
    dS_ptr,  # [SPLITS, B, T, G, 2 * BT] out: rows of dscores, off the diagonal
    cu_ptr, chunks_ptr, T, tokens,
    WHOLE: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: what the second tile of a chunk reads of the first, of some heads.

    Grid (NT * G * SPLITS).  The decay is one factor a row and one a column.
    Arguments without a shape as of ssd_bwd_dx_kernel.
    Reference: linattn_edu.reference.fused.ssd_bwd.
    """
    _, i_g, i_split, i_h, n_heads, _, first, n_t = tile_of(
        tl.program_id(0), cu_ptr, chunks_ptr, T, H, G, SPLITS, 2 * BT, 2 * BT, WHOLE
    )
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    n_1 = n_t - BT
    i_B = first * G + i_g
    b_B = load_tile(B_ptr + i_B * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_C = load_tile(C_ptr + (i_B + BT * G) * N, o_t, o_n, G * N, n_1, N)  # [BT, BN]
    # eq:ssd-cb   S = C B^T
    b_S = dot(b_C, tl.trans(b_B))  # [BT, BT], rows of the second tile
    if seq_ptr is not None:
        b_id = load_gate(seq_ptr + first, o_t, 1, n_t)
        b_id1 = load_gate(seq_ptr + first, BT + o_t, 1, n_t)
        b_S = tl.where(b_id1[:, None] == b_id[None, :], b_S, 0.0)
    b_S = cast(b_S, b_B.dtype).to(tl.float32)  # as dx rounds it; so is v below
    b_dS = tl.zeros([BT, BT], dtype=tl.float32)
    n_mid = tl.minimum(n_t, BT) - 1

    i_0, i_gate = first * H + i_h, i_h.to(tl.int64) * tokens + first
    b_gs = load_step(gs_ptr + i_gate, o_t, n_t)
    b_gc1, mid = load_gate(gc_ptr + i_gate, BT + o_t, 1, n_t), tl.load(gc_ptr + i_gate + n_mid)
    for i_s in range(n_heads):
        i_1 = i_0 + BT * H
        b_x = load_tile(x_ptr + i_0 * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_dy = load_tile(dy_ptr + i_1 * P, o_t, o_p, H * P, n_1, P)  # [BT, BP]
        b_dgc = load_vector(dgc_ptr + i_gate, BT + o_t, n_t)
        b_r, b_e = tl.exp2(mid - b_gs), tl.exp2(tl.minimum(b_gc1 - mid, 0.0))
        # of the next head, one head ahead
        i_next = i_gate + tl.where(i_s + 1 < n_heads, tokens, 0)
        b_gs = load_step(gs_ptr + i_next, o_t, n_t)
        b_gc1, mid = load_gate(gc_ptr + i_next, BT + o_t, 1, n_t), tl.load(gc_ptr + i_next + n_mid)
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        b_v = cast(b_dy.to(tl.float32) * b_e[:, None], b_dy.dtype)
        b_W = dot(b_v, tl.trans(b_x)) * b_r[None, :]
        b_dS += b_W
        # eq:ssd-dgc-rows   rowsum(W)_i = dY_i . (M X)_i
        b_dgc += tl.sum(b_W * b_S, 1)
        tl.store(dgc_ptr + i_gate + BT + o_t, b_dgc, mask=o_t < n_1)
        i_0 += 1
        i_gate = i_next

    if seq_ptr is not None:
        b_dS = tl.where(b_id1[:, None] == b_id[None, :], b_dS, 0.0)
    dS_ptr += (i_split * tokens * G + i_B) * 2 * BT
    store_tile(dS_ptr + BT * G * 2 * BT, b_dS, o_t, o_t, G * 2 * BT, n_1, BT)
    store_tile(dS_ptr + BT, 0.0 * b_dS, o_t, o_t, G * 2 * BT, n_t, BT)


@triton.jit(do_not_specialize=["T", "tokens"])
def ssd_bwd_db_kernel(
    x_ptr, gs_ptr, gc_ptr, dh_ptr, seq_ptr,
    parts_ptr,  # [SPLITS, B, T, G, N] out: of dB
    cu_ptr, chunks_ptr, T, tokens,
    WHOLE: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: what some heads of a group give to dB through the states.

    Grid (NT * G * SPLITS).  Reference: linattn_edu.reference.fused.ssd_bwd.
    Arguments without a shape as of ssd_bwd_dx_kernel.
    """
    _, i_g, i_split, i_h, n_heads, i_c, first, n_t = tile_of(
        tl.program_id(0), cu_ptr, chunks_ptr, T, H, G, SPLITS, BT, BT, WHOLE
    )
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    if seq_ptr is not None:
        b_id, _before, end = documents_of(seq_ptr, chunks_ptr, i_c, first, T, o_t, n_t)
    b_dB = tl.zeros([BT, BN], dtype=tl.float32)
    for i_s in range(n_heads):
        i = first * H + i_h + i_s
        i_gate = (i_h + i_s).to(tl.int64) * tokens + first
        last = tl.load(gc_ptr + i_gate + tl.minimum(BT, n_t) - 1)
        b_w = tl.exp2(last - load_step(gs_ptr + i_gate, o_t, n_t))
        if seq_ptr is not None:
            b_w = tl.where(b_id == end, b_w, 0.0)
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_ds = load_tile(dh_ptr + (i_c * H + i_h + i_s) * N * P, o_n, o_p, P, N, P)
        # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
        b_u = cast(b_x.to(tl.float32) * b_w[:, None], b_x.dtype)
        b_dB = dot(b_u, tl.trans(b_ds), b_dB)
    parts_ptr += (i_split * tokens * G + first * G + i_g) * N
    store_tile(parts_ptr, b_dB, o_t, o_n, G * N, n_t, N)


@triton.jit(do_not_specialize=["T", "tokens"])
def ssd_bwd_sum_kernel(
    C_ptr, B_ptr,
    inter_ptr,  # [B, T, G, N] in fp32: dC through the states
    parts_ptr,  # [SPLITS, B, T, G, N]: dB through the states
    dS_ptr,  # [SPLITS, B, T, G, BT]
    dB_ptr, dC_ptr,  # [B, T, G, N] out
    cu_ptr, chunks_ptr, T, tokens,
    WHOLE: tl.constexpr,
    G: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: dC or dB of one chunk of one group, from its parts.  Grid (NT * G * 2).

    Reference: linattn_edu.reference.fused.ssd_bwd.
    Arguments without a shape as of ssd_bwd_dx_kernel.
    """
    i_gb, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G * 2, BT)
    if WHOLE:
        n_t = BT
    to_B, i_g = i_gb % 2, i_gb // 2
    i = first * G + i_g
    o_t, o_n = tl.arange(0, BT), tl.arange(0, BN)
    b_d = tl.zeros([BT, BN], dtype=tl.float32)
    b_dS = tl.zeros([BT, BT], dtype=tl.float32)
    if to_B == 1:
        far_ptr = C_ptr
        d_ptr = dB_ptr
        part_ptr = parts_ptr
    else:
        far_ptr = B_ptr
        d_ptr = dC_ptr
        part_ptr = inter_ptr
    for i_split in range(SPLITS):
        if (i_split == 0) | (to_B == 1):
            part = part_ptr + (i_split * tokens * G + i) * N
            b_d += load_tile(part, o_t, o_n, G * N, n_t, N)
        b_dS += load_tile(dS_ptr + (i_split * tokens * G + i) * BT, o_t, o_t, G * BT, n_t, BT)
    # eq:ssd-dc   dC = inter + dscores B
    # eq:ssd-db   dB = dB_state + dscores^T C
    b_far = load_tile(far_ptr + i * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dS16 = cast(b_dS, b_far.dtype)
    if to_B == 1:
        b_d = dot(tl.trans(b_dS16), b_far, b_d)
    else:
        b_d = dot(b_dS16, b_far, b_d)
    store_tile(d_ptr + i * N, b_d, o_t, o_n, G * N, n_t, N)


# chunks of more than 64 tokens -> row: 8 warps share a tile of 128 tokens
DB = {False: row(4, 3), True: row(8, 3, 128)}
SUM = {False: row(4, 1), True: row(8, 1)}
DX, DA, FAR = row(4, 2), row(4, 3), row(4, 3)


def ssd_ends_bwd(
    C: Tensor, gc: Tensor, dy: Tensor, **which
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch ssd_ends_kernel back in time; arguments and result as in the reference.

    which: of ssd_ends; rows: the sequences whose first piece is wanted.
    """
    return ssd_ends(C, dy, None, gc, back=True, **which)


def ssd_bwd_dx(
    C: Tensor, B: Tensor, x: Tensor, gs: Tensor, gc: Tensor, dh: Tensor, dy: Tensor, dC: Tensor,
    dgc: Tensor, D: Tensor | None = None, seq_idx: Tensor | None = None, *, chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch ssd_bwd_dx's kernels; arguments and result as in the reference."""
    n, T, H, P = x.shape
    G, N = B.shape[2:]
    gs, gc, dgc = (by_head(y) for y in (gs, gc, dgc))
    BC, BT, (BN, BP) = chunk_size, min(chunk_size, TOKENS), _widths(N)
    kind = kind_of(B, H, P, BC, packing, (C, B, x, dh, dy))
    splits, few = (by_kind.ssd_heads(kind, kept).takes for kept in (True, False))
    NT, *chunks = chunk_args(x, BC, packing)
    sizes, per = (*chunks, T, n * T, whole(x, BC, packing)), 1 if D is None else D.numel() // H
    dB, dx, sums = torch.empty_like(B), torch.empty_like(x), gc.new_empty(4, H, n, T)
    parts, dS = gc.new_empty(splits, *B.shape), gc.new_empty(splits, n, T, G, BC)
    inter, dC, dD, xdy = dC, torch.empty_like(C), None, sums[3]
    given, out = (C, B, x, gs, gc, dh, dy, dgc, D), (dx, sums, parts, dS)
    gluon = by_kind.ssd_bwd_dx(kind, seq_idx is not None, per > 1).takes == "gluon"
    if not (gluon and ssd_bwd.ssd_dx_gluon(given, out)):
        x = x.contiguous()
        ssd_bwd_db_kernel[(NT * G * splits,)](
            x, gs, gc, dh, seq_idx, parts, *sizes, G, H, N, P, splits, BC, BN, BP,
            **DB[BC > 64].launch(),
        )  # fmt: skip
        read = gc.new_empty(2, H, n, T)
        xdy = read[1]
        if packing is not None:  # of xdy all tokens are summed, those behind the last end too
            xdy.zero_()
        ssd_bwd_da_kernel[(NT * G * splits * (BC // BT),)](
            C, B, x, gs, gc, dy, dgc, seq_idx, read, dS, *sizes, G, H, N, P, BC, splits, BT, BN,
            BP, **DA.launch(),
        )  # fmt: skip
        if BC > BT:
            ssd_bwd_far_kernel[(NT * G * splits,)](
                C, B, x, gs, gc, dy, seq_idx, read, dS, *sizes, G, H, N, P, splits, BT, BN, BP,
                **FAR.launch(),
            )  # fmt: skip
        dD = gc.new_empty(NT * (BC // BT), H, P) if per > 1 else None
        ssd_bwd_dx_kernel[(NT * G * few * (BC // BT),)](
            C, B, x, gs, gc, dh, dy, xdy, read[0], D, seq_idx, dx, sums, dD, *sizes, per, G, H,
            N, P, BC, few, BT, BN, BP, **DX.launch(),
        )  # fmt: skip
    ssd_bwd_sum_kernel[(NT * G * 2,)](
        C, B, inter, parts, dS, dB, dC, *sizes, G, N, splits, BC, BN, **SUM[BC > 64].launch()
    )  # fmt: skip
    dgc, dstep, m = sums[:3].permute(0, 2, 3, 1)
    if D is not None:
        dD = (dD.sum(0) if per > 1 else xdy.sum((1, 2))).view(D.shape)
    return dx, dB, dC, dstep, dgc, m, dD
