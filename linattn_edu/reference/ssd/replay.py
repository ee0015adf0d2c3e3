"""Decoding of Mamba-2 that does not write its state: a checkpoint, and a ring of inputs since."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.replay import entries, fold, rows_of, slots_of
from linattn_edu.reference.ssd.chunk_cumsum import steps
from linattn_edu.reference.ssd.selective_state_update import UNLIMITED
from linattn_edu.reference.tiles import compute_dtype


def replay(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    keys: Tensor,
    writes: Tensor,
    decays: Tensor,
    counts: Tensor,
    indices: Tensor | None = None,
    accepted: Tensor | None = None,
    *,
    length: int,
    softplus: bool = False,
) -> Tensor:
    """Take tokens into the ring of each sequence, and read what the state with them would give.

        S = e^(g_1 + .. + g_c) S_0 + sum_i e^(g_(i+1) + .. + g_c) (step_i x_i)^T B_i
        g_i = step_i A

    is never formed: C S is a sum over the c entries of the ring. Where the new tokens do not fit
    beside them, the ring is first folded into S_0, and is empty.

    Args:
        x: [N, T, H, P].  dt: [N, T, H].  A: [H].  B, C: [N, T, G, S], S the columns of a state.
        D: [H, P or 1] or None.  z: like x, or None.  dt_bias: [H] or None.
        state: [slots, H, P, S], read, and written where a ring is folded.
        keys: [slots, G, R, S], writes: [slots, H, R, P], decays: [slots, H, R, 1]: B_i, step_i x_i
            and g_i.
        counts, indices, accepted, length: as in reference.delta.replay.
        softplus: whether the softplus of dt + dt_bias is the step.
    Returns:
        out [N, T, H, P] in x.dtype.
    Source: chapter 26b.
    """
    dtype = compute_dtype(state, x, dt, A, B, C, D, z, dt_bias)
    (T, H), G, R, out = x.shape[1:3], B.shape[2], keys.shape[2], torch.zeros_like(x)
    x_, C_ = x.to(dtype), C.to(dtype)
    for n, slot in slots_of(state, len(x), indices):
        begin, count = entries(counts[slot], accepted, n)
        S = state[slot].to(dtype)
        if count + T > length:
            rows = rows_of(begin, count, R)
            S = fold(S.mT, keys[slot], writes[slot], decays[slot], rows).mT
            state[slot] = S  # which may be rounded there, and is not here
            begin, count = (begin + count) % R, 0
        rows = rows_of(begin, count + T, R)
        for t in range(T):
            # eq:ssd-step   step = softplus(dt + dt_bias)
            step = steps(
                dt[n, t, :, None], None if dt_bias is None else dt_bias[:, None],
                softplus=softplus, limit=UNLIMITED, dtype=dtype,
            )  # fmt: skip
            # eq:ssd-update   S <- exp(step A) S + step B x
            keys[slot][:, rows[count + t]] = B[n, t]
            writes[slot][:, rows[count + t]] = (step * x_[n, t]).to(writes.dtype)
            decays[slot][:, rows[count + t]] = step * A.to(dtype)[:, None]
            # eq:ssd-read   out = C S + D x
            now = rows[: count + t + 1]
            K, U, g = (y[slot][:, now].to(dtype) for y in (keys, writes, decays))
            a = g.sum(1, keepdim=True).exp()
            w = torch.cat([g[:, 1:], g.new_zeros(H, 1, 1)], 1).flip(1).cumsum(1).flip(1).exp()
            c = C_[n, t].repeat_interleave(H // G, 0)[:, None]
            scores = (c * K.repeat_interleave(H // G, 0)).sum(-1, keepdim=True)
            y = ((a * c) @ S.mT)[:, 0] + (w * scores * U).sum(1)
            if D is not None:
                y = y + D.to(dtype) * x_[n, t]
            # eq:ssd-gate   out = out silu(z)
            if z is not None:
                y = y * F.silu(z[n, t].to(dtype))
            out[n, t] = y.to(x.dtype)
        counts[slot] = torch.tensor([begin, count, T], dtype=counts.dtype)
    return out
