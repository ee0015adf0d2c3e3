"""Stage chunk_scan: read the state and the chunk's own tokens."""

import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def chunk_scan(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> Tensor:
    """The output: from the incoming state, from the tokens of the chunk, and past both.

        y = diag(e) C h + (C B^T * G * step) X + D X,   out = y silu(z)

    Args:
        C, B: [B, T, G, N].  x: [B, T, H, P].  step, gc: [B, T, H].  h: [B, NT, H, N, P].
        D: [H] or [H, P], or None.  z: [B, T, H, P], or None: out = y.
        seq_idx: as in chunk_state: e and G are zero between documents.
    Returns:
        out [B, T, H, P] in x.dtype.
    Source: arXiv:2405.21060 section 6, chapter 13.
    """
    dtype = compute_dtype(C, B, x, step, gc, h)
    T, H = x.shape[1:3]
    e, G, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, B_, X, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(B, H), x, step)
    )
    # eq:ssd-inter   diag(e) C h
    y = e * (C_ @ h.to(dtype).transpose(1, 2))
    # eq:ssd-scores   M = C B^T * G * step
    M = (C_ @ B_.mT) * G * step[..., None, :]
    # eq:ssd-output   y = inter + M X + D X
    y = from_chunks(y + M @ X, T)
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).to(dtype) * x.to(dtype)
    # eq:ssd-gate   out = y silu(z)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype)
