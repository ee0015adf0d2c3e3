"""Stage gate_cumsum: the decay accumulated inside each chunk."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import columns, gate_tile
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import LOG2E, cdiv, channels_of, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit
def cumulative(b_g, A_log_ptr, bias_ptr, bound, o_d, D: tl.constexpr, PER: tl.constexpr):
    """gc of a chunk of gates, raw with A_log or a bound, whose columns are o_d."""
    if A_log_ptr is not None or bound is not None:
        b_g, _, _ = gate_tile(b_g, A_log_ptr, bias_ptr, bound, o_d, D, PER)
    # 2^-150 is zero in fp32; without the floor a closed gate would cost later sums their low bits
    b_g *= LOG2E
    b_g = tl.where(b_g < -150.0, -150.0, b_g)  # not tl.maximum, which would drop a NaN
    return tl.cumsum(b_g, axis=0)


@triton.jit(do_not_specialize=["T"])
def gate_cumsum_kernel(
    g_ptr,  # [B, T, D] natural log; with A_log or a bound, the raw gate.  D = HV * PER
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [D] or None
    gc_ptr,  # [B, T, D] out: log2, cumulative within a chunk
    bound,  # lower bound of the gate, or None
    cu_ptr, chunks_ptr, T,  # of channels_of
    D: tl.constexpr,
    PER: tl.constexpr,  # gates of a head
    BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of BD gates.  Grid (NT * D / BD).

    Reference: linattn_edu.reference.delta.gate_cumsum.
    """
    _, first, n_t, o_t, o_d = channels_of(cu_ptr, chunks_ptr, T, D, BT, BD)
    b_g = load_tile(g_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    b_gc = cumulative(b_g, A_log_ptr, bias_ptr, bound, o_d, D, PER)
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
    D, PER, width = columns(g)
    gc = torch.empty_like(g, dtype=torch.float32)
    NT, *chunks = chunk_args(g, chunk_size, packing)
    gate_cumsum_kernel[(NT * cdiv(D, width),)](
        g, A_log, dt_bias, gc, lower_bound, *chunks, g.shape[1], D, PER, BT=chunk_size, BD=width,
        num_warps=4,
    )  # fmt: skip
    return gc
