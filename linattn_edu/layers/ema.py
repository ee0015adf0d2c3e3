"""The exponential moving average with a gate that is learnt, the layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.layers.cache import Cache
from linattn_edu.layers.layer import Layer, Projected
from linattn_edu.ops import check, inplace
from linattn_edu.ops.ema import ema_scan
from linattn_edu.ops.tensors import wide


class Gate(nn.Linear):
    """The projection of the gate: its first numbers are its own, in whatever order modules draw."""

    memory: tuple[float, float] | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As of :meth:`EMA.reset_parameters`."""
        if self.memory is None:  # called by nn.Linear
            return super().reset_parameters()
        nn.init.zeros_(self.weight)
        low, high = (math.log(m) for m in self.memory)
        each = torch.linspace(low, high, self.out_features, device=self.bias.device)
        self.bias.copy_(-(each.exp() - 1).log())


class EMA(Layer):
    r"""An exponential moving average whose decay is learnt, between projections.

    .. math::

        h_t = (1 - p_t)\, h_{t-1} + p_t\, x_t W_v, \qquad p_t = \mathrm{sigmoid}(x_t W_a + b_a),
        \qquad y_t = h_t W_o

    for each head: the average is that of :func:`ema_scan`, ``g = -softplus(x W_a + b_a)``.

    Parameters, of H heads: a_proj.weight ``[H, hidden_size]``, a_proj.bias ``[H]``, v_proj.weight
    and o_proj.weight ``[hidden_size, hidden_size]``. At first a_proj.weight is zero and a_proj.bias
    ``-log(m - 1)``, so that head i averages over m tokens, from the least to the largest memory in
    equal ratios; the projections are as PyTorch draws them.

    Args:
        hidden_size: Numbers of a hidden state.
        num_heads: H, a divisor of hidden_size; each head has a decay of its own.
        memory: Tokens over which the first and the last head average before they have learnt
            anything, 1 < least <= largest.
        layer_idx: Number of the layer in a model, which is only kept.
        device, dtype: Of the parameters.
        impl: "triton", "reference" or "auto", as in :func:`ema_scan`.

    Raises:
        ValueError: sizes that do not fit.

    Source: chapter 20.
    """

    first, last = ("v_proj", "a_proj"), "o_proj"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 8,
        memory: tuple[float, float] = (2.0, 512.0),
        layer_idx: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ):
        super().__init__()
        check.choice("impl", impl, check.IMPLS)
        check.positive(hidden_size=hidden_size, num_heads=num_heads)
        if hidden_size % num_heads:
            raise ValueError(f"num_heads must divide hidden_size={hidden_size}, got {num_heads}")
        memory = check.pair("memory", memory)
        if not 1 < memory[0] <= memory[1]:
            raise ValueError(f"memory must be 1 < least <= largest, got {memory}")
        factory = {"device": device, "dtype": dtype}
        self.hidden_size, self.num_heads, self.memory = hidden_size, num_heads, memory
        self.layer_idx, self.impl = layer_idx, impl
        self.conv_shapes, self.state_shape = (), (num_heads, hidden_size // num_heads)
        self.a_proj = Gate(hidden_size, num_heads, **factory)
        self.a_proj.memory = memory
        self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False, **factory) for _ in range(2)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the gate's weight to zero and its bias to the memories of the heads."""
        self.a_proj.reset_parameters()

    def _projection(self) -> nn.Module:
        return self.v_proj

    def _mixed(
        self,
        projected: Projected,
        padding: Tensor | None,
        cache: Cache | None,
        bounds: dict,
        step: bool,
    ) -> Tensor:
        v = projected("v_proj").unflatten(-1, self.state_shape)
        u = projected("a_proj")
        u = u.to(wide(u))
        state = None if cache is None else cache.recurrent_state
        if step:
            with inplace.writable(state):  # h <- h + sigmoid(u) (v - h)
                state.lerp_(v[:, 0].to(state.dtype), torch.sigmoid(u[:, 0, :, None]))
            y = state[:, None].to(v.dtype)
        else:
            y, final = ema_scan(
                v, -F.softplus(u), None, state, state is not None, impl=self.impl, **bounds
            )
            if state is not None:
                cache.put(0, final)
        return y.flatten(-2)
