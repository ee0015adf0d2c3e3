"""The gate of a Kimi Delta Attention layer as a function of its own."""

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.delta.gate import layer_gate, write_strength


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | int | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    head_k_dim: int | None = None,
    g_bias: Tensor | None = None,
    b: Tensor | None = None,
    beta: float = 1.0,
    threshold: float = 20.0,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""The log decay of :func:`chunk_kda` from the raw gate of a layer.

    .. math::

        y = -e^{A_{\log}} \, \mathrm{softplus}(g + \mathrm{dt\_bias}), \qquad\text{or}\qquad
        y = \mathrm{lower\_bound} \cdot \sigma\bigl(e^{A_{\log}} (g + \mathrm{dt\_bias})\bigr)

    Differentiable. The same as ``use_gate_in_kernel``, for those who need the decay itself.
    Infinite arguments give the limits.

    Two ways to call it, as fla-core has had it: with heads and channels apart; or, as in its
    releases before 0.5, with them in one axis and ``head_k_dim`` in the third place.

    Args:
        g: Raw gate ``[..., HV, K]``, or with head_k_dim ``[..., HV * K]``, float32, float16 or
            bfloat16 (float64: reference only).
        A_log: HV numbers in any shape; with lower_bound None stands for a rate of 1.
        dt_bias: HV * K numbers in any shape, or None; in the older form head_k_dim.
        lower_bound: The least log decay, < 0; None: the softplus.
        output_dtype: Dtype of the result. The arithmetic is in float32 (float64 where an argument
            is).
        head_k_dim: K, in the older form.  g_bias: dt_bias, in the older form.
        b: Raw write strength ``[..., HV]``, in the older form: its sigmoid is returned too.
        beta, threshold: Of the softplus in the older form: 1 and 20, which changes nothing.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Returns:
        Natural-log decay ``[..., HV, K]``, <= 0; with b also ``sigmoid(b)`` in float32 (float64).

    Raises:
        TypeError, ValueError: an argument does not fit; no kernel has run then.

    Source: Kimi Team 2025 (arXiv:2510.26692); chapter 12b.
    """
    if isinstance(dt_bias, int):  # True too, to be refused below
        if head_k_dim is not None:
            raise ValueError("head_k_dim is given twice, in the third place and by name")
        head_k_dim, dt_bias = dt_bias, None
    if g_bias is not None:
        if dt_bias is not None:
            raise ValueError("dt_bias and g_bias are one argument: give the first")
        dt_bias = g_bias
    for name, value, default in (("beta", beta, 1.0), ("threshold", threshold, 20.0)):
        if check.number(name, value) != default:
            raise ValueError(f"{name} must be {default}, got {value}")
    given = check.Tensors()
    given.dense("g", g, "[..., HV, K]")
    if head_k_dim is not None:
        if isinstance(head_k_dim, bool) or not isinstance(head_k_dim, int):
            raise TypeError(f"head_k_dim must be an integer, got {head_k_dim!r}")
        if g.ndim < 1 or head_k_dim < 1 or g.shape[-1] % head_k_dim:
            raise ValueError(
                f"g must have shape [..., HV * K] with K = head_k_dim = {head_k_dim}, "
                f"got {tuple(g.shape)}"
            )
        g = g.unflatten(-1, (-1, head_k_dim))
    if g.ndim < 2 or 0 in g.shape[-2:]:
        raise ValueError(f"g must have shape [..., HV, K], got {tuple(g.shape)}")
    check.dtype("output_dtype", output_dtype)
    lower_bound = check.number("lower_bound", lower_bound)
    if lower_bound is not None and lower_bound >= 0:
        raise ValueError(f"lower_bound must be < 0, the least log decay, got {lower_bound}")
    if lower_bound is None and A_log is None:
        raise ValueError("A_log or lower_bound must be given, got None for both")
    given.sizes |= zip(("HV", "K"), g.shape[-2:], strict=True)
    A_log, dt_bias = arguments.layer_parameters(given, A_log, dt_bias, channels=True)
    if b is not None:
        given.dense("b", b, "[..., HV]")
        if b.shape != g.shape[:-1]:
            raise ValueError(
                f"b must have shape [..., HV] = {tuple(g.shape[:-1])}, got {tuple(b.shape)}"
            )
        given.dtypes.pop()  # which no kernel reads
    impl = check.resolve_impl(impl, given.device, tuple(given.dtypes))
    rows = g if g.ndim == 4 and g.numel() else g.reshape(1, -1, *g.shape[-2:])
    y = layer_gate(rows, A_log, dt_bias, lower_bound, impl)
    y = y.view(g.shape).to(output_dtype)
    return y if b is None else (y, write_strength(b, 1))
