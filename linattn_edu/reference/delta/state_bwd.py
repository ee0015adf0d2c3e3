"""Stage state_bwd: carry the gradient of the state back through the chunks."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import (
    compute_dtype,
    documents,
    from_chunks,
    pad_gate,
    repeat_heads,
    to_chunks,
)


def state_bwd(
    q: Tensor,
    k: Tensor | None,
    w: Tensor | None,
    gc: Tensor,
    do: Tensor,
    dv_new: Tensor | None,
    dht: Tensor | None = None,
    seq_idx: Tensor | None = None,
    P: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor | None, ...]:
    """Carry dS from the last chunk to the first.

        dv_new += diag(2^(gc_last - gc)) K dS
        dS     <- 2^(gc_last) dS + scale (diag(2^gc) Q)^T dO - w^T dv_new

    or, with a gate for each row of the state, dv_new += kg dS and dS <- diag(2^(gc_last)) dS
    + scale qg^T dO - w^T dv_new, where dv_new starts from scale P^T dO. Without k, w and dv_new
    nothing was corrected, as in Mamba-2, and dS alone is carried.

    Args:
        q, k, w, gc: as in the forward stages; with gc [B, T, HV, K], q and k are qg and kg of wy.
            do: [B, T, HV, V], gradient of o.
        dv_new: [B, T, HV, V], the part of the gradient of v_new that output_bwd found; None with P.
        dht: [B, HV, K, V], gradient of the final state, zero if None.
        seq_idx: [B, T], the document of each token, over whose end nothing is carried; with gc
            [B, T, HV] only.
        P: [B, T, HV, C] of kda_intra, in place of dv_new with gc [B, T, HV, K].
    Returns:
        dh [B, NT, HV, K, V] in q.dtype, the gradient of the state leaving each chunk; the whole
        gradient dv_new [B, T, HV, V] in q.dtype, None without k; and dh0 [B, HV, K, V] in fp32
        (fp64 for fp64 input), the gradient of the initial state.
    Source: chapter 09.
    """
    dtype = compute_dtype(q, k, w, gc, do, dv_new, dht, P)
    T, HV = gc.shape[1:3]
    Q, K, W, dO, dV, P, gc = (
        None if x is None else to_chunks(x.to(dtype), chunk_size)
        for x in (
            repeat_heads(q, HV), None if k is None else repeat_heads(k, HV), w, do, dv_new, P,
            pad_gate(gc, chunk_size),
        )
    )  # fmt: skip
    B, _, NT, _, DK = Q.shape
    last = gc[:, :, :, -1:]
    e, a = torch.exp2(gc) if gc.ndim == 4 else None, torch.exp2(last)  # else Q and K are decayed
    if seq_idx is not None:
        ids, before, end = documents(seq_idx, chunk_size)
        e, a = e * (ids == before), a * (end == before)
    if P is not None:
        # eq:kda-dv-out   dv_new = scale P^T dO
        dV = scale * P.mT @ dO
    dS = Q.new_zeros(B, HV, DK, do.shape[-1]) if dht is None else dht.to(dtype)
    dh, dv_new = [], []
    for c in reversed(range(NT)):
        dh.append(dS)
        if k is not None:
            written = K[:, :, c] @ dS
            if gc.ndim == 4:
                written = torch.exp2(last[:, :, c] - gc[:, :, c])[..., None] * written
            # eq:delta-dv-new   dv_new += diag(2^(gc_last - gc)) K dS
            dv_new.append(dV[:, :, c] + written)
        # eq:delta-ds   dS <- 2^gc_last dS + scale (diag(2^gc) Q)^T dO - w^T dv_new
        read = scale * dO[:, :, c] if e is None else scale * e[:, :, c, :, None] * dO[:, :, c]
        dS = (a[:, :, c].mT if e is None else a[:, :, c, :, None]) * dS + Q[:, :, c].mT @ read
        if k is not None:
            dS = dS - W[:, :, c].mT @ dv_new[-1]
    dv_new = None if k is None else from_chunks(torch.stack(dv_new[::-1], 2), T).to(q.dtype)
    return torch.stack(dh[::-1], 1).to(q.dtype), dv_new, dS
