"""Stage gate_cumsum: the decay accumulated inside each chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import LOG2E, load_tile, store_tile

BH = 16  # heads a program: 64 contiguous bytes of g, so that whole memory sectors are used


@triton.jit(do_not_specialize=["T"])
def gate_cumsum_kernel(
    g_ptr,  # [B, T, HV] natural log
    gc_ptr,  # [B, T, HV] out: log2, cumulative within a chunk
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """One program: one chunk of BH heads.  Grid (B * NT, HV / BH).

    Reference: linattn_edu.reference.delta.gate_cumsum.
    """
    NT = tl.cdiv(T, BT)
    i_t, i_b = tl.program_id(0) % NT, (tl.program_id(0) // NT).to(tl.int64)
    first = i_b * T + i_t * BT
    o_t = tl.arange(0, BT)
    o_h = tl.program_id(1) * BH + tl.arange(0, BH)
    b_g = load_tile(g_ptr + first * HV, o_t, o_h, HV, T - i_t * BT, HV)  # [BT, BH]
    # 2^-150 is zero in fp32; without the floor a closed gate would cost later sums their low bits
    b_g = b_g.to(tl.float32) * LOG2E
    b_g = tl.where(b_g < -150.0, -150.0, b_g)  # not tl.maximum, which would drop a NaN
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_gc = tl.cumsum(b_g, axis=0)
    store_tile(gc_ptr + first * HV, b_gc, o_t, o_h, HV, T - i_t * BT, HV)


def gate_cumsum(g: Tensor, *, chunk_size: int) -> Tensor:
    """Launch gate_cumsum_kernel; arguments and result as in the reference."""
    B, T, HV = g.shape
    gc = torch.empty_like(g, dtype=torch.float32)
    grid = (B * triton.cdiv(T, chunk_size), triton.cdiv(HV, BH))
    gate_cumsum_kernel[grid](g, gc, T, HV, BT=chunk_size, BH=BH, num_warps=4)
    return gc
