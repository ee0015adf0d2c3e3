"""rms_norm_gated: the public function, its declaration, its two stages."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import wide

WIDEST = 2**15  # a program of the kernels holds a row
ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


@repeated()
def rms_norm_gated(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
    *,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Divide each row of x by its root mean square, and gate it.

    .. math::

        y &= \Big(\frac{x}{\mathrm{rms}(x)} \odot w + b\Big) \odot \mathrm{act}(z)
        \quad\text{with norm\_before\_gate, else} \\
        y &= \frac{v}{\mathrm{rms}(v)} \odot w + b, \quad v = x \odot \mathrm{act}(z); \qquad
        \mathrm{rms}(v) = \sqrt{\mathrm{mean}(v^2) + eps}

    With residual, x is the sum of both. Differentiable by x, weight, bias, z and residual.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16 (float64, or rows above 32768: reference
            only).
        weight: w ``[D]``, any of these dtypes, one if None.
        bias: b ``[D]``, any of these dtypes, zero if None.
        z: Gate ``[..., D]`` of x's shape, any of these dtypes, or None: y is not gated.
        eps: Added to the mean of squares, so that a row of zeros stays one.
        group_size: Length of the parts of the last axis, each of its own root mean square, a
            divisor of D, or None: D.
        norm_before_gate: Whether the gate comes after the norm, or before it.
        activation: act, "silu" (also called "swish"), ``z * sigmoid(z)``, or "sigmoid".
        residual: Of x's shape, any of these dtypes, added to x first, or None.
        prenorm: Whether to return the sum too, what the next residual is.
        residual_in_fp32: Whether the sum is in float32 where there is no residual.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Accuracy: the arithmetic is in float32 (float64 where an input is); y is rounded once. Squares
    do not overflow.

    Memory: between the passes it keeps its inputs, and a number of float32 for each row. The
    backward pass adds up the gradients of weight and bias from at most 1024 rows of float32. A z
    whose rows lie at any one distance, as a slice of a projection's do, is not copied.

    Returns:
        y ``[..., D]`` in x's dtype; with prenorm ``(y, sum)``, the sum in residual's dtype (x's
        without one, or float32), to which it is rounded before the norm.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, group_size, activation or impl does not fit, or eps is not a
            finite number >= 0. No kernel has run then.

    Source: the arguments are those of mamba_ssm 2.3.2's rmsnorm_fn, and activation that of
    fla-core's FusedRMSNormGated; chapter 27.
    """
    D, group = _check_tensors(x, weight, bias, z, residual, group_size)
    prenorm = check.flag("prenorm", prenorm)
    residual_in_fp32 = check.flag("residual_in_fp32", residual_in_fp32)
    eps = check_eps("eps", eps)
    norm_before_gate = check.flag("norm_before_gate", norm_before_gate)
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu', 'swish' or 'sigmoid', got {activation!r}")
    if group > WIDEST and impl == "triton":
        raise ValueError(f"impl='triton' takes rows up to {WIDEST}, got {group}")
    if group > WIDEST and impl == "auto":
        impl = "reference"
    tensors = (x, weight, bias, z, residual)
    impl = check.resolve_impl(impl, x.device, tuple(t.dtype for t in tensors if t is not None))
    dtype, total = x.dtype, summed(x, residual, residual_in_fp32)
    x, weight, bias, z = (
        None if t is None else t.reshape(*t.shape[:-1], D // group, group)
        for t in (total, weight, bias, z)
    )
    y, _ = norm(x, weight, bias, z, eps, norm_before_gate, ACTIVATIONS[activation], impl)
    y = y.flatten(-2).to(dtype)
    return (y, total) if prenorm else y


def summed(x: Tensor, residual: Tensor | None, in_fp32: bool) -> Tensor:
    """x + residual in residual's dtype; without a residual x, or x in float32."""
    if residual is not None:
        return (x.to(wide(x, residual)) + residual).to(residual.dtype)
    return x.to(wide(x)) if in_fp32 else x


def check_eps(name: str, eps: float) -> float:
    """eps, a finite number >= 0."""
    eps = check.number(name, eps)
    if eps is None or eps < 0:
        raise ValueError(f"{name} must be >= 0, got {eps}")
    return eps


def _check_tensors(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    residual: Tensor | None,
    group_size: int | None,
) -> tuple[int, int]:
    """Refuse tensors that do not fit; return D and the length of a group."""
    given = check.Tensors()
    given.dense("x", x, "[..., D]")
    if x.ndim < 1 or 0 in x.shape[-1:]:
        raise ValueError(f"x must have shape [..., D] with D >= 1, got {tuple(x.shape)}")
    D = given.sizes["D"] = x.shape[-1]
    for name, y in (("weight", weight), ("bias", bias)):
        if y is not None:
            given.take(name, y, ("D",))
    for name, y in (("z", z), ("residual", residual)):
        if y is not None:
            given.dense(name, y, "[..., D]")
            if y.shape != x.shape:
                raise ValueError(
                    f"{name} must have x's shape {tuple(x.shape)}, got {tuple(y.shape)}"
                )
    if group_size is None:
        return D, D
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size must be an integer or None, got {group_size!r}")
    if group_size < 1 or D % group_size:
        raise ValueError(f"group_size must divide D={D}, got {group_size}")
    return D, group_size


@dataclass(frozen=True)
class Stages:
    """The norm with its gate, and its adjoint."""

    rms_norm_gated: Callable = stage("delta.rms_norm_gated")
    rms_norm_gated_bwd: Callable = stage("delta.rms_norm_gated")


stages = implementations(Stages)

norm = Operator(
    "rms_norm_gated",
    {"x": "... G D", "weight": "G D?", "bias": "G D?", "z": "... G D?"},
    {"y": like("... G D", "x", gradient="dy"), "rstd": widened("... G", "x")},
    options={"eps": "float", "norm_before_gate": "bool", "activation": "str"},
    stages=stages,
    apart={"z": 2},
)


@norm.forward
def forward(
    stages: Stages,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    eps: float,
    norm_before_gate: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """y and 1 / rms."""
    return stages.rms_norm_gated(
        x, weight, bias, z, eps=eps, norm_before_gate=norm_before_gate, activation=activation
    )


@norm.backward
def backward(
    stages: Stages,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None,
    rstd: Tensor,
    dy: Tensor,
    norm_before_gate: bool,
    activation: str,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """dx, dweight, dbias and dz."""
    options = {"norm_before_gate": norm_before_gate, "activation": activation}
    return stages.rms_norm_gated_bwd(x, weight, bias, z, rstd, dy, **options)
