"""Stage state_passing: carry the state from chunk to chunk."""

import torch
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays


def state_passing(
    s: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The state that enters each chunk.

        h_0 = initial_state,   h_(c+1) = a_c h_c + s_c,   a_c = 2^gc_last

    Args:
        s: [B, NT, H, N, P] of chunk_state.  gc: [B, T, H] (log2).
        initial_state: [B, H, N, P], zero if None; the state of the first token's document.
        seq_idx: as in chunk_state: a is zero where a document ended in the chunk.
    Returns:
        h like s; the final state [B, H, N, P] like s, or None.
    Source: arXiv:2405.21060 section 6, chapter 13.
    """
    _, _, _, a = decays(gc.to(s.dtype), seq_idx, chunk_size)
    S = torch.zeros_like(s[:, 0]) if initial_state is None else initial_state.to(s.dtype)
    h = []
    for c in range(s.shape[1]):
        h.append(S)
        # eq:ssd-state-passing   h <- a h + s
        S = a[:, :, c] * S + s[:, c]
    return torch.stack(h, 1), S if output_final_state else None
