"""Decoding that does not write its state: a checkpoint, and a ring of what was written since."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, repeat_heads


def replay(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor,
    keys: Tensor,
    writes: Tensor,
    decays: Tensor,
    counts: Tensor,
    indices: Tensor | None = None,
    accepted: Tensor | None = None,
    *,
    length: int,
    gk: Tensor | None = None,
    scale: float | None = None,
    normalise: bool = False,
) -> Tensor:
    """Take tokens into the ring of each sequence, and read what the state with them would give.

        S = e^(g_1 + .. + g_c) S_0 + sum_i e^(g_(i+1) + .. + g_c) k_i^T u_i

    is never formed: k S and q S are sums over the c entries of the ring, of k_i, u_i and g_i. Where
    the new tokens do not fit beside them, the ring is first folded into S_0, and is empty.

    Args:
        q, k: [N, T, H, K].  v: [N, T, HV, V].  g: [N, T, HV], natural log, or None with gk: [N, T,
            HV, K].  beta: [N, T, HV].
        state: [slots, HV, K, V], the checkpoints S_0; read, and written where a ring is folded.
        keys: [slots, H, R, K], writes: [slots, HV, R, V], decays: [slots, HV, R, 1 or
            K]: k_i, u_i = beta_i e_i and g_i, in the entries of a ring of R. In place.
        counts: [slots, HV, tiles, 3] int32, the same for all heads and tiles: the first entry, the
            entries before the last call, and its tokens. In place.
        indices: slot of each sequence [N], or None: its number. Outside of the pool there is no
            sequence: its o is zero, and nothing is written.
        accepted: how many of the last call's tokens were right [N], or None: all. The others leave.
        length: the most entries that are in use at a time; T <= R - length.
        normalise: divide q and k by their length. keys are those that are given, and u_i is divided
            in their place: neither is rounded.
    Returns:
        o [N, T, HV, V] in v.dtype.
    Source: chapter 26b.
    """
    dtype = compute_dtype(q, k, v, g, beta, gk, state)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    (T, HV), R = v.shape[1:3], keys.shape[2]
    log = (g[..., None] if gk is None else gk).to(dtype)
    o, rstd = torch.zeros_like(v), [1.0, 1.0]
    if normalise:
        rstd = [(x.to(dtype).square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k)]
        rstd = [repeat_heads(x, HV)[..., None] for x in rstd]
    # rows of one token: matrices, for the products with S
    q, k, v, beta = (
        x.to(dtype)[..., None, :]
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v, beta[..., None])
    )
    q, k_unit = rstd[0] * q, rstd[1] * k
    for n, slot in slots_of(state, len(q), indices):
        begin, count = entries(counts[slot], accepted, n)
        S = state[slot].to(dtype)
        if count + T > length:
            rows = rows_of(begin, count, R)
            S = fold(S, keys[slot], writes[slot], decays[slot], rows)
            state[slot] = S  # which may be rounded there, and is not here
            begin, count = (begin + count) % R, 0
        rows = rows_of(begin, count + T, R)
        K_, U, logs = (x[slot].to(dtype) for x in (keys, writes, decays))
        for t in range(T):
            now, past = rows[count + t], rows[: count + t]
            # eq:delta-decay   S <- a S
            logs[:, now] = log[n, t]
            since = logs[:, rows[: count + t + 1]].flip(1).cumsum(1).flip(1).exp()
            a, w = since[:, :1], since[:, 1:]
            # eq:delta-error   e = v - k S
            kS = _read(k_unit[n, t], S, a, w, K_[:, past], U[:, past])
            u = beta[n, t] * (v[n, t] - kS)
            # eq:delta-write   S <- S + k^T beta e
            K_[:, now] = k[n, t, :: HV // K_.shape[0], 0]
            entry = u if not normalise else rstd[1][n, t] * u
            U[:, now] = entry[:, 0].to(writes.dtype).to(dtype)
            # eq:delta-read   o = scale q S
            own = (q[n, t] * k_unit[n, t]).sum(-1, keepdim=True) * u
            qS = _read(q[n, t], S, a, w, K_[:, past], U[:, past])
            o[n, t] = (scale * (qS + own))[:, 0]
        new = rows[count:]
        for kept, x in ((keys, K_), (writes, U), (decays, logs)):
            kept[slot][:, new] = x[:, new].to(kept.dtype)
        counts[slot] = torch.tensor([begin, count, T], dtype=counts.dtype)
    return o


def commit(
    state: Tensor,
    keys: Tensor,
    writes: Tensor,
    decays: Tensor,
    counts: Tensor,
    indices: Tensor,
    accepted: Tensor | None = None,
) -> Tensor:
    """Fold the ring of each sequence into its checkpoint, which is then the state; it is empty.

    Args: as in replay.
    Returns:
        How many entries there were [N], int32.
    Source: chapter 26b.
    """
    R, folded = keys.shape[2], counts.new_zeros(len(indices))
    for n, slot in slots_of(state, len(indices), indices):
        begin, count = entries(counts[slot], accepted, n)
        rows = rows_of(begin, count, R)
        state[slot] = fold(state[slot], keys[slot], writes[slot], decays[slot], rows)
        counts[slot] = torch.tensor([(begin + count) % R, 0, 0], dtype=counts.dtype)
        folded[n] = count
    return folded


def fold(S: Tensor, keys: Tensor, writes: Tensor, decays: Tensor, rows: list[int]) -> Tensor:
    """The state after the entries `rows` of a ring, one after the other.

    Args:
        S: [HV, K, V].  keys, writes, decays: as in replay, of one slot.
    """
    dtype, HV = compute_dtype(S, writes), S.shape[0]
    S = S.to(dtype)
    for i in rows:
        # eq:delta-decay   S <- a S
        S = decays[:, i, :, None].exp() * S
        # eq:delta-write   S <- S + k^T u
        k = keys[:, i].repeat_interleave(HV // keys.shape[0], 0)
        S = S + k.to(dtype)[..., None] * writes[:, i, None].to(dtype)
    return S


def _read(x: Tensor, S: Tensor, a: Tensor, w: Tensor, keys: Tensor, writes: Tensor) -> Tensor:
    """x times the state: x [HV, 1, K], a [HV, 1, 1 or K], w [HV, c, 1 or K] -> [HV, 1, V]."""
    keys = keys.repeat_interleave(len(x) // len(keys), 0)
    return (a * x) @ S + (w * x * keys).sum(-1)[:, None] @ writes


def slots_of(state: Tensor, N: int, indices: Tensor | None) -> list[tuple[int, int]]:
    """The sequences that there are, and their slots."""
    slots = range(N) if indices is None else indices.tolist()
    return [(n, slot) for n, slot in enumerate(slots) if 0 <= slot < len(state)]


def entries(counts: Tensor, accepted: Tensor | None, n: int) -> tuple[int, int]:
    """The first entry of a ring, and how many there are without the tokens that were wrong."""
    begin, count, last = counts[0, 0].tolist()
    return begin, count + (last if accepted is None else min(max(int(accepted[n]), 0), last))


def rows_of(begin: int, count: int, R: int) -> list[int]:
    """Where the entries of a ring of R are."""
    return [(begin + j) % R for j in range(count)]
