"""Stages dplr_scan, dplr_states and dplr_map: carry the state through the chunks."""

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
    Source: the rule of arXiv:2503.14456, chapter 12e.
    """
    dtype = compute_dtype(qg, v, gc, initial_state)
    _, _, o, S = _through(kg, ag, bg, v, gc, M, ak, initial_state, dtype, (qg, qb, qk))
    return from_chunks(scale * o, v.shape[1]).to(v.dtype), S if output_final_state else None


def dplr_states(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same way, for what the backward pass reads.

    Returns:
        h [B, NT, H, K, V], the state that enters each chunk, and e [B, T, H, V], in v.dtype.
    """
    dtype = compute_dtype(kg, v, gc, initial_state)
    h, e, _, _ = _through(kg, ag, bg, v, gc, M, ak, initial_state, dtype)
    return h.transpose(1, 2).contiguous().to(v.dtype), from_chunks(e, v.shape[1]).to(v.dtype)


def dplr_map(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    initial_state: Tensor | None = None, *, transition: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What a piece of a sequence makes of the state that enters it: S_out = M_p S_in + S_ext.

        S_ext <- diag(2^gc_last) S_ext + bg^T M (ag S_ext + ak v) + kg^T v
        M_p   <- diag(2^gc_last) M_p   + bg^T M ag M_p

    through the chunks, from S_ext = 0 and M_p = I.

    Args:
        kg, ag, bg, v, gc, M, ak: as in dplr_states, of the piece alone.
        initial_state: [B, H, K, V]: the state itself where it is known; S_ext starts from it, and
            M_p does not depend on it.
        transition: Whether to compute M_p.
    Returns:
        S_ext [B, H, K, V], and M_p [B, H, K, K] or None; in fp32 (fp64 for fp64 input).
    Source: chapters 12e and 21.
    """
    dtype, (B, _, H, K) = compute_dtype(kg, v, gc, initial_state), kg.shape
    # eq:cp-ext   S_ext: the state after the piece, from zero
    columns = [(v, initial_state)]
    if transition:
        # eq:cp-transition   M_p: the same with v = 0, from I
        eye = torch.eye(K, dtype=dtype, device=v.device).expand(B, H, K, K)
        columns.append((v.new_zeros(*v.shape[:3], K), eye))
    S_ext, *M_p = (_through(kg, ag, bg, x, gc, M, ak, S, dtype)[-1] for x, S in columns)
    return S_ext, *(M_p or [None])


def _through(
    kg: Tensor, ag: Tensor, bg: Tensor, v: Tensor, gc: Tensor, M: Tensor, ak: Tensor,
    S: Tensor | None, dtype: torch.dtype, reads: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:  # fmt: skip
    """h [B, H, NT, K, V], e and o without scale [B, H, NT, C, V], the last state.

    reads: qg, qb and qk; without them no o.
    """
    C = M.shape[-1]
    kg, ag, bg, V, gc, M, ak, *reads = (
        to_chunks(x.to(dtype), C).unbind(2)
        for x in (kg, ag, bg, v, pad_gate(gc, C), M, ak, *(reads or ()))
    )
    (B, H, _, K), NT = kg[0].shape, len(kg)
    S = kg[0].new_zeros(B, H, K, v.shape[-1]) if S is None else S.to(dtype)
    h, e, o = [], [], []
    for c in range(NT):
        h.append(S)
        # eq:dplr-e   e = M (ag S + ak v)
        e.append(M[c] @ (ag[c] @ S + ak[c] @ V[c]))
        if reads:
            qg, qb, qk = reads
            # eq:dplr-output   o = scale (qg S + qb e + qk v)
            o.append(qg[c] @ S + qb[c] @ e[c] + qk[c] @ V[c])
        # eq:dplr-state   S <- diag(2^gc_last) S + bg^T e + kg^T v
        S = torch.exp2(gc[c][..., -1, :, None]) * S + bg[c].mT @ e[c] + kg[c].mT @ V[c]
    return torch.stack(h, 2), torch.stack(e, 2), torch.stack(o, 2) if o else None, S
