"""Gated DeltaNet, the layer."""

import torch
from torch import Tensor, nn

from linattn_edu.layers.delta import DeltaLayer
from linattn_edu.layers.layer import draw_rate
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.ops.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule


class GatedDeltaNet(DeltaLayer):
    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ):
        factory = {"device": device, "dtype": dtype}
        super().__init__(
            hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode, use_short_conv,
            allow_neg_eigval, conv_size, conv_bias, layer_idx, norm_eps, impl, **factory,
        )  # fmt: skip
        self.use_gate = use_gate
        self.a_proj = nn.Linear(hidden_size, self.num_v_heads, bias=False, **factory)
        if use_gate:
            self.g_proj = nn.Linear(hidden_size, self.value_dim, bias=False, **factory)
        self.o_norm = RMSNormGated(
            self.head_v_dim, eps=norm_eps, activation=output_gate_activation, impl=impl, **factory
        )
        self._gate_parameters(self.num_v_heads, **factory)

    def _draw_rate(self) -> None:
        draw_rate(self.A_log, 0, 16)

    def _raw_gate(self, x: Tensor) -> Tensor:
        return self.a_proj(x)

    def _rule(self, recurrent: bool, **arguments) -> tuple[Tensor, Tensor | None]:
        rule = fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule
        return rule(**arguments)

    def _norm(self, o: Tensor, x: Tensor) -> Tensor:
        z = self.g_proj(x).view_as(o) if self.use_gate else None
        return self.o_norm(o, z)
