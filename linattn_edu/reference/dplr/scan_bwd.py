"""Stages dplr_scan_bwd, dplr_map_bwd: carry the gradient of the state back through the chunks."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, pad_gate, to_chunks


def dplr_scan_bwd(
    qg: Tensor, kg: Tensor, ag: Tensor, bg: Tensor, gc: Tensor,
    M: Tensor, ak: Tensor, qb: Tensor, qk: Tensor, do: Tensor, dht: Tensor | None = None,
    *, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The adjoint of dplr_scan's chain, from the last chunk to the first.

        dx  = M^T (scale qb^T dO + bg dS)
        dv  = scale qk^T dO + kg dS + ak^T dx
        dS <- diag(2^gc_last) dS + scale qg^T dO + ag^T dx

    x = ag S + ak v is what M multiplies.

    Args:
        qg, kg, ag, bg, M, ak, qb, qk: from dplr_intra. gc: [B, T, H, K] log2.
        do: [B, T, H, V], gradient of o. dht: [B, H, K, V], of the final state, zero if None.
    Returns:
        dh [B, NT, H, K, V], the gradient of the state that leaves each chunk, dx and dv
        [B, T, H, V], in do.dtype; dh0 [B, H, K, V] in fp32 (fp64 for fp64 input).
    Source: the adjoint of dplr_scan, chapter 12e.
    """
    dtype, C, T = compute_dtype(qg, gc, do, dht), M.shape[-1], do.shape[1]
    qg, kg, ag, bg, gc, M, ak, qb, qk, dO = (
        to_chunks(x.to(dtype), C)
        for x in (qg, kg, ag, bg, pad_gate(gc, C), M, ak, qb, qk, do)
    )  # fmt: skip
    dO, (B, H, NT, _, K) = scale * dO, kg.shape
    dS = kg.new_zeros(B, H, K, do.shape[-1]) if dht is None else dht.to(dtype)
    dh, dx, dv = [], [], []
    for c in reversed(range(NT)):
        dh.append(dS)
        # eq:dplr-dx   dx = M^T (scale qb^T dO + bg dS)
        x = M[:, :, c].mT @ (qb[:, :, c].mT @ dO[:, :, c] + bg[:, :, c] @ dS)
        dx.append(x)
        # eq:dplr-dv   dv = scale qk^T dO + kg dS + ak^T dx
        dv.append(qk[:, :, c].mT @ dO[:, :, c] + kg[:, :, c] @ dS + ak[:, :, c].mT @ x)
        # eq:dplr-ds   dS <- diag(2^gc_last) dS + scale qg^T dO + ag^T dx
        dS = torch.exp2(gc[:, :, c, -1])[..., None] * dS
        dS = dS + qg[:, :, c].mT @ dO[:, :, c] + ag[:, :, c].mT @ x
    dx, dv = (from_chunks(torch.stack(x[::-1], 2), T).to(do.dtype) for x in (dx, dv))
    return torch.stack(dh[::-1], 1).to(do.dtype), dx, dv, dS


def dplr_map_bwd(
    qg: Tensor, kg: Tensor, ag: Tensor, bg: Tensor, gc: Tensor,
    M: Tensor, ak: Tensor, qb: Tensor, qk: Tensor, do: Tensor, dht: Tensor | None = None,
    *, scale: float, transition: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What a piece makes of the gradient of the state that leaves it: dS_in = dM_p dS_out + dS_ext.

        dS_ext <- diag(2^gc_last) dS_ext + scale qg^T dO + ag^T M^T (scale qb^T dO + bg dS_ext)
        dM_p   <- diag(2^gc_last) dM_p   + ag^T M^T bg dM_p

    back through the chunks, from dS_ext = 0 and dM_p = I. dM_p is M_p^T.

    Args:
        qg, kg, ag, bg, gc, M, ak, qb, qk, do: as in dplr_scan_bwd, of the piece alone.
        dht: [B, H, K, V]: the gradient itself where it is known; dS_ext starts from it.
        transition: Whether to compute dM_p.
    Returns:
        dS_ext [B, H, K, V], and dM_p [B, H, K, K] or None; in fp32 (fp64 for fp64 input).
    Source: the adjoint of dplr_map, chapters 12e and 22.
    """
    dtype, (B, _, H, K) = compute_dtype(qg, gc, do, dht), kg.shape
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    columns = [(do, dht)]
    if transition:
        # eq:cp-transition-bwd   dM_p: the same with dO = 0, from I
        eye = torch.eye(K, dtype=dtype, device=do.device).expand(B, H, K, K)
        columns.append((do.new_zeros(*do.shape[:3], K), eye))
    given = qg, kg, ag, bg, gc, M, ak, qb, qk
    dS_ext, *dM_p = (dplr_scan_bwd(*given, x, dS, scale=scale)[-1] for x, dS in columns)
    return dS_ext, *(dM_p or [None])
