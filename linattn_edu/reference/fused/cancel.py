"""Where the numbers that 16 bit round cancel, and halves are needed."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import compute_dtype, to_chunks

# the most that a head without halves has of each; what they bound is measured, see cancels
SCORES, INVERSE = 1.15, 1.1


def cancels(P: Tensor, AG: Tensor, beta: Tensor | None, heads: int) -> Tensor:
    """Which heads want their numbers of 16 bit in halves, where beta may be beyond 1.

    With R = (A * G) diag(beta) a chunk writes v_new = R W and reads P v_new. Each row of v_new is
    rounded. Were the rows of W independent and of one length, the squares of the roundings that
    are read, and of what is read, would be as

        r = sum_j norm(P_j)^2 norm(R_j)^2 / norm(P R)^2

    to 1, P_j the columns of P, R_j the rows of R. A head cancels if in some chunk r > 1.15^2, or
    norm(R) > 1.1 norm(beta): what is read, or what the state takes, is small beside what is
    rounded. So it is where keys are alike, or nothing fades and beta is near 2.

    Args:
        P, AG: [B, T, HV, C], P and A * G from intra_chunk, or P and A from kda_prepare.
        beta: [B, T, HV]; None: 1, where A has an erase gate.
        heads: Of q and k; value heads of one are told apart nowhere, and all cancel if one does.
    Returns:
        [B, HV] int32: -1 where a head cancels, or is not a number, else 0.
    Source: chapter 11b.
    """
    C, dtype = P.shape[-1], compute_dtype(P, AG, beta)
    beta = P.new_ones(P.shape[:3]) if beta is None else beta
    P, AG, b = (to_chunks(x.to(dtype), C) for x in (P, AG, beta[..., None]))
    R = AG * b.mT
    # eq:11-cancels   r = sum_j |P_j|^2 |R_j|^2 / |P R|^2
    rounded = (P.square().sum(-2) * R.square().sum(-1)).sum(-1)
    read = (P @ R).square().sum((-1, -2))
    written, own = R.square().sum((-1, -2)), b.square().sum((-1, -2))
    few = (rounded <= SCORES**2 * read) & (written <= INVERSE**2 * own)  # [B, HV, NT]
    some = ~few.all(-1).unflatten(1, (heads, -1)).all(-1, keepdim=True)
    return -some.expand(-1, -1, P.shape[1] // heads).flatten(1).to(torch.int32)


def those(cancels: Tensor, k: Tensor, *, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The heads that cancel, for kernels that work on these alone.

    Args:
        cancels: [B, HV]. k: [B, T, H, K], the keys, or what else has the heads that are listed.
    Returns:
        [B, HV] int32: 0 where a head cancels, else -1; and [1 + NT * H] int32: how many chunks of
        these heads that is, and which, H times the chunk and the head, in any order; and so those
        of heads that do not.
    Source: chapter 11b.
    """
    T, H = k.shape[1:3]
    NT = -(-T // chunk_size)
    found = cancels[:, :: cancels.shape[1] // H].repeat_interleave(NT, 0).flatten()
    lists = found.nonzero(), (1 + found).nonzero()
    numbered = (torch.cat([x.new_tensor([[len(x)]]), x])[:, 0].int() for x in lists)
    return -1 - cancels, *numbered
