"""GDN-2, the layer."""

import torch
from torch import Tensor, nn

from linattn_edu.layers.delta import DeltaLayer
from linattn_edu.layers.layer import Projected, draw_rate
from linattn_edu.layers.rms_norm_gated import RMSNormGated
from linattn_edu.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2


class GatedDeltaNet2(DeltaLayer):
    r"""GDN-2: the delta rule with gates of channels for what is erased and for what is written.

    .. math::

        q, k, v &= \mathrm{silu}(\mathrm{conv}(x W_q)),\ \mathrm{silu}(\mathrm{conv}(x W_k)),\
            \mathrm{silu}(\mathrm{conv}(x W_v)) \\
        g &= -e^{A\_log}\, \mathrm{softplus}(x W_{f0} W_{f1} + dt\_bias), \qquad
            b = \mathrm{sigmoid}(x W_b), \qquad w = \mathrm{sigmoid}(x W_w) \\
        y &= \Big(\frac{o}{\mathrm{rms}(o)}\, w_o \odot
            \mathrm{sigmoid}(x W_{g0} W_{g1} + b_{g1})\Big) W_o

    with o of :func:`chunk_gdn2`, whose rows of q and k are divided by their length. The value heads
    of a q/k head have the same g and b.

    A state dict of fla's GatedDeltaNet2 (fla-core 0.6.0) loads with strict=True and gives its
    outputs. What differs from fla's forward is said at :class:`GatedDeltaNet`.

    Parameters, with K = head_dim, V = expand_v K, H = num_heads, HV = num_v_heads: q_proj, k_proj,
    v_proj, o_proj, the convolutions and o_norm as of :class:`GatedDeltaNet`; f_proj.0 and g_proj.0
    ``[V, hidden_size]``, f_proj.1 ``[H K, V]``, g_proj.1 ``[HV V, V]`` with a bias; b_proj
    ``[H K, hidden_size]``, w_proj ``[HV V, hidden_size]``; A_log ``[H]`` and dt_bias ``[H K]``, in
    float32 at least. At first exp(A_log) is uniform in (1, 16), softplus(dt_bias) log-uniform in
    [0.001, 0.1], the norm one, and the others are as PyTorch draws them.

    Args:
        hidden_size, expand_v, head_dim, num_heads, num_v_heads, mode: As of :class:`GatedDeltaNet`.
        use_short_conv, conv_size, conv_bias, layer_idx, norm_eps, device, dtype, impl: Likewise.
        allow_neg_eigval: Whether b is twice the sigmoid.

    Raises:
        ValueError: sizes that do not fit, or a name that is none of those above.

    Source: the layer as in fla-core 0.6.0; chapter 27 has that of Kimi Delta Attention.
    """

    first = ("q_proj", "k_proj", "v_proj", "f_proj", "b_proj", "w_proj", "g_proj")

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
        self.w_proj = nn.Linear(hidden_size, self.value_dim, bias=False, **factory)
        self.f_proj = self._low_rank(self.key_dim, False, **factory)
        self.g_proj = self._low_rank(self.value_dim, True, **factory)
        self.o_norm = RMSNormGated(
            self.head_v_dim, eps=norm_eps, activation="sigmoid", impl=impl, **factory
        )
        self._gate_parameters(self.num_heads, self.key_dim, **factory)

    def _strengths(self) -> int:
        return self.key_dim

    def _draw_rate(self) -> None:
        draw_rate(self.A_log, 1, 16)

    def _gates(self, projected: Projected) -> dict[str, Tensor]:
        b, w = projected("b_proj").sigmoid(), projected("w_proj").sigmoid()
        b = 2 * b if self.allow_neg_eigval else b
        heads = self.num_heads, self.head_k_dim
        of_keys = {
            "g": projected("f_proj").unflatten(-1, heads),
            "b": b.unflatten(-1, heads),
            "A_log": self.A_log[:, None],
            "dt_bias": self.dt_bias.unflatten(-1, heads),
        }
        n = self.num_v_heads // self.num_heads
        if n > 1:
            of_keys = {m: y.repeat_interleave(n, -2) for m, y in of_keys.items()}
        return of_keys | {"w": w.unflatten(-1, (self.num_v_heads, self.head_v_dim))}

    def _rule(self, recurrent: bool, **arguments) -> tuple[Tensor, Tensor | None]:
        if recurrent:
            return fused_recurrent_gdn2(**arguments)
        return chunk_gdn2(allow_neg_eigval=self.allow_neg_eigval, **arguments)

    def _ring_kind(self) -> None:
        return None

    def _norm(self, o: Tensor, projected: Projected) -> Tensor:
        return self.o_norm(o, projected("g_proj").view_as(o))
