"""Stage chunk_scan_bwd_da_cs: the adjoint of the scores by the decay."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.rows import chunk_args, entry, row
from linattn_edu.kernels.ssd.chunk_cumsum import decay_within, decays
from linattn_edu.kernels.tiles import chunk_of, dot, load_row, load_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def chunk_scan_bwd_da_cs_kernel(
    C_ptr, B_ptr,  # [B, T, G, N]
    x_ptr,  # [B, T, H, P]
    step_ptr,  # [B, T, H]
    gc_ptr,  # [B, T, H] log2
    dy_ptr,  # [B, T, H, P]
    seq_ptr,  # [B, T] or None
    dgc_ptr,  # [B, T, H] out: natural units
    cu_ptr, chunks_ptr, T,  # of chunk_of
    G: tl.constexpr, H: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of one head.  Grid (NT * H).

    Reference: linattn_edu.reference.ssd.chunk_scan_bwd_da_cs.
    """
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, H, BT)
    i = first * H + i_h
    i_B = (first * G + i_h // (H // G)) * N
    o_t = tl.arange(0, BT)
    b_gc, _, _, _, b_id = decays(gc_ptr + i, seq_ptr, chunks_ptr, i_c, first, o_t, n_t, T, H)
    b_M = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(N, BN)):
        o_n = j * BN + tl.arange(0, BN)
        b_C = load_tile(C_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_B = load_tile(B_ptr + i_B, o_t, o_n, G * N, n_t, N)  # [BT, BN]
        b_M = dot(b_C, tl.trans(b_B), b_M)
    b_M *= decay_within(b_gc, b_id, o_t, seq_ptr) * load_row(step_ptr + i, o_t, H, n_t)[None, :]
    b_dM = tl.zeros([BT, BT], dtype=tl.float32)
    for j in range(tl.cdiv(P, BP)):
        o_p = j * BP + tl.arange(0, BP)
        b_dy = load_tile(dy_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_x = load_tile(x_ptr + i * P, o_t, o_p, H * P, n_t, P)  # [BT, BP]
        b_dM = dot(b_dy, tl.trans(b_x), b_dM)
    # eq:ssd-dgc-scores   dgc = rowsum(W) - colsum(W), W = M * dY X^T below the diagonal
    b_W = tl.where(o_t[:, None] > o_t[None, :], b_M * b_dM, 0.0)
    tl.store(dgc_ptr + i + o_t * H, tl.sum(b_W, 1) - tl.sum(b_W, 0), mask=o_t < n_t)


# generation -> bytes of an element -> row. Two matrices of the chunk in fp32 are what a program
# holds; narrower heads keep these tiles, for the reason given in kernels/delta/wy.py.
CONFIGS = {
    "turing": {2: row(4, 1, BN=32, BP=32), 4: row(4, 1, BN=32, BP=32)},
    "ampere": {2: row(4, 1, BN=64, BP=64), 4: row(4, 1, BN=32, BP=32)},
    "hopper": {2: row(4, 1, BN=128, BP=64), 4: row(4, 1, BN=32, BP=64)},
}


def chunk_scan_bwd_da_cs(
    C: Tensor, B: Tensor, x: Tensor, step: Tensor, gc: Tensor, dy: Tensor,
    seq_idx: Tensor | None = None, *, chunk_size: int, packing: Packing | None = None,
) -> Tensor:  # fmt: skip
    """Launch chunk_scan_bwd_da_cs_kernel; arguments and result as in the reference."""
    _, T, H, P = x.shape
    G, N = B.shape[2:]
    dgc = torch.empty_like(gc)
    config = entry(CONFIGS, x).launch()
    NT, *chunks = chunk_args(x, chunk_size, packing)
    chunk_scan_bwd_da_cs_kernel[(NT * H,)](
        C, B, x, step, gc, dy, seq_idx, dgc, *chunks, T, G, H, N, P, BT=chunk_size, **config
    )
    return dgc
