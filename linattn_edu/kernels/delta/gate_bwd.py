"""Stage gate_bwd: the adjoint of gate_cumsum, and of the gate a layer computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import (
    columns,
    gate_sums,
    gate_tile,
    parameter_gradients,
    store_sums,
)
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.tiles import LOG2E, cdiv, chunk_of, load_tile, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def gate_bwd_kernel(
    dgc_ptr,  # [B, T, D] natural units.  D = HV * PER
    g_ptr,  # [B, T, D] natural log; with A_log or a bound, the raw gate
    A_log_ptr,  # [HV] or None
    bias_ptr,  # [D] or None
    dg_ptr,  # [B, T, D] out
    sums_ptr,  # [NT, 2, D] out: of dA_log, and of da, over the chunk; or None
    near_ptr,  # [NT, D / BD], or None: where it is not 0, dgc is summed already
    bound,  # lower bound of the gate, or None
    cu_ptr, chunks_ptr, T,  # of chunk_of
    D: tl.constexpr,
    PER: tl.constexpr,  # gates of a head
    BT: tl.constexpr, BD: tl.constexpr,
    IN_PLACE: tl.constexpr,  # dg is dgc
):  # fmt: skip
    """One program: one chunk of BD gates.  Grid (NT * D / BD).

    Reference: linattn_edu.reference.delta.gate_bwd.
    """
    ND: tl.constexpr = (D + BD - 1) // BD
    i_d, i_c, first, n_t = chunk_of(tl.program_id(0), cu_ptr, chunks_ptr, T, ND, BT)
    summed = False
    if near_ptr is not None:
        summed = tl.load(near_ptr + i_c * ND + i_d) != 0
        if IN_PLACE and summed:
            return
    o_t = BT - 1 - tl.arange(0, BT)  # from the last token: tl.cumsum(reverse=True) turns tiles over
    o_d = i_d * BD + tl.arange(0, BD)
    b_dgc = load_tile(dgc_ptr + first * D, o_t, o_d, D, n_t, D)  # [BT, BD]
    b_g = load_tile(g_ptr + first * D, o_t, o_d, D, n_t, D).to(tl.float32)  # [BT, BD]
    if sums_ptr is not None:
        b_g, b_slope, b_a = gate_tile(b_g, A_log_ptr, bias_ptr, bound, o_d, D, PER)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    b_dg = tl.cumsum(b_dgc, axis=0)
    b_dg = tl.where(b_g * LOG2E < -150.0, 0.0, b_dg)  # where gate_cumsum held g at its floor
    if near_ptr is not None:
        b_dg = tl.where(summed, b_dgc, b_dg)
    if sums_ptr is not None:
        b_da, b_dA = gate_sums(b_dg, b_g, b_slope, b_a, (o_t < n_t)[:, None], bound)
        store_sums(sums_ptr, b_dA, b_da, i_c, o_d, D)
        b_dg = b_da
    store_tile(dg_ptr + first * D, b_dg, o_t, o_d, D, n_t, D)


def gate_bwd(
    dgc: Tensor, g: Tensor, A_log: Tensor | None = None, dt_bias: Tensor | None = None, *,
    lower_bound: float | None = None, chunk_size: int, packing: Packing | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Launch gate_bwd_kernel; arguments and result as in the reference."""
    return launch_gate_bwd(dgc, g, A_log, dt_bias, None, lower_bound, chunk_size, packing)


def launch_gate_bwd(
    dgc: Tensor, g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, near: Tensor | None,
    lower_bound: float | None, chunk_size: int, packing: Packing | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """gate_bwd; near: of which chunks and groups of channels dgc is dg already, or None."""
    D, PER, width = columns(g)
    NT, *chunks = chunk_args(g, chunk_size, packing)
    raw = A_log is not None or lower_bound is not None
    sums = dgc.new_empty(NT, 2, D) if raw else None
    own = near is not None and not raw and g.dtype == dgc.dtype
    dg = dgc if own else torch.empty_like(g)
    gate_bwd_kernel[(NT * cdiv(D, width),)](
        dgc, g, A_log, dt_bias, dg, sums, near, lower_bound, *chunks, g.shape[1], D, PER,
        BT=chunk_size, BD=width, IN_PLACE=own, num_warps=4 if g.ndim == 3 else 8,
    )  # fmt: skip
    return dg, *(parameter_gradients(sums, A_log, dt_bias) if raw else (None, None))
