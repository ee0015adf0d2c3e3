"""Stage cp_merge: a piece of a sequence as an affine map of the state, and a chain of such maps."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.state import state
from linattn_edu.reference.tiles import compute_dtype


def piece_map(
    k: Tensor,
    w: Tensor | None,
    u: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    gs: Tensor | None = None,
    *,
    chunk_size: int,
    transition: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What a piece of a sequence makes of the state that enters it: S_out = M S_in + S_ext.

        S_ext <- 2^(gc_last) S_ext + (diag(2^(gc_last - gc)) K)^T (u - w S_ext)
        M     <- 2^(gc_last) M     - (diag(2^(gc_last - gc)) K)^T w M

    through the chunks, from S_ext = 0 and M = I; with a gate for each row of the state diag(2^gc)
    on the left of both and kg as in `state`. Without w, as in Mamba-2, M is a number.

    Args:
        k: [B, T, H, K]. w: [B, T, HV, K] or None. u: [B, T, HV, V]. gc: [B, T, HV] (log2); or
            gc: [B, T, HV, K] and k: kg [B, T, HV, K]. All of the piece alone.
        initial_state: [B, HV, K, V]: the state itself where it is known; S_ext starts from it, and
            M does not depend on it.
        gs: [B, T, HV] in place of gc for what a token writes, as in `state`.
        transition: Whether to compute M.
    Returns:
        S_ext [B, HV, K, V], and M [B, HV, K, K], or [B, HV] without w, or None; in fp32 (fp64 for
        fp64 input).
    Source: chapter 21.
    """
    options = {"chunk_size": chunk_size, "output_final_state": True}
    # eq:cp-ext   S_ext: the state after the piece, from zero
    _, _, S_ext = state(k, w, u, gc, initial_state, gs, **options)
    if not transition:
        return S_ext, None
    if w is not None:
        B, _, HV, K = w.shape
        eye = torch.eye(K, dtype=S_ext.dtype, device=k.device).expand(B, HV, K, K)
        # eq:cp-transition   M: the same with u = 0, from I
        _, _, M = state(k, w, u.new_zeros(*u.shape[:3], K), gc, eye, **options)
        return S_ext, M
    return S_ext, transition_number(gc, S_ext.dtype, chunk_size)


def transition_number(gc: Tensor, dtype: torch.dtype, chunk_size: int) -> Tensor:
    """[B, HV]: what is left of the state, whose rows decay alike, after the gates [B, T, HV]."""
    T = gc.shape[1]
    ends = [min(c + chunk_size, T) - 1 for c in range(0, T, chunk_size)]
    # eq:cp-number   M = 2^(sum of gc_last)
    return torch.exp2(gc[:, ends].to(dtype).sum(1))


def cp_merge(
    S_ext: Tensor, M: Tensor, initial_state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The state that enters each piece of a sequence, and the one that leaves the last.

        S_1 = initial_state,   S_(p+1) = M_p S_p + S_ext_p

    Args:
        S_ext: [B, NP, H, K, V], one for each piece.  M: [B, NP, H, K, K], or numbers [B, NP, H].
        initial_state: [B, H, K, V], zero if None.
    Returns:
        S_in like S_ext; S_out [B, H, K, V]; in fp32 (fp64 for fp64 input).
    Source: chapter 21.
    """
    dtype = compute_dtype(S_ext, M, initial_state)
    S_ext, M = S_ext.to(dtype), M.to(dtype)
    S = torch.zeros_like(S_ext[:, 0]) if initial_state is None else initial_state.to(dtype)
    S_in = []
    for p in range(S_ext.shape[1]):
        S_in.append(S)
        # eq:cp-merge   S <- M S + S_ext
        S = apply(M[:, p], S) + S_ext[:, p]
    return torch.stack(S_in, 1), S


def cp_join(S_ext: Tensor, M: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The map of a sequence, or of the part that a rank has of it, from those of its pieces.

        S_ext <- M_p S_ext + S_ext_p,   M <- M_p M

    Args:
        S_ext: [B, NP, H, K, V], one for each piece.  M: numbers [B, NP, H].
        initial_state: [B, H, K, V]: the state itself where it is known; S_ext starts from it.
    Returns:
        S_ext [B, H, K, V] and M [B, H]; in fp32 (fp64 for fp64 input).
    Source: chapter 21.
    """
    return cp_merge(S_ext, M, initial_state)[1], M.to(compute_dtype(S_ext, M)).prod(1)


def apply(M: Tensor, S: Tensor) -> Tensor:
    """M S, with M a matrix [.., K, K] or a number [..] for each state [.., K, V]."""
    return M @ S if M.ndim == S.ndim else M[..., None, None] * S
