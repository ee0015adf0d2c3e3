"""Stage causal_conv1d_update: the short convolution of new tokens, the state written in place."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, sigmoid


def causal_conv1d_update(
    state: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    *,
    activation: str | None = None,
) -> Tensor:
    """Take T tokens into the state of each sequence, which is overwritten, and convolve them.

        p_t = b + sum_j w_j u_(t-W+1+j),   y_t = p_t, or p_t sigmoid(p_t),

    where u_t is x_t, and for t < 0 the state's. It keeps the last S tokens: in order, the newest
    last, or, with lengths, token t of a sequence that had `length` before in column
    (length + t) mod S.

    Args:
        state: [B, D, S], S >= W - 1, read and written; with indices [slots, D, S].
        x: [B, T, D].  weight: [D, W].  bias: [D], zero if None.  activation: None or "silu".
        lengths: tokens of each sequence before these [B], or None: a state in order.
        indices: slot of each sequence [B], or None. Outside of the pool there is no sequence: its
            y is zero, and nothing is written.
    Returns:
        y [B, T, D] in x.dtype. It is read from x before that is rounded to the state's dtype.
    Source: chapter 27.
    """
    if indices is None:
        return _update(state, x, weight, bias, lengths, activation)
    rows = ((indices >= 0) & (indices < len(state))).nonzero().flatten()
    y, part = torch.zeros_like(x), state[indices[rows]]
    lengths = None if lengths is None else lengths[rows]
    y[rows] = _update(part, x[rows], weight, bias, lengths, activation)
    state[indices[rows]] = part
    return y


def _update(state, x, weight, bias, lengths, activation) -> Tensor:
    """The same of sequences in the order of their states."""
    dtype = compute_dtype(state, x, weight, bias)
    (_, T, D), W, S = x.shape, weight.shape[1], state.shape[2]
    # eq:conv-update-read   u_t = s_((length + t) mod S) for t < 0
    if lengths is None:
        before = state[:, :, S - W + 1 :]
    else:
        before = (lengths[:, None] + torch.arange(1 - W, 0, device=x.device)) % S
        before = state.gather(2, before[:, None].expand(-1, D, -1).long())
    u = torch.cat([before.mT.to(dtype), x.to(dtype)], 1)
    # eq:conv-pre   p_t = b + sum_j w_j u_(t-W+1+j)
    p = (u.unfold(1, W, 1) * weight.to(dtype)).sum(-1)
    p = p if bias is None else p + bias.to(dtype)
    # eq:conv-act   y = p sigmoid(p)
    y = p * sigmoid(p) if activation == "silu" else p
    # eq:conv-update-write   s_((length + t) mod S) <- x_t
    if lengths is None:
        state.copy_(torch.cat([state, x.mT.to(state.dtype)], 2)[:, :, T:])
    else:
        t = torch.arange(max(T - S, 0), T, device=x.device)
        columns = ((lengths[:, None] + t) % S)[:, None].expand(-1, D, -1).long()
        state.scatter_(2, columns, x[:, t].mT.to(state.dtype))
    return y.to(x.dtype)
