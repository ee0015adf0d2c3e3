"""Stage ema_bwd: the adjoint of ema, the same scan from the last token to the first."""

import torch
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.ssd.ema import mixed, seen, weights
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def ema_bwd(
    x: Tensor,
    g: Tensor,
    gc: Tensor,
    weight: Tensor | None,
    h: Tensor,
    dy: Tensor,
    dht: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of x, g, weight and the initial state.

        dh_t = dy_t + e^g_(t+1) dh_(t+1)
        dx_t = w_t dh_t,   dw_t = x_t . dh_t,   dg_t = e^g_t h_(t-1) . dh_t

    and without a weight, where g makes w too, dg_t = e^g_t (h_(t-1) - x_t) . dh_t; in chunks, from
    the dh of the token after the chunk and the h of the token before it,

        dH = G^T dY + diag(r) dh,   dh <- a dh + e^T dY
        e^g_t h_(t-1) = row t of diag(e) h + (G * w below the diagonal) X

    Args:
        x, g, gc, weight: as in ema.  h: [B, NT, H, D] of ema.  dy: [B, T, H, D].
        dht: [B, H, D], zero if None.
    Returns:
        dx, dg, dweight (or None) in the dtypes of x, g and weight; the gradient of the initial
        state [B, H, D] in fp32 (fp64 for fp64 input).
    Source: chapter 20.
    """
    dtype = compute_dtype(x, g, gc, weight, h, dy, dht)
    e, G, r, a = decays(gc.to(dtype), None, chunk_size)
    w = to_chunks(weights(g, weight, dtype), chunk_size)[..., None]
    X, dY = (to_chunks(z.to(dtype), chunk_size) for z in (x, dy))
    dh = torch.zeros_like(dY[:, :, 0, :1]) if dht is None else dht[:, :, None].to(dtype)
    dH = []
    for c in reversed(range(dY.shape[2])):
        # eq:ema-dh   dH = G^T dY + diag(r) dh
        dH.append(mixed(G[:, :, c].mT, dY[:, :, c]) + r[:, :, c] * seen(r[:, :, c], dh))
        # eq:ema-dh-before   dh <- a dh + e^T dY
        dh = a[:, :, c] * seen(a[:, :, c], dh) + mixed(e[:, :, c].mT, dY[:, :, c])
    dH = torch.stack(dH[::-1], 2)
    # eq:ema-dx   dX = diag(w) dH
    dx = from_chunks(w * dH, x.shape[1])
    # eq:ema-kept   e^g h_(t-1) = diag(e) h + (G * w below the diagonal) X
    G = G.tril(-1)
    kept = e * seen(e, h.to(dtype).transpose(1, 2)[..., None, :]) + mixed(G * seen(G, w.mT), X)
    if weight is None:
        kept = kept - to_chunks(g.to(dtype).exp(), chunk_size)[..., None] * X
    # eq:ema-dg   dg = e^g (h_(t-1) [- x]) . dH
    dg = from_chunks((kept * dH).sum(-1), x.shape[1])
    # eq:ema-dw   dw = x . dH
    dw = from_chunks((X * dH).sum(-1), x.shape[1])
    dw = None if weight is None else dw.to(weight.dtype)
    return dx.to(x.dtype), dg.to(g.dtype), dw, dh[:, :, 0]
