"""The gated delta rule, one token at a time: what all other forms are measured against."""

import math
from itertools import pairwise

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, repeat_heads, sum_heads


def block_length(T: int) -> int:
    """Tokens between two states that the backward pass keeps: ceil(sqrt(T))."""
    return math.isqrt(T - 1) + 1 if T else 1


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    write: Tensor | None = None,
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
        write: [B, T, HV, V]; beta is [B, T, HV, K] then, e = write_t * v_t - (beta_t * k_t) S.
        gk: [B, T, HV, K], a decay for each row of the state; gv: [B, T, HV, V], for each column.
            The logs of all gates given are added; g may be None.
        scale: K**-0.5 if None.  initial_state: [B, HV, K, V], zero if None.
    Returns:
        o [B, T, HV, V] in q.dtype and the final state [B, HV, K, V] in fp32
        (fp64 if any input is fp64; all arithmetic is done in that dtype).
    Source: arXiv:2412.06464; chapter 01.
    """
    dtype = compute_dtype(q, k, v, g, beta, gk, gv, write, initial_state)
    HV = v.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out_dtype = q.dtype
    B, T, _, K = q.shape
    S = v.new_zeros(B, HV, K, v.shape[-1]) if initial_state is None else initial_state
    S, a = S.to(dtype), decay(v, g, gk, gv, dtype)
    k = repeat_heads(k, HV)
    read, v, beta = _gated(k, v, beta, write, dtype)
    # rows of length K and V, and numbers: matrices of one row, for the products with S
    q, k, read, v, beta = (
        x.to(dtype)[..., None, :] for x in (repeat_heads(q, HV), k, read, v, beta)
    )
    o = []
    for t in range(T):
        # eq:delta-decay   S <- a S
        S = a[:, t] * S
        # eq:delta-error   e = v - k S
        e = v[:, t] - read[:, t] @ S
        # eq:delta-write   S <- S + k^T beta e
        S = S + k[:, t].mT * (beta[:, t] * e)
        # eq:delta-read   o = scale q S
        o.append(scale * (q[:, t] @ S))
    return torch.stack(o, 1).squeeze(-2).to(out_dtype), S


def recurrent_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    pool: Tensor,
    indices: Tensor,
    accepted: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    bounds: list[int],
) -> Tensor:
    """The recurrence of sequences whose states lie in a pool, which is read and written in place.

    Sequence n starts from the state in slot indices[n, accepted[n] - 1] (accepted None: 1), and
    leaves the state after its token t in slot indices[n, t]. With more tokens than columns the last
    slot is left with the last state. Nothing is kept in a negative slot. A sequence that would
    start from one is no sequence: its outputs are zero, and it writes nothing.

    Args:
        q, k, v, g, beta, gk, gv, write, scale: as in recurrent, with B = 1: sequences one after the
            other.
        pool: [slots, HV, K, V].  indices: [N] or [N, S].  accepted: [N] or None.
        bounds: the N + 1 boundaries of the sequences.
    Returns:
        o [1, T, HV, V] in q.dtype.
    Source: chapter 01.
    """
    o = torch.zeros_like(v)
    rows = indices.reshape(len(bounds) - 1, -1).tolist()
    for n, (first, last) in enumerate(pairwise(bounds)):
        before = rows[n][0 if accepted is None else int(accepted[n]) - 1]
        if before < 0:
            continue
        S = pool[before : before + 1]
        for t in range(first, last):
            now = slice(t, t + 1)
            gates = {"gk": gk, "gv": gv, "write": write}
            gates = {n: x if x is None else x[:, now] for n, x in gates.items()}
            o[:, now], S = recurrent(
                q[:, now], k[:, now], v[:, now], g if g is None else g[:, now], beta[:, now],
                scale=scale, initial_state=S, **gates,
            )  # fmt: skip
            slot = rows[n][min(t - first, len(rows[n]) - 1)]
            if slot >= 0:
                pool[slot] = S[0]
    return o


def _gated(
    k: Tensor, v: Tensor, beta: Tensor, write: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows r and v and a number b of each token: S <- S + k^T b (v - r S)."""
    if write is None:
        return k, v, beta[..., None]
    return beta.to(dtype) * k.to(dtype), write.to(dtype) * v.to(dtype), v.new_ones(*v.shape[:3], 1)


def decay(
    v: Tensor, g: Tensor | None, gk: Tensor | None, gv: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """e^(g + gk + gv), [B, T, HV, 1 or K, 1 or V]: the factor of each entry of the state."""
    shapes = (g, (1, 1)), (gk, (-1, 1)), (gv, (1, -1))
    logs = [x.to(dtype).reshape(*v.shape[:3], *shape) for x, shape in shapes if x is not None]
    return sum(logs[1:], logs[0]).exp() if logs else v.new_ones(*v.shape[:3], 1, 1, dtype=dtype)


def recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    write: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """The recurrence in reverse, with the states recomputed a block of tokens at a time.

        dq    = scale S do^T,       dS <- dS + scale q^T do
        dbeta = <k dS, e>,          de = beta k dS
        dv    = de,                 dk = (dS (beta e)^T - S' de^T)^T,  dS <- dS - k^T de
        dg    = <dS, S'>,           dS <- e^g dS

    or, with an erase gate and a write gate and r = beta * k,

        de = k dS,                  dwrite = v * de,    dv = write * de
        dr = -(S' de^T)^T,          dbeta = k * dr,     dk = (dS e^T)^T + beta * dr
        dS <- dS - r^T de

    S' is the decayed state, before token t writes; S the one after. Only the states at the ends of
    blocks of sqrt(T) tokens are kept from the way forward: 2 sqrt(T) states at a time, not T.

    Args:
        q, k, v, g, beta, gk, gv, write, scale, initial_state: the arguments of recurrent.
        do: [B, T, HV, V], gradient of o. dht: [B, HV, K, V], of the final state, zero if None.
    Returns:
        dq, dk [B, T, H, K], dv [B, T, HV, V] in q.dtype; dg, dbeta [B, T, HV], dgk [B, T, HV, K],
        dgv [B, T, HV, V] and dh0 [B, HV, K, V] in fp32 (fp64 for fp64 input); dg, dgk and dgv are
        None where the gate is. With write also dwrite [B, T, HV, V], the last, and dbeta is
        [B, T, HV, K].
    Source: chapter 07b.
    """
    dtype = compute_dtype(q, k, v, g, beta, do, dht, gk, gv, write, initial_state)
    H, HV, out_dtype = q.shape[2], v.shape[2], q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = repeat_heads(q, HV).to(dtype), repeat_heads(k, HV).to(dtype)
    v, beta, do, a = v.to(dtype), beta.to(dtype), do.to(dtype), decay(v, g, gk, gv, dtype)
    r, wanted, b = _gated(k, v, beta, write, dtype)
    B, T, _, K = q.shape
    S = q.new_zeros(B, HV, K, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    block, kept = block_length(T), [S]
    for t in range(T - 1):
        S, _, _ = _step(S, k, r, wanted, b, a, t)
        if t % block == block - 1:
            kept.append(S)
    dS = torch.zeros_like(S) if dht is None else dht.to(dtype)
    dq, dk, dv, dr = (torch.zeros_like(x) for x in (q, k, v, k))
    db, dlog = torch.zeros_like(b), [None] * T
    for first in reversed(range(0, T, block)):
        S, states = kept.pop(), []
        for t in range(first, min(first + block, T)):
            S, decayed, e = _step(S, k, r, wanted, b, a, t)
            states.append((decayed, e, S))
        for t in reversed(range(first, min(first + block, T))):
            decayed, e, S = states.pop()
            # eq:delta-read-bwd   dq = scale S do^T, dS <- dS + scale q^T do
            dq[:, t] = scale * torch.einsum("bhkv,bhv->bhk", S, do[:, t])
            dS = dS + scale * torch.einsum("bhk,bhv->bhkv", q[:, t], do[:, t])
            # eq:delta-write-bwd   dbeta = <k dS, e>, de = beta k dS
            written = torch.einsum("bhk,bhkv->bhv", k[:, t], dS)
            db[:, t] = (written * e).sum(-1, keepdim=True)
            de = b[:, t] * written
            # eq:delta-error-bwd   dv = de, dk = dS (beta e)^T - S' de^T, dS <- dS - k^T de
            dv[:, t] = de
            dk[:, t] = torch.einsum("bhkv,bhv->bhk", dS, b[:, t] * e)
            dr[:, t] = -torch.einsum("bhkv,bhv->bhk", decayed, de)
            dS = dS - torch.einsum("bhk,bhv->bhkv", r[:, t], de)
            # eq:delta-decay-bwd   dg = <dS, S'>, dS <- a dS
            product = dS * decayed
            dlog[t] = (product.sum((-1, -2)), product.sum(-1), product.sum(-2))
            dS = a[:, t] * dS
    dbeta, gates = db[..., 0], ()
    if write is not None:
        dbeta, gates = k * dr, (v * dv,)
        dr, dv = beta * dr, write.to(dtype) * dv
    dq, dk = sum_heads(dq, H).to(out_dtype), sum_heads(dk + dr, H).to(out_dtype)
    dg, dgk, dgv = (
        None if x is None else torch.stack([d[i] for d in dlog], 1)
        for i, x in enumerate((g, gk, gv))
    )
    return dq, dk, dv.to(out_dtype), dg, dbeta, dgk, dgv, dS, *gates


def _step(
    S: Tensor, k: Tensor, r: Tensor, v: Tensor, b: Tensor, a: Tensor, t: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Token t of the recurrence: the state after it, the decayed state before it, the error."""
    decayed = a[:, t] * S
    e = v[:, t] - torch.einsum("bhk,bhkv->bhv", r[:, t], decayed)
    S = decayed + torch.einsum("bhk,bhv->bhkv", k[:, t], b[:, t] * e)
    return S, decayed, e
