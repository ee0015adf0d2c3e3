"""Stage chunk_cumsum: the step sizes of Mamba-2, and the decay accumulated inside each chunk."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import FLOOR, LOG2E
from linattn_edu.reference.delta.gate_cumsum import decay_matrix as causal_decay
from linattn_edu.reference.tiles import (
    compute_dtype,
    documents,
    from_chunks,
    pad_gate,
    to_chunks,
)

LEAST = 2.0**-100  # a step that is written in an exponent: fp32 can divide by it


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    *,
    softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")),
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Step sizes, and their log decay accumulated inside each chunk, in base 2.

        step = clamp(softplus(dt + dt_bias), limit)
        gc_i = sum over j <= i in the chunk of max(log2(e) step_j A, floor)

    with the floor of gate_cumsum. The state decays by 2^(gc_i - gc_j) from token j to token i.

    Args:
        dt: [B, T, H], any float dtype.  A: [H], <= 0.  dt_bias: [H].
        softplus: whether the softplus is taken.  limit: least and largest step.
    Returns:
        step [B, T, H] and gc [B, T, H] (log2), both fp32 (fp64 for fp64 input).
    Source: arXiv:2405.21060 section 6, chapter 13.
    """
    dtype = compute_dtype(dt, A, dt_bias)
    # eq:ssd-step   step = clamp(softplus(dt + dt_bias))
    step = steps(dt, dt_bias, softplus=softplus, limit=limit, dtype=dtype)
    # eq:ssd-cumsum   gc = log2(e) cumsum(step A)
    gc = (step * A.to(dtype) * LOG2E).clamp(min=FLOOR[dtype])
    return step, from_chunks(to_chunks(gc, chunk_size).cumsum(3), dt.shape[1])


def chunk_cumsum_log(
    dt: Tensor,
    A: Tensor,
    dt_bias: Tensor | None = None,
    *,
    softplus: bool = False,
    limit: tuple[float, float] = (0.0, float("inf")),
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """chunk_cumsum with the step in the exponent, as the fused stages read it.

        gs = gc - log2(step)

    2^(gc_i - gs_j) is the decay from token j to token i times the step of token j. The step must
    not be negative. A step below 2^-100 counts as 0: gs is infinite.

    Args:
        dt, A, dt_bias, softplus, limit: as in chunk_cumsum.
    Returns:
        gs and gc [B, T, H] (log2), both fp32 (fp64 for fp64 input).
    Source: chapter 13.
    """
    step, gc = chunk_cumsum(dt, A, dt_bias, softplus=softplus, limit=limit, chunk_size=chunk_size)
    # eq:ssd-gs   gs = gc - log2(step)
    return torch.where(step < LEAST, torch.inf, gc - torch.log2(step)), gc


def steps(
    dt: Tensor,
    dt_bias: Tensor | None,
    *,
    softplus: bool,
    limit: tuple[float, float],
    dtype: torch.dtype,
) -> Tensor:
    """clamp(softplus(dt + dt_bias), *limit) in dtype."""
    raw = dt.to(dtype) if dt_bias is None else dt.to(dtype) + dt_bias.to(dtype)
    return (F.softplus(raw) if softplus else raw).clamp(*limit)


def decays(
    gc: Tensor, seq_idx: Tensor | None, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four decays of a chunk, zero between tokens of different documents.

        e_i  = 2^gc_i               from the state before the chunk to token i
        G_ij = 2^(gc_i - gc_j)      from token j to token i >= j, 0 above
        r_j  = 2^(gc_last - gc_j)   from token j to the state after the chunk
        a    = 2^gc_last            from the state before to the state after the chunk

    Args:
        gc: [B, T, H] of chunk_cumsum.
        seq_idx: [B, T], the document of each token, or None; equal numbers are neighbours.
    Returns:
        e [B, H, NT, C, 1], G [B, H, NT, C, C], r [B, H, NT, C, 1], a [B, H, NT, 1, 1].
    """
    gc = to_chunks(pad_gate(gc, chunk_size), chunk_size)
    last = gc[..., -1:]
    # eq:ssd-decays   e = 2^gc, G = 2^(gc_i - gc_j), r = 2^(gc_last - gc), a = 2^gc_last
    e, G, r, a = torch.exp2(gc), causal_decay(gc), torch.exp2(last - gc), torch.exp2(last)
    if seq_idx is not None:
        ids, before, end = documents(seq_idx, chunk_size)
        e, r, a = e * (ids == before), r * (ids == end), a * (end == before)
        G = G * (ids[..., :, None] == ids[..., None, :])
    return e[..., None], G, r[..., None], a[..., None]
