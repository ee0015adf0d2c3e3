"""Padded batches and packed sequences, in the signatures of fla's layers.utils and ops.utils."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.ops.names import prepare_chunk_indices


def tensor_cache(function: Callable) -> Callable:
    """fla's decorator keeps the last results of a function; here nothing is kept."""
    return function


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Tokens of each sequence [N]."""
    return cu_seqlens.diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """Tokens of each row of a mask [B, T], int32."""
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Boundaries [N + 1] of sequences of so many tokens."""
    return F.pad(lens.cumsum(0, dtype=dtype), (1, 0))


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Boundaries [B + 1] of the rows of a mask [B, T], their padding taken out."""
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Sequence of every token, and its number in the sequence, [T, 2]."""
    return prepare_chunk_indices(cu_seqlens, 1, cu_seqlens_cpu)


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Sequence of every token [T]."""
    return prepare_token_indices(cu_seqlens, cu_seqlens_cpu)[:, 0]


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """Number of every token in its sequence [T]."""
    return prepare_token_indices(cu_seqlens, cu_seqlens_cpu)[:, 1]


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """Number of the first chunk of each sequence, and of all chunks, [N + 1]."""
    counts = (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor")
    return F.pad(counts, (1, 0)).cumsum(0)


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where the tokens of a mask [B, T] are in [B T], their boundaries, and the longest row."""
    lens = prepare_lens_from_mask(attention_mask)
    indices = attention_mask.flatten().nonzero().flatten()
    return indices, prepare_cu_seqlens_from_lens(lens), int(lens.max())


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows of x at indices."""
    return x.index_select(0, indices)


def index_put_first_axis(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """So many rows: those of x at indices, the others zero."""
    rows = x.new_zeros(first_axis_dim, *x.shape[1:])
    return rows.index_copy(0, indices, x)


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """[B, T, ...] of the tokens at indices of [B T], padding zero."""
    return index_put_first_axis(hidden_states, indices, batch_size * seq_len).unflatten(
        0, (batch_size, seq_len)
    )


def unpad_input(
    q: Tensor, states: tuple[Tensor, ...], attention_mask: Tensor, q_len: int, keepdim: bool = False
) -> tuple[Tensor, tuple[Tensor, ...], Tensor, tuple[Tensor, Tensor], tuple[int, int]]:
    """q and states [B, T, ...] without the padding of a mask; q may be one token a row.

    keepdim: with a batch of one in front. Also returns where q's tokens are, boundaries and longest
    rows of both.
    """
    indices, cu_seqlens, longest = get_unpad_data(attention_mask)
    states = tuple(index_first_axis(s.flatten(0, 1), indices) for s in states)
    of_q = indices, cu_seqlens, longest
    if q_len == attention_mask.shape[1]:
        q = index_first_axis(q.flatten(0, 1), indices)
    elif q_len == 1:
        bounds = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        q, of_q = q.squeeze(1), (bounds[:-1], bounds, 1)
    else:
        raise ValueError(f"q_len must be 1 or {attention_mask.shape[1]}, got {q_len}")
    if keepdim:
        q, states = q[None], tuple(s[None] for s in states)
    return q, states, of_q[0], (of_q[1], cu_seqlens), (of_q[2], longest)


def get_layer_cache(module: torch.nn.Module, past_key_values: Any) -> Any:
    """What a cache of many layers holds for a module, by its layer_idx, or None."""
    at = _layer_idx(module, past_key_values)
    return (
        past_key_values[at] if past_key_values is not None and len(past_key_values) > at else None
    )


def update_layer_cache(module: torch.nn.Module, past_key_values: Any, **kwargs: Any) -> Any:
    """The cache, after its update for a module."""
    at = _layer_idx(module, past_key_values)
    if past_key_values is not None:
        past_key_values.update(layer_idx=at, **kwargs)
    return past_key_values


def _layer_idx(module: torch.nn.Module, past_key_values: Any) -> int | None:
    at = getattr(module, "layer_idx", None)
    if past_key_values is not None and at is None:
        raise ValueError(f"layer_idx of {type(module).__name__} must be given, got None")
    return at
