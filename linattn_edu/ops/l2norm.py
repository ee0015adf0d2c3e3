"""l2norm: the public function, its declaration, its two stages."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import wide

WIDEST = 2**16  # a program of the kernel holds a row
EPS = 1e-6


@repeated()
def l2norm(
    x: Tensor, eps: float = EPS, output_dtype: torch.dtype | None = None, *, impl: str = "auto"
) -> Tensor:
    """Divide each row of x by its length: y = x / sqrt(sum x^2 + eps).

    Differentiable.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16 (float64, or D above 65536: reference only).
        eps: Added to the sum of squares, so that a row of zeros stays one.
        output_dtype: Dtype of the result, x's if None. The arithmetic is in float32 (float64).
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Returns:
        y ``[..., D]``.

    Raises:
        TypeError: x is no floating-point tensor, or output_dtype no floating-point dtype.
        ValueError: x has no axis or no elements; eps is not a finite number >= 0; impl cannot run.

    Source: chapter 08b.
    """
    check.dense("x", x, "[..., D]")
    if x.ndim < 1 or 0 in x.shape[-1:]:
        raise ValueError(f"x must have shape [..., D] with D >= 1, got {tuple(x.shape)}")
    eps = check.number("eps", eps)
    if eps is None or eps < 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if output_dtype is not None:
        check.dtype("output_dtype", output_dtype)
    if x.shape[-1] > WIDEST and impl == "triton":
        raise ValueError(f"impl='triton' takes D up to {WIDEST}, got {x.shape[-1]}")
    if x.shape[-1] > WIDEST and impl == "auto":
        impl = "reference"
    impl = check.resolve_impl(impl, x.device, (x.dtype,))
    if output_dtype not in (None, x.dtype):
        x = x.to(wide(x))  # so that y is rounded once
    y, _ = norm(x, eps, impl)
    return y if output_dtype is None else y.to(output_dtype)


def unit(x: Tensor, impl: str) -> Tensor:
    """`l2norm` of rows that an operator has checked."""
    return norm(x, EPS, impl)[0]


@dataclass(frozen=True)
class Stages:
    """The division of rows by their length, and its adjoint."""

    l2norm: Callable = stage("delta.l2norm")
    l2norm_bwd: Callable = stage("delta.l2norm")


stages = implementations(Stages)

norm = Operator(
    "l2norm",
    {"x": "... D"},
    {"y": like("... D", "x", gradient="dy"), "rstd": widened("...", "x")},
    options={"eps": "float"},
    stages=stages,
)


@norm.forward
def forward(stages: Stages, x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y and 1 / sqrt(sum x^2 + eps)."""
    return stages.l2norm(x, eps)


@norm.backward
def backward(stages: Stages, x: Tensor, rstd: Tensor, dy: Tensor) -> Tensor:
    """dx."""
    return stages.l2norm_bwd(x, rstd, dy)
