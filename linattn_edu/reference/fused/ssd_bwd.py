"""The backward pass of Mamba-2 in few stages: every gradient of a chunk at once."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.cp_merge_bwd import piece_map_bwd
from linattn_edu.reference.fused.ssd_fwd import side_by_side
from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def ssd_ends_bwd(
    C: Tensor, gc: Tensor, dy: Tensor, *, chunk_size: int, piece: int | None = None
) -> tuple[Tensor, Tensor, None]:
    """The maps of the pieces of a sequence back in time: the adjoints of those of ssd_ends.

        dS_in = M dS_out + dS_ext,   with M a number, as in piece_map_bwd

    Args:
        C, gc, dy: as in ssd_bwd_dc.  piece: as in ssd_ends.
    Returns:
        dS_ext [B, NP, H, N, P] and M [B, NP, H], 0 from 2^-32 down, in fp32 (fp64 for fp64 input);
        and the number of the first piece of each sequence, where they are packed.
    Source: chapter 22.
    """
    piece = piece or dy.shape[1]
    cuts = [slice(a, a + piece) for a in range(0, dy.shape[1], piece)]
    given, options = (None, None), {"scale": 1.0, "chunk_size": chunk_size}
    maps = [piece_map_bwd(C[:, t], *given, gc[:, t], dy[:, t], None, **options) for t in cuts]
    return side_by_side(maps)


def ssd_bwd_dx(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    gs: Tensor,
    gc: Tensor,
    dh: Tensor,
    dy: Tensor,
    dC: Tensor,
    dgc: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """All gradients but those by the states that tokens read: of chapters 16 to 19.

    What other tokens read of token j, in its chunk, is the sum of a column of W. The product that
    gives dX has that sum, and with it that of the token itself:

        colsum(W)_j + m_j = step_j (x_j . dXs_j - S_jj x_j . dY_j)

    Args:
        C, B, x, gs, gc, seq_idx: as in ssd_fwd.  dh: [B, NT, H, N, P] of ssd_states_bwd.
        dy: as in ssd_bwd_dc.  dC, dgc: of ssd_bwd_dc.  D: as in chunk_scan.
    Returns:
        dx [B, T, H, P], dB and dC [B, T, G, N] in the dtypes of x, B and C; dstep [B, T, H], the
        gradient of the step where it multiplies x; dgc, now whole, and m [B, T, H], from which
        chunk_cumsum_bwd goes on; dD of D's shape, or None; the last four in fp32 (fp64 for fp64
        input).
    Source: chapters 16 to 19.
    """
    dtype = compute_dtype(C, B, x, gs, gc, dh, dy, D)
    T, H = x.shape[1:3]
    _, G, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    step = torch.exp2(gc.to(dtype) - gs)
    C_, B_, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step[..., None])
    )
    ds = dh.to(dtype).transpose(1, 2)
    # eq:ssd-db-state   dB_head = diag(r * step) X ds^T
    dB = r * step * (X @ ds.mT)
    # eq:ssd-cb   S = C B^T
    S = C_ @ B_.mT
    # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
    dscores = (dY @ X.mT) * G * step.mT
    # eq:ssd-dgc-rows   rowsum(W)_i = dY_i . (M X)_i, M below the diagonal
    rows = (dY * ((S * G * step.mT).tril(-1) @ X)).sum(-1)
    # eq:ssd-dgc-state   dgc = -m, dlast = sum(m), m_j = B_j . dB_j = step_j r_j x_j . (B ds)_j
    dXs = r * (B_ @ ds)
    m = (step * X * dXs).sum(-1)
    # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
    dXs = dXs + (S * G).mT @ dY
    # eq:ssd-dstep   dstep_j = x_j . dXs_j
    dstep = (X * dXs).sum(-1)
    # eq:ssd-dgc-columns   colsum(W)_j + m_j = step_j (x_j . dXs_j - S_jj x_j . dY_j)
    columns = step[..., 0] * (dstep - S.diagonal(0, -2, -1) * (X * dY).sum(-1))
    dgc = dgc + from_chunks(rows - columns, T)
    # eq:ssd-dx   dX = diag(step) dXs + D dY
    dx, dD = from_chunks(step * dXs, T), None
    if D is not None:
        dx = dx + (D if D.ndim == 2 else D[:, None]).to(dtype) * dy.to(dtype)
        # eq:ssd-dd   dD = sum over tokens of dY * X
        dD = (dy.to(dtype) * x.to(dtype)).sum((0, 1))
        dD = dD if D.shape == dD.shape else dD.sum(-1).view(D.shape)
    # eq:ssd-dc   dC = inter + dscores B
    # eq:ssd-db   dB = dB_state + dscores^T C
    dC = dC + sum_heads(from_chunks(dscores @ B_, T), C.shape[2])
    dB = sum_heads(from_chunks(dB + dscores.mT @ C_, T), B.shape[2])
    dstep, m = from_chunks(dstep, T), from_chunks(m, T)
    return dx.to(x.dtype), dB.to(B.dtype), dC.to(C.dtype), dstep, dgc, m, dD
