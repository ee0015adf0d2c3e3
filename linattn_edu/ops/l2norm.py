"""l2norm: the public function and its gradient."""

import torch
from torch import Tensor

from linattn_edu.ops import check, library

WIDEST = 2**16  # a program of the kernel holds a row


def l2norm(
    x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None, *, impl: str = "auto"
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

    Source: chapter 08.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor of shape [..., D], got {type(x).__name__}")
    if x.dtype not in check.FLOATS:
        raise TypeError(f"x must be float64, float32, float16 or bfloat16, got {x.dtype}")
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"x must have shape [..., D] without an empty axis, got {tuple(x.shape)}")
    check.number("eps", eps)
    if eps is None or eps < 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if output_dtype is not None and output_dtype not in check.FLOATS:
        raise TypeError(f"output_dtype must be a floating-point dtype, got {output_dtype}")
    if x.shape[-1] > WIDEST and impl == "triton":
        raise ValueError(f"impl='triton' takes D up to {WIDEST}, got {x.shape[-1]}")
    if x.shape[-1] > WIDEST and impl == "auto":
        impl = "reference"
    impl = check.resolve_impl(impl, x.device, (x.dtype,))
    if output_dtype not in (None, x.dtype):
        x = x.to(library.wide(x))  # so that y is rounded once
    y, _ = library.form(_l2norm, _eager, _rows, x)(x, float(eps), impl)
    return y if output_dtype is None else y.to(output_dtype)


def _module(impl: str):
    if impl == "triton":
        from linattn_edu.kernels.delta import l2norm as module
    else:
        from linattn_edu.reference.delta import l2norm as module
    return module


def _rows(x: Tensor, eps: float, impl: str) -> tuple[Tensor, Tensor]:
    """y and 1 / sqrt(sum x^2 + eps)."""
    return _module(impl).l2norm(library.contiguous(x), eps)


_l2norm = torch.library.custom_op("linattn_edu::l2norm", _rows, mutates_args=())


@_l2norm.register_fake
def _(x, eps, impl):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(x.shape[:-1], dtype=library.wide(x))


def _rows_gradient(x: Tensor, rstd: Tensor, dy: Tensor, impl: str) -> Tensor:
    """dx."""
    return _module(impl).l2norm_bwd(*map(library.contiguous, (x, rstd, dy)))


_l2norm_backward = torch.library.custom_op(
    "linattn_edu::l2norm_backward", _rows_gradient, mutates_args=()
)


@_l2norm_backward.register_fake
def _(x, rstd, dy, impl):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output):
    x, _, ctx.impl = inputs
    ctx.save_for_backward(x, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, dy, _):
    x, rstd = ctx.saved_tensors
    f = library.adjoint(_l2norm_backward, _once, _rows_gradient, x)
    return f(x, rstd, dy, ctx.impl), None, None


_l2norm.register_autograd(_backward, setup_context=_setup)
_eager = library.eager("l2norm", _rows, _setup, _backward)
_once = library.once("l2norm", _rows_gradient)
