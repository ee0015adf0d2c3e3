"""Every gradient of a chunk at once, from the states at its ends."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def ssd_bwd(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dh: Tensor,
    dy: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of x, step, the log decay, B, C and D: chapters 15 to 19 in one stage.

    Args:
        C, B, x, step, gc, D, seq_idx: as in chunk_scan.  dy: [B, T, H, P], gradient of y.
        h: [B, NT, H, N, P] of state.  dh: like h, of state_bwd.
    Returns:
        dx [B, T, H, P], dB and dC [B, T, G, N], in the dtypes of x, B and C; dstep [B, T, H], the
        gradient of the step where it multiplies x, and da [B, T, H], that of each token's log decay
        (natural units); dD of D's shape, or None; these in fp32 (fp64 for fp64 input).
    Source: chapters 15 to 19.
    """
    dtype = compute_dtype(C, B, x, step, gc, h, dh, dy, D)
    T, H = x.shape[1:3]
    e, G, r, a = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, B_, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step[..., None])
    )
    h, ds = (y.to(dtype).transpose(1, 2) for y in (h, dh))
    # eq:ssd-dlast   dlast = a <h, ds>
    dlast = (a * h * ds).sum((-1, -2))
    # eq:ssd-dc-inter   inter = diag(e) dY h^T
    dC = e * (dY @ h.mT)
    # eq:ssd-dgc-inter   dgc_i = C_i . inter_i
    dgc = (C_ * dC).sum(-1)
    # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
    dB = r * step * (X @ ds.mT)
    # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_head_j
    m = (B_ * dB).sum(-1)
    dgc, dlast = dgc - m, dlast + m.sum(-1)
    # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
    scores, dscores = C_ @ B_.mT, (dY @ X.mT) * G * step.mT
    # eq:ssd-dgc-scores   dgc = rowsum(X) - colsum(X), X = M * dY X^T below the diagonal
    M = (scores * dscores).tril(-1)
    dgc = dgc + M.sum(-1) - M.sum(-2)
    # eq:ssd-da   da_i = dlast + reverse cumsum(dgc)
    da = dlast[..., None] + dgc.flip(3).cumsum(3).flip(3)
    # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
    dXs = (scores * G).mT @ dY + r * (B_ @ ds)
    # eq:ssd-dstep   dstep_j = x_j . dXs_j
    dstep = (X * dXs).sum(-1)
    # eq:ssd-dx   dX = diag(step) dXs + D dY
    dx, dD = from_chunks(step * dXs, T), None
    if D is not None:
        dx = dx + (D if D.ndim == 2 else D[:, None]).to(dtype) * dy.to(dtype)
        # eq:ssd-dd   dD = sum over tokens of dY * X
        dD = (dy.to(dtype) * x.to(dtype)).sum((0, 1))
        dD = dD if D.ndim == 2 else dD.sum(-1)
    # eq:ssd-dc   dC = inter + dscores B
    dC = dC + dscores @ B_
    # eq:ssd-db   dB = dB_state + dscores^T C
    dB = dB + dscores.mT @ C_
    dB, dC = (sum_heads(from_chunks(y, T), B.shape[2]) for y in (dB, dC))
    return (
        dx.to(x.dtype), dB.to(B.dtype), dC.to(C.dtype), from_chunks(dstep, T), from_chunks(da, T),
        dD,
    )  # fmt: skip
