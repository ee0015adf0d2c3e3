"""Stage chunk_scan: read the state and the chunk's own tokens."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.ssd.chunk_cumsum import decay_within, decays
from linattn_edu.kernels.tiles import cast, cdiv, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit
def past_state(D_ptr, i_h, o_p, P: tl.constexpr, PER: tl.constexpr):
    """D of a head's channels o_p.  PER: 1, one number a head; P, one a channel."""
    return tl.load(D_ptr + i_h * PER + o_p % PER, mask=o_p < P, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def chunk_scan_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, N, P]
    D_ptr,  # [H, PER] or None
    z_ptr,  # [B, T, H, P] or None
    seq_ptr,  # [B, T] or None
    out_ptr,  # [B, T, H, P] out
    cu_ptr, chunks_ptr, T,  # of chunk_of
    PER: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head, BP of its channels.  Grid (NT * H, P / BP).

    Reference: linattn_edu.reference.ssd.chunk_scan.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    i = first * H + i_h
    i_B = (first * G + i_h // (H // G)) * N
    h_ptr += (i_c * H + i_h) * N * P
    o_t = tl.arange(0, BT)
    o_p = tl.program_id(1) * BP + tl.arange(0, BP)
    b_gc, b_e, _, _, b_id = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
    b_y = tl.zeros([BT, BP], dtype=tl.float32)
    b_M = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(N, BN)):
        o_n = j * BN + tl.arange(0, BN)
        b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_h = load_tile(h_ptr, o_n, o_p, P, N, P)  # [BN, BP]
        b_y = dot(b_C, cast(b_h, b_C.dtype), b_y)
        b_M = dot(b_C, tl.trans(b_B), b_M)
    # eq:ssd-inter   diag(e) C h
    b_y *= b_e[:, None]
    # eq:ssd-scores   M = C B^T * G * step
    b_M *= decay_within(b_gc, b_id, o_t, seq_ptr) * load_row(step_ptr + i, o_t, H, n_t)[None, :]
    # eq:ssd-output   y = inter + M X + D X
    b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
    b_y = dot(cast(b_M, b_x.dtype), b_x, b_y)
    if D_ptr is not None:
        b_y += b_x.to(tl.float32) * past_state(D_ptr, i_h, o_p, P, PER)[None, :]
    # eq:ssd-gate   out = y silu(z)
    if z_ptr is not None:
        b_z = load_tile(z_ptr + i * P, o_t, o_p, H * P, n_t, P).to(tl.float32)
        b_y *= b_z * tl.sigmoid(b_z)
    store_tile(out_ptr + i * P, b_y, o_t, o_p, H * P, n_t, P)


# generation -> bytes of an element -> row; narrower heads keep these tiles, for the reason given
# in kernels/delta/wy.py.
CONFIGS = {
    "turing": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=32)},
    "ampere": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=64)},
    "hopper": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=64)},
}


def chunk_scan(
    C: Tensor, B: Tensor, x: Tensor, step: Tensor, gc: Tensor, h: Tensor, D: Tensor | None = None,
    z: Tensor | None = None, seq_idx: Tensor | None = None, *, chunk_size: int,
    packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch chunk_scan_kernel; arguments and result as in the reference."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    out = torch.empty_like(x)
    config = entry(CONFIGS, x).launch()
    NT, *chunks = chunk_args(x, chunk_size, packing)
    chunk_scan_kernel[(NT * H, cdiv(P, config["BP"]))](
        C, B, x, step, gc, h, D, z, seq_idx, out, *chunks, T, 1 if D is None else D.numel() // H,
        G, H, N, P, BT=chunk_size, **config,
    )  # fmt: skip
    return out
