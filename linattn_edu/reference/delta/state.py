"""Stage state: carry the state through the chunks."""

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


def state(
    k: Tensor,
    w: Tensor | None,
    u: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    gs: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Carry S from chunk to chunk.

        v_new = u - w S
        S    <- 2^(gc_last) S + (diag(2^(gc_last - gc)) K)^T v_new

    or, with a gate for each row of the state, on the decayed keys kg of wy,

        S    <- diag(2^(gc_last)) S + kg^T v_new

    Without w nothing is corrected: v_new = u, as in Mamba-2, whose values have a weight each:

        S    <- 2^(gc_last) S + (diag(2^(gc_last - gs)) K)^T u,   gs = gc - log2(step)

    Args:
        k: [B, T, H, K]. w: [B, T, HV, K] or None. u: [B, T, HV, V]. gc: [B, T, HV] (log2); or
            gc: [B, T, HV, K] and k: kg [B, T, HV, K].
        initial_state: [B, HV, K, V], zero if None.
        gs: [B, T, HV] of chunk_cumsum_log, in place of gc for what a token writes, and seq_idx:
            [B, T], the document of each token, over whose end nothing is carried; both with gc
            [B, T, HV] only.
    Returns:
        h [B, NT, HV, K, V], the state entering each chunk, in k.dtype; v_new [B, T, HV, V] in
        k.dtype, None without w; the final state [B, HV, K, V] in fp32 (fp64 for fp64 input) or
        None.
    Source: arXiv:2412.06464 section 3.3, chapter 05; a gate a row: arXiv:2510.26692, chapter 07.
    """
    dtype = compute_dtype(k, w, u, gc, initial_state)
    T, HV = gc.shape[1:3]
    gs = gc if gs is None else gs
    K, U, W, gc, gs = (
        None if x is None else to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(k, HV), u, w, pad_gate(gc, chunk_size), pad_gate(gs, chunk_size))
    )
    B, _, NT, _, DK = K.shape
    last = gc[:, :, :, -1:]
    a = torch.exp2(last)
    r = torch.exp2(last - gs) if gc.ndim == 4 else None  # with a gate a row, K is decayed already
    if seq_idx is not None:
        ids, before, end = documents(seq_idx, chunk_size)
        r, a = r * (ids == end), a * (end == before)
    S = K.new_zeros(B, HV, DK, u.shape[-1]) if initial_state is None else initial_state.to(dtype)
    h, v_new = [], []
    for c in range(NT):
        h.append(S)
        # eq:delta-v-new   v_new = u - w S
        v_new.append(U[:, :, c] if w is None else U[:, :, c] - W[:, :, c] @ S)
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        decayed = v_new[-1] if r is None else r[:, :, c, :, None] * v_new[-1]
        S = (a[:, :, c].mT if r is None else a[:, :, c, :, None]) * S + K[:, :, c].mT @ decayed
    v_new = None if w is None else from_chunks(torch.stack(v_new, 2), T).to(k.dtype)
    return torch.stack(h, 1).to(k.dtype), v_new, S if output_final_state else None
