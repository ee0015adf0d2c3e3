"""Stage gate_cumsum: the decay accumulated inside each chunk."""

import math

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate import gate
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks

LOG2E = math.log2(math.e)
# the log2 of a factor that is zero in the dtype: decays below it need not be told apart,
# and leaving them in would cost the sum the low bits of every later decay of the chunk
FLOOR = {torch.float32: -150.0, torch.float64: -1080.0}


def gate_cumsum(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int,
) -> Tensor:
    """Accumulate the log decay inside each chunk, in base 2.

        gc_i = sum over j <= i in the chunk of max(log2(e) g_j, floor)

    so that 2^(gc_i - gc_j) is the decay from token j to token i of one chunk. The floor is -150
    (fp64: -1080): 2^-150 is zero in fp32.

    Args:
        g: [B, T, HV] natural-log decay of one token, <= 0, or [B, T, HV, K], one for each row of
            the state; with A_log or lower_bound, the raw gate of a layer, from which the decay is
            -e^A_log softplus(g + dt_bias), or lower_bound sigmoid(e^A_log (g + dt_bias)).
        A_log: [HV]. dt_bias: [HV] or [HV * K], may be left out.  lower_bound: < 0.
        chunk_size: C.
    Returns:
        gc, of g's shape, log2 units, fp32 (fp64 for fp64 input).
    Source: chapter 02; the gate of a layer: chapter 12.
    """
    dtype = compute_dtype(g, A_log, dt_bias)
    if A_log is not None or lower_bound is not None:
        g = gate(g, A_log, dt_bias, lower_bound=lower_bound)
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    gc = to_chunks((g.to(dtype) * LOG2E).clamp(min=FLOOR[dtype]), chunk_size).cumsum(3)
    return from_chunks(gc, g.shape[1])


def decay_matrix(gc: Tensor) -> Tensor:
    """gc [..., C] -> G [..., C, C] with G_ij = 2^(gc_i - gc_j) for i >= j and 0 above."""
    # eq:delta-decay-matrix   G = 2^(gc_i - gc_j), i >= j
    diff = gc[..., :, None] - gc[..., None, :]
    causal = torch.ones(diff.shape[-2:], dtype=torch.bool, device=gc.device).tril()
    return torch.exp2(diff.masked_fill(~causal, -torch.inf))
