"""The general delta rule, one token at a time: a decay and a matrix of rank one, DPLR."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.recurrent import block_length
from linattn_edu.reference.tiles import compute_dtype


def dplr_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence token by token.

        e   = a_t S
        S  <- e^(gk_t) S + b_t^T e + k_t^T v_t
        o_t = scale q_t S

    Args:
        q, k, a, b: [B, T, H, K]. v: [B, T, H, V].
        gk: [B, T, H, K] natural-log decay of each row of the state.
        scale: K**-0.5 if None.  initial_state: [B, H, K, V], zero if None.
        reverse: from the last token to the first.
    Returns:
        o [B, T, H, V] in q.dtype and the final state [B, H, K, V] in fp32
        (fp64 if any input is fp64; all arithmetic is done in that dtype).
    Source: arXiv:2503.14456; chapter 01.
    """
    dtype = compute_dtype(q, k, v, a, b, gk, initial_state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o = torch.empty_like(v)
    S = _first(q, v, initial_state, dtype)
    q, k, v, a, b, decay = (x.to(dtype) for x in (q, k, v, a, b, gk.to(dtype).exp()))
    for t in _order(q.shape[1], reverse):
        S, _ = _step(S, k, v, a, b, decay, t)
        # eq:delta-read   o = scale q S
        o[:, t] = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o, S


def dplr_recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, ...]:
    """The recurrence against its order, with the states recomputed a block of tokens at a time.

        dq = scale S do^T,     dS <- dS + scale q^T do
        dk = dS v^T,           dv = k dS
        db = dS e^T,           de = b dS,     da = S' de^T
        dg = e^g <dS, S'>,     dS <- e^g dS + a^T de

    S' is the state before token t, S the one after; <,> sums over the columns. Only the states at
    the ends of blocks of sqrt(T) tokens are kept from the way forward.

    Args:
        q, k, v, a, b, gk, scale, initial_state, reverse: the arguments of dplr_recurrent.
        do: [B, T, H, V], gradient of o. dht: [B, H, K, V], of the final state, zero if None.
    Returns:
        dq, dk [B, T, H, K], dv [B, T, H, V], da, db [B, T, H, K] in q.dtype; dgk [B, T, H, K] and
        dh0 [B, H, K, V] in fp32 (fp64 for fp64 input).
    Source: the adjoint, line by line, of dplr_recurrent; chapter 07b has that of the delta rule.
    """
    dtype, out_dtype = compute_dtype(q, k, v, a, b, gk, do, dht, initial_state), q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S = _first(q, v, initial_state, dtype)
    q, k, v, a, b, gk, do = (x.to(dtype) for x in (q, k, v, a, b, gk, do))
    decay, order = gk.exp(), _order(q.shape[1], reverse)
    length, kept = block_length(len(order)), []
    for i, t in enumerate(order):
        if i % length == 0:
            kept.append(S)
        S, _ = _step(S, k, v, a, b, decay, t)
    dS = torch.zeros_like(S) if dht is None else dht.to(dtype)
    dq, dk, dv, da, db, dgk = (torch.empty_like(x) for x in (q, k, v, a, b, gk))
    for first in reversed(range(0, len(order), length)):
        S, states = kept.pop(), []
        for t in order[first : first + length]:
            before = S
            S, e = _step(S, k, v, a, b, decay, t)
            states.append((t, before, e, S))
        for t, before, e, S in reversed(states):
            # eq:delta-read-bwd   dq = scale S do^T, dS <- dS + scale q^T do
            dq[:, t] = scale * torch.einsum("bhkv,bhv->bhk", S, do[:, t])
            dS = dS + scale * torch.einsum("bhk,bhv->bhkv", q[:, t], do[:, t])
            # eq:delta-write-bwd   dk = dS v^T, dv = k dS, db = dS e^T, de = b dS
            dk[:, t] = torch.einsum("bhkv,bhv->bhk", dS, v[:, t])
            dv[:, t] = torch.einsum("bhk,bhkv->bhv", k[:, t], dS)
            db[:, t] = torch.einsum("bhkv,bhv->bhk", dS, e)
            de = torch.einsum("bhk,bhkv->bhv", b[:, t], dS)
            # eq:delta-error-bwd   da = S' de^T
            da[:, t] = torch.einsum("bhkv,bhv->bhk", before, de)
            # eq:delta-decay-bwd   dg = e^g <dS, S'>, dS <- e^g dS + a^T de
            dS = decay[:, t, ..., None] * dS
            dgk[:, t] = (dS * before).sum(-1)
            dS = dS + torch.einsum("bhk,bhv->bhkv", a[:, t], de)
    return *(x.to(out_dtype) for x in (dq, dk, dv, da, db)), dgk, dS


def _first(q: Tensor, v: Tensor, initial_state: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The state before the first token."""
    if initial_state is not None:
        return initial_state.to(dtype)
    return q.new_zeros(q.shape[0], *q.shape[2:], v.shape[-1], dtype=dtype)


def _order(T: int, reverse: bool) -> range:
    """The tokens in the order in which the state comes by them."""
    return range(T - 1, -1, -1) if reverse else range(T)


def _step(
    S: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, decay: Tensor, t: int
) -> tuple[Tensor, Tensor]:
    """Token t of the recurrence: the state after it, and what a reads of the one before."""
    # eq:delta-error   e = a S, with the S of before the decay
    e = torch.einsum("bhk,bhkv->bhv", a[:, t], S)
    # eq:delta-write   S <- e^g S + b^T e + k^T v
    S = decay[:, t, ..., None] * S + torch.einsum("bhk,bhv->bhkv", b[:, t], e)
    return S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t]), e
