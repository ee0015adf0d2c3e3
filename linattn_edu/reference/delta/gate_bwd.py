"""Stage gate_bwd: the adjoint of gate_cumsum, and of the gate a layer computes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import FLOOR, LOG2E, gate
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def gate_bwd(
    dgc: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """From the gradient of the accumulated decay to that of each token's, and of the gate.

        dg_i = sum over j >= i in the chunk of dgc_j,  0 where gate_cumsum held g at its floor,

    and with A_log, where g is the raw gate a: gate = -e^A_log softplus(a + dt_bias),

        da = -e^A_log sigmoid(a + dt_bias) dg,  dA_log = sum dg gate,  ddt_bias = sum da

    Args:
        dgc: [B, T, HV] natural units. g, A_log, dt_bias, chunk_size: the arguments of gate_cumsum.
    Returns:
        dg [B, T, HV] in g.dtype, dA_log and ddt_bias [HV] in fp32 (fp64 for fp64 input) or None.
    Source: chapter 12.
    """
    dtype = compute_dtype(dgc, g, A_log, dt_bias)
    log_decay = g.to(dtype) if A_log is None else gate(g, A_log, dt_bias).to(dtype)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    dg = to_chunks(dgc.to(dtype), chunk_size).flip(-1).cumsum(-1).flip(-1)
    dg = from_chunks(dg, g.shape[1]).masked_fill(log_decay * LOG2E < FLOOR[dtype], 0)
    if A_log is None:
        return dg.to(g.dtype), None, None
    # eq:delta-dgate   da = -e^A_log sigmoid(a + dt_bias) dg
    a = g.to(dtype) if dt_bias is None else g.to(dtype) + dt_bias.to(dtype)
    da = -A_log.to(dtype).exp() * F.sigmoid(a) * dg
    # eq:delta-dgate-sums   dA_log = sum dg gate, ddt_bias = sum da
    dA_log = torch.where(dg == 0, 0, dg * log_decay).sum((0, 1))
    return da.to(g.dtype), dA_log, None if dt_bias is None else da.sum((0, 1))
