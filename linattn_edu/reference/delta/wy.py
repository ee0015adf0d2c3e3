"""Stage wy: what each chunk would write, and how that depends on the incoming state."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def wy(k: Tensor, v: Tensor, beta: Tensor, gc: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """The WY form of a chunk: the values it writes are v_new = u - w S.

        w = diag(2^gc) A diag(beta) K
        u = (A * G) diag(beta) V

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. beta: [B, T, HV].
        gc: [B, T, HV] from gate_cumsum (log2).  A: [B, T, HV, C] from solve.
    Returns:
        w [B, T, HV, K] and u [B, T, HV, V] in k.dtype.
    Source: arXiv:2412.06464 section 3.3, chapter 04.
    """
    dtype = compute_dtype(k, v, beta, gc, A)
    T, HV = beta.shape[1:]
    C = A.shape[-1]
    K, V, b, gc, A = (
        to_chunks(x.to(dtype), C) for x in (repeat_heads(k, HV), v, beta[..., None], gc, A)
    )
    # eq:delta-w   w = diag(2^gc) A diag(beta) K
    w = torch.exp2(gc)[..., None] * (A @ (b * K))
    # eq:delta-u   u = (A * G) diag(beta) V
    u = (A * decay_matrix(gc)) @ (b * V)
    return from_chunks(w, T).to(k.dtype), from_chunks(u, T).to(k.dtype)
