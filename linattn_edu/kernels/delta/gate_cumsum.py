"""Stage gate_cumsum: the decay accumulated inside each chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.tiles import LOG2E, cdiv, chunk_args, chunk_of, load_tile, store_tile
from linattn_edu.packing import Packing

BH = 16  # heads a program: 64 contiguous bytes of g, so that whole memory sectors are used
BD = 64  # channels a program


@triton.jit
def softplus(x):
    """log(1 + e^x), to full relative precision: e^-|x| may be too small to change 1."""
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y
    # log1p(y) = log(u) y / (u - 1): the rounding of u cancels
    log1p = tl.where(u == 1.0, y, tl.log(u) * (y / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log1p


@triton.jit
def gate(b_a, A_log_ptr, bias_ptr, bound, o_d, D: tl.constexpr, PER: tl.constexpr):
    """(gate, its derivative by a, a + dt_bias) of a tile of raw gates, whose columns are o_d.

    PER columns share a head's A_log.  bound: the lower bound, or None: no bound.
    """
    b_rate = 1.0
    if A_log_ptr is not None:
        b_rate = tl.load(A_log_ptr + o_d // PER, mask=o_d < D, other=0.0).to(tl.float32)
        b_rate = tl.exp(b_rate)[None, :]
    if bias_ptr is not None:
        b_a += tl.load(bias_ptr + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    if bound is None:
        # eq:delta-gate   gate = -e^A_log softplus(a + dt_bias)
        b_g, b_slope = -b_rate * softplus(b_a), -b_rate * tl.sigmoid(b_a)
    else:
        # eq:kda-gate   gate = lower_bound sigmoid(e^A_log (a + dt_bias))
        b_y = bound * tl.sigmoid(b_rate * b_a)
        b_g, b_slope = b_y, b_y * b_rate * tl.sigmoid(-b_rate * b_a)
    return b_g, b_slope, b_a


@triton.jit(do_not_specialize=["T"])
def gate_cumsum_kernel(
    g_ptr,  # [B, T, D] natural log; with A_log or a bound, the raw gate.  D = HV * PER
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [D] or None
    gc_ptr,  # [B, T, D] out: log2, cumulative within a chunk
    bound,  # lower bound of the gate, or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    D: tl.constexpr,
    PER: tl.constexpr,  # gates of a head
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """One program: one chunk of BD gates.  Grid (NT * D / BD).

    Reference: linattn_edu.reference.delta.gate_cumsum.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, _, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BT)
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    b_g = load_tile(g_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    if A_log_ptr is not None or bound is not None:
        b_g, _, _ = gate(b_g, A_log_ptr, bias_ptr, bound, o_d, D, PER)
    # 2^-150 is zero in fp32; without the floor a closed gate would cost later sums their low bits
    b_g *= LOG2E
    b_g = tl.where(b_g < -150.0, -150.0, b_g)  # not tl.maximum, which would drop a NaN
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_gc = tl.cumsum(b_g, axis=0)
    store_tile(gc_ptr + first * D, b_gc, o_t, o_d, D, n_t, D)


def gate_cumsum(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int,
    packing: Packing | None = None,
) -> Tensor:
    """Launch gate_cumsum_kernel; arguments and result as in the reference."""
    _, T, HV, *channels = g.shape
    PER = channels[0] if channels else 1
    gc = torch.empty_like(g, dtype=torch.float32)
    NT, *chunks = chunk_args(g, chunk_size, packing)
    width = BD if channels else BH
    gate_cumsum_kernel[(NT * cdiv(HV * PER, width),)](
        g, A_log, dt_bias, gc, lower_bound, *chunks, T, HV * PER, PER, BT=chunk_size, BD=width,
        num_warps=4,
    )  # fmt: skip
    return gc
