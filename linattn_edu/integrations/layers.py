"""The layers in the calls of fla and mamba_ssm: their arguments, results and memories of tokens.

Parameters are those of the layers here, which are theirs.
"""

from typing import Any

import torch
from torch import Tensor

from linattn_edu import layers
from linattn_edu.integrations.padding import get_layer_cache, update_layer_cache
from linattn_edu.layers import Cache
from linattn_edu.ops import check


class _Fla:
    """forward of fla's layers, which returns three things and keeps states in past_key_values."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """The new hidden states, None, and past_key_values.

        Args:
            attention_mask: Left padding ``[B, T]``, or of earlier tokens too, of which the last T
                count.
            past_key_values: As fla's Cache: at layer_idx a dict with "conv_state", a tuple of
                tensors ``[N, D, W]`` or None, and "recurrent_state"; with ``update``. Where a
                gradient is recorded, it goes on into the pieces that they come from, as in fla.
            kwargs: cu_seqlens; what else there is changes nothing.
        """
        if attention_mask is not None:
            attention_mask = attention_mask[:, -hidden_states.shape[1] :]
        cu_seqlens, cache = kwargs.get("cu_seqlens"), None
        if past_key_values is not None:
            held = get_layer_cache(self, past_key_values)
            N = hidden_states.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            cache = self.make_cache(N)
            if held is not None:
                convs = held["conv_state"] or ()
                for state, value in zip(cache.conv_states, convs, strict=True):
                    state.copy_(value)
                cache.recurrent_state.copy_(held["recurrent_state"])
        y = super().forward(hidden_states, attention_mask, cache, cu_seqlens)
        if cache is not None:
            past_key_values = update_layer_cache(
                self, past_key_values, recurrent_state=cache.recurrent_state,
                conv_state=cache.conv_states or None, offset=hidden_states.shape[1],
            )  # fmt: skip
        return y, None, past_key_values


class GatedDeltaNet(_Fla, layers.GatedDeltaNet):
    """:class:`linattn_edu.layers.GatedDeltaNet` as fla's layer is called."""


class GatedDeltaNet2(_Fla, layers.GatedDeltaNet2):
    """:class:`linattn_edu.layers.GatedDeltaNet2` as fla's layer is called."""


class KimiDeltaAttention(_Fla, layers.KimiDeltaAttention):
    """:class:`linattn_edu.layers.KimiDeltaAttention` as fla's layer is called."""


class Mamba2(layers.Mamba2):
    """:class:`linattn_edu.layers.Mamba2` as mamba_ssm's layer is called."""

    def forward(
        self,
        u: Tensor,
        seqlen: int | None = None,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inference_params: Any = None,
    ) -> Tensor:
        """y like u ``[B, T, d_model]``, or with seqlen ``[B * seqlen, d_model]``.

        Args:
            seq_idx: Sequence of each token ``[B, T]``: one begins where the number changes. Not
                with inference_params, and cu_seqlens, if there, must say the same.
            cu_seqlens: Boundaries ``[N + 1]`` of sequences packed into a batch of one.
            inference_params: Has key_value_memory_dict, in which the states of this layer are, or
                are put, at layer_idx, and seqlen_offset, 0 before the first tokens. Where a
                gradient is recorded, it goes on into the pieces that they come from.
        """
        shape = u.shape
        if seqlen is not None:
            check.tensor("u", u, ("B * seqlen", "d_model"), {})
            check.positive(seqlen=seqlen)
            u = u.unflatten(0, (-1, seqlen))
        cache = None
        if inference_params is not None:
            if seq_idx is not None:
                raise ValueError("seq_idx must be None with inference_params, got both")
            cache = self._held(inference_params, u, cu_seqlens)
        elif seq_idx is not None:
            check.tensor("u", u, ("B", "T", "d_model"), {})
            check.sequence_numbers("seq_idx", seq_idx, *u.shape[:2])
            cu_seqlens, u = _bounds(seq_idx), u.flatten(0, 1)[None]
        y = super().forward(u, cache=cache, cu_seqlens=cu_seqlens).reshape(shape)
        if cache is not None:
            inference_params.key_value_memory_dict[self.layer_idx] = cache.states
        return y

    def step(
        self, hidden_states: Tensor, conv_state: Tensor, ssm_state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y of one token ``[B, 1, d_model]``, without a gradient, and the states, overwritten."""
        if not isinstance(hidden_states, Tensor) or hidden_states.shape[1:2] != (1,):
            got = tuple(getattr(hidden_states, "shape", ()))
            raise ValueError(f"hidden_states must be [B, 1, d_model], one token, got {got}")
        cache = Cache(layers.Mamba2.__name__, (conv_state.detach(),), ssm_state.detach())
        with torch.no_grad():
            y = super().forward(hidden_states, cache=cache)
        return y, conv_state, ssm_state

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **unknown: Any
    ) -> tuple[Tensor, Tensor]:
        """States of no tokens: of the convolution ``[B, D_conv, W]``, and of the recurrence
        ``[B, H, P, N]`` in float32. Their size does not depend on max_seqlen.
        """
        cache = self.make_cache(batch_size, dtype=dtype)
        return *cache.conv_states, cache.recurrent_state

    def _held(self, inference_params: Any, u: Tensor, cu_seqlens: Tensor | None) -> Cache:
        """The states of this layer, made where there are none, zeroed before the first token."""
        if self.layer_idx is None:
            raise ValueError("layer_idx must be given for inference_params, got None")
        kept = inference_params.key_value_memory_dict
        if self.layer_idx not in kept:
            N = u.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
            kept[self.layer_idx] = self.allocate_inference_cache(N, 0)
        *conv, state = kept[self.layer_idx]
        cache = Cache(layers.Mamba2.__name__, tuple(conv), state)
        if not inference_params.seqlen_offset:
            cache.reset()
        return cache


def _bounds(seq_idx: Tensor) -> Tensor:
    """Boundaries of the sequences of all rows, one row after the other."""
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    first = torch.cat([torch.ones_like(changes[:, :1]), changes], 1).flatten()
    end = torch.tensor([first.numel()], device=first.device)
    return torch.cat([first.nonzero()[:, 0], end])
