"""Stage chunk_scan_chunk_state_bwd_dx: the adjoint of chunk_scan and chunk_state by x."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.ssd.chunk_cumsum import decay_within_transposed, decays
from linattn_edu.kernels.ssd.chunk_scan import past_state
from linattn_edu.kernels.tiles import cast, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def chunk_scan_chunk_state_bwd_dx_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    ds_ptr,  # [B, NT, H, N, P]
    dy_ptr,  # [B, T, H, P]
    D_ptr,  # [H, PER] or None
    seq_ptr,  # [B, T] or None
    dx_ptr,  # [B, T, H, P] out
    dstep_ptr,  # [B, T, H] out
    dD_ptr,  # [NT, H, PER] out: sums over the chunk; or None
    cu_ptr, chunks_ptr, T,  # of chunk_of
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head, BP channels after the other.  Grid (NT * H).

    The scores are computed transposed, as the product needs them: see chapter 18.
    Reference: linattn_edu.reference.ssd.chunk_scan_chunk_state_bwd_dx.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    i = first * H + i_h
    i_B = (first * G + i_h // (H // G)) * N
    ds_ptr += (i_c * H + i_h) * N * P
    o_t = tl.arange(0, BT)
    b_gc, _, b_r, _, b_id = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
    b_step = load_row(step_ptr + i, o_t, H, n_t)
    b_MT = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(N, BN)):
        o_n = j * BN + tl.arange(0, BN)
        b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_MT = dot(b_B, tl.trans(b_C), b_MT)
    b_MT *= decay_within_transposed(b_gc, b_id, o_t, seq_ptr)
    b_MT = cast(b_MT, dy_ptr.dtype.element_ty)
    b_dstep = tl.zeros([BT], dtype=tl.float32)
    dD = 0.0
    for j_p in range(tl.cdiv(P, BP)):
        o_p = j_p * BP + tl.arange(0, BP)
        b_dxs = tl.zeros([BT, BP], dtype=tl.float32)
        for j in range(tl.cdiv(N, BN)):
            o_n = j * BN + tl.arange(0, BN)
            b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
            b_ds = load_tile(ds_ptr, o_n, o_p, P, N, P)  # [BN, BP]
            b_dxs = dot(b_B, cast(b_ds, b_B.dtype), b_dxs)
        # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_dxs = dot(b_MT, b_dy, b_dxs * b_r[:, None])
        # eq:ssd-dstep   dstep_j = x_j . dXs_j
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P).to(tl.float32)  # [BT, BP]
        b_dstep += tl.sum(b_x * b_dxs, 1)
        # eq:ssd-dx   dX = diag(step) dXs + D dY
        b_dx = b_dxs * b_step[:, None]
        if D_ptr is not None:
            b_dy = b_dy.to(tl.float32)
            b_dx += b_dy * past_state(D_ptr, i_h, o_p, P, PER)[None, :]
            # eq:ssd-dd   dD = sum over tokens of dY * X
            b_dD = tl.sum(b_dy * b_x, 0)
            if PER > 1:
                tl.store(dD_ptr + (i_c * H + i_h) * P + o_p, b_dD, mask=o_p < P)
            dD += tl.sum(b_dD)
        store_tile(dx_ptr + i * P, b_dx, o_t, o_p, H * P, n_t, P)
    tl.store(dstep_ptr + i + o_t * H, b_dstep, mask=o_t < n_t)
    if D_ptr is not None and PER == 1:
        tl.store(dD_ptr + i_c * H + i_h, dD)


# generation -> bytes of an element -> row; narrower heads keep these tiles, for the reason given
# in kernels/delta/wy.py.
CONFIGS = {
    "turing": {2: row(4, 1, BN=32, BP=32), 4: row(4, 1, BN=32, BP=32)},
    "ampere": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=32)},
    "hopper": {2: row(4, 1, BN=64, BP=64), 4: row(4, 2, BN=32, BP=64)},  # fp32: loads ahead
}


def chunk_scan_chunk_state_bwd_dx(
    C: Tensor, B: Tensor, x: Tensor, step: Tensor, gc: Tensor, ds: Tensor, dy: Tensor,
    D: Tensor | None = None, seq_idx: Tensor | None = None, *, chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch chunk_scan_chunk_state_bwd_dx_kernel; arguments and result as in the reference."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    PER = 1 if D is None else D.numel() // H
    dx, dstep = torch.empty_like(x), torch.empty_like(step)
    config = entry(CONFIGS, x).launch()
    NT, *chunks = chunk_args(x, chunk_size, packing)
    dD = None if D is None else step.new_empty(NT, *D.shape)
    chunk_scan_chunk_state_bwd_dx_kernel[(NT * H,)](
        C, B, x, step, gc, ds, dy, D, seq_idx, dx, dstep, dD, *chunks, T, PER, G, H, N, P,
        BT=chunk_size, **config,
    )  # fmt: skip
    return dx, dstep, None if D is None else dD.sum(0)
