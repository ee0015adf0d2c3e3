"""Stage gate_bwd: the adjoint of gate_cumsum, and of the gate a layer computes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import FLOOR, LOG2E, gate, raw_gate
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def gate_bwd(
    dgc: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """From the gradient of the accumulated decay to that of each token's, and of the gate.

        dg_i = sum over j >= i in the chunk of dgc_j,  0 where gate_cumsum held g at its floor,

    and with A_log, where g is the raw gate a: gate = -e^A_log softplus(a + dt_bias),

        da = -e^A_log sigmoid(a + dt_bias) dg,  dA_log = sum dg gate,  ddt_bias = sum da;

    with lower_bound, gate = lower_bound y, y = sigmoid(e^A_log (a + dt_bias)):

        da = lower_bound e^A_log y (1 - y) dg,  dA_log = sum da (a + dt_bias),  ddt_bias = sum da

    Args:
        dgc: [B, T, HV] or [B, T, HV, K], natural units.
        g, A_log, dt_bias, lower_bound, chunk_size: the arguments of gate_cumsum.
    Returns:
        dg in g.dtype; dA_log [HV] and ddt_bias of dt_bias's shape in fp32 (fp64 for fp64 input), or
        None.
    Source: chapter 12.
    """
    dtype = compute_dtype(dgc, g, A_log, dt_bias)
    raw = A_log is not None or lower_bound is not None
    log_decay = gate(g, A_log, dt_bias, lower_bound) if raw else g.to(dtype)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    dg = to_chunks(dgc.to(dtype), chunk_size).flip(3).cumsum(3).flip(3)
    dg = from_chunks(dg, g.shape[1]).masked_fill(log_decay * LOG2E < FLOOR[dtype], 0)
    if not raw:
        return dg.to(g.dtype), None, None
    a, rate = raw_gate(g, A_log, dt_bias)
    if lower_bound is None:
        # eq:delta-dgate   da = -e^A_log sigmoid(a + dt_bias) dg
        da = -rate * F.sigmoid(a) * dg
        # eq:delta-dgate-sums   dA_log = sum dg gate, ddt_bias = sum da
        dA_log = torch.where(dg == 0, 0, dg * log_decay)
    else:
        # eq:kda-dgate   da = lower_bound e^A_log y (1 - y) dg
        da = lower_bound * rate * F.sigmoid(rate * a) * F.sigmoid(-rate * a) * dg
        # eq:kda-dgate-sums   dA_log = sum da (a + dt_bias), ddt_bias = sum da
        dA_log = torch.where(da == 0, 0, da * a)
    dA_log = None if A_log is None else dA_log.sum((0, 1, *range(3, g.ndim)))
    ddt_bias = None if dt_bias is None else da.sum((0, 1)).view(dt_bias.shape)
    return da.to(g.dtype), dA_log, ddt_bias
