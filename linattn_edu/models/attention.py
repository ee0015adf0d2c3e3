"""Softmax attention, to be mixed with the layers that keep a state."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linattn_edu.layers import ShortConvolution
from linattn_edu.layers.cache import check_back, owned, shifted
from linattn_edu.layers.layer import check_mask, placed
from linattn_edu.ops import check


class Attention(nn.Module):
    """Softmax attention with rotary positions (arXiv:2104.09864) and a cache of keys and values.

    The short convolution of the recurrent layers stands before it, as in Primer (arXiv:2109.08668),
    so that a key may hold the token before.

    Args:
        width, heads, head_dim: ``width`` channels in and out, ``head_dim`` even.
        impl: As in :class:`LanguageModel`, of the convolution.
    """

    def __init__(self, width: int, heads: int, head_dim: int, impl: str = "auto"):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.qkv_proj = nn.Linear(width, 3 * heads * head_dim, bias=False)
        self.qkv_conv1d = ShortConvolution(3 * heads * head_dim, 4, activation=None, impl=impl)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def make_cache(
        self,
        batch_size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        guesses: int = 0,
    ) -> "KeyValueCache":
        """The memory of no tokens; arguments as those of the recurrent layers."""
        device, dtype = placed(self, self.qkv_proj, batch_size, device, dtype)
        conv = self.qkv_conv1d
        shape = batch_size, conv.hidden_size, conv.kernel_size[0] + guesses
        return KeyValueCache(torch.zeros(shape, device=device, dtype=dtype), guesses)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cache: "KeyValueCache | None" = None,
        cu_seqlens: Tensor | None = None,
        cp_context: None = None,
    ) -> Tensor:
        """x ``[B, T, width]`` to the same shape; arguments as those of the recurrent layers.

        cu_seqlens: not together with a cache, whose keys would be those of one sequence.
        cp_context: none, for keys stay on their rank.
        """
        if cp_context is not None:
            raise ValueError("cp_context must be None: attention is not cut over ranks")
        check.tensor("x", x, ("B", "T", "width"), {"width": self.qkv_proj.in_features})
        B, T, _ = x.shape
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must come from make_cache, got {type(cache).__name__}")
        if cache is not None and cache.conv_state.shape[0] != B:
            raise ValueError(f"cache is of a batch of {cache.conv_state.shape[0]}, got one of {B}")
        if cu_seqlens is not None and (cache is not None or attention_mask is not None):
            raise ValueError("cu_seqlens must be None with a cache or an attention_mask")
        if attention_mask is not None:
            attention_mask = check_mask(attention_mask, x)
        qkv = self.qkv_proj(x)
        if attention_mask is not None:
            qkv = qkv.masked_fill(~attention_mask[..., None], 0)
        if cache is not None and not torch.is_grad_enabled() and cache.conv_state.requires_grad:
            cache.conv_state = owned(cache.conv_state)  # a step writes it
        qkv, conv_state = self.qkv_conv1d(
            qkv, cache=cache and cache.conv_state, output_final_state=cache is not None,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        q, k, v = qkv.view(B, T, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        before = 0 if cache is None else cache.length
        q, k = rotate(q, before), rotate(k, before)
        if cache is not None:
            cache.conv_state = conv_state
            k, v, attention_mask = cache.append(k, v, attention_mask)
        mask = None
        if attention_mask is not None or cu_seqlens is not None or (before and T > 1):
            at = torch.arange(before + T, device=x.device)
            mask = at <= at[before:, None]
            if cu_seqlens is not None:
                document = torch.bucketize(at, cu_seqlens.to(at), right=True)
                mask = mask & (document == document[:, None])
            if attention_mask is not None:  # padding sees itself: no row is empty
                own = at == at[before:, None]
                mask = (mask & attention_mask[:, None] | own)[:, None]
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None and before == 0
        )
        return self.o_proj(o.transpose(1, 2).flatten(2))


class KeyValueCache:
    """Rotated keys and values of all tokens so far, and which of them are no padding."""

    def __init__(self, conv_state: Tensor, guesses: int = 0):
        self.conv_state, self.length, self.guesses = conv_state, 0, guesses
        self.k = self.v = self.mask = None

    def commit(self, impl: str = "auto") -> None:
        """As of the recurrent layers; here nothing is late."""

    def take_back(self, tokens: int) -> None:
        """Forget the last tokens, at most guesses, as the recurrent layers do."""
        check_back(tokens, self.guesses)
        if tokens:
            self.length -= tokens
            self.k, self.v = (x[:, :, : self.length] for x in (self.k, self.v))
            self.mask = self.mask if self.mask is None else self.mask[:, : self.length]
            self.conv_state = shifted(self.conv_state, tokens)

    def detach(self) -> None:
        """Forget the history: no gradient goes back over this place."""
        for name in ("conv_state", "k", "v"):
            state = getattr(self, name)
            setattr(self, name, None if state is None else state.detach())

    def append(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple:
        """Keys, values and mask (or None) of all tokens, with the new ones."""
        new, old = mask, self.mask
        if new is not None or old is not None:
            ones = k.new_ones(len(k), self.length + k.shape[2], dtype=torch.bool)
            if old is not None:
                ones[:, : self.length] = old
            if new is not None:
                ones[:, self.length :] = new
            self.mask = ones
        if self.length:
            k, v = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        self.k, self.v, self.length = k, v, k.shape[2]
        return k, v, self.mask


def rotate(x: Tensor, start: int) -> Tensor:
    """Each pair of channels of x ``[B, H, T, D]`` turned by its frequency times the position."""
    T, D = x.shape[-2:]
    frequencies = 10000 ** -(torch.arange(0, D, 2, device=x.device) / D)
    angle = (start + torch.arange(T, device=x.device))[:, None] * frequencies
    a, b = x.float().chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)
