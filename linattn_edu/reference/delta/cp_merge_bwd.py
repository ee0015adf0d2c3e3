"""Stage cp_merge_bwd: the adjoints of the maps of pieces, and a chain of them, back in time."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.cp_merge import apply, transition_number
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.reference.tiles import compute_dtype


def piece_map_bwd(
    q: Tensor,
    k: Tensor | None,
    w: Tensor | None,
    gc: Tensor,
    do: Tensor,
    dv_new: Tensor | None,
    dht: Tensor | None = None,
    P: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
    transition: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What a piece makes of the gradient of the state that leaves it: dS_in = dM dS_out + dS_ext.

        dS_ext <- 2^(gc_last) dS_ext + scale (diag(2^gc) Q)^T dO - w^T dv_new'(dS_ext)
        dM     <- 2^(gc_last) dM     - w^T diag(2^(gc_last - gc)) K dM

    back through the chunks, from dS_ext = 0 and dM = I, with dv_new' of `state_bwd`. dM is M^T.
    Without w, as in Mamba-2, it is the number M.

    Args:
        q, k, w, gc, do, dv_new, P: as in `state_bwd`, of the piece alone.
        dht: [B, HV, K, V]: the gradient itself where it is known; dS_ext starts from it.
        transition: Whether to compute dM.
    Returns:
        dS_ext [B, HV, K, V], and dM [B, HV, K, K], or [B, HV] without w, or None; in fp32 (fp64 for
        fp64 input).
    Source: chapter 22.
    """
    options = {"scale": scale, "chunk_size": chunk_size}
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    dS_ext = state_bwd(q, k, w, gc, do, dv_new, dht, P=P, **options)[2]
    if not transition:
        return dS_ext, None
    if w is not None:
        B, T, HV, K = w.shape
        eye = torch.eye(K, dtype=dS_ext.dtype, device=q.device).expand(B, HV, K, K)
        none = do.new_zeros(B, T, HV, K)
        # eq:cp-transition-bwd   dM: the same with dO = 0, from I
        return dS_ext, state_bwd(q, k, w, gc, none, none, eye, **options)[2]
    # eq:cp-number   dM = M = 2^(sum of gc_last)
    return dS_ext, transition_number(gc, dS_ext.dtype, chunk_size)


def cp_join_bwd(dS_ext: Tensor, dM: Tensor, dht: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The map of a sequence back in time, from those of its pieces.

        dS_ext <- dM_p dS_ext + dS_ext_p,   dM <- dM_p dM,   from the last piece on

    Args:
        dS_ext: [B, NP, H, K, V], one for each piece.  dM: numbers [B, NP, H].
        dht: [B, H, K, V]: the gradient itself where it is known; dS_ext starts from it.
    Returns:
        dS_ext [B, H, K, V] and dM [B, H]; in fp32 (fp64 for fp64 input).
    Source: chapter 22.
    """
    return cp_merge_bwd(dS_ext, dM, dht)[1], dM.to(compute_dtype(dS_ext, dM)).prod(1)


def cp_merge_bwd(dS_ext: Tensor, dM: Tensor, dht: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The gradient of the state that leaves each piece, and of the one that enters the first.

        dS_NP = dht,   dS_(p-1) = dM_p dS_p + dS_ext_p

    The maps themselves need no gradient: the backward pass of a piece starts from dS_p, and so
    counts what its tokens did to all that came after.

    Args:
        dS_ext: [B, NP, H, K, V], one for each piece.  dM: [B, NP, H, K, K], or numbers [B, NP, H].
        dht: [B, H, K, V], zero if None.
    Returns:
        dS_out like dS_ext; dS_in [B, H, K, V]; in fp32 (fp64 for fp64 input).
    Source: chapter 22.
    """
    dtype = compute_dtype(dS_ext, dM, dht)
    dS_ext, dM = dS_ext.to(dtype), dM.to(dtype)
    dS = torch.zeros_like(dS_ext[:, 0]) if dht is None else dht.to(dtype)
    dS_out = []
    for p in reversed(range(dS_ext.shape[1])):
        dS_out.append(dS)
        # eq:cp-merge-bwd   dS <- dM dS + dS_ext
        dS = apply(dM[:, p], dS) + dS_ext[:, p]
    return torch.stack(dS_out[::-1], 1), dS
