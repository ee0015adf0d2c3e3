"""Stage chunk_scan_bwd_dc: the adjoint of chunk_scan by C, and what the scores give to B."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.ssd.chunk_cumsum import decay_within, decay_within_transposed, decays
from linattn_edu.kernels.ssd.chunk_state_bwd_db import sum_tiles
from linattn_edu.kernels.tiles import cast, cdiv, chunk_of, dot, load_row, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T", "tokens"])
def chunk_scan_bwd_dc_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    h_ptr,  # [B, NT, H, N, P]
    dy_ptr,  # [B, T, H, P]
    dB_state_ptr,  # [B, T, G, N]
    seq_ptr,  # [B, T] or None
    dC_ptr, dB_ptr,  # [B, T, G, N] out
    dgc_ptr,  # [N / BN, B, T, H] out: natural units
    cu_ptr, chunks_ptr,  # of chunk_of
    tokens, T,
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: BN columns of B and C in one chunk, head after head.  Grid (NT * G, N / BN).

    tokens: of all sequences.  The scores' gradient is also computed transposed: see chapter 17.
    Reference: linattn_edu.reference.ssd.chunk_scan_bwd_dc.
    """
    i_g, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, G, BT)
    i_n = tl.program_id(1)
    o_t = tl.arange(0, BT)
    o_n = i_n * BN + tl.arange(0, BN)
    i_B = (first * G + i_g) * N
    dgc_ptr += i_n.to(tl.int64) * tokens * H
    b_dC = tl.zeros([BT, BN], dtype=tl.float32)
    b_dM = tl.zeros([BT, BT], dtype=tl.float32)
    b_dMT = tl.zeros([BT, BT], dtype=tl.float32)
    for i_h in range(i_g * (H // G), (i_g + 1) * (H // G)):
        i = first * H + i_h
        i_S = (i_c * H + i_h) * N * P
        b_gc, b_e, _, _, b_id = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
        b_step = load_row(step_ptr + i, o_t, H, n_t)
        b_inter = tl.zeros([BT, BN], dtype=tl.float32)
        b_YX = tl.zeros([BT, BT], dtype=tl.float32)
        b_XY = tl.zeros([BT, BT], dtype=tl.float32)
        for j in range(tl.cdiv(P, BP)):
            o_p = j * BP + tl.arange(0, BP)
            b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
            b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
            b_h = load_tile(h_ptr + i_S, o_n, o_p, P, N, P)  # [BN, BP]
            b_inter = dot(b_dy, tl.trans(cast(b_h, b_dy.dtype)), b_inter)
            b_YX = dot(b_dy, tl.trans(b_x), b_YX)
            b_XY = dot(b_x, tl.trans(b_dy), b_XY)
        # eq:ssd-dc-inter   inter = diag(e) dY h^T
        b_inter *= b_e[:, None]
        b_dC += b_inter
        # eq:ssd-dgc-inter   dgc_i = C_i . inter_i
        b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_t, N).to(tl.float32)  # [BT, BN]
        tl.store(dgc_ptr + i + o_t * H, tl.sum(b_C * b_inter, 1), mask=o_t < n_t)
        # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
        b_dM += b_YX * decay_within(b_gc, b_id, o_t, seq_ptr) * b_step[None, :]
        b_dMT += b_XY * decay_within_transposed(b_gc, b_id, o_t, seq_ptr) * b_step[:, None]
    b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
    # eq:ssd-dc   dC = inter + dscores B
    b_dC = dot(cast(b_dM, b_B.dtype), b_B, b_dC)
    store_tile(dC_ptr + i_B, b_dC, o_t, o_n, G * N, n_t, N)
    # eq:ssd-db   dB = dB_state + dscores^T C
    b_dB = load_tile(dB_state_ptr + i_B, o_t, o_n, G * N, n_t, N).to(tl.float32)  # [BT, BN]
    b_dB = dot(cast(b_dMT, b_C.dtype), b_C, b_dB)
    store_tile(dB_ptr + i_B, b_dB, o_t, o_n, G * N, n_t, N)


# generation -> bytes of an element -> row. Four matrices of the chunk and two of BN columns need 8
# warps; BN = 128 spares N = 128 the scores of a second tile. Narrower heads keep these tiles, for
# the reason given in kernels/delta/wy.py.
CONFIGS = {
    "turing": {2: row(8, 1, BN=32, BP=32), 4: row(4, 1, BN=32, BP=32)},
    "ampere": {2: row(8, 2, BN=64, BP=32), 4: row(4, 1, BN=32, BP=32)},
    "hopper": {2: row(8, 1, BN=128, BP=64), 4: row(8, 1, BN=64, BP=32)},
}


def chunk_scan_bwd_dc(
    C: Tensor, B: Tensor, x: Tensor, step: Tensor, gc: Tensor, h: Tensor, dy: Tensor,
    dB_state: Tensor, seq_idx: Tensor | None = None, *, chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Launch chunk_scan_bwd_dc_kernel; arguments and result as in the reference."""
    batch, T, H, P = x.shape
    G, N = B.shape[2:]
    config = entry(CONFIGS, x).launch()
    NN = cdiv(N, config["BN"])
    dC, dB = torch.empty_like(C), torch.empty_like(B)
    dgc = gc.new_empty(NN, batch, T, H)
    NT, *chunks = chunk_args(x, chunk_size, packing)
    chunk_scan_bwd_dc_kernel[(NT * G, NN)](
        C, B, x, step, gc, h, dy, dB_state, seq_idx, dC, dB, dgc, *chunks, batch * T, T,
        G, H, N, P, BT=chunk_size, **config,
    )  # fmt: skip
    return dC, dB, sum_tiles(dgc)
