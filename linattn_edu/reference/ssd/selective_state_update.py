"""Stage selective_state_update: tokens of Mamba-2, the states written in place."""

from itertools import pairwise

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
    accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    softplus: bool = False,
) -> Tensor:
    """Take one token into the state of each sequence, which is overwritten, and read it; with
    cu_seqlens several, of which some may be rejected later.

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
        cu_seqlens: boundaries [sequences + 1], or None. x, dt, B, C and z then have a row for each
            token, and indices is [sequences, columns]: the state after token t of sequence n goes
            to slot indices[n, t]. With more tokens than columns the last slot is left with the last
            state. A state is rounded to its dtype after each token. out is zero behind the last
            sequence, and where one would start from no slot.
        accepted: [sequences], with cu_seqlens: sequence n starts from the state in slot
            indices[n, accepted[n] - 1]; None: from slot indices[n, 0].
        softplus: whether the softplus is taken.
    Returns:
        out [B, H, P] in x.dtype. It is read from the state before that is rounded to its dtype.
    Source: arXiv:2405.21060 section 6, chapter 13.
    """
    tokens, parameters = (x, dt, B, C, z), (A, D, dt_bias)
    if cu_seqlens is not None:
        return _drafts(state, tokens, parameters, indices, accepted, cu_seqlens, softplus)
    if indices is None:
        return _update(state, *tokens, *parameters, softplus)
    rows = ((indices >= 0) & (indices < len(state))).nonzero().flatten()
    out, S = torch.zeros_like(x), state[indices[rows]]
    tokens = (None if y is None else y[rows] for y in tokens)
    out[rows] = _update(S, *tokens, *parameters, softplus)
    state[indices[rows]] = S
    return out


def _drafts(state, tokens, parameters, indices, accepted, cu_seqlens, softplus) -> Tensor:
    """The same token by token, with a slot for the state after each."""
    out, rows = torch.zeros_like(tokens[0]), indices.tolist()
    for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        column = 0 if accepted is None else int(accepted[n]) - 1
        before = rows[n][column] if 0 <= column < len(rows[n]) else -1
        if not 0 <= before < len(state):
            continue
        S = state[before : before + 1].clone()
        for t in range(first, last):
            one = (y if y is None else y[t : t + 1] for y in tokens)
            out[t] = _update(S, *one, *parameters, softplus)[0]
            slot = rows[n][min(t - first, len(rows[n]) - 1)]
            if 0 <= slot < len(state):
                state[slot] = S[0]
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
