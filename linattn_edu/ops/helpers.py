"""Two stages as functions of their own: the cumulative sum in chunks, the triangular inverse."""

import torch
from torch import Tensor

from linattn_edu.ops import arguments, check, library


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
        chunk_size: Tokens of a chunk: a power of two, 16 to 256.
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
    sizes: dict[str, int] = {}
    axes = ("B", "T", "H", "D") if isinstance(g, Tensor) and g.ndim == 4 else ("B", "T", "H")
    check.tensor("g", g, axes, sizes)
    if 0 in g.shape:
        raise ValueError(f"g must have no empty axis, got {tuple(g.shape)}")
    check.choice("chunk_size", chunk_size, (16, 32, 64, 128, 256))
    check.flag("reverse", reverse)
    check.number("scale", scale)
    if output_dtype is not None and output_dtype not in check.FLOATS:
        raise TypeError(f"output_dtype must be a floating-point dtype, got {output_dtype}")
    arguments.count_sequences("g", g, cu_seqlens, sizes)
    impl = check.resolve_impl(impl, g.device, (g.dtype,))
    cu_seqlens_cpu = arguments.check_packing(
        "g", g, sizes, cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size
    )
    f = library.form(_cumsum, _cumsum_eager, _sums, g)
    y = f(
        g.flatten(2), cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size, reverse,
        1.0 if scale is None else float(scale), impl,
    ).view(g.shape)  # fmt: skip
    return y.to(g.dtype if output_dtype is None else output_dtype)


def _sums(
    x: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    chunk_size: int,
    reverse: bool,
    scale: float,
    impl: str,
) -> Tensor:
    """The sum of x [B, T, D] in float32 or float64."""
    options = {"chunk_size": chunk_size, "reverse": reverse, "scale": scale}
    x = library.contiguous(x)
    if impl == "triton":
        from linattn_edu.kernels.delta.cumsum import cumsum

        bounds = (cu_seqlens, cu_seqlens_cpu, chunk_indices)
        packing = library.packing(*bounds, x, chunk_size, chunk_size)
        return cumsum(x, packing=packing, **options)
    from linattn_edu.reference.delta.cumsum import cumsum

    if cu_seqlens is None:
        return cumsum(x, **options)
    y = torch.empty_like(x, dtype=library.wide(x))
    for _, t in library.sequences(cu_seqlens, cu_seqlens_cpu, x.shape[1]):
        y[:, t] = cumsum(x[:, t], **options)
    return y


_cumsum = torch.library.custom_op("linattn_edu::chunk_local_cumsum", _sums, mutates_args=())


@_cumsum.register_fake
def _(x, *rest):
    return torch.empty_like(x, dtype=library.wide(x), memory_format=torch.contiguous_format)


def _setup_cumsum(ctx, inputs, output):
    x, *bounds, ctx.chunk_size, ctx.reverse, ctx.scale, ctx.impl = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(*bounds)


def _cumsum_backward(ctx, dy):
    bounds = ctx.saved_tensors
    f = library.adjoint(_cumsum, _cumsum_eager, _sums, dy)
    dx = f(dy, *bounds, ctx.chunk_size, not ctx.reverse, ctx.scale, ctx.impl)
    return dx.to(ctx.dtype), *(None,) * 7


_cumsum.register_autograd(_cumsum_backward, setup_context=_setup_cumsum)
_cumsum_eager = library.eager("chunk_local_cumsum", _sums, _setup_cumsum, _cumsum_backward)


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
    sizes: dict[str, int] = {}
    check.tensor("A", A, ("B", "T", "H", "C"), sizes)
    if 0 in A.shape:
        raise ValueError(f"A must have no empty axis, got {tuple(A.shape)}")
    if sizes["C"] not in arguments.CHUNK_SIZES:
        raise ValueError(f"A must have C = 16, 32 or 64, got C={sizes['C']}")
    if output_dtype is not None and output_dtype not in check.FLOATS:
        raise TypeError(f"output_dtype must be a floating-point dtype, got {output_dtype}")
    arguments.count_sequences("A", A, cu_seqlens, sizes)
    impl = check.resolve_impl(impl, A.device, (A.dtype,))
    cu_seqlens_cpu = arguments.check_packing(
        "A", A, sizes, cu_seqlens, cu_seqlens_cpu, chunk_indices, sizes["C"]
    )
    f = library.form(_solve, _solve_eager, _inverses, A)
    X = f(A, cu_seqlens, cu_seqlens_cpu, chunk_indices, impl)
    return X.to(A.dtype if output_dtype is None else output_dtype)


@library.at_first
def _inverses(
    A: Tensor,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    impl: str,
) -> Tensor:
    """The inverse in float32 or float64."""
    A = library.contiguous(A)
    if impl == "triton":
        from linattn_edu.kernels.delta.solve import solve_tril

        C = A.shape[-1]
        packing = library.packing(cu_seqlens, cu_seqlens_cpu, chunk_indices, A, C, C)
        return solve_tril(A, packing=packing)
    from linattn_edu.reference.delta.solve import solve_tril

    return _each(solve_tril, cu_seqlens, cu_seqlens_cpu, A)


@library.at_first
def _solve_adjoint(
    X: Tensor, dX: Tensor, cu_seqlens: Tensor | None, cu_seqlens_cpu: Tensor | None
) -> Tensor:
    """-tril(X^T dX X^T, -1), by matrix products of PyTorch."""
    from linattn_edu.reference.delta.solve import solve_tril_bwd

    return _each(solve_tril_bwd, cu_seqlens, cu_seqlens_cpu, X, dX)


def _each(f, cu_seqlens, cu_seqlens_cpu, x, *others):
    """f of every sequence by itself."""
    if cu_seqlens is None:
        return f(x, *others)
    y = torch.empty_like(x, dtype=library.wide(x))
    for _, t in library.sequences(cu_seqlens, cu_seqlens_cpu, x.shape[1]):
        y[:, t] = f(x[:, t], *(z[:, t] for z in others))
    return y


_solve = torch.library.custom_op("linattn_edu::solve_tril", _inverses, mutates_args=())
_solve_backward = torch.library.custom_op(
    "linattn_edu::solve_tril_backward", _solve_adjoint, mutates_args=()
)


@_solve.register_fake
def _(A, *rest):
    return torch.empty_like(A, dtype=library.wide(A), memory_format=torch.contiguous_format)


@_solve_backward.register_fake
def _(X, *rest):
    return torch.empty_like(X, memory_format=torch.contiguous_format)


def _setup_solve(ctx, inputs, output):
    A, *bounds, _, _ = inputs
    ctx.dtype = A.dtype
    ctx.save_for_backward(output, *bounds)


def _solve_gradient(ctx, dX):
    X, *bounds = ctx.saved_tensors
    f = library.adjoint(_solve_backward, _solve_once, _solve_adjoint, X)
    return f(X, dX, *bounds).to(ctx.dtype), *(None,) * 4


_solve.register_autograd(_solve_gradient, setup_context=_setup_solve)
_solve_eager = library.eager("solve_tril", _inverses, _setup_solve, _solve_gradient)
_solve_once = library.once("solve_tril", _solve_adjoint)
