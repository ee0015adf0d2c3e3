"""Stage gate_bwd: the adjoint of gate_cumsum, and of the gate a layer computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate_cumsum import BD, BH, gate
from linattn_edu.kernels.tiles import LOG2E, cdiv, chunk_args, chunk_of, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def gate_bwd_kernel(
    dgc_ptr,  # [B, T, D] natural units.  D = HV * PER
    g_ptr,  # [B, T, D] natural log; with A_log or a bound, the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [D] or None
    dg_ptr,  # [B, T, D] out
    sums_ptr,  # [NT, 2, D] out: of dA_log, and of da, over the chunk; or None
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

    Reference: linattn_edu.reference.delta.gate_bwd.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BT)
    o_t = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    b_dgc = load_tile(dgc_ptr + first * D, o_t, o_d, D, n_t, D)  # [BT, BD]
    b_g = load_tile(g_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    if sums_ptr is not None:
        b_g, b_slope, b_a = gate(b_g, A_log_ptr, bias_ptr, bound, o_d, D, PER)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    b_dg = tl.cumsum(b_dgc, axis=0, reverse=True)
    b_dg = tl.where(b_g * LOG2E < -150.0, 0.0, b_dg)  # where gate_cumsum held g at its floor
    if sums_ptr is not None:
        m_t = (o_t < n_t)[:, None]
        if bound is None:
            # eq:delta-dgate   da = -e^A_log sigmoid(a + dt_bias) dg
            b_da = tl.where(m_t, b_slope * b_dg, 0.0)
            # eq:delta-dgate-sums   dA_log = sum dg gate, ddt_bias = sum da
            b_dA = tl.where(m_t & (b_dg != 0.0), b_dg * b_g, 0.0)
        else:
            # eq:kda-dgate   da = lower_bound e^A_log y (1 - y) dg
            b_da = tl.where(m_t, b_slope * b_dg, 0.0)
            # eq:kda-dgate-sums   dA_log = sum da (a + dt_bias), ddt_bias = sum da
            b_dA = tl.where(b_da != 0.0, b_da * b_a, 0.0)
        sums_ptr += 2 * i_c * D + o_d
        tl.store(sums_ptr, tl.sum(b_dA, 0), mask=o_d < D)
        tl.store(sums_ptr + D, tl.sum(b_da, 0), mask=o_d < D)
        b_dg = b_da
    store_tile(dg_ptr + first * D, b_dg, o_t, o_d, D, n_t, D)


def gate_bwd(
    dgc: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch gate_bwd_kernel; arguments and result as in the reference."""
    _, T, HV, *channels = g.shape
    D = HV * (channels[0] if channels else 1)
    dg = torch.empty_like(g)
    NT, *chunks = chunk_args(g, chunk_size, packing)
    raw = A_log is not None or lower_bound is not None
    sums = dgc.new_empty(NT, 2, D) if raw else None
    width = BD if channels else BH
    gate_bwd_kernel[(NT * cdiv(D, width),)](
        dgc, g, A_log, dt_bias, dg, sums, lower_bound, *chunks, T, D, D // HV, BT=chunk_size,
        BD=width, num_warps=4,
    )  # fmt: skip
    dA_log = None if A_log is None else sums[:, 0].sum(0).view(HV, -1).sum(-1)
    ddt_bias = None if dt_bias is None or not raw else sums[:, 1].sum(0).view(dt_bias.shape)
    return dg, dA_log, ddt_bias
