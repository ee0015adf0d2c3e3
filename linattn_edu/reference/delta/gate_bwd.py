"""Stage gate_bwd: the adjoint of gate_cumsum, and of the gate a layer computes."""

from torch import Tensor

from linattn_edu.reference.delta.gate import gate, layer_gate_bwd
from linattn_edu.reference.delta.gate_cumsum import FLOOR, LOG2E
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

    and with A_log or lower_bound, where g is the raw gate, the adjoint of gate (layer_gate_bwd).

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
    log_decay = gate(g, A_log, dt_bias, lower_bound=lower_bound) if raw else g.to(dtype)
    # eq:delta-dg   dg = reverse cumsum(dgc)
    dg = to_chunks(dgc.to(dtype), chunk_size).flip(3).cumsum(3).flip(3)
    dg = from_chunks(dg, g.shape[1]).masked_fill(log_decay * LOG2E < FLOOR[dtype], 0)
    if not raw:
        return dg.to(g.dtype), None, None
    return layer_gate_bwd(dg, g, A_log, dt_bias, lower_bound=lower_bound)
