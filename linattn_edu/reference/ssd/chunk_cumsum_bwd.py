"""Stage chunk_cumsum_bwd: from the gradients of step and gc to those of dt, A and dt_bias."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import FLOOR, LOG2E
from linattn_edu.reference.ssd.chunk_cumsum import steps
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def chunk_cumsum_bwd(
    dgc: Tensor,
    dlast: Tensor,
    dstep: Tensor,
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    m: Tensor | None = None,
    *,
    softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")),
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adjoint of chunk_cumsum.

        da_i = dlast + sum over j >= i in the chunk of dgc_j,   0 where step A was held at its floor
        dA   = sum over tokens of step da
        ddt  = (dstep + A da) softplus'(dt + dt_bias),   0 where the step was clamped

    Args:
        dgc: [B, T, H] and dlast: [B, NT, H], gradients of gc and of its last entry in each chunk,
            natural units.  dstep: [B, T, H], the gradient of the step where it multiplies x.
        dt, A, dt_bias, softplus, limit: as in chunk_cumsum.
        m: [B, T, H], whose sum over each chunk is added to dlast; or None, where that has been
            done.
    Returns:
        ddt in dt.dtype; dA [H] and ddt_bias [H] in fp32 (fp64 for fp64 input), or None.
    Source: chapter 19.
    """
    dtype = compute_dtype(dgc, dlast, dstep, dt, A, dt_bias)
    step = steps(dt, dt_bias, softplus=softplus, limit=limit, dtype=dtype)
    # eq:ssd-da   da_i = dlast + reverse cumsum(dgc)
    if m is not None:
        dlast = dlast + to_chunks(m, chunk_size).sum(-1).transpose(1, 2)
    da = to_chunks(dgc.to(dtype), chunk_size).flip(3).cumsum(3).flip(3)
    da = from_chunks(da + dlast.to(dtype).transpose(1, 2)[..., None], dt.shape[1])
    da = da.masked_fill(step * A.to(dtype) * LOG2E < FLOOR[dtype], 0)
    # eq:ssd-da-head   dA = sum(step da)
    dA = (step * da).sum((0, 1))
    # eq:ssd-ddt   ddt = (dstep + A da) softplus'(dt + dt_bias), 0 where clamped
    raw = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    free = steps(dt, dt_bias, softplus=softplus, limit=(-torch.inf, torch.inf), dtype=dtype)
    ddt = (dstep.to(dtype) + A.to(dtype) * da).masked_fill(free != step, 0)
    ddt = ddt * torch.sigmoid(raw) if softplus else ddt
    return ddt.to(dt.dtype), dA, None if dt_bias is None else ddt.sum((0, 1))
