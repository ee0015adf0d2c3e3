"""Stage dplr_intra: what the tokens of a chunk read from each other, and their gated rows."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.kda_intra import pair_decay
from linattn_edu.reference.delta.solve import unit_lower_inverse
from linattn_edu.reference.tiles import compute_dtype, from_chunks, pad_gate, to_chunks


def dplr_intra(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, gc: Tensor, *, chunk_size: int
) -> tuple[Tensor, ...]:
    """The four scores of a chunk, the inverse of its triangular system, and the gated rows.

        qk_ij = sum over d of q_id k_jd 2^(gc_id - gc_jd),  i >= j;  qb likewise
        ak_ij = sum over d of a_id k_jd 2^(gp_id - gc_jd),  i > j;   ab likewise
        M     = (I - ab)^-1
        qg    = 2^gc * Q,  ag = 2^gp * A
        kg    = 2^(gc_last - gc) * K,  bg = 2^(gc_last - gc) * B

    a reads before the decay of its own token: gp_i = gc_(i - 1), and 0 for a chunk's first. No
    exponent is positive, whatever the gate.

    Args:
        q, k, a, b: [B, T, H, K]. gc: [B, T, H, K] from gate_cumsum (log2).
    Returns:
        M, ak, qb, qk [B, T, H, C] and qg, kg, ag, bg [B, T, H, K], in k.dtype.
    Source: the rule of arXiv:2503.14456, chapter 12e.
    """
    dtype, T = compute_dtype(q, k, a, b, gc), q.shape[1]
    Q, K, A, B, gc = (
        to_chunks(x.to(dtype), chunk_size) for x in (q, k, a, b, pad_gate(gc, chunk_size))
    )
    gp, columns = before(gc), []
    # eq:dplr-rows   qg = 2^gc * Q, ag = 2^gp * A, kg = 2^(gc_last - gc) * K; bg likewise
    to_end = torch.exp2(gc[..., -1:, :] - gc)
    rows = torch.exp2(gc) * Q, to_end * K, torch.exp2(gp) * A, to_end * B
    for j in range(chunk_size):
        read, erased = pair_decay(gc, j), read_before(gc, gp, j)
        one = slice(j, j + 1)
        columns.append([
            # eq:dplr-qb   qb_ij = sum_d q_id b_jd 2^(gc_id - gc_jd), i >= j; qk likewise
            (Q * read * B[..., one, :]).sum(-1),
            (Q * read * K[..., one, :]).sum(-1),
            # eq:dplr-ab   ab_ij = sum_d a_id b_jd 2^(gp_id - gc_jd), i > j; ak likewise
            (A * erased * B[..., one, :]).sum(-1),
            (A * erased * K[..., one, :]).sum(-1),
        ])  # fmt: skip
    qb, qk, ab, ak = (torch.stack(x, -1) for x in zip(*columns, strict=True))
    # eq:dplr-inverse   M = (I - ab)^-1
    M = unit_lower_inverse(-ab)
    return tuple(from_chunks(x, T).to(k.dtype) for x in (M, ak, qb, qk, *rows))


def before(gc: Tensor) -> Tensor:
    """gc [..., C, K] of the token before, 0 for the first of a chunk."""
    return torch.cat([torch.zeros_like(gc[..., :1, :]), gc[..., :-1, :]], -2)


def read_before(gc: Tensor, gp: Tensor, j: int) -> Tensor:
    """[..., C, K]: 2^(gp_i - gc_j) for i > j, else 0."""
    early = torch.arange(gc.shape[-2], device=gc.device)[:, None] <= j
    return torch.exp2((gp - gc[..., j : j + 1, :]).masked_fill(early, -torch.inf))
