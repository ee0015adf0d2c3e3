"""Gated DeltaNet, the layer."""

import torch
from torch import Tensor, nn

from linattn_edu.layers.delta import DeltaLayer
from linattn_edu.layers.layer import Projected, draw_rate
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.ops.gdn import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    replay_gated_delta_rule,
)


class GatedDeltaNet(DeltaLayer):
    r"""Gated DeltaNet: the gated delta rule between projections.

    .. math::

        q, k, v &= \mathrm{silu}(\mathrm{conv}(x W_q)),\ \mathrm{silu}(\mathrm{conv}(x W_k)),\
            \mathrm{silu}(\mathrm{conv}(x W_v)) \\
        g &= -e^{A\_log}\, \mathrm{softplus}(x W_a + dt\_bias), \qquad
            \beta = \mathrm{sigmoid}(x W_b) \\
        y &= \Big(\frac{o}{\mathrm{rms}(o)}\, w \odot \mathrm{silu}(x W_g)\Big) W_o

    with o of :func:`chunk_gated_delta_rule`, whose rows of q and k are divided by their length; the
    norm is that of each head.

    A state dict of fla's GatedDeltaNet (fla-core 0.6.0) loads with strict=True and gives its
    outputs; one that does not fit is refused whole. What differs from fla's forward: y alone is
    returned; a :class:`Cache` of :meth:`make_cache` takes the place of past_key_values and
    use_cache; what runs is the same in training and not, whatever T is: mode, and for one token
    with a cache, where no gradient is recorded, the recurrent form; a mask covers the tokens of
    this call alone, and beside cu_seqlens is ones. ``linattn_edu.integrations.layers`` has fla's
    call.

    Parameters, with K = head_dim, V = expand_v K, H = num_heads, HV = num_v_heads: q_proj, k_proj
    ``[H K, hidden_size]``, v_proj, g_proj ``[HV V, hidden_size]``, a_proj, b_proj
    ``[HV, hidden_size]``, o_proj ``[hidden_size, HV V]`` (.weight of each); q_conv1d, k_conv1d,
    v_conv1d, of :class:`ShortConvolution`; A_log, dt_bias ``[HV]``, in float32 at least;
    o_norm.weight ``[V]``. At first exp(A_log) is uniform in (0, 16), softplus(dt_bias) log-uniform
    in [0.001, 0.1], the norm one, and the others are as PyTorch draws them.

    Args:
        hidden_size: Numbers of a hidden state.
        expand_v: V / K.
        head_dim: K, at most 256, or 512 with mode "fused_recurrent"; V at most 512.
        num_heads, num_v_heads: H, and HV, a multiple of H; None: H.
        mode: "chunk", or "fused_recurrent": token by token, without cp_context.
        use_gate: Whether o is gated by x W_g.
        use_short_conv: Whether there are convolutions; else q, k, v are the silu of projections.
        allow_neg_eigval: Whether beta is twice the sigmoid.
        conv_size, conv_bias: W of the convolutions, from 1 to 8, and whether they have a bias.
        layer_idx: Number of the layer in a model, which is only kept.
        norm_eps: Added to the mean of squares of o.
        output_gate_activation: "swish", "silu" or "sigmoid", of the gate of o.
        device, dtype: Of the parameters.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`, for all
            operators of the layer.

    Raises:
        ValueError: sizes that do not fit, or a name that is none of those above.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapter 27.
    """

    first = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj", "g_proj")

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
        self._gate_parameters(self.num_v_heads, self.num_v_heads, **factory)

    def _draw_rate(self) -> None:
        draw_rate(self.A_log, 0, 16)

    def _raw_gate(self, projected: Projected) -> Tensor:
        return projected("a_proj")

    def _rule(self, recurrent: bool, **arguments) -> tuple[Tensor, Tensor | None]:
        rule = fused_recurrent_gated_delta_rule if recurrent else chunk_gated_delta_rule
        return rule(**arguments)

    def _replay(self, **arguments) -> Tensor:
        return replay_gated_delta_rule(**arguments)

    def _norm(self, o: Tensor, projected: Projected) -> Tensor:
        z = projected("g_proj").view_as(o) if self.use_gate else None
        return self.o_norm(o, z)
