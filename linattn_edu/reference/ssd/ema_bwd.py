"""Stage ema_bwd: the adjoint of ema, the same scan from the last token to the first."""

import torch
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.ssd.ema import weights
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def ema_bwd(
    x: Tensor,
    g: Tensor,
    gc: Tensor,
    weight: Tensor | None,
    initial_state: Tensor | None,
    y: Tensor,
    dy: Tensor,
    dht: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The gradients of x, g, weight and the initial state.

        dh_t = dy_t + e^g_(t+1) dh_(t+1)
        dx_t = w_t dh_t,   dw_t = x_t . dh_t,   dg_t = e^g_t (y_(t-1) . dh_t)

    and without a weight, where g makes w too, dg_t = e^g_t ((y_(t-1) - x_t) . dh_t); in chunks,
    with the dh of the token after the chunk,

        dH = G^T dY + diag(r) dh,   dh <- a dh + e^T dY

    y_(t-1) is the state before token t: none has to be kept beside the output.

    Args:
        x, g, gc, weight, initial_state: as in ema.  y: its output.  dy: [B, T, H, D].
        dht: [B, H, D], zero if None.
    Returns:
        dx, dg, dweight (or None) in the dtypes of x, g and weight; the gradient of the initial
        state [B, H, D] in fp32 (fp64 for fp64 input).
    Source: chapter 20.
    """
    dtype = compute_dtype(x, g, gc, weight, initial_state, dy, dht)
    x_, g_, y, dy = (z.to(dtype) for z in (x, g, y, dy))
    e, G, r, a = decays(gc.to(dtype), None, chunk_size)
    dY = to_chunks(dy, chunk_size)
    dh = torch.zeros_like(dY[:, :, 0, :1]) if dht is None else dht[:, :, None].to(dtype)
    dH = []
    for c in reversed(range(dY.shape[2])):
        # eq:ema-dh   dH = G^T dY + diag(r) dh
        dH.append(G[:, :, c].mT @ dY[:, :, c] + r[:, :, c] * dh)
        # eq:ema-dh-before   dh <- a dh + e^T dY
        dh = a[:, :, c] * dh + e[:, :, c].mT @ dY[:, :, c]
    dH = from_chunks(torch.stack(dH[::-1], 2), x.shape[1])
    # eq:ema-dx   dX = diag(w) dH
    dx = weights(g, weight, dtype)[..., None] * dH
    before = torch.zeros_like(y[:, :1]) if initial_state is None else initial_state[:, None]
    before = torch.cat([before.to(dtype), y[:, :-1]], 1)
    # eq:ema-dg   dg = e^g (y_(t-1) [- x]) . dH
    change = before - x_ if weight is None else before
    dg = g_.exp() * (change * dH).sum(-1)
    # eq:ema-dw   dw = x . dH
    dw = None if weight is None else (x_ * dH).sum(-1).to(weight.dtype)
    return dx.to(x.dtype), dg.to(g.dtype), dw, dh[:, :, 0]
