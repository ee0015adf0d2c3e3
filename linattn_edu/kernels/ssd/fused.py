"""Every gradient of a chunk at once, from the states at its ends."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.ssd.chunk_cumsum import decay_within_transposed, decays
from linattn_edu.kernels.ssd.chunk_scan import past_state
from linattn_edu.kernels.tiles import (
    cast,
    cdiv,
    chunk_args,
    chunk_of,
    device_of,
    dot,
    load_row,
    load_tile,
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


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_dx_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    S_ptr,  # [B, T, G, BT]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, N, P]
    dh_ptr,  # [B, NT, H, N, P]
    dy_ptr,  # [B, T, H, P]
    D_ptr,  # [H, PER] or None
    seq_ptr,  # [B, T] or None
    dx_ptr,  # [B, T, H, P] out
    dstep_ptr,  # [B, T, H] out
    da_ptr,  # [B, T, H] out
    dD_ptr,  # [NT, H, PER] out, or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * H).

    Reference: linattn_edu.reference.ssd.fused.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    i, i_S = first * H + i_h, (i_c * H + i_h) * N * P
    i_g = first * G + i_h // (H // G)
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_gc, b_e, b_r, b_a, b_id = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
    b_step = load_row(step_ptr + i, o_t, H, n_t)
    b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_h = load_tile(h_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
    b_ds = load_tile(dh_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
    # eq:ssd-dlast   dlast = a <h, ds>
    b_dlast = b_a * tl.sum(tl.sum(b_h.to(tl.float32) * b_ds.to(tl.float32), 1), 0)
    # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
    b_C = load_tile(C_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dgc = b_e * tl.sum(b_dy.to(tl.float32) * dot(b_C, b_h), 1)
    # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_head_j = step_j r_j x_j . (B ds)_j
    b_B = load_tile(B_ptr + i_g * N, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_dxs = dot(b_B, b_ds) * b_r[:, None]
    b_m = b_step * tl.sum(b_x.to(tl.float32) * b_dxs, 1)
    b_dgc -= b_m
    b_dlast += tl.sum(b_m, 0)
    # eq:ssd-dgc-scores   dgc = rowsum(X) - colsum(X), X = M * dY X^T below the diagonal
    o_S = o_t[:, None] + o_t[None, :] * G * BT
    b_ST = tl.load(S_ptr + i_g * BT + o_S, mask=o_t[None, :] < n_t, other=0.0)  # [BT, BT]
    b_ST = b_ST.to(tl.float32) * decay_within_transposed(b_gc, b_id, o_t, seq_ptr)
    b_X = tl.where(o_t[:, None] != o_t[None, :], dot(b_x, tl.trans(b_dy)) * b_ST, 0.0)
    b_X *= b_step[:, None]
    b_dgc += tl.sum(b_X, 0) - tl.sum(b_X, 1)
    # eq:ssd-da   da_i = dlast + reverse cumsum(dgc)
    b_da = tl.cumsum(b_dgc, 0, reverse=True) + b_dlast
    tl.store(da_ptr + i + o_t * H, b_da, mask=o_t < n_t)
    # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
    b_dxs = dot(cast(b_ST, b_dy.dtype), b_dy, b_dxs)
    # eq:ssd-dstep   dstep_j = x_j . dXs_j
    tl.store(dstep_ptr + i + o_t * H, tl.sum(b_x.to(tl.float32) * b_dxs, 1), mask=o_t < n_t)
    # eq:ssd-dx   dX = diag(step) dXs + D dY
    b_dx = b_dxs * b_step[:, None]
    if D_ptr is not None:
        b_dx += b_dy.to(tl.float32) * past_state(D_ptr, i_h, o_p, P, PER)[None, :]
        # eq:ssd-dd   dD = sum over tokens of dY * X
        b_dD = tl.sum(b_dy.to(tl.float32) * b_x.to(tl.float32), 0)
        dD_ptr += (i_c * H + i_h) * PER
        if PER == 1:
            tl.store(dD_ptr, tl.sum(b_dD, 0))
        else:
            tl.store(dD_ptr + o_p, b_dD, mask=o_p < P)
    store_tile(dx_ptr + i * P, b_dx, o_t, o_p, H * P, n_t, P)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_states_kernel(
    x_ptr,  # [B, T, H, P]
    dy_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, N, P]
    dh_ptr,  # [B, NT, H, N, P]
    seq_ptr,  # [B, T] or None
    parts_ptr,  # [SPLITS, 2, B, T, G, N] out: of dC and dB
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
        state_ptr = dh_ptr
    else:
        v_ptr = dy_ptr
        state_ptr = h_ptr
    HEADS: tl.constexpr = H // G
    PART: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    o_t, o_n, o_p = tl.arange(0, BT), tl.arange(0, BN), tl.arange(0, BP)
    b_d = tl.zeros([BT, BN], dtype=tl.float32)
    for i_s in range(i_split * PART, tl.minimum(i_split * PART + PART, HEADS)):
        i_h = i_g * HEADS + i_s
        i = first * H + i_h
        _, b_e, b_r, _, _ = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
        b_w = tl.where(to_B == 1, b_r * load_row(step_ptr + i, o_t, H, n_t), b_e)
        b_v = load_tile(v_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_state = load_tile(state_ptr + (i_c * H + i_h) * N * P, o_n, o_p, P, N, P)  # [BN, BP]
        # eq:ssd-dc-inter   inter = diag(e) dY h^T
        # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
        b_v = cast(b_v.to(tl.float32) * b_w[:, None], b_v.dtype)
        b_d = dot(b_v, tl.trans(b_state), b_d)
    parts_ptr += ((i_split * 2 + to_B) * tokens * G + first * G + i_g) * N
    store_tile(parts_ptr, b_d, o_t, o_n, G * N, n_t, N)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_scores_kernel(
    x_ptr,  # [B, T, H, P]
    dy_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    seq_ptr,  # [B, T] or None
    dS_ptr,  # [SPLITS, B, T, G, BT] out: rows of S^T
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    tokens,  # B * T
    G: tl.constexpr, H: tl.constexpr, P: tl.constexpr, SPLITS: tl.constexpr,
    BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: the gradient of one chunk's scores, of some heads.  Grid (NT * G * SPLITS).

    Reference: linattn_edu.reference.ssd.fused.
    """
    i_gs, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G * SPLITS, BT)
    i_split, i_g = i_gs % SPLITS, i_gs // SPLITS
    HEADS: tl.constexpr = H // G
    PART: tl.constexpr = (HEADS + SPLITS - 1) // SPLITS
    o_t, o_p = tl.arange(0, BT), tl.arange(0, BP)
    b_dST = tl.zeros([BT, BT], dtype=tl.float32)
    for i_s in range(i_split * PART, tl.minimum(i_split * PART + PART, HEADS)):
        i = first * H + i_g * HEADS + i_s
        b_gc, _, _, _, b_id = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
        b_step = load_row(step_ptr + i, o_t, H, n_t)
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        GT = decay_within_transposed(b_gc, b_id, o_t, seq_ptr) * b_step[:, None]
        b_dST += dot(b_x, tl.trans(b_dy)) * GT
    dS_ptr += (i_split * tokens * G + first * G + i_g) * BT
    store_tile(dS_ptr, b_dST, o_t, o_t, G * BT, n_t, BT)


@triton.jit(do_not_specialize=["T"])
def ssd_bwd_sum_kernel(
    C_ptr,  # [B, T, G, N]
    B_ptr,  # [B, T, G, N]
    parts_ptr,  # [SPLITS, 2, B, T, G, N]
    dS_ptr,  # [SPLITS, B, T, G, BT]: rows of S^T
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
    if to_B == 1:
        far_ptr = C_ptr
        d_ptr = dB_ptr
    else:  # the rows of S^T are the columns of S
        o_r, o_c = o_c, o_r
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


HEADS = 20  # of a program: enough programs for few chunks, and few sums of parts
LARGEST = (128, 64)  # N and P of one tile


def fits(x: Tensor, B: Tensor) -> bool:
    """Whether `ssd_bwd` holds x's heads and B's states: 16 bit, a Hopper or later, one tile."""
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
    BT, tokens, splits = S.shape[3], gc.numel() // H, cdiv(H // G, HEADS)
    NT, *chunks = chunk_args(x, BT, packing)
    dx, dB, dC = (torch.empty_like(y) for y in (x, B, C))
    dstep, da = torch.empty_like(step), torch.empty_like(gc)
    parts, dS = gc.new_empty(splits, 2, *B.shape), gc.new_empty(splits, *S.shape)
    per = 1 if D is None or D.ndim == 1 else P
    dD = None if D is None else gc.new_empty(NT, H, per)
    BN, BP = 128 if N > 64 else 64, 64
    wide = {"num_warps": 8 if BT > 64 else 4}
    ssd_bwd_dx_kernel[(NT * H,)](
        C, B, S, x, step, gc, h, dh, dy, D, seq_idx, dx, dstep, da, dD, *chunks, T,
        per, G, H, N, P, BT, BN, BP, num_stages=1, **wide,
    )  # fmt: skip
    ssd_bwd_states_kernel[(NT * G * splits * 2,)](
        x, dy, step, gc, h, dh, seq_idx, parts, *chunks, T, tokens, G, H, N, P, splits, BT, BN, BP,
        num_stages=3, **wide,
    )  # fmt: skip
    ssd_bwd_scores_kernel[(NT * G * splits,)](
        x, dy, step, gc, seq_idx, dS, *chunks, T, tokens, G, H, P, splits, BT, BP, num_stages=3,
        **wide,
    )  # fmt: skip
    ssd_bwd_sum_kernel[(NT * G * 2,)](
        C, B, parts, dS, dB, dC, *chunks, T, tokens, G, N, splits, BT, BN, num_stages=1, **wide,
    )  # fmt: skip
    return dx, dB, dC, dstep, da, None if dD is None else dD.sum(0).view(D.shape)
