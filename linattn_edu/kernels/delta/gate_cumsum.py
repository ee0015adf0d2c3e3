"""Stage gate_cumsum: the decay accumulated inside each chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import LOG2E, cdiv, chunk_args, chunk_of, load_tile, store_tile
from linattn_edu.packing import Packing

BH = 16  # heads a program: 64 contiguous bytes of g, so that whole memory sectors are used


@triton.jit
def softplus(x):
    """log(1 + e^x), to full relative precision: e^-|x| may be too small to change 1."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    # log1p(y) = log(u) y / (u - 1): the rounding of u cancels
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log1p


@triton.jit
def gate(b_a, A_log_ptr, bias_ptr, o_h, HV: tl.constexpr):
    """(gate, its derivative by a) of a tile of raw gates [BT, BH], whose columns are o_h."""
    b_rate = -tl.exp(tl.load(A_log_ptr + o_h, mask=o_h < HV, other=0.0).to(tl.float32))[None, :]
    if bias_ptr is not None:
        b_a += tl.load(bias_ptr + o_h, mask=o_h < HV, other=0.0).to(tl.float32)[None, :]
    # eq:delta-gate   gate = -e^A_log softplus(a + dt_bias)
    return b_rate * softplus(b_a), b_rate * tl.sigmoid(b_a)


@triton.jit(do_not_specialize=["T"])
def gate_cumsum_kernel(
    g_ptr,  # [B, T, HV] natural log; with A_log, the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [HV] or None
    gc_ptr,  # [B, T, HV] out: log2, cumulative within a chunk
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """One program: one chunk of BH heads.  Grid (NT * HV / BH).

    Reference: linattn_edu.reference.delta.gate_cumsum.
    """
    NH: tl.constexpr = (HV + BH - 1) // BH
    i_h, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, NH, BT)
    o_t = tl.arange(0, BT)
    o_h = i_h * BH + tl.arange(0, BH)
    b_g = load_tile(g_ptr + first * HV, o_t, o_h, HV, n_t, HV).to(tl.float32)  # [BT, BH]
    if A_log_ptr is not None:
        b_g, _ = gate(b_g, A_log_ptr, bias_ptr, o_h, HV)
    # 2^-150 is zero in fp32; without the floor a closed gate would cost later sums their low bits
    b_g *= LOG2E
    b_g = tl.where(b_g < -150.0, -150.0, b_g)  # not tl.maximum, which would drop a NaN
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_gc = tl.cumsum(b_g, axis=0)
    store_tile(gc_ptr + first * HV, b_gc, o_t, o_h, HV, n_t, HV)


def gate_cumsum(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int,
    packing: Packing | None = None,
) -> Tensor:
    """Launch gate_cumsum_kernel; arguments and result as in the reference."""
    _, T, HV = g.shape
    gc = torch.empty_like(g, dtype=torch.float32)
    NT, *chunks = chunk_args(g, chunk_size, packing)
    gate_cumsum_kernel[(NT * cdiv(HV, BH),)](
        g, A_log, dt_bias, gc, *chunks, T, HV, BT=chunk_size, BH=BH, num_warps=4
    )
    return gc
