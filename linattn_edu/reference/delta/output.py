"""Stage output: read the state and the chunk's own writes."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def output(
    q: Tensor,
    k: Tensor | None,
    v_new: Tensor,
    h: Tensor,
    gc: Tensor | None,
    P: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
) -> Tensor:
    """Combine what a chunk reads from the incoming state with what it reads from its own tokens.

        o = scale (diag(2^gc) Q h + (Q K^T * G) v_new)

    or, with a gate for each row of the state, where qg and P have it in them already,

        o = scale (qg h + P v_new)

    Args:
        q, k: [B, T, H, K]. v_new: [B, T, HV, V] and h: [B, NT, HV, K, V] from state.
        gc: [B, T, HV] from gate_cumsum (log2); or
        P: [B, T, HV, C] from kda_intra and q: qg from wy; k and gc are not used then.
    Returns:
        o [B, T, HV, V] in q.dtype.
    Source: arXiv:2412.06464 section 3.3, chapter 06; a gate a row: arXiv:2510.26692, chapter 07.
    """
    dtype = compute_dtype(q, k, v_new, h, gc)
    T, HV = v_new.shape[1:3]
    if P is not None:
        qg, P, V = (to_chunks(x.to(dtype), chunk_size) for x in (q, P, v_new))
        # eq:kda-output   o = scale (qg h + P v_new)
        o = scale * (qg @ h.to(dtype).transpose(1, 2) + P @ V)
        return from_chunks(o, T).to(q.dtype)
    Q, K, V, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v_new, gc)
    )
    # eq:delta-inter   diag(2^gc) Q h
    inter = torch.exp2(gc)[..., None] * (Q @ h.to(dtype).transpose(1, 2))
    # eq:delta-intra   P = Q K^T * G
    P = (Q @ K.mT) * decay_matrix(gc)
    # eq:delta-output   o = scale (inter + P v_new)
    return from_chunks(scale * (inter + P @ V), T).to(q.dtype)
