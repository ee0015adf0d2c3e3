"""The forward pass of Mamba-2 in few stages: scores that heads share, a scan with the output."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn_edu.reference.delta.cp_merge import piece_map
from linattn_edu.reference.delta.state import state
from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import (
    compute_dtype,
    documents,
    from_chunks,
    repeat_heads,
    to_chunks,
)

FORGOTTEN = 2.0**-32  # of a state: no sum in fp32 holds it


def chunk_scores(C: Tensor, B: Tensor, seq_idx: Tensor | None = None, *, chunk_size: int) -> Tensor:
    """The scores of a chunk, which all heads of a group share.

        S_ij = C_i . B_j   for the tokens j <= i of i's chunk and document, else 0

    Args:
        C, B: [B, T, G, N].  seq_idx: [B, T], the document of each token, or None: one.
    Returns:
        S [B, T, G, chunk_size] in C.dtype.
    Source: chapter 13.
    """
    C_, B_ = (to_chunks(y.to(compute_dtype(C, B)), chunk_size) for y in (C, B))
    # eq:ssd-cb   S = C B^T
    S = (C_ @ B_.mT).tril()
    if seq_idx is not None:
        ids, *_ = documents(seq_idx, chunk_size)
        S = S * (ids[..., :, None] == ids[..., None, :])
    return from_chunks(S, C.shape[1]).to(C.dtype)


def ssd_ends(
    B: Tensor, x: Tensor, gs: Tensor, gc: Tensor, *, chunk_size: int, piece: int | None = None
) -> tuple[Tensor, Tensor, None]:
    """The maps of the pieces of a sequence: what each makes of the state that enters it.

        S_out = M S_in + S_ext,   with M a number, as in piece_map

    Args:
        B, x, gs, gc: as in ssd_fwd.  piece: Tokens of a piece, whole chunks; the last may be
            shorter. None: the sequence is one piece.
    Returns:
        S_ext [B, NP, H, N, P] and M [B, NP, H], 0 from 2^-32 down, in fp32 (fp64 for fp64 input);
        and the number of the first piece of each sequence, where they are packed.
    Source: chapters 21 and 25.
    """
    piece = piece or x.shape[1]
    cuts = [slice(a, a + piece) for a in range(0, x.shape[1], piece)]
    maps = [
        piece_map(B[:, t], None, x[:, t], gc[:, t], gs=gs[:, t], chunk_size=chunk_size)
        for t in cuts
    ]
    return side_by_side(maps)


def side_by_side(maps: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, None]:
    """The maps of pieces as ssd_ends returns them."""
    S_ext, M = (torch.stack(y, 1) for y in zip(*maps, strict=True))
    return S_ext, M.where(M > FORGOTTEN, 0.0), None


def ssd_fwd(
    C: Tensor,
    B: Tensor,
    S: Tensor,
    x: Tensor,
    gs: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """state and chunk_scan in one scan, from scores that are there already.

        y = diag(e) C h + (S * G * step) X + D X,   out = y silu(z)
        h <- a h + (diag(r * step) B)^T X

    Args:
        C, B, x, D, z, seq_idx: as in chunk_scan.  gs, gc: of chunk_cumsum_log.
        S: [B, T, G, C] of chunk_scores, C the tokens of a chunk.
        initial_state: [B, H, N, P], or None: zero.
    Returns:
        out [B, T, H, P] in x.dtype; the final state [B, H, N, P] in fp32 (fp64 for fp64 input), or
        None.
    Source: chapter 13.
    """
    dtype, chunk_size = compute_dtype(C, B, x, gs, gc, initial_state), S.shape[3]
    T, H = x.shape[1:3]
    # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X
    h, _, final_state = state(
        B, None, x, gc, initial_state, gs, seq_idx, chunk_size=chunk_size,
        output_final_state=output_final_state,
    )  # fmt: skip
    e, G, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, S, X, step = (
        to_chunks(y.to(dtype), chunk_size)
        for y in (repeat_heads(C, H), repeat_heads(S, H), x, torch.exp2(gc.to(dtype) - gs))
    )
    # eq:ssd-scores   M = C B^T * G * step
    M = S * G * step[..., None, :]
    # eq:ssd-inter   inter = diag(e) C h
    y = e * (C_ @ h.to(dtype).transpose(1, 2))
    # eq:ssd-output   y = inter + M X + D X
    y = from_chunks(y + M @ X, T)
    if D is not None:
        y = y + (D if D.ndim == 2 else D[:, None]).to(dtype) * x.to(dtype)
    # eq:ssd-gate   out = y silu(z)
    if z is not None:
        y = y * F.silu(z.to(dtype))
    return y.to(x.dtype), final_state
