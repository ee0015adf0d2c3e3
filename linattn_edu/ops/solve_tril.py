"""The inverse of a unit triangular matrix, one for each chunk."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.operator import Operator, widened
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.packing import Packing
from linattn_edu.reference.delta.solve import solve_tril_bwd


def solve_tril(
    A: Tensor,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Invert I + A for the strictly lower-triangular matrix A of each chunk.

    Differentiable: dA = -tril(X^T dX X^T, -1) with X = (I + A)^-1.

    Args:
        A: ``[B, T, H, C]``, float32, float16 or bfloat16 (float64: reference only), C = 16, 32 or
            64: row i of a chunk is row i of its matrix. What stands on or above the diagonal is not
            read, nor are the columns past the end of a chunk that has fewer than C tokens.
        cu_seqlens, cu_seqlens_cpu, chunk_indices: As in :func:`chunk_gated_delta_rule`.
        output_dtype: Dtype of the result, A's if None. The arithmetic is in float32 (float64 for
            float64).
        impl: "triton", "reference" or "auto".

    Returns:
        X ``[B, T, H, C]``.

    Raises:
        TypeError, ValueError: an argument does not fit; no kernel has run then.

    Source: chapters 03 and 10.
    """
    given = check.Tensors()
    given.take("A", A, ("B", "T", "H", "C"))
    sizes = given.sizes
    if any(size == 0 for axis, size in sizes.items() if axis != "T"):
        raise ValueError(f"A must have no empty axis but T, got {tuple(A.shape)}")
    if sizes["C"] not in arguments.CHUNK_SIZES:
        raise ValueError(f"A must have C = 16, 32 or 64, got C={sizes['C']}")
    if output_dtype is not None:
        check.dtype("output_dtype", output_dtype)
    arguments.count_sequences(given, cu_seqlens)
    impl = check.resolve_impl(impl, A.device, (A.dtype,))
    cu_seqlens_cpu = arguments.check_packing(
        given, cu_seqlens, cu_seqlens_cpu, chunk_indices, sizes["C"]
    )
    (X,) = solve(A, cu_seqlens, cu_seqlens_cpu, chunk_indices, impl)
    return X.to(A.dtype if output_dtype is None else output_dtype)


@dataclass(frozen=True)
class Stages:
    """The inverse and its adjoint, which is matrix products of PyTorch."""

    solve_tril: Callable = stage("delta.solve")
    solve_tril_bwd: Callable = solve_tril_bwd


stages = implementations(Stages)

solve = Operator(
    "solve_tril",
    {"A": "B T H C"},
    {"X": widened("B T H C", "A", gradient="dX")},
    stages=stages,
    packed="chunks",
)


@solve.forward
def forward(stages: Stages, A: Tensor, packing: Packing | None = None) -> Tensor:
    """X."""
    packed = {} if packing is None else {"packing": packing}
    return stages.solve_tril(A, **packed)


@solve.backward
def backward(stages: Stages, X: Tensor, dX: Tensor) -> Tensor:
    """dA."""
    return stages.solve_tril_bwd(X, dX)
