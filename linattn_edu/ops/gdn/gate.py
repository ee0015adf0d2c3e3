"""The gate of a Gated DeltaNet layer as a function of its own."""

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.delta.gate import layer_gate


def fused_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    *,
    impl: str = "auto",
) -> Tensor:
    r"""The log decay of :func:`chunk_gated_delta_rule` from the raw gate of a layer.

    .. math::

        y = -e^{A_{\log}} \, \mathrm{softplus}(g + \mathrm{dt\_bias})

    Differentiable. The same as ``use_gate_in_kernel``, for those who need the decay itself.
    Infinite arguments give the limits.

    Args:
        g: Raw gate ``[..., HV]``, float32, float16 or bfloat16 (float64: reference only).
        A_log, dt_bias: HV numbers in any shape; dt_bias may be None.
        output_dtype: Dtype of the result. The arithmetic is in float32 (float64 where an argument
            is).
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Returns:
        Natural-log decay ``[..., HV]``, <= 0.

    Raises:
        TypeError, ValueError: an argument does not fit; no kernel has run then.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapter 12.
    """
    given = check.Tensors()
    given.dense("g", g, "[..., HV]")
    if g.ndim < 1 or g.shape[-1] < 1:
        raise ValueError(f"g must have shape [..., HV] with HV >= 1, got {tuple(g.shape)}")
    check.dtype("output_dtype", output_dtype)
    given.sizes["HV"] = g.shape[-1]
    if A_log is None:
        raise TypeError("A_log must be a torch.Tensor of shape [HV], got NoneType")
    A_log, dt_bias = arguments.layer_parameters(given, A_log, dt_bias, channels=False)
    impl = check.resolve_impl(impl, given.device, tuple(given.dtypes))
    rows = g if g.ndim == 3 and g.numel() else g.reshape(1, -1, g.shape[-1])
    y = layer_gate(rows, A_log, dt_bias, None, impl)
    return y.view(g.shape).to(output_dtype)
