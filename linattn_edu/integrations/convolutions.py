"""Short convolutions in the signatures of fla, and the states of packed ones of causal_conv1d."""

from typing import Any

import torch
from torch import Tensor

from linattn_edu.ops import causal_conv1d as operator
from linattn_edu.ops import check
from linattn_edu.ops.causal_conv1d_update import causal_conv1d_update as convolve_one


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context=None,
    *,
    seq_idx: Tensor | None = None,
    impl: str = "auto",
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.causal_conv1d` as fla is called: x may have its channels in several axes,
    ``[B, T, H, D]``; a backend, and what is not known, changes nothing.
    """
    flat, residual = (t if t is None or t.ndim <= 3 else t.flatten(2) for t in (x, residual))
    y, state = operator.causal_conv1d(
        flat, weight, bias, residual, initial_state, output_final_state, activation, None,
        cu_seqlens, cu_seqlens_cpu, chunk_indices, cp_context, seq_idx=seq_idx, impl=impl,
    )  # fmt: skip
    return y.view(x.shape), state


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """One token of each sequence as fla has it: y and the cache, which is written in place.

    Args:
        x: ``[N, D]``, ``[N, 1, D]`` or ``[1, N, D]``; the channels may be in several axes.
        cache: The W tokens before ``[N, D, W]``.
        residual: Of x's shape, added to y, or None.
        weight, bias, activation: As in :func:`linattn_edu.causal_conv1d_update`.

    Raises:
        TypeError, ValueError: As that function, whose messages call the cache conv_state.
    """
    check.dense("x", x, "[N, D]")
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        check.tensor("weight", weight, ("D", "W"), {})
    if residual is not None and (not isinstance(residual, Tensor) or residual.shape != x.shape):
        got = tuple(getattr(residual, "shape", ()))
        raise ValueError(f"residual must have x's shape {tuple(x.shape)}, got {got}")
    D = weight.shape[0]
    if x.numel() % D or not x.numel():
        raise ValueError(f"x must have D={D} channels like weight, got {tuple(x.shape)}")
    y = convolve_one(x.reshape(-1, D), cache, weight, bias, activation, impl=impl).view(x.shape)
    return y if residual is None else (y + residual).to(x.dtype), cache


@torch.no_grad()
def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last tokens of each packed sequence, newest last, zero before its first.

    Args:
        x: ``[T, D]``.  cu_seqlens: ``[N + 1]``.  state_len: tokens of a state.
    Returns:
        ``[N, D, state_len]``, without a gradient.
    """
    N = check.boundaries("cu_seqlens", cu_seqlens)
    check.tensor("x", x, ("T", "D"), {})
    check.positive(state_len=state_len)
    if not len(x):
        return x.new_zeros(N, x.shape[1], state_len)
    at = cu_seqlens[1:, None] + torch.arange(-state_len, 0, device=x.device)
    states = x[at.clamp(min=0).long()]
    return states.masked_fill((at < cu_seqlens[:-1, None])[..., None], 0).mT
