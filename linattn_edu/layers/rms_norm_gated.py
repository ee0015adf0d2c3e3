"""RMSNorm with a gate, as a module."""

import torch
from torch import Tensor, nn

from linattn_edu.ops import check
from linattn_edu.ops.rms_norm_gated import ACTIVATIONS, check_eps, rms_norm_gated


class RMSNormGated(nn.Module):
    r""":func:`rms_norm_gated` as a module.

    Parameters: ``weight`` ``[hidden_size]``, ones at first; none without elementwise_affine.
    The defaults are those of fla's FusedRMSNormGated; mamba_ssm's RMSNormGated has the same
    parameters and group_size, norm_before_gate.

    Args:
        hidden_size: Numbers of a row D.
        elementwise_affine: Whether there is a weight.
        eps: Added to the mean of squares.
        activation: Of the gate: "swish", "silu" or "sigmoid".
        device, dtype: Of the weight.
        group_size: Numbers of a group, which are divided by their own root mean square; None: D.
        norm_before_gate: Whether the gate multiplies the normalised row, or the row before.
        impl: "triton", "reference" or "auto", as in :func:`rms_norm_gated`.

    Raises:
        ValueError: sizes that are no integers >= 1, group_size no divisor of hidden_size, eps no
            finite number >= 0, or a name that is none of those above.

    Source: chapter 27.
    """

    def __init__(
        self,
        hidden_size: int,
        elementwise_affine: bool = True,
        eps: float = 1e-5,
        activation: str = "swish",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        impl: str = "auto",
    ):
        super().__init__()
        check.positive(hidden_size=hidden_size)
        check_eps("eps", eps)
        check.choice("impl", impl, check.IMPLS)
        if not isinstance(activation, str) or activation not in ACTIVATIONS:
            raise ValueError(f"activation must be 'swish', 'silu' or 'sigmoid', got {activation!r}")
        if group_size is not None:
            check.positive(group_size=group_size)
        if group_size is not None and hidden_size % group_size:
            raise ValueError(f"group_size must divide hidden_size={hidden_size}, got {group_size}")
        self.hidden_size, self.eps, self.activation = hidden_size, eps, activation
        self.group_size, self.norm_before_gate, self.impl = group_size, norm_before_gate, impl
        weight = None
        if elementwise_affine:
            weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("weight", weight)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight to ones."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(
        self,
        x: Tensor,
        z: Tensor | None = None,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """y like x ``[..., D]``; z, the gate before its activation, like x, or None: no gate.

        residual, prenorm, residual_in_fp32: As in :func:`rms_norm_gated`.
        """
        return rms_norm_gated(
            x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate,
            self.activation, residual=residual, prenorm=prenorm,
            residual_in_fp32=residual_in_fp32, impl=self.impl,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, activation={self.activation!r}"
