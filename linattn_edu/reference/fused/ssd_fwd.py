"""Mamba-2 in few stages: the output from shared scores, and every gradient of a chunk at once."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.state import state
from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    documents,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def chunk_scores(C: Tensor, B: Tensor, seq_idx: Tensor | None = None, *, chunk_size: int) -> Tensor:
    """The scores of a chunk, which all heads of a group share.

        S_ij = C_i . B_j   for the tokens j <= i of i's chunk and document, else 0

    Args:
        C, B: [B, T, G, N].  seq_idx: [B, T], the document of each token, or None: one.
    Returns:
        S [B, T, G, chunk_size] in C.dtype.
    Source: chapter 13.
    """
    C_, B_ = (to_chunks(y.to(compute_dtype(C, B)), chunk_size) for y in (C, B))
    # eq:ssd-cb   S = C B^T
    S = (C_ @ B_.mT).tril()
    if seq_idx is not None:
        ids, *_ = documents(seq_idx, chunk_size)
        S = S * (ids[..., :, None] == ids[..., None, :])
    return from_chunks(S, C.shape[1]).to(C.dtype)


def ssd_fwd(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    gs: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """state and chunk_scan in one scan, from scores that are there already.

        y = diag(e) C h + (S * G * step) X + D X,   out = y silu(z)
        h <- a h + (diag(r * step) B)^T X

    Args:
        C, B, x, D, z, seq_idx: as in chunk_scan.  gs, gc: of chunk_cumsum_log.
        S: [B, T, G, C] of chunk_scores, C the tokens of a chunk.
        initial_state: [B, H, N, P], or None: zero.
    Returns:
        out [B, T, H, P] in x.dtype; the final state [B, H, N, P] in fp32 (fp64 for fp64 input), or
        None.
    Source: chapter 13.
    """
    dtype, chunk_size = compute_dtype(C, B, x, gs, gc, initial_state), S.shape[3]
    T, H = x.shape[1:3]
    # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X
    h, _, final_state = state(
        B, None, x, gc, initial_state, gs, seq_idx, chunk_size=chunk_size,
        output_final_state=output_final_state,
    )  # fmt: skip
    e, G, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, S, X, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(S, H), x, torch.exp2(gc.to(dtype) - gs))
    )
    # eq:ssd-scores   M = C B^T * G * step
    M = S * G * step[..., None, :]
    # eq:ssd-inter   inter = diag(e) C h
    y = e * (C_ @ h.to(dtype).transpose(1, 2))
    # eq:ssd-output   y = inter + M X + D X
    y = from_chunks(y + M @ X, T)
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).to(dtype) * x.to(dtype)
    # eq:ssd-gate   out = y silu(z)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), final_state


def ssd_bwd_bc(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    gs: Tensor,
    gc: Tensor,
    h: Tensor,
    dh: Tensor,
    dy: Tensor,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of B and C, and of the decay by what each token reads: of chapters 16 to 19.

    Args:
        C, B, x, gs, gc, seq_idx: as in ssd_fwd.  dy: [B, T, H, P], gradient of y.
        h: [B, NT, H, N, P] of state.  dh: like h, of state_bwd.
    Returns:
        dB and dC [B, T, G, N] in the dtypes of B and C; dgc [B, T, H], which lacks what other
        tokens read of the token; xdy [B, T, H], x . dY of each token; both in fp32 (fp64 for fp64
        input).
    Source: chapters 16, 17 and 19.
    """
    dtype = compute_dtype(C, B, x, gs, gc, h, dh, dy)
    T, H = x.shape[1:3]
    e, G, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    step = torch.exp2(gc.to(dtype) - gs)
    C_, B_, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step[..., None])
    )
    h, ds = (y.to(dtype).transpose(1, 2) for y in (h, dh))
    # eq:ssd-dc-inter   inter = diag(e) dY h^T
    # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
    inter, dB = e * (dY @ h.mT), r * step * (X @ ds.mT)
    # eq:ssd-cb   S = C B^T
    S = C_ @ B_.mT
    # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
    dscores = (dY @ X.mT) * G * step.mT
    # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
    dgc = (e * dY * (C_ @ h)).sum(-1)
    # eq:ssd-dgc-rows   rowsum(W)_i = dY_i . (M X)_i, M below the diagonal
    dgc = dgc + (dY * ((S * G * step.mT).tril(-1) @ X)).sum(-1)
    # eq:ssd-dc   dC = inter + dscores B
    # eq:ssd-db   dB = dB_state + dscores^T C
    dC, dB = inter + dscores @ B_, dB + dscores.mT @ C_
    dB, dC = (sum_heads(from_chunks(y, T), B.shape[2]) for y in (dB, dC))
    xdy = (X * dY).sum(-1)
    return dB.to(B.dtype), dC.to(C.dtype), from_chunks(dgc, T), from_chunks(xdy, T)


def ssd_bwd_dx(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    gs: Tensor,
    gc: Tensor,
    dh: Tensor,
    dy: Tensor,
    xdy: Tensor,
    dgc: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of x, step and D, and the rest of the decay's: of chapters 16, 18 and 19.

    What other tokens read of token j, in its chunk, is the sum of a column of W. The product that
    gives dX has that sum, and with it that of the token itself:

        colsum(W)_j + m_j = step_j (x_j . dXs_j - S_jj x_j . dY_j)

    Args:
        C, B, x, gs, gc, dh, dy, seq_idx: as in ssd_bwd_bc, and its xdy and dgc.
        D: as in chunk_scan.
    Returns:
        dx [B, T, H, P] in x.dtype; dstep [B, T, H], the gradient of the step where it multiplies
        x; dgc, now whole, and m [B, T, H], from which chunk_cumsum_bwd goes on; dD of D's shape, or
        None; all but dx in fp32 (fp64 for fp64 input).
    Source: chapters 16, 18 and 19.
    """
    dtype = compute_dtype(C, B, x, gs, gc, dh, dy, D)
    T, H = x.shape[1:3]
    _, G, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    step = torch.exp2(gc.to(dtype) - gs)
    C_, B_, X, dY, step, xdy = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step[..., None], xdy)
    )
    ds = dh.to(dtype).transpose(1, 2)
    # eq:ssd-cb   S = C B^T
    S = C_ @ B_.mT
    # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_j = step_j r_j x_j . (B ds)_j
    dXs = r * (B_ @ ds)
    m = (step * X * dXs).sum(-1)
    # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
    dXs = dXs + (S * G).mT @ dY
    # eq:ssd-dstep   dstep_j = x_j . dXs_j
    dstep = (X * dXs).sum(-1)
    # eq:ssd-dgc-columns   colsum(W)_j + m_j = step_j (x_j . dXs_j - S_jj x_j . dY_j)
    dgc = dgc - from_chunks(step[..., 0] * (dstep - S.diagonal(0, -2, -1) * xdy), T)
    # eq:ssd-dx   dX = diag(step) dXs + D dY
    dx, dD = from_chunks(step * dXs, T), None
    if D is not None:
        dx = dx + (D if D.ndim == 2 else D[:, None]).to(dtype) * dy.to(dtype)
        # eq:ssd-dd   dD = sum over tokens of dY * X
        dD = (dy.to(dtype) * x.to(dtype)).sum((0, 1))
        dD = dD if D.shape == dD.shape else dD.sum(-1).view(D.shape)
    return dx.to(x.dtype), from_chunks(dstep, T), dgc, from_chunks(m, T), dD
