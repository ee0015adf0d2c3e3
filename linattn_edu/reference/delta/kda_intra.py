"""Stage kda_intra: what the tokens of a chunk read from each other, with a gate a channel."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.reference.tiles import (
    by_channel,
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    to_chunks,
)


def kda_intra(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    *,
    chunk_size: int,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The scores of a chunk and the inverse of its triangular system, both with the gate in them.

        P_ij = sum over d of q_id k_jd 2^(gc_id - gc_jd),  i >= j
        L_ij = beta_i sum over d of k_id k_jd 2^(gc_id - gc_jd),  i > j
        A    = (I + L)^-1

    No exponent is positive, whatever the gate. With an erase gate for each channel, beta_id stands
    inside the sum: token i reads with the key beta_i * k_i, and writes with k_i.

    Args:
        q, k: [B, T, H, K]. beta: [B, T, HV], or the erase gate [B, T, HV, K].
        gc: [B, T, HV, K] from gate_cumsum (log2).
        lower_bound: A promise that no token's log decay is below it, which the kernels use.
    Returns:
        P and A, [B, T, HV, C] in k.dtype.
    Source: arXiv:2510.26692, chapter 07.
    """
    dtype = compute_dtype(q, k, beta, gc)
    T, HV = gc.shape[1:3]
    Q, K, b, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), by_channel(beta), pad_gate(gc, chunk_size)
        )
    )  # fmt: skip
    P, L = [], []
    for j in range(chunk_size):
        decayed = pair_decay(gc, j) * K[..., j : j + 1, :]
        # eq:kda-scores   P_ij = sum_d q_id k_jd 2^(gc_id - gc_jd), i >= j
        P.append((Q * decayed).sum(-1))
        # eq:kda-kk   L_ij = beta_i sum_d k_id k_jd 2^(gc_id - gc_jd), i > j
        L.append((b * K * decayed).sum(-1))
    # eq:kda-inverse   A = (I + L)^-1
    A = unit_lower_inverse(torch.stack(L, -1).tril(-1))
    return from_chunks(torch.stack(P, -1), T).to(k.dtype), from_chunks(A, T).to(k.dtype)


def pair_decay(gc: Tensor, j: int) -> Tensor:
    """gc [..., C, K] -> 2^(gc_i - gc_j) for i >= j, 0 for the tokens before j."""
    before = torch.arange(gc.shape[-2], device=gc.device)[:, None] < j
    return torch.exp2((gc - gc[..., j : j + 1, :]).masked_fill(before, -torch.inf))
