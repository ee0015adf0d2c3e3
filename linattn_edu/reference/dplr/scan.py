"""Stages dplr_scan and dplr_states: carry the state through the chunks."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, pad_gate, to_chunks


def dplr_scan(
    qg: Tensor, kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor,
    M: Tensor, ak: Tensor, qb: Tensor, qk: Tensor, initial_state: Tensor | None = None,
    *, scale: float, output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Carry S from chunk to chunk and read the output on the way.

        e = M (ag S + ak v)
        o = scale (qg S + qb e + qk v)
        S <- diag(2^gc_last) S + bg^T e + kg^T v

    Args:
        qg, kg, ag, bg, M, ak, qb, qk: from dplr_intra. v: [B, T, H, V]. gc: [B, T, H, K] log2.
        initial_state: [B, H, K, V], zero if None.
    Returns:
        o [B, T, H, V] in v.dtype; the final state [B, H, K, V] in fp32 (fp64 for fp64 input), or
        None.
    Source: the chunk form of arXiv:2503.14456.
    """
    dtype = compute_dtype(qg, v, gc, initial_state)
    h, e, S = _through(kg, ag, bg, v, gc, M, ak, initial_state, dtype)
    C = M.shape[-1]
    qg, qb, qk, V = (to_chunks(x.to(dtype), C) for x in (qg, qb, qk, v))
    # eq:dplr-output   o = scale (qg S + qb e + qk v)
    o = scale * (qg @ h + qb @ e + qk @ V)
    return from_chunks(o, v.shape[1]).to(v.dtype), S if output_final_state else None


def dplr_states(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same way, for what the backward pass reads.

    Returns:
        h [B, NT, H, K, V], the state that enters each chunk, and e [B, T, H, V], in v.dtype.
    """
    dtype = compute_dtype(kg, v, gc, initial_state)
    h, e, _ = _through(kg, ag, bg, v, gc, M, ak, initial_state, dtype)
    return h.transpose(1, 2).contiguous().to(v.dtype), from_chunks(e, v.shape[1]).to(v.dtype)


def _through(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    S: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h [B, H, NT, K, V], e [B, H, NT, C, V], the last state."""
    C = M.shape[-1]
    kg, ag, bg, V, gc, M, ak = (
        to_chunks(x.to(dtype), C) for x in (kg, ag, bg, v, pad_gate(gc, C), M, ak)
    )
    B, H, NT, _, K = kg.shape
    S = kg.new_zeros(B, H, K, v.shape[-1]) if S is None else S.to(dtype)
    h, e = [], []
    for c in range(NT):
        h.append(S)
        # eq:dplr-e   e = M (ag S + ak v)
        e.append(M[:, :, c] @ (ag[:, :, c] @ S + ak[:, :, c] @ V[:, :, c]))
        # eq:dplr-state   S <- diag(2^gc_last) S + bg^T e + kg^T v
        S = torch.exp2(gc[:, :, c, -1])[..., None] * S
        S = S + bg[:, :, c].mT @ e[-1] + kg[:, :, c].mT @ V[:, :, c]
    return torch.stack(h, 2), torch.stack(e, 2), S
