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


def selective_state_update_drafts(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    indices: Tensor,
    accepted: Tensor | None,
    cu_seqlens: Tensor,
    *,
    softplus: bool = False,
) -> Tensor:
    """Take all tokens of each sequence into states of a pool, and keep those that may be wanted.

    Sequence n, tokens cu_seqlens[n] to cu_seqlens[n + 1], starts from the state in slot
    indices[n, accepted[n] - 1] (accepted None: 1), and leaves the state after its token t in slot
    indices[n, t]. With more tokens than columns the last slot is left with the last state. Nothing
    is kept in a slot outside of the pool. A sequence that would start from one is no sequence: its
    out is zero, and it writes nothing. A state is rounded to its dtype after each token.

    Args:
        state: [slots, H, P, N].  x, dt, B, C, z: as above, with tokens in place of sequences.
        A, D, dt_bias, softplus: as above.  indices: [sequences, columns].
        accepted: [sequences] or None.  cu_seqlens: [sequences + 1].
    Returns:
        out [tokens, H, P] in x.dtype, zero behind the last sequence.
    Source: arXiv:2405.21060 section 6, chapter 26.
    """
    out, rows = torch.zeros_like(x), indices.tolist()
    for n, (first, last) in enumerate(pairwise(cu_seqlens.tolist())):
        column = 0 if accepted is None else int(accepted[n]) - 1
        before = rows[n][column] if 0 <= column < len(rows[n]) else -1
        if not 0 <= before < len(state):
            continue
        S = state[before : before + 1].clone()
        for t in range(first, last):
            tokens = (y if y is None else y[t : t + 1] for y in (x, dt, B, C, z))
            out[t] = _update(S, *tokens, A, D, dt_bias, softplus)[0]
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
