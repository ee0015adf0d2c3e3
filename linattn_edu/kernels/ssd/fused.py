"""Every gradient of a chunk at once, from the states at its ends."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.ssd.chunk_scan import past_state
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_args,
    chunk_of,
    decay_matrix_transposed,
    device_of,
    dot,
    load_row,
    load_tile,
    store_tile,
)
from linattn_edu.packing import Packing


@triton.jit
def half_decays(gc_ptr, start, o_t, n_t, H: tl.constexpr):
    """gc, e, r, a of the tokens start + o_t of a chunk with n_t tokens, as a chunk of their own.

    gc_ptr: at the chunk's first token and the head.
    """
    n = tl.minimum(start + o_t.shape[0], n_t)
    b_gc = tl.load(gc_ptr + tl.minimum(start + o_t, n_t - 1) * H)
    b_last = tl.load(gc_ptr + (n - 1) * H)
    b_first = tl.load(gc_ptr + (tl.maximum(tl.minimum(start, n_t), 1) - 1) * H)
    b_first = tl.where(start > 0, b_first, 0.0)
    return b_gc, tl.exp2(b_gc - b_first), tl.exp2(b_last - b_gc), tl.exp2(b_last - b_first)


@triton.jit
def half_documents(seq_ptr, i_t, start, o_t, n_t):
    """Documents of those tokens, of the state before them, of the state after them.

    seq_ptr: at the chunk's first token.  i_t: the chunk's number in its sequence.
    """
    b_id = tl.load(seq_ptr + tl.minimum(start + o_t, n_t - 1))
    before = tl.minimum(start, n_t) - tl.minimum(start + i_t, 1)
    return (
        b_id,
        tl.load(seq_ptr + before),
        tl.load(seq_ptr + tl.minimum(start + o_t.shape[0], n_t) - 1),
    )


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, N, P]
    dh_ptr,  # [B, NT, H, N, P]
    dy_ptr,  # [B, T, H, P]
    D_ptr,  # [H, PER] or None
    seq_ptr,  # [B, T] or None
    dx_ptr,  # [B, T, H, P] out
    dB_ptr,  # [SPLITS, B, T, G, N] out: the part through the state
    dC_ptr,  # [SPLITS, B, T, G, N] out: the part through the state
    dscores_ptr,  # [NT * HALVES, G, SPLITS, BT, BT] out, transposed
    dstep_ptr,  # [B, T, H] out
    da_ptr,  # [B, T, H] out
    dD_ptr,  # [NT * HALVES, H, PER] out, or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    HALVES: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: half a chunk of a group, head after head.  Grid (NT * G * SPLITS * HALVES).

    With HALVES = 2 a state is kept for every second tile of BT tokens alone: the one between the
    halves is made again, from that before the chunk or from that after it.
    Reference: linattn_edu.reference.ssd.fused.
    """
    HEADS: tl.constexpr = H // G
    PART: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    i_half = tl.program_id(0) % HALVES
    i_gs, i_c, first, n_t = chunk_of(
        tl.program_id(0) // HALVES, cu_ptr, chunks_ptr, T, G * SPLITS, HALVES * BT
    )
    i_g, i_split = i_gs // SPLITS, i_gs % SPLITS
    start, other = i_half * BT, (HALVES - 1 - i_half) * BT
    n_own = n_t - start
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    o_p = tl.arange(0, BP)
    own = first + start
    i_B = (own * G + i_g) * N
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    b_ST = dot(b_B, tl.trans(b_C))  # [BT, BT], transposed
    if HALVES == 2:
        if i_half == 0:
            far_ptr = C_ptr
            value_ptr = dy_ptr
        else:
            far_ptr = B_ptr
            value_ptr = x_ptr
        n_far = n_t - other
        far_ptr += ((first + other) * G + i_g) * N
        b_far = load_tile(far_ptr, o_t, o_n, G * N, n_far, N)  # [BT, BN]
    if seq_ptr is not None:
        i_t = first % T if chunks_ptr is None else tl.load(chunks_ptr + 2 * i_c + 1)
        b_id, before, end = half_documents(seq_ptr + first, i_t, start, o_t, n_t)
        b_id2, before2, end2 = half_documents(seq_ptr + first, i_t, other, o_t, n_t)

    b_dB = tl.zeros([BT, BN], dtype=tl.float32)
    b_dC = tl.zeros([BT, BN], dtype=tl.float32)
    b_dST = tl.zeros([BT, BT], dtype=tl.float32)
    for i_s in range(i_split * PART, tl.minimum(i_split * PART + PART, HEADS)):
        i_h = i_g * HEADS + i_s
        i = own * H + i_h
        i_S = (i_c * H + i_h) * N * P
        b_h = load_tile(h_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
        b_ds = load_tile(dh_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_own, P)  # [BT, BP]
        b_gc, b_e, b_r, b_a = half_decays(gc_ptr + first * H + i_h, start, o_t, n_t, H)
        b_step = load_row(step_ptr + i, o_t, H, n_own)
        GT = decay_matrix_transposed(b_gc, o_t)
        if seq_ptr is not None:
            b_e = tl.where(b_id == before, b_e, 0.0)
            b_r = tl.where(b_id == end, b_r, 0.0)
            b_a = tl.where(end == before, b_a, 0.0)
            GT = tl.where(b_id[:, None] == b_id[None, :], GT, 0.0)
        if HALVES == 2:
            i_far = (first + other) * H + i_h
            b_v = load_tile(value_ptr + i_far * P, o_t, o_p, H * P, n_far, P)  # [BT, BP]
            _, b_e2, b_r2, b_a2 = half_decays(gc_ptr + first * H + i_h, other, o_t, n_t, H)
            if seq_ptr is not None:
                b_e2 = tl.where(b_id2 == before2, b_e2, 0.0)
                b_r2 = tl.where(b_id2 == end2, b_r2, 0.0)
                b_a2 = tl.where(end2 == before2, b_a2, 0.0)
            b_r2 *= load_row(step_ptr + i_far, o_t, H, n_far)
            b_w = tl.where(i_half == 0, b_e2, b_r2)
            b_far_state = dot(tl.trans(b_far), cast(b_v.to(tl.float32) * b_w[:, None], b_v.dtype))
            b_hf, b_dsf = b_h.to(tl.float32), b_ds.to(tl.float32)
            if i_half == 0:
                b_dsf = b_dsf * b_a2 + b_far_state
            else:
                b_hf = b_hf * b_a2 + b_far_state
            b_h, b_ds = cast(b_hf, b_v.dtype), cast(b_dsf, b_v.dtype)

        # eq:ssd-dlast   dlast = a <h, ds>
        b_dlast = b_a * tl.sum(tl.sum(b_h.to(tl.float32) * b_ds.to(tl.float32), 1), 0)
        # eq:ssd-dc-inter   inter = diag(e) dY h^T
        b_inter = dot(cast(b_dy.to(tl.float32) * b_e[:, None], b_dy.dtype), tl.trans(b_h))
        b_dC += b_inter
        # eq:ssd-dgc-inter   dgc_i = C_i . inter_i
        b_dgc = tl.sum(b_C.to(tl.float32) * b_inter, 1)
        # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
        b_rx = cast(b_x.to(tl.float32) * (b_r * b_step)[:, None], b_x.dtype)
        b_state = dot(b_rx, tl.trans(b_ds))
        b_dB += b_state
        # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_head_j
        b_m = tl.sum(b_B.to(tl.float32) * b_state, 1)
        b_dgc -= b_m
        b_dlast += tl.sum(b_m, 0)
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        b_W = dot(b_x, tl.trans(b_dy)) * GT * b_step[:, None]
        b_dST += b_W
        # eq:ssd-dgc-scores   dgc = rowsum(X) - colsum(X), X = M * dY X^T below the diagonal
        b_W = tl.where(o_t[:, None] != o_t[None, :], b_W * b_ST, 0.0)
        b_dgc += tl.sum(b_W, 0) - tl.sum(b_W, 1)
        # eq:ssd-da   da_i = dlast + reverse cumsum(dgc)
        b_da = tl.cumsum(b_dgc, 0, reverse=True) + b_dlast
        tl.store(da_ptr + i + o_t * H, b_da, mask=o_t < n_own)
        # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
        b_dxs = dot(b_B, b_ds) * b_r[:, None]
        b_dxs = dot(cast(b_ST * GT, b_dy.dtype), b_dy, b_dxs)
        # eq:ssd-dstep   dstep_j = x_j . dXs_j
        b_dstep = tl.sum(b_x.to(tl.float32) * b_dxs, 1)
        tl.store(dstep_ptr + i + o_t * H, b_dstep, mask=o_t < n_own)
        # eq:ssd-dx   dX = diag(step) dXs + D dY
        b_dx = b_dxs * b_step[:, None]
        if D_ptr is not None:
            b_dx += b_dy.to(tl.float32) * past_state(D_ptr, i_h, o_p, P, PER)[None, :]
            # eq:ssd-dd   dD = sum over tokens of dY * X
            b_dD = tl.sum(b_dy.to(tl.float32) * b_x.to(tl.float32), 0)
            dD = dD_ptr + ((i_c * HALVES + i_half) * H + i_h) * PER
            if PER == 1:
                tl.store(dD, tl.sum(b_dD, 0))
            else:
                tl.store(dD + o_p, b_dD, mask=o_p < P)
        store_tile(dx_ptr + i * P, b_dx, o_t, o_p, H * P, n_own, P)

    i_B += i_split * tokens * G * N
    store_tile(dB_ptr + i_B, b_dB, o_t, o_n, G * N, n_own, N)
    store_tile(dC_ptr + i_B, b_dC, o_t, o_n, G * N, n_own, N)
    i_M = ((i_c * HALVES + i_half) * G + i_g) * SPLITS + i_split
    store_tile(dscores_ptr + i_M * BT * BT, b_dST, o_t, o_t, BT, BT, BT)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_scores_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    dB_part_ptr,  # [SPLITS, B, T, G, N]
    dC_part_ptr,  # [SPLITS, B, T, G, N]
    dscores_ptr,  # [NT * HALVES, G, SPLITS, BT, BT], transposed
    dB_ptr,  # [B, T, G, N] out
    dC_ptr,  # [B, T, G, N] out
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    G: tl.constexpr, N: tl.constexpr, HALVES: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: half a chunk of one group, the parts of all its heads.  Grid (NT * G * HALVES).

    Reference: linattn_edu.reference.ssd.fused.
    """
    i_half = tl.program_id(0) % HALVES
    i_g, i_c, first, n_t = chunk_of(
        tl.program_id(0) // HALVES, cu_ptr, chunks_ptr, T, G, HALVES * BT
    )
    n_own = n_t - i_half * BT
    i_B = ((first + i_half * BT) * G + i_g) * N
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    dscores_ptr += ((i_c * HALVES + i_half) * G + i_g) * SPLITS * BT * BT
    b_dB = tl.zeros([BT, BN], dtype=tl.float32)
    b_dC = tl.zeros([BT, BN], dtype=tl.float32)
    b_dST = tl.zeros([BT, BT], dtype=tl.float32)
    b_dS = tl.zeros([BT, BT], dtype=tl.float32)
    for i in range(SPLITS):
        b_dB += load_tile(dB_part_ptr + i_B + i * tokens * G * N, o_t, o_n, G * N, n_own, N)
        b_dC += load_tile(dC_part_ptr + i_B + i * tokens * G * N, o_t, o_n, G * N, n_own, N)
        b_dST += load_tile(dscores_ptr + i * BT * BT, o_t, o_t, BT, BT, BT)
        o = o_t[:, None] + o_t[None, :] * BT
        b_dS += tl.load(dscores_ptr + i * BT * BT + o)
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_own, N)  # [BT, BN]
    # eq:ssd-dc   dC = inter + dscores B
    b_dC = dot(cast(b_dS, b_B.dtype), b_B, b_dC)
    store_tile(dC_ptr + i_B, b_dC, o_t, o_n, G * N, n_own, N)
    # eq:ssd-db   dB = dB_state + dscores^T C
    b_dB = dot(cast(b_dST, b_C.dtype), b_C, b_dB)
    store_tile(dB_ptr + i_B, b_dB, o_t, o_n, G * N, n_own, N)


TOKENS = 64  # of a tile: with 128 the sums over the heads would not fit the registers
HEADS = 20  # of a program: enough programs for few chunks, and few sums of parts
LARGEST = (128, 64)  # N and P of one tile


def fits(x: Tensor, B: Tensor) -> bool:
    """Whether `ssd_bwd` holds x's heads and B's states: 16 bit, a Hopper or later, one tile."""
    large = device_of(x)[0] in ("hopper", "blackwell")
    return large and x.element_size() == 2 and B.shape[3] <= LARGEST[0] and x.shape[3] <= LARGEST[1]


def ssd_bwd(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dh: Tensor,
    dy: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Launch ssd_bwd_kernel and ssd_bwd_scores_kernel; arguments and result as in the reference."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    BT = min(chunk_size, TOKENS)
    halves, splits = chunk_size // BT, cdiv(H // G, HEADS)
    NT, *chunks = chunk_args(x, chunk_size, packing)
    dx, dB, dC = (torch.empty_like(y) for y in (x, B, C))
    dstep, da = torch.empty_like(step), torch.empty_like(gc)
    parts = [gc.new_empty(splits, *B.shape) for _ in range(2)]
    dscores = gc.new_empty(NT * halves, G, splits, BT, BT)
    per = 1 if D is None or D.ndim == 1 else P
    dD = None if D is None else gc.new_empty(NT * halves, H, per)
    tiles = {"BT": BT, "BN": 128 if N > 64 else 64, "BP": 64}
    ssd_bwd_kernel[(NT * G * splits * halves,)](
        C, B, x, step, gc, h, dh, dy, D, seq_idx, dx, *parts, dscores, dstep, da, dD, *chunks, T,
        gc.numel() // H, per, G, H, N, P, halves, splits, **tiles, num_warps=8, num_stages=1,
    )  # fmt: skip
    ssd_bwd_scores_kernel[(NT * G * halves,)](
        C, B, *parts, dscores, dB, dC, *chunks, T, gc.numel() // H, G, N, halves, splits,
        BT=BT, BN=tiles["BN"], num_warps=8, num_stages=1,
    )  # fmt: skip
    return dx, dB, dC, dstep, da, None if dD is None else dD.sum(0).view(D.shape)
