"""Gated norms in the signatures of mamba_ssm and fla: functions, and modules with their parameters.

A LayerNorm is an RMSNorm of what is centred first: y = (v - mean(v)) / rms(v - mean(v)) w + b.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.layers import RMSNormGated
from linattn_edu.ops import check
from linattn_edu.ops.rms_norm_gated import ACTIVATIONS, rms_norm_gated, summed
from linattn_edu.ops.tensors import wide


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    *,
    impl: str = "auto",
) -> Tensor:
    """:func:`linattn_edu.rms_norm_gated` with silu, as mamba_ssm has it."""
    return rms_norm_gated(x, weight, bias, z, eps, group_size, norm_before_gate, impl=impl)


def layernorm_fn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    *,
    impl: str = "auto",
) -> Tensor:
    """The same of a LayerNorm, of each group by itself, as mamba_ssm has it."""
    norm = rms_norm_gated if is_rms_norm else layer_norm_gated
    return norm(x, weight, bias, z, eps, group_size, norm_before_gate, impl=impl)


def layer_norm_gated(
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
    """LayerNorm with a gate; arguments, dtypes and results as :func:`linattn_edu.rms_norm_gated`.

    Centring is PyTorch's, in float32; what the norm reads is a copy of x in that.
    """
    check.dense("x", x, "[..., D]")
    if residual is not None and (not isinstance(residual, Tensor) or residual.shape != x.shape):
        got = tuple(getattr(residual, "shape", ()))
        raise ValueError(f"residual must have x's shape {tuple(x.shape)}, got {got}")
    dtype, total = x.dtype, summed(x, residual, residual_in_fp32)
    v = total.to(wide(total))
    if z is not None and not norm_before_gate:
        gate = torch.sigmoid if ACTIVATIONS.get(activation) == "sigmoid" else F.silu
        v, z = v * gate(z.to(v.dtype)), None
    group = x.shape[-1] if group_size is None else group_size
    if x.ndim and isinstance(group, int) and group > 0 and x.shape[-1] % group == 0:
        v = v.unflatten(-1, (-1, group))
        v = (v - v.mean(-1, keepdim=True)).flatten(-2)
    y = rms_norm_gated(v, weight, bias, z, eps, group_size, True, activation, impl=impl).to(dtype)
    return (y, total) if prenorm else y


class RMSNorm(RMSNormGated):
    """mamba_ssm's gated RMSNorm: its parameters and arguments."""

    def __init__(
        self, hidden_size, eps=1e-5, group_size=None, norm_before_gate=True, device=None,
        dtype=None, *, impl="auto",
    ):  # fmt: skip
        super().__init__(
            hidden_size, eps=eps, group_size=group_size, norm_before_gate=norm_before_gate,
            device=device, dtype=dtype, impl=impl,
        )  # fmt: skip


class LayerNorm(RMSNorm):
    """mamba_ssm's gated LayerNorm."""

    def __init__(self, hidden_size, *args, device=None, dtype=None, **kwargs):
        super().__init__(hidden_size, *args, device=device, dtype=dtype, **kwargs)
        self.bias = nn.Parameter(torch.zeros_like(self.weight))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return layernorm_fn(
            x, self.weight, self.bias, z, self.eps, self.group_size, self.norm_before_gate,
            impl=self.impl,
        )  # fmt: skip


class _Fla(RMSNormGated):
    """What the gated norms of fla share: a function, a weight, and a bias or None."""

    norm = staticmethod(rms_norm_gated)

    def __init__(
        self, hidden_size, elementwise_affine=True, bias=False, activation="swish", eps=1e-5,
        device=None, dtype=None, *, impl="auto",
    ):  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, eps, activation, device, dtype, impl=impl)
        with_bias = bias and elementwise_affine
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros_like(self.weight)) if with_bias else None
        )

    def forward(
        self,
        x: Tensor,
        g: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return self.norm(
            x, self.weight, self.bias, g, self.eps, activation=self.activation, residual=residual,
            prenorm=prenorm, residual_in_fp32=residual_in_fp32, impl=self.impl,
        )  # fmt: skip


class FusedRMSNormGated(_Fla):
    """fla's gated RMSNorm."""

    def __init__(
        self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None,
        dtype=None, *, impl="auto",
    ):  # fmt: skip
        super().__init__(
            hidden_size, elementwise_affine, False, activation, eps, device, dtype, impl=impl
        )


class FusedLayerNormGated(_Fla):
    """fla's gated LayerNorm."""

    norm = staticmethod(layer_norm_gated)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """fla's RMSNorm with silu as its gate."""

    def __init__(
        self, hidden_size, elementwise_affine=True, eps=1e-5, device=None, dtype=None, *,
        impl="auto",
    ):  # fmt: skip
        super().__init__(
            hidden_size, elementwise_affine, eps, device=device, dtype=dtype, impl=impl
        )


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """fla's LayerNorm with silu as its gate."""

    def __init__(
        self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None,
        *, impl="auto",
    ):  # fmt: skip
        super().__init__(
            hidden_size, elementwise_affine, bias, eps=eps, device=device, dtype=dtype, impl=impl
        )


class FlaRMSNorm(_Fla):
    """fla's RMSNorm without a gate, which it calls RMSNorm."""

    def __init__(
        self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None,
        *, impl="auto",
    ):  # fmt: skip
        super().__init__(
            hidden_size, elementwise_affine, bias, eps=eps, device=device, dtype=dtype, impl=impl
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        return super().forward(x, None, residual, prenorm, residual_in_fp32)


class _Linear:
    """A norm whose output goes through a linear map, of which it is given the weight and bias."""

    def forward(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        y, total = super().forward(x, g, residual, True, residual_in_fp32)
        out = F.linear(y.to(weight.dtype), weight, bias)
        return (out, total) if prenorm else out


class FusedRMSNormSwishGateLinear(_Linear, FusedRMSNormSwishGate):
    """fla's RMSNorm with silu as its gate, then a linear map."""


class FusedLayerNormSwishGateLinear(_Linear, FusedLayerNormSwishGate):
    """fla's LayerNorm with silu as its gate, then a linear map."""

    def __init__(
        self, hidden_size, elementwise_affine=True, eps=1e-5, device=None, dtype=None, *,
        impl="auto",
    ):  # fmt: skip
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype, impl=impl)
