"""The exponential moving average with a gate that is learnt, the layer."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.cp.context import CPContext
from linattn_edu.layers.cache import Cache
from linattn_edu.layers.layer import Layer, write
from linattn_edu.ops import check, inplace
from linattn_edu.ops.ema import ema_scan
from linattn_edu.ops.tensors import wide


class EMA(Layer):
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
        if num_heads < 1 or hidden_size % num_heads:
            raise ValueError(f"num_heads must divide hidden_size={hidden_size}, got {num_heads}")
        if not 1 < memory[0] <= memory[1] < math.inf:
            raise ValueError(f"memory must be 1 < least <= largest, got {memory}")
        factory = {"device": device, "dtype": dtype}
        self.hidden_size, self.num_heads, self.memory = hidden_size, num_heads, tuple(memory)
        self.layer_idx, self.impl = layer_idx, impl
        self.conv_shapes, self.state_shape = (), (num_heads, hidden_size // num_heads)
        self.a_proj = nn.Linear(hidden_size, num_heads, **factory)
        self.v_proj, self.o_proj = (
            nn.Linear(hidden_size, hidden_size, bias=False, **factory) for _ in range(2)
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the gate's weight to zero and its bias to the memories of the heads."""
        nn.init.zeros_(self.a_proj.weight)
        low, high = (math.log(m) for m in self.memory)
        each = torch.linspace(low, high, self.num_heads, device=self.a_proj.bias.device)
        self.a_proj.bias.copy_(-(each.exp() - 1).log())

    def _weight(self) -> Tensor:
        return self.v_proj.weight

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: CPContext | None = None,
    ) -> Tensor:
        """The new hidden states; see :meth:`Layer.forward`."""
        x, padding, cu_seqlens_cpu = self._begin(
            x, attention_mask, cache, cu_seqlens, cu_seqlens_cpu, cp_context
        )
        v = self.v_proj(x).unflatten(-1, self.state_shape)
        u = self.a_proj(x)
        u = u.to(wide(u))
        state = None if cache is None else cache.recurrent_state
        if state is not None and x.shape[1] == 1 and cu_seqlens is None:
            with inplace.writable(state):  # h <- h + sigmoid(u) (v - h)
                state.lerp_(v[:, 0].to(state.dtype), torch.sigmoid(u[:, 0, :, None]))
            y = state[:, None].to(v.dtype)
        else:
            y, final = ema_scan(
                v, -F.softplus(u), None, state, state is not None, cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, cp_context=cp_context, impl=self.impl,
            )  # fmt: skip
            if state is not None:
                write(state, final)
        y = self.o_proj(y.flatten(-2))
        return y if padding is None else y.masked_fill(padding, 0)
