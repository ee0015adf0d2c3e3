"""The gated delta rule, one token at a time: what all other forms are measured against."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, repeat_heads


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

        S <- e^(g_t) S
        e  = v_t - k_t S
        S <- S + k_t^T beta_t e
        o_t = scale q_t S

    Args:
        q, k: [B, T, H, K]. v: [B, T, HV, V]. g: [B, T, HV] natural-log decay. beta: [B, T, HV].
        scale: K**-0.5 if None.  initial_state: [B, HV, K, V], zero if None.
    Returns:
        o [B, T, HV, V] in q.dtype and the final state [B, HV, K, V] in fp32
        (fp64 if any input is fp64; all arithmetic is done in that dtype).
    Source: arXiv:2412.06464; chapter 01.
    """
    dtype = compute_dtype(q, k, v, g, beta, initial_state)
    HV = v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out_dtype = q.dtype
    q, k = repeat_heads(q, HV).to(dtype), repeat_heads(k, HV).to(dtype)
    v, g, beta = v.to(dtype), g.to(dtype), beta.to(dtype)
    B, T, _, K = q.shape
    S = q.new_zeros(B, HV, K, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    o = []
    for t in range(T):
        # eq:delta-decay   S <- a S
        S = S * g[:, t].exp()[..., None, None]
        # eq:delta-error   e = v - k S
        e = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        # eq:delta-write   S <- S + k^T beta e
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * e)
        # eq:delta-read   o = scale q S
        o.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1).to(out_dtype), S
