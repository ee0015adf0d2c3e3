"""Stage selective_state_update: one token of Mamba-2, the state written in place."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import steps
from linattn_edu.reference.tiles import compute_dtype

UNLIMITED = (-float("inf"), float("inf"))


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    softplus: bool = False,
) -> Tensor:
    """Take one token into the state of each sequence, which is overwritten, and read it.

        step = softplus(dt + dt_bias)
        S <- exp(step A) S + step B x
        out = C S + D x,   out <- out silu(z)

    Where an axis of P or N may be 1, one number stands for all: A [H, 1, 1] is one decay a head.

    Args:
        state: [B, H, P, N], read and written; with indices [slots, H, P, N].
        x: [B, H, P].  dt: [B, H, P or 1].  A: [H, P or 1, N or 1].  B, C: [B, G, N].
        D, dt_bias: [H, P or 1] or None.  z: [B, H, P], or None: out is not gated.
        indices: slot of each sequence [B], or None. Outside of the pool there is no sequence: its
            out is zero, and nothing is written.
        softplus: whether the softplus is taken.
    Returns:
        out [B, H, P] in x.dtype. It is read from the state before that is rounded to its dtype.
    Source: arXiv:2405.21060 section 6, chapter 13.
    """
    tokens, parameters = (x, dt, B, C, z), (A, D, dt_bias)
    if indices is None:
        return _update(state, *tokens, *parameters, softplus)
    rows = ((indices >= 0) & (indices < len(state))).nonzero().flatten()
    out, S = torch.zeros_like(x), state[indices[rows]]
    tokens = (None if y is None else y[rows] for y in tokens)
    out[rows] = _update(S, *tokens, *parameters, softplus)
    state[indices[rows]] = S
    return out


def _update(state, x, dt, B, C, z, A, D, dt_bias, softplus) -> Tensor:
    """The same of sequences in the order of their states."""
    dtype, out_dtype = compute_dtype(state, x, dt, A, B, C, D, z, dt_bias), x.dtype
    B, C = (y.to(dtype).repeat_interleave(x.shape[1] // y.shape[1], 1)[:, :, None] for y in (B, C))
    x = x.to(dtype)
    # eq:ssd-step   step = softplus(dt + dt_bias)
    step = steps(dt, dt_bias, softplus=softplus, limit=UNLIMITED, dtype=dtype)
    # eq:ssd-update   S <- exp(step A) S + step B x
    S = torch.exp(step[..., None] * A.to(dtype)) * state.to(dtype) + (step * x)[..., None] * B
    state.copy_(S)
    # eq:ssd-read   out = C S + D x
    out = (S @ C.mT)[..., 0]
    if D is not None:
        out = out + D.to(dtype) * x
    # eq:ssd-gate   out = out silu(z)
    if z is not None:
        out = out * F.silu(z.to(dtype))
    return out.to(out_dtype)
