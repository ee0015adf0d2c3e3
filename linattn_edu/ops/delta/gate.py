"""The gates of a layer: the log decay of a raw gate, for each head or each channel; beta's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops.operator import Operator, widened
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import wide

DOMAINS = ("log", "linear")  # a decay as its logarithm, and as the factor itself


def layer_gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None, impl: str
) -> Tensor:
    """The log decay in float32 (float64): g [B, T, HV] or [B, T, HV, K], A_log [HV], dt_bias [HV]
    or [HV, K].
    """
    (y,) = gates[g.ndim](g, A_log, dt_bias, lower_bound, impl)
    return y


def as_logarithm(g: Tensor | None, domain: str) -> Tensor | None:
    """g, or with "linear" the logarithm of these factors, in float32 (float64): -1000 of 0, which
    shuts as -inf does and has the gradient 0.
    """
    if g is None or domain == DOMAINS[0]:
        return g
    g = g.to(wide(g))
    shut = g == 0
    return g.masked_fill(shut, 1).log().masked_fill(shut, -1000.0)


def write_strength(beta: Tensor, factor: int) -> Tensor:
    """beta, or this factor times its sigmoid, in float32 (float64 for float64)."""
    if not factor:
        return beta
    beta = torch.sigmoid(beta.to(wide(beta)))
    return 2 * beta if factor == 2 else beta


@dataclass(frozen=True)
class Stages:
    """The gate and its adjoint."""

    gate: Callable = stage("delta.gate")
    layer_gate_bwd: Callable = stage("delta.gate")


stages = implementations(Stages)


def _declare(name: str, channels: str) -> Operator:
    """The gate of a head, or with the axis of its channels."""
    operator = Operator(
        name,
        {"g": f"B T HV{channels}", "A_log": "HV?", "dt_bias": f"HV{channels}?"},
        {"y": widened(f"B T HV{channels}", "g A_log dt_bias", gradient="dy")},
        options={"lower_bound": "float?"},
        stages=stages,
    )

    @operator.forward
    def forward(
        stages: Stages,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
    ) -> Tensor:
        return stages.gate(g, A_log, dt_bias, lower_bound=lower_bound)

    @operator.backward
    def backward(
        stages: Stages,
        dy: Tensor,
        g: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        lower_bound: float | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return stages.layer_gate_bwd(dy, g, A_log, dt_bias, lower_bound=lower_bound)

    return operator


gates = {3: _declare("gdn_gate", ""), 4: _declare("kda_gate", " K")}  # by the axes of g
