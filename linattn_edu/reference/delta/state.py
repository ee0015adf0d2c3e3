"""Stage state: carry the state through the chunks."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def state(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    *,
    chunk_size: int,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Carry S from chunk to chunk.

        v_new = u - w S
        S    <- 2^(gc_last) S + (diag(2^(gc_last - gc)) K)^T v_new

    or, with a gate for each row of the state, on the decayed keys kg of wy,

        S    <- diag(2^(gc_last)) S + kg^T v_new

    Args:
        k: [B, T, H, K]. w: [B, T, HV, K]. u: [B, T, HV, V]. gc: [B, T, HV] (log2); or
            gc: [B, T, HV, K] and k: kg [B, T, HV, K].
        initial_state: [B, HV, K, V], zero if None.
    Returns:
        h [B, NT, HV, K, V], the state entering each chunk, in k.dtype; v_new [B, T, HV, V] in
        k.dtype; the final state [B, HV, K, V] in fp32 (fp64 for fp64 input) or None.
    Source: arXiv:2412.06464 section 3.3, chapter 05; a gate a row: arXiv:2510.26692, chapter 07.
    """
    dtype = compute_dtype(k, w, u, gc, initial_state)
    T, HV = gc.shape[1:3]
    K, w_, u_, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(k, HV), w, u, pad_gate(gc, chunk_size))
    )
    B, _, NT, _, DK = K.shape
    S = K.new_zeros(B, HV, DK, u.shape[-1]) if initial_state is None else initial_state.to(dtype)
    h, v_new = [], []
    for c in range(NT):
        h.append(S)
        # eq:delta-v-new   v_new = u - w S
        v_new.append(u_[:, :, c] - w_[:, :, c] @ S)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        last, decayed = gc[:, :, c, -1:], v_new[-1]
        if gc.ndim == 4:  # one gate for all rows; K is not decayed yet
            decayed = torch.exp2(last - gc[:, :, c])[..., None] * decayed
        S = torch.exp2(last).mT * S if gc.ndim > 4 else torch.exp2(last)[..., None] * S
        S = S + K[:, :, c].mT @ decayed
    v_new = from_chunks(torch.stack(v_new, 2), T).to(k.dtype)
    return torch.stack(h, 1).to(k.dtype), v_new, S if output_final_state else None


def pad_gate(gc: Tensor, chunk_size: int) -> Tensor:
    """Repeat the last token's gate up to the chunk's end: a missing token does not decay."""
    pad = -gc.shape[1] % chunk_size
    return torch.cat([gc, gc[:, -1:].expand(-1, pad, *gc.shape[2:])], 1)
