"""Stage ema: the exponential moving average of every channel, Mamba-2 without B and C."""

import torch
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, from_chunks, to_chunks


def ema(
    x: Tensor,
    g: Tensor,
    gc: Tensor,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int,
    output_final_state: bool = False,
    return_states: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The moving average of all channels of a head, which share its decay.

        h_t = e^g_t h_(t-1) + w_t x_t,   y_t = h_t,   w_t = 1 - e^g_t without a weight;

    in chunks, with e, G, r, a of chunk_cumsum.decays,

        Y  = diag(e) h + (G * w) X,   h <- a h + (r * w)^T X

    in which a factor of zero takes away NaN and inf too.

    Args:
        x: [B, T, H, D].  g: [B, T, H], natural log, <= 0.  gc: [B, T, H] of gate_cumsum (log2).
        weight: [B, T, H], or None.  initial_state: [B, H, D], zero if None.
    Returns:
        y [B, T, H, D] in x.dtype; h [B, NT, H, D], the state entering each chunk, and the final
        state [B, H, D], both in fp32 (fp64 for fp64 input), or None.
    Source: arXiv:2405.21060 section 6 with N = 1 and B = C = 1, chapter 20.
    """
    dtype = compute_dtype(x, g, gc, weight, initial_state)
    w = to_chunks(weights(g, weight, dtype), chunk_size)[..., None, :]
    e, G, r, a = decays(gc.to(dtype), None, chunk_size)
    G, r = G * seen(G, w), r.mT * seen(r.mT, w)
    X = to_chunks(x.to(dtype), chunk_size)
    S = torch.zeros_like(X[:, :, 0, :1]) if initial_state is None else initial_state[:, :, None]
    S, y, h = S.to(dtype), [], []  # S: [B, H, 1, D]
    for c in range(X.shape[2]):
        h.append(S[:, :, 0])
        # eq:ema-output   Y = diag(e) h + (G * w) X
        y.append(e[:, :, c] * seen(e[:, :, c], S) + mixed(G[:, :, c], X[:, :, c]))
        # eq:ema-state   h <- a h + (r * w)^T X
        S = a[:, :, c] * seen(a[:, :, c], S) + mixed(r[:, :, c], X[:, :, c])
    y = from_chunks(torch.stack(y, 2), x.shape[1]).to(x.dtype)
    final_state = S[:, :, 0] if output_final_state else None
    return y, torch.stack(h, 1) if return_states else None, final_state


def weights(g: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """w of each token: the weight, or 1 - e^g with all digits of a small g."""
    # eq:ema-weight   w = 1 - e^g
    return -torch.expm1(g.to(dtype)) if weight is None else weight.to(dtype)


def seen(f: Tensor, x: Tensor) -> Tensor:
    """x where its factor f is not zero: behind a reset NaN and inf count no more.

    A number below 2^-126 is zero: where two sums of g are subtracted, 2^-150 may be 2^-149.
    """
    return torch.where(f.abs() < 2.0**-126, 0, x)


def mixed(M: Tensor, X: Tensor) -> Tensor:
    """M X, in which each x counts as `seen` by its factor.  M: [..., I, J].  X: [..., J, D]."""
    bad = ~X.isfinite()
    if not bad.any():
        return M @ X
    Y = M @ X.masked_fill(bad, 0)
    for j in bad.flatten(0, -3).any(0).any(-1).nonzero()[:, 0]:
        f, x = M[..., j, None], X[..., j, None, :]
        Y = Y + torch.where(bad[..., j, None, :], f * seen(f, x), 0)
    return Y
