"""Stage chunk_scan_chunk_state_bwd_dx: the adjoint of chunk_scan and chunk_state by x."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def chunk_scan_chunk_state_bwd_dx(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    ds: Tensor,
    dy: Tensor,
    D: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, of the step where it multiplies x, and of D.

        dXs = (C B^T * G)^T dY + diag(r) B ds,   the gradient of step x
        dX  = diag(step) dXs + D dY,   dstep_j = x_j . dXs_j,   dD = sum over tokens of dY * X

    Args:
        C, B, x, step, gc, D, seq_idx: as in chunk_scan, D also [H, 1].  ds: [B, NT, H, N, P] of
            state_passing_bwd.  dy: [B, T, H, P], gradient of y.
    Returns:
        dx [B, T, H, P] in x.dtype; dstep [B, T, H]; dD of D's shape, or None; both fp32 (fp64 for
        fp64 input).
    Source: chapter 18.
    """
    dtype = compute_dtype(C, B, x, step, gc, ds, dy, D)
    T, H = x.shape[1:3]
    _, G, r, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, B_, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, dy, step[..., None])
    )
    # eq:ssd-dxs   dXs = (C B^T * G)^T dY + diag(r) B ds
    dXs = ((C_ @ B_.mT) * G).mT @ dY + r * (B_ @ ds.to(dtype).transpose(1, 2))
    # eq:ssd-dstep   dstep_j = x_j . dXs_j
    dstep = from_chunks((X * dXs).sum(-1), T)
    # eq:ssd-dx   dX = diag(step) dXs + D dY
    dx = from_chunks(step * dXs, T)
    if D is None:
        return dx.to(x.dtype), dstep, None
    D_ = D.to(dtype).view(H, -1)
    dx = dx + D_ * dy.to(dtype)
    # eq:ssd-dd   dD = sum over tokens of dY * X
    dD = (dy.to(dtype) * x.to(dtype)).sum((0, 1))
    dD = dD if D_.shape[1] > 1 else dD.sum(1)
    return dx.to(x.dtype), dstep, dD.view(D.shape)
