"""The short convolution of every channel over the last W tokens, and its adjoint."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, sigmoid


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    activation: str | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Each token's sum over itself and the W - 1 tokens before, channel by channel.

        p_t = b + sum_j w_j u_(t-W+1+j),   y_t = p_t, or p_t sigmoid(p_t),

    where u_t is x_t, and for -W <= t < 0 the initial state, oldest first. With seq_idx the sum is
    over tokens of t's sequence, and the final state holds the last token's.

    Args:
        x: [B, T, D].  weight: [D, W].  bias: [D], zero if None.  activation: None or "silu".
        initial_state: [B, D, W], zero if None. Of its W tokens the last W - 1 enter y.
        seq_idx: sequence of each token [B, T], negative: none, whose y is zero; or None: one.
    Returns:
        y [B, T, D] and the final state [B, D, W], u of the last W tokens, or None; in x.dtype.
    Source: chapter 23.
    """
    dtype, T = compute_dtype(x, weight, bias, initial_state), x.shape[1]
    u, n = tokens(x, weight, initial_state, dtype), reach(seq_idx, weight.shape[1])
    p = preactivation(u, weight, bias, n)
    # eq:conv-act   y = p sigmoid(p)
    y = p * sigmoid(p) if activation == "silu" else p
    # eq:conv-state   s_i = u_(T-W+i)
    last = of_last(u[:, T:], n).mT.to(x.dtype).contiguous() if output_final_state else None
    return own(y, n, 0).to(x.dtype), last


def causal_conv1d_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    dy: Tensor,
    dht: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    activation: str | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The adjoint of causal_conv1d; p is computed again.

        dp_t = dy_t, or dy_t sigmoid(p_t) (1 + p_t (1 - sigmoid(p_t)))
        du_t = sum_j w_j dp_(t+W-1-j) + ds_(t-T+W)
        dw_j = sum_t dp_t u_(t-W+1+j),   db = sum_t dp_t

    Args:
        x, weight, bias, initial_state, seq_idx: as in causal_conv1d.  dy: [B, T, D].
        dht: gradient of the final state [B, D, W], zero if None.
    Returns:
        dx, dweight, dbias and the gradient of the initial state, in the dtypes of x, weight, bias
        and initial_state; None where these are.
    Source: chapter 23.
    """
    dtype = compute_dtype(x, weight, bias, initial_state, dy, dht)
    T, W = x.shape[1], weight.shape[1]
    u, n, dp = tokens(x, weight, initial_state, dtype), reach(seq_idx, W), dy.to(dtype)
    if activation == "silu":
        p = preactivation(u, weight, bias, n)
        # eq:conv-dpre   dp = dy sigmoid(p) (1 + p (1 - sigmoid(p)))
        dp = dp * sigmoid(p) * (1 + p * sigmoid(-p))
    # eq:conv-dweight   dw_j = sum_t dp_t u_(t-W+1+j),   db = sum_t dp_t
    products = (own(dp * u[:, 1 + j : 1 + j + T], n, W - 1 - j) for j in range(W))
    dw = torch.stack([product.sum((0, 1)) for product in products], 1)
    db = None if bias is None else own(dp, n, 0).sum((0, 1)).to(bias.dtype)
    du, w = torch.zeros_like(u), weight.mT.to(dtype).contiguous()
    for j in range(W):
        # eq:conv-dx   du_t = sum_j w_j dp_(t+W-1-j)
        du[:, 1 + j : 1 + j + T] += own(w[j] * dp, n, W - 1 - j)
    if dht is not None:
        # eq:conv-dstate   du_t += ds_(t-T+W)
        du[:, T:] += of_last(dht.mT, n)
    dh0 = None if initial_state is None else du[:, :W].mT.to(initial_state.dtype).contiguous()
    return du[:, W:].to(x.dtype).contiguous(), dw.to(weight.dtype), db, dh0


def tokens(x: Tensor, weight: Tensor, initial_state: Tensor | None, dtype: torch.dtype) -> Tensor:
    """u [B, W + T, D]: the W tokens of the initial state, or zeros, and x."""
    state = x.new_zeros(len(x), *weight.shape) if initial_state is None else initial_state
    return torch.cat([state.mT.to(dtype), x.to(dtype)], 1)


def reach(seq_idx: Tensor | None, W: int) -> Tensor | None:
    """n_t: how many tokens before t are of its sequence, W - 1 at most; -1 of padding [B, T, 1].

    Those of the initial state are of the first token's.
    """
    if seq_idx is None:
        return None
    u, T = torch.cat([seq_idx[:, :1].expand(-1, W), seq_idx], 1), seq_idx.shape[1]
    same = seq_idx >= 0
    n = same.int() - 1
    for i in range(1, W):
        # eq:conv-sequences   n_t = how many i in 1..W-1 have s_(t-i) = ... = s_t
        same = same & (u[:, W - i : W - i + T] == seq_idx)
        n = n + same
    return n[..., None]


def own(x: Tensor, n: Tensor | None, i: int) -> Tensor:
    """x [B, T, D], 0 where the token i tokens before is not of the token's sequence."""
    return x if n is None else torch.where(n >= i, x, 0)


def of_last(u: Tensor, n: Tensor | None) -> Tensor:
    """The last tokens u [B, W, D], 0 where they are not of the last one's sequence."""
    i = torch.arange(u.shape[1] - 1, -1, -1, device=u.device)[:, None]
    return u if n is None else torch.where(n[:, -1:] >= i, u, 0)


def preactivation(u: Tensor, weight: Tensor, bias: Tensor | None, n: Tensor | None) -> Tensor:
    """p [B, T, D] of u [B, W + T, D]."""
    W = weight.shape[1]
    T, w = u.shape[1] - W, weight.mT.to(u.dtype).contiguous()
    p = torch.zeros_like(u[:, W:])
    for j in range(W):
        # eq:conv-pre   p_t = b + sum_j w_j u_(t-W+1+j)
        p += own(w[j] * u[:, 1 + j : 1 + j + T], n, W - 1 - j)
    return p if bias is None else p.add_(bias.to(u.dtype))
