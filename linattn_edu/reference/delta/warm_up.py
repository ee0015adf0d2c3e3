"""Stage warm_up: how far before a piece a scan begins for the state to be forgotten by then."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, pad_gate, repeat_heads, to_chunks


def bound(k: Tensor, beta: Tensor, gc: Tensor, *, chunk_size: int) -> Tensor:
    """How much of a state's norm a chunk leaves at most, as a power of two.

        norm(S_out) <= 2^bound norm(S_in) without values,
        bound = gc_last + sum_t log2 max(1, abs(1 - beta_t k_t^T k_t))

    Token t multiplies the state by 2^g_t (I - beta_t k_t k_t^T), whose largest singular value is
    2^g_t max(1, abs(1 - beta_t k_t^T k_t)). For keys of length 1 and beta up to 2 the sum is zero.

    Args:
        k: [B, T, H, K]. beta: [B, T, HV]. gc: [B, T, HV] from gate_cumsum (log2).
    Returns:
        [B, NT, HV] in fp32 (fp64 for fp64 input), log2.
    Source: chapter 25b.
    """
    dtype = compute_dtype(k, beta, gc)
    K, b, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(k, gc.shape[2]), beta[..., None], pad_gate(gc, chunk_size))
    )
    # eq:warm-bound   log2 |S_out| - log2 |S_in| <= gc_last + sum log2 max(1, |1 - beta k^T k|)
    gain = (1 - b[..., 0] * (K * K).sum(-1)).abs().clamp(min=1).log2()
    return (gc[..., -1] + gain.sum(-1)).transpose(1, 2)


def warm_up(
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    *,
    chunk_size: int,
    piece: int,
    reach: int,
    forgotten: float = 32.0,
    back: bool = False,
) -> Tensor:
    """The fewest chunks before each piece that leave 2^-forgotten of any state, or less.

    A scan of the piece that begins so many chunks before it, from zero, enters it with the state
    of the whole scan, as far as fp32 can tell.

    Args:
        k, beta, gc: as of bound. piece: tokens of a piece, a multiple of chunk_size.
        reach: tokens before a piece that are looked at. forgotten: log2.
        back: for a scan from the last chunk to the first: the chunks behind each piece.
    Returns:
        [B, NP, HV] int32; 0 for the first piece (with back, the last), where the state is known;
        -1 where more chunks would be needed: there the piece before goes on.
    Source: chapter 25b.
    """
    T, chunks = gc.shape[1], piece // chunk_size
    NP, most = -(-T // piece), reach // chunk_size
    left = bound(k, beta, gc, chunk_size=chunk_size)
    warmup = torch.zeros(gc.shape[0], NP, gc.shape[2], dtype=torch.int32, device=gc.device)
    for p in range(NP - 1):
        end = (p + 1) * chunks  # between piece p and the next
        if back:
            near = left[:, end : min(end + min(most, chunks), T // chunk_size)]
        else:
            near = left[:, end - min(most, chunks) : end].flip(1)
        found = near.cumsum(1) <= -forgotten
        first = torch.where(found.any(1), found.int().argmax(1) + 1, -1) if near.shape[1] else -1
        warmup[:, p if back else p + 1] = first
    return warmup
