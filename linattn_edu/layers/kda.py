"""Kimi Delta Attention, the layer."""

import torch
from torch import Tensor, nn

from linattn_edu.layers.delta import DeltaLayer
from linattn_edu.layers.layer import Projected, draw_rate
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.ops import check
from linattn_edu.ops.kda import chunk_kda, fused_recurrent_kda, replay_kda


class KimiDeltaAttention(DeltaLayer):
    r"""Kimi Delta Attention: the delta rule with a gate for each channel, between projections.

    .. math::

        q, k, v &= \mathrm{silu}(\mathrm{conv}(x W_q)),\ \mathrm{silu}(\mathrm{conv}(x W_k)),\
            \mathrm{silu}(\mathrm{conv}(x W_v)) \\
        g &= -e^{A\_log}\, \mathrm{softplus}(x W_{f0} W_{f1} + dt\_bias), \qquad
            \beta = \mathrm{sigmoid}(x W_b) \\
        y &= \Big(\frac{o}{\mathrm{rms}(o)}\, w \odot
            \mathrm{sigmoid}(x W_{g0} W_{g1} + b_{g1})\Big) W_o

    with o of :func:`chunk_kda`, whose rows of q and k are divided by their length; with lower_bound
    ``g = lower_bound sigmoid(exp(A_log) (x W_f0 W_f1 + dt_bias))``.

    A state dict of fla's KimiDeltaAttention (fla-core 0.6.0) loads with strict=True and gives its
    outputs. What differs from fla's forward is said at :class:`GatedDeltaNet`.

    Parameters, with K = head_dim, V = expand_v K, H = num_heads, HV = num_v_heads: q_proj, k_proj,
    v_proj, b_proj, o_proj, the convolutions, A_log ``[HV]`` and o_norm as of
    :class:`GatedDeltaNet`; f_proj.0 and g_proj.0 ``[V, hidden_size]``, f_proj.1 ``[HV K, V]``,
    g_proj.1 ``[HV V, V]`` with a bias; dt_bias ``[HV K]``. At first exp(A_log) is uniform in
    (1, 16), or one with safe_gate, softplus(dt_bias) log-uniform in [0.001, 0.1], the norm one, and
    the others are as PyTorch draws them.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode: As of :class:`GatedDeltaNet`.
        use_short_conv, allow_neg_eigval, conv_size, conv_bias, layer_idx, norm_eps: Likewise.
        device, dtype, impl: Likewise.
        safe_gate: Whether the kernels count on the lower bound, as in :func:`chunk_kda`.
        lower_bound: The least log decay, < 0, with safe_gate at least -5; None: no bound.

    Raises:
        ValueError: sizes that do not fit, or a name that is none of those above.

    Source: Kimi Team 2025 (arXiv:2510.26692); chapter 27.
    """

    first = ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "g_proj")

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
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
        if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
            raise ValueError(f"safe_gate needs lower_bound in [-5, 0), got {lower_bound}")
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound must be < 0, got {lower_bound}")
        lower_bound = check.number("lower_bound", lower_bound)
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self.gate_dim = self.num_v_heads * self.head_k_dim
        self.f_proj = self._low_rank(self.gate_dim, False, **factory)
        self.g_proj = self._low_rank(self.value_dim, True, **factory)
        self.o_norm = RMSNormGated(
            self.head_v_dim, eps=norm_eps, activation="sigmoid", impl=impl, **factory
        )
        self._gate_parameters(self.num_v_heads, self.gate_dim, **factory)

    def _draw_rate(self) -> None:
        if self.safe_gate:
            nn.init.zeros_(self.A_log)
        else:
            draw_rate(self.A_log, 1, 16)

    def _raw_gate(self, projected: Projected) -> Tensor:
        return projected("f_proj").unflatten(-1, (self.num_v_heads, self.head_k_dim))

    def _rule(self, recurrent: bool, **arguments) -> tuple[Tensor, Tensor | None]:
        if recurrent:
            return fused_recurrent_kda(lower_bound=self.lower_bound, **arguments)
        return chunk_kda(safe_gate=self.safe_gate, lower_bound=self.lower_bound, **arguments)

    def _replay(self, **arguments) -> Tensor:
        return replay_kda(lower_bound=self.lower_bound, **arguments)

    def _ring_kind(self) -> dict:
        return {**super()._ring_kind(), "channels": True}

    def _norm(self, o: Tensor, projected: Projected) -> Tensor:
        return self.o_norm(o, projected("g_proj").view_as(o))
