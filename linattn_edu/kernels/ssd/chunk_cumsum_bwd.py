"""Stage chunk_cumsum_bwd: from the gradients of step and gc to those of dt, A and dt_bias."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from linattn_edu.kernels.delta.gate import parameter_gradients, store_sums
from linattn_edu.kernels.rows import chunk_args
from linattn_edu.kernels.ssd.chunk_cumsum import BH, step_tile
from linattn_edu.kernels.tiles import LOG2E, cdiv, channels_of, load_tile, load_vector, store_tile
from linattn_edu.packing import Packing


@triton.jit(do_not_specialize=["T"])
def chunk_cumsum_bwd_kernel(
    dgc_ptr,  # [B, T, H] natural units
    dlast_ptr,  # [B, NT, H] natural units
    dstep_ptr,  # [B, T, H]
    dt_ptr,  # [B, T, H]
    A_ptr,  # [H]
    bias_ptr,  # [H] or None
    m_ptr,  # [B, T, H] or None: added to dlast
    ddt_ptr,  # [B, T, H] out
    sums_ptr,  # [NT, 2, H] out: of dA, and of ddt, over the chunk
    low, high,
    cu_ptr, chunks_ptr, T,  # of channels_of
    stride_t,  # of dgc, dstep and m, between tokens
    stride_h,  # and between heads
    H: tl.constexpr, SOFTPLUS: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """One program: one chunk of BH heads.  Grid (NT * H / BH).

    Reference: linattn_edu.reference.ssd.chunk_cumsum_bwd.
    """
    i_c, first, n_t, o_t, o_h = channels_of(cu_ptr, chunks_ptr, T, H, BT, BH)
    o = first * stride_t + o_t[:, None] * stride_t + o_h[None, :].to(tl.int64) * stride_h
    mask = (o_t < n_t)[:, None] & (o_h < H)[None, :]
    b_dgc = tl.load(dgc_ptr + o, mask=mask, other=0.0)  # [BT, BH]
    b_dstep = tl.load(dstep_ptr + o, mask=mask, other=0.0)  # [BT, BH]
    b_dt = load_tile(dt_ptr + first * H, o_t, o_h, H, n_t, H).to(tl.float32)  # [BT, BH]
    b_A = load_vector(A_ptr, o_h, H)[None, :]
    b_step, b_dt, b_free = step_tile(b_dt, bias_ptr, o_h, low, high, H, SOFTPLUS)
    # eq:ssd-da   da_i = dlast + reverse cumsum(dgc)
    b_dlast = load_vector(dlast_ptr + i_c * H, o_h, H)
    if m_ptr is not None:
        b_dlast += tl.sum(tl.load(m_ptr + o, mask=mask, other=0.0), 0)
    b_da = tl.cumsum(b_dgc, axis=0, reverse=True) + b_dlast[None, :]
    # 0 where chunk_cumsum held step A at its floor, and for tokens that do not exist
    b_da = tl.where((b_step * b_A * LOG2E < -150.0) | (o_t >= n_t)[:, None], 0.0, b_da)
    # eq:ssd-da-head   dA = sum(step da)
    b_dA = b_step * b_da
    # eq:ssd-ddt   ddt = (dstep + A da) softplus'(dt + dt_bias), 0 where clamped
    b_ddt = tl.where(b_free != b_step, 0.0, b_dstep + b_A * b_da)
    if SOFTPLUS:
        b_ddt *= tl.sigmoid(b_dt)
    store_tile(ddt_ptr + first * H, b_ddt, o_t, o_h, H, n_t, H)
    store_sums(sums_ptr, b_dA, b_ddt, i_c, o_h, H)


def chunk_cumsum_bwd(
    dgc: Tensor, dlast: Tensor, dstep: Tensor, dt: Tensor, A: Tensor, dt_bias: Tensor | None = None,
    m: Tensor | None = None, *, softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")), chunk_size: int,
    packing: Packing | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Launch chunk_cumsum_bwd_kernel; arguments and result as in the reference."""
    _, T, H = dt.shape
    dgc, dstep, m = (
        y if y is None or y.stride() == dgc.stride() else torch.empty_like(dgc).copy_(y)
        for y in (dgc, dstep, m)
    )
    ddt = torch.empty_like(dt)
    NT, *chunks = chunk_args(dt, chunk_size, packing)
    sums = dgc.new_empty(NT, 2, H)
    chunk_cumsum_bwd_kernel[(NT * cdiv(H, BH),)](
        dgc, dlast, dstep, dt, A, dt_bias, m, ddt, sums, *limit, *chunks, T,
        *dgc.stride()[1:], H, softplus,
        BT=chunk_size, BH=BH, num_warps=4,
    )  # fmt: skip
    return ddt, *parameter_gradients(sums, A, dt_bias)
