"""Stage state_bwd: carry the gradient of the state back through the chunks."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.state import pad_gate
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def state_bwd(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    gc: Tensor,
    do: Tensor,
    dv_new: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Carry dS from the last chunk to the first.

        dv_new += diag(2^(gc_last - gc)) K dS
        dS     <- 2^(gc_last) dS + scale (diag(2^gc) Q)^T dO - w^T dv_new

    or, with a gate for each row of the state, dv_new += kg dS and dS <- diag(2^(gc_last)) dS
    + scale qg^T dO - w^T dv_new.

    Args:
        q, k, w, gc: as in the forward stages; with gc [B, T, HV, K], q and k are qg and kg of wy.
            do: [B, T, HV, V], gradient of o.
        dv_new: [B, T, HV, V], the part of the gradient of v_new that output_bwd found.
        dht: [B, HV, K, V], gradient of the final state, zero if None.
    Returns:
        dh [B, NT, HV, K, V] in k.dtype, the gradient of the state leaving each chunk; the whole
        gradient dv_new [B, T, HV, V] in k.dtype; dh0 [B, HV, K, V] in fp32 (fp64 for fp64
        input), the gradient of the initial state.
    Source: chapter 09.
    """
    dtype = compute_dtype(q, k, w, gc, do, dv_new, dht)
    T, HV = gc.shape[1:3]
    Q, K, W, dO, dV, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (
            repeat_heads(q, HV),
            repeat_heads(k, HV),
            w,
            do,
            dv_new,
            pad_gate(gc, chunk_size),
        )
    )
    B, _, NT, _, DK = K.shape
    dS = K.new_zeros(B, HV, DK, do.shape[-1]) if dht is None else dht.to(dtype)
    dh, dv_new = [], []
    for c in reversed(range(NT)):
        dh.append(dS)
        last, written, decayed = gc[:, :, c, -1:], K[:, :, c] @ dS, scale * dO[:, :, c]
        if gc.ndim == 4:  # one gate for all rows; Q and K are not decayed yet
            written = torch.exp2(last - gc[:, :, c])[..., None] * written
            decayed = torch.exp2(gc[:, :, c])[..., None] * decayed
        # eq:delta-dv-new   dv_new += diag(2^(gc_last - gc)) K dS
        dv_new.append(dV[:, :, c] + written)
        # eq:delta-ds   dS <- 2^gc_last dS + scale (diag(2^gc) Q)^T dO - w^T dv_new
        dS = torch.exp2(last).mT * dS if gc.ndim > 4 else torch.exp2(last)[..., None] * dS
        dS = dS + Q[:, :, c].mT @ decayed
        dS = dS - W[:, :, c].mT @ dv_new[-1]
    dv_new = from_chunks(torch.stack(dv_new[::-1], 2), T).to(k.dtype)
    return torch.stack(dh[::-1], 1).to(k.dtype), dv_new, dS
