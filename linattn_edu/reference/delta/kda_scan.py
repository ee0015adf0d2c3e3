"""Stage kda_scan: carry the state through the chunks and read the output on the way."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, pad_gate, to_chunks


def kda_scan(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    gc: Tensor,
    P: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The stages state and output of KDA in one: no state of a chunk and no v_new is kept.

        v_new = u - w S
        o     = scale (qg S + P v_new)
        S    <- diag(2^gc_last) S + kg^T v_new

    Args:
        w, u, kg, qg: from wy with q, [B, T, HV, K], u with V. gc: [B, T, HV, K] (log2).
        P: from kda_intra. initial_state: [B, HV, K, V], zero if None.
    Returns:
        o [B, T, HV, V] in u.dtype; the final state [B, HV, K, V] in fp32 (fp64 for fp64 input)
        or None.
    Source: chapter 07.
    """
    dtype = compute_dtype(qg, kg, w, u, gc, P, initial_state)
    T, C = gc.shape[1], P.shape[-1]
    Qg, Kg, W, U, gc, P = (to_chunks(x.to(dtype), C) for x in (qg, kg, w, u, pad_gate(gc, C), P))
    B, HV, NT, _, DK = Kg.shape
    S = U.new_zeros(B, HV, DK, U.shape[-1]) if initial_state is None else initial_state.to(dtype)
    o = []
    for c in range(NT):
        # eq:delta-v-new   v_new = u - w S
        v_new = U[:, :, c] - W[:, :, c] @ S
        # eq:delta-output   o = scale (inter + P v_new)
        o.append(scale * (Qg[:, :, c] @ S + P[:, :, c] @ v_new))
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        S = torch.exp2(gc[:, :, c, -1])[..., None] * S + Kg[:, :, c].mT @ v_new
    return from_chunks(torch.stack(o, 2), T).to(u.dtype), S if output_final_state else None
