"""Mamba-2 in few stages: the output from shared scores, and every gradient of a chunk at once."""

import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd
from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def chunk_scores(C: Tensor, B: Tensor, *, chunk_size: int) -> Tensor:
    """The scores of a chunk, which all heads of a group share.

        S_ij = C_i . B_j   for all tokens j of i's chunk

    Args:
        C, B: [B, T, G, N].
    Returns:
        S [B, T, G, chunk_size] in C.dtype; columns past the last token are zero.
    Source: chapter 13.
    """
    C_, B_ = (to_chunks(y.to(compute_dtype(C, B)), chunk_size) for y in (C, B))
    # eq:ssd-cb   S = C B^T
    return from_chunks(C_ @ B_.mT, C.shape[1]).to(C.dtype)


def ssd_fwd(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    step: Tensor,
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
        C, B, x, step, gc, D, z, seq_idx: as in chunk_scan.  S: [B, T, G, C] of chunk_scores, C the
            tokens of a chunk.  initial_state: [B, H, N, P], or None: zero.
    Returns:
        out [B, T, H, P] in x.dtype; the final state [B, H, N, P] in fp32 (fp64 for fp64 input), or
        None.
    Source: chapter 13.
    """
    dtype, chunk_size = compute_dtype(C, B, x, step, gc, initial_state), S.shape[3]
    T, H = x.shape[1:3]
    h, _, final_state = state(
        B, None, x, gc, initial_state, step, seq_idx, chunk_size=chunk_size,
        output_final_state=output_final_state,
    )  # fmt: skip
    e, G, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, S, X, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(S, H), x, step)
    )
    # eq:ssd-inter   inter = diag(e) C h
    y = e * (C_ @ h.to(dtype).transpose(1, 2))
    # eq:ssd-output   y = inter + M X
    y = from_chunks(y + (S * G * step[..., None, :]) @ X, T)
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).to(dtype) * x.to(dtype)
    # eq:ssd-gate   out = y silu(z)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), final_state


def ssd_bwd_dx(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dy: Tensor,
    dht: Tensor | None = None,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The adjoint of ssd_fwd's scan, which is the same scan read backwards.

        dXs = diag(r) B ds + (S * G)^T dY,   dX = diag(step) dXs + D dY
        dlast = a <h, ds>,   ds <- a ds + (diag(e) C)^T dY

    Args:
        C, B, S, step, gc, D, seq_idx: as in ssd_fwd.  h: [B, NT, H, N, P] of state.  dy: [B, T, H,
            P], gradient of y.  dht: [B, H, N, P], gradient of the final state, or None: zero.
    Returns:
        dx [B, T, H, P] in dy.dtype; dh, like h, the gradient of the state leaving each chunk; dh0
        [B, H, N, P] and dlast [B, NT, H], the gradient of gc's last entry in each chunk through the
        state that it decays, in fp32 (fp64 for fp64 input).
    Source: chapters 14, 15 and 18.
    """
    dtype, chunk_size = compute_dtype(C, B, step, gc, h, dy, dht), S.shape[3]
    T, H = dy.shape[1:3]
    dh, _, dh0, dlast = state_bwd(
        C, None, None, gc, dy, None, dht, seq_idx, h, scale=1.0, chunk_size=chunk_size
    )
    _, G, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    B_, S, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(B, H), repeat_heads(S, H), dy, step[..., None])
    )
    # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
    dXs = r * (B_ @ dh.to(dtype).transpose(1, 2)) + (S * G).mT @ dY
    # eq:ssd-dx   dX = diag(step) dXs + D dY
    dx = from_chunks(step * dXs, T)
    if D is not None:
        dx = dx + (D if D.ndim == 2 else D[:, None]).to(dtype) * dy.to(dtype)
    return dx.to(dy.dtype), dh, dh0, dlast


def ssd_bwd(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dh: Tensor,
    dy: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of B, C, step, gc and D: chapters 16, 17 and 19 in one stage.

    Args:
        C, B, x, step, gc, D, seq_idx: as in chunk_scan.  S: [B, T, G, C] of chunk_scores, C the
            tokens of a chunk.  dy: [B, T, H, P], gradient of y.
        h: [B, NT, H, N, P] of state.  dh: like h, of ssd_bwd_dx.
    Returns:
        dB and dC [B, T, G, N] in the dtypes of B and C; dstep, dgc and m [B, T, H], from which
        chunk_cumsum_bwd goes on: dstep is what the scores give to the step where it multiplies x,
        m what the states give to it; dD of D's shape, or None; these in fp32 (fp64 for fp64 input).
    Source: chapters 16, 17 and 19.
    """
    dtype, chunk_size = compute_dtype(C, B, x, step, gc, h, dh, dy, D), S.shape[3]
    T, H = x.shape[1:3]
    e, G, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, B_, S, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (*(repeat_heads(y, H) for y in (C, B, S)), x, dy, step[..., None])
    )
    h, ds = (y.to(dtype).transpose(1, 2) for y in (h, dh))
    # eq:ssd-dc-inter   inter = diag(e) dY h^T
    # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
    inter, dB = e * (dY @ h.mT), r * step * (X @ ds.mT)
    # eq:ssd-dgc-inter   dgc_i = C_i . inter_i = e_i dY_i . (C h)_i
    dgc = (e * dY * (C_ @ h)).sum(-1)
    # eq:ssd-m   m_j = r_j x_j . (B ds)_j
    m = (r * X * (B_ @ ds)).sum(-1)
    # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
    W = (dY @ X.mT) * G
    dscores = W * step.mT
    # eq:ssd-dd   dD = sum over tokens of dY * X
    if D is not None:
        dD = (dy.to(dtype) * x.to(dtype)).sum((0, 1))
        dD = dD if D.shape == dD.shape else dD.sum(-1).view(D.shape)
    # eq:ssd-dgc-scores   dgc = rowsum(W) - colsum(W), W = M * dY X^T below the diagonal
    below = (S * dscores).tril(-1)
    dgc = dgc + below.sum(-1) - below.sum(-2)
    # eq:ssd-dstep-scores   dstep_j = sum_i S_ij G_ij dY_i . x_j
    dstep = (S * W).sum(-2)
    # eq:ssd-dc   dC = inter + dscores B
    # eq:ssd-db   dB = dB_state + dscores^T C
    dC, dB = inter + dscores @ B_, dB + dscores.mT @ C_
    dB, dC = (sum_heads(from_chunks(y, T), B.shape[2]) for y in (dB, dC))
    return (
        dB.to(B.dtype), dC.to(C.dtype), from_chunks(dstep, T), from_chunks(dgc, T),
        from_chunks(m, T), None if D is None else dD,
    )  # fmt: skip
