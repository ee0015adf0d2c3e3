"""Stage gate_bwd: the adjoint of gate_cumsum, and of the gate a layer computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate_cumsum import BH, gate
from linattn_edu.kernels.tiles import LOG2E, cdiv, chunk_args, chunk_of, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def gate_bwd_kernel(
    dgc_ptr,  # [B, T, HV] natural units
    g_ptr,  # [B, T, HV] natural log; with A_log, the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [HV] or None
    dg_ptr,  # [B, T, HV] out
    sums_ptr,  # [NT, 2, HV] out: of dg gate, and of da, over the chunk; or None
    cu_ptr,  # [N + 1] or None
    chunks_ptr,  # [NT, 2] or None
    T,
    HV: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
):
    """One program: one chunk of BH heads.  Grid (NT * HV / BH).

    Reference: linattn_edu.reference.delta.gate_bwd.
    """
    NH: tl.constexpr = (HV + BH - 1) // BH
    i_h, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, NH, BT)
    o_t = tl.arange(0, BT)
    o_h = i_h * BH + tl.arange(0, BH)
    b_dgc = load_tile(dgc_ptr + first * HV, o_t, o_h, HV, n_t, HV)  # [BT, BH]
    b_g = load_tile(g_ptr + first * HV, o_t, o_h, HV, n_t, HV).to(tl.float32)  # [BT, BH]
    if A_log_ptr is not None:
        b_g, b_slope = gate(b_g, A_log_ptr, bias_ptr, o_h, HV)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    b_dg = tl.cumsum(b_dgc, axis=0, reverse=True)
    b_dg = tl.where(b_g * LOG2E < -150.0, 0.0, b_dg)  # where gate_cumsum held g at its floor
    if A_log_ptr is not None:
        m_t = (o_t < n_t)[:, None]
        # eq:delta-dgate   da = -e^A_log sigmoid(a + dt_bias) dg
        b_da = tl.where(m_t, b_slope * b_dg, 0.0)
        # eq:delta-dgate-sums   dA_log = sum dg gate, ddt_bias = sum da
        sums_ptr += 2 * i_c * HV + o_h
        tl.store(sums_ptr, tl.sum(tl.where(m_t & (b_dg != 0.0), b_dg * b_g, 0.0), 0), mask=o_h < HV)
        tl.store(sums_ptr + HV, tl.sum(b_da, 0), mask=o_h < HV)
        b_dg = b_da
    store_tile(dg_ptr + first * HV, b_dg, o_t, o_h, HV, n_t, HV)


def gate_bwd(
    dgc: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Launch gate_bwd_kernel; arguments and result as in the reference."""
    _, T, HV = g.shape
    dg = torch.empty_like(g)
    NT, *chunks = chunk_args(g, chunk_size, packing)
    sums = None if A_log is None else dgc.new_empty(NT, 2, HV)
    gate_bwd_kernel[(NT * cdiv(HV, BH),)](
        dgc, g, A_log, dt_bias, dg, sums, *chunks, T, HV, BT=chunk_size, BH=BH, num_warps=4
    )
    if sums is None:
        return dg, None, None
    return dg, sums[:, 0].sum(0), None if dt_bias is None else sums[:, 1].sum(0)
