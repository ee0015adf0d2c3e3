"""The log decay that a layer computes from its raw gate, and its adjoint."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype

STEEP = 2.0**100  # a bounded gate of this rate is a step to any precision


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y, and 0 where either is 0, however large the other."""
    return torch.where((x == 0) | (y == 0), 0, x * y)


def raw_gate(a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """a + dt_bias, and e^A_log (1 without A_log) with an axis for each of a's behind the heads."""
    dtype = compute_dtype(a, A_log, dt_bias)
    a = a.to(dtype) if dt_bias is None else a.to(dtype) + dt_bias.to(dtype).view(a.shape[2:])
    rate = a.new_ones(a.shape[2]) if A_log is None else A_log.to(dtype).exp()
    return a, rate.view(-1, *[1] * (a.ndim - 3))


def gate(
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> Tensor:
    """The log decay of a raw gate.

        gate = -e^A_log softplus(g + dt_bias),  or lower_bound sigmoid(e^A_log (g + dt_bias))

    Infinite arguments give the limits: 0 where the softplus is 0, -inf elsewhere at an infinite
    rate e^A_log; at a bound, a step. Infinity times zero counts as zero.

    Args:
        g: [B, T, HV] or [B, T, HV, K], the raw gate.
        A_log: [HV]; None, for a rate of 1, with lower_bound only.  dt_bias: [HV] or [HV * K].
        lower_bound: < 0, or None for the softplus.
    Returns:
        The natural-log decay, of g's shape, in fp32 (fp64 for fp64 input).
    Source: chapter 12.
    """
    a, rate = raw_gate(g, A_log, dt_bias)
    if lower_bound is None:
        # eq:delta-gate   gate = -e^A_log softplus(a + dt_bias)
        return -product(rate, F.softplus(a, threshold=40.0))  # from there it is a, in fp64 too
    # eq:kda-gate   gate = lower_bound sigmoid(e^A_log (a + dt_bias))
    return lower_bound * F.sigmoid(product(rate, a))


def layer_gate_bwd(
    dy: Tensor,
    g: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The adjoint of gate; a is g, the raw gate, and dg the gradient of the log decay.

        da = -e^A_log sigmoid(a + dt_bias) dg,  dA_log = sum dg gate,  ddt_bias = sum da;

    with lower_bound, where gate = lower_bound y, y = sigmoid(e^A_log (a + dt_bias)),

        da = lower_bound e^A_log y (1 - y) dg,  dA_log = sum da (a + dt_bias),  ddt_bias = sum da

    Where the gate is -inf nothing moves it, and where it is a step (an infinite rate; at a bound,
    one of 2^100) it is flat: the gradients are 0 there.

    Args:
        dy: the gradient of the result of gate.  The others: the arguments of gate.
    Returns:
        da in g.dtype; dA_log [HV] and ddt_bias of dt_bias's shape in fp32 (fp64 for fp64 input), or
        None.
    Source: chapter 12.
    """
    dtype = compute_dtype(dy, g, A_log, dt_bias)
    log_decay = gate(g, A_log, dt_bias, lower_bound=lower_bound)
    dg = dy.to(dtype).masked_fill(log_decay.isinf(), 0)
    a, rate = raw_gate(g, A_log, dt_bias)
    if lower_bound is None:
        # eq:delta-dgate   da = -e^A_log sigmoid(a + dt_bias) dg
        da = -rate.masked_fill(rate.isinf(), 0) * F.sigmoid(a) * dg
        # eq:delta-dgate-sums   dA_log = sum dg gate, ddt_bias = sum da
        dA_log = product(dg, log_decay)
    else:
        # eq:kda-dgate   da = lower_bound e^A_log y (1 - y) dg
        x, rate = product(rate, a), rate.masked_fill(rate > STEEP, 0)
        da = lower_bound * rate * F.sigmoid(x) * F.sigmoid(-x) * dg
        # eq:kda-dgate-sums   dA_log = sum da (a + dt_bias), ddt_bias = sum da
        dA_log = product(da, a)
    dA_log = None if A_log is None else dA_log.sum((0, 1, *range(3, g.ndim)))
    ddt_bias = None if dt_bias is None else da.sum((0, 1)).view(dt_bias.shape)
    return da.to(g.dtype), dA_log, ddt_bias
