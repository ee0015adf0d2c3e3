"""Cumulative sums over the tokens, in chunks and over whole sequences."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.operator import Operator, widened
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import known
from linattn_edu.packing import Packing


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Cumulative sum over the tokens of each chunk by itself.

        y_i = scale * sum over j <= i (reverse: j >= i) in the chunk of g_j

    Differentiable: the adjoint is the same sum the other way round.

    Args:
        g: ``[B, T, H]`` or ``[B, T, H, D]``, any float dtype.
        chunk_size: Tokens of a chunk: a power of two.
        reverse: Whether to add up from the end of the chunk.
        scale: Factor of the result, 1 if None; ``log2(e)`` turns natural logarithms into base 2.
        cu_seqlens, cu_seqlens_cpu, chunk_indices: As in :func:`chunk_gated_delta_rule`.
        output_dtype: Dtype of the result, g's if None. Sums are in float32 (float64 for float64).
        impl: "triton", "reference" or "auto".

    Returns:
        y of g's shape.

    Raises:
        TypeError, ValueError: an argument does not fit; no kernel has run then.

    Source: chapters 02 and 12.
    """
    given = _check_summands("g", g, cu_seqlens, output_dtype)
    check.power_of_two("chunk_size", chunk_size)
    reverse, scale = check.flag("reverse", reverse), check.number("scale", scale)
    impl = check.resolve_impl(impl, g.device, (g.dtype,))
    cu_seqlens_cpu = arguments.check_packing(
        given, cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size
    )
    (y,) = local(
        g.flatten(2), cu_seqlens, cu_seqlens_cpu, chunk_indices,
        1.0 if scale is None else scale, reverse, chunk_size, impl,
    )  # fmt: skip
    return y.view(g.shape).to(g.dtype if output_dtype is None else output_dtype)


def chunk_global_cumsum(
    s: Tensor,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    *,
    impl: str = "auto",
) -> Tensor:
    """Cumulative sum over all tokens of each sequence.

        y_i = scale * sum over j <= i (reverse: j >= i) of s_j

    Differentiable: the adjoint is the same sum the other way round.

    Args:
        s: ``[B, T, H]`` or ``[B, T, H, D]``, any float dtype.
        reverse: Whether to add up from the end.
        scale: Factor of the result, 1 if None.
        cu_seqlens: As in :func:`fused_recurrent_gated_delta_rule`.
        output_dtype: Dtype of the result, s's if None. Sums are in float32 (float64 for float64).
        impl: "triton", "reference" or "auto".

    Returns:
        y of s's shape.

    Raises:
        TypeError, ValueError: an argument does not fit; no kernel has run then.

    Source: chapter 02.
    """
    given = _check_summands("s", s, cu_seqlens, output_dtype)
    reverse, scale = check.flag("reverse", reverse), check.number("scale", scale)
    impl = check.resolve_impl(impl, s.device, (s.dtype,))
    if known(cu_seqlens):
        check.lengths("cu_seqlens", cu_seqlens.tolist(), given.sizes["T"])
    (y,) = whole(
        s.flatten(2), cu_seqlens, 1.0 if scale is None else scale, reverse,
        impl,
    )  # fmt: skip
    return y.view(s.shape).to(s.dtype if output_dtype is None else output_dtype)


def _check_summands(
    name: str, x: Tensor, cu_seqlens: Tensor | None, output_dtype: torch.dtype | None
) -> check.Tensors:
    """Refuse summands, and a dtype of their sums, that do not fit."""
    given = check.Tensors()
    axes = ("B", "T", "H", "D") if isinstance(x, Tensor) and x.ndim == 4 else ("B", "T", "H")
    given.take(name, x, axes)
    if any(size == 0 for axis, size in given.sizes.items() if axis != "T"):
        raise ValueError(f"{name} must have no empty axis but T, got {tuple(x.shape)}")
    if output_dtype is not None:
        check.dtype("output_dtype", output_dtype)
    arguments.count_sequences(given, cu_seqlens)
    return given


@dataclass(frozen=True)
class Stages:
    """The sums within chunks, and over whole sequences."""

    cumsum: Callable = stage("delta.cumsum")
    global_cumsum: Callable = stage("delta.cumsum")


stages = implementations(Stages)

local = Operator(
    "chunk_local_cumsum",
    {"x": "B T D"},
    {"y": widened("B T D", "x", gradient="dy")},
    options={"scale": "float", "reverse": "bool", "chunk_size": "int"},
    stages=stages,
    packed="chunks",
)


@local.forward
def forward(
    stages: Stages,
    x: Tensor,
    scale: float,
    reverse: bool,
    chunk_size: int,
    packing: Packing | None = None,
) -> Tensor:
    """y."""
    packed = {} if packing is None else {"packing": packing}
    return stages.cumsum(x, chunk_size=chunk_size, reverse=reverse, scale=scale, **packed)


@local.adjoint
def adjoint(dy: Tensor, *rest) -> Tensor:
    """dx: the same sum the other way round."""
    *bounds, scale, reverse, chunk_size, impl = rest
    return local(dy, *bounds, scale, not reverse, chunk_size, impl)[0]


whole = Operator(
    "chunk_global_cumsum",
    {"x": "B T D"},
    {"y": widened("B T D", "x", gradient="dy")},
    options={"scale": "float", "reverse": "bool"},
    stages=stages,
    packed="tokens",
)


@whole.forward
def forward_whole(
    stages: Stages, x: Tensor, scale: float, reverse: bool, cu_seqlens: Tensor | None = None
) -> Tensor:
    """y."""
    packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    return stages.global_cumsum(x, reverse=reverse, scale=scale, **packed)


@whole.adjoint
def adjoint_of_whole(dy: Tensor, *rest) -> Tensor:
    """dx: the same sum the other way round."""
    cu_seqlens, scale, reverse, impl = rest
    return whole(dy, cu_seqlens, scale, not reverse, impl)[0]
