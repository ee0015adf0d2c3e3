"""Stage wy: what each chunk would write, and how that depends on the incoming state."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import (
    by_channel,
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    to_chunks,
)


def wy(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    A: Tensor,
    q: Tensor | None = None,
    write: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The WY form of a chunk: the values it writes are v_new = u - w S.

        w = diag(2^gc) A diag(beta) K
        u = (A * G) diag(beta) V

    or, with a gate for each row of the state, which A has in it already,

        w = A diag(beta) (2^gc * K),  u = A diag(beta) V,
        kg = 2^(gc_last - gc) * K,    qg = 2^gc * Q

    and with gates of its own for what is erased and for what is written,

        w = A (beta * 2^gc * K),      u = A (write * V)

    Args:
        k: [B, T, H, K]. v: [B, T, HV, V]. beta: [B, T, HV].
        gc: [B, T, HV] from gate_cumsum (log2).  A: [B, T, HV, C] from solve; or
        gc: [B, T, HV, K], A from kda_intra, and q: [B, T, H, K]; with these perhaps
        write: [B, T, HV, V], the write gate; beta is the erase gate [B, T, HV, K] then.
    Returns:
        w [B, T, HV, K] and u [B, T, HV, V] in k.dtype; with a gate for each row also kg and qg,
        [B, T, HV, K].
    Source: arXiv:2412.06464 section 3.3, chapter 04; a gate a row: arXiv:2510.26692, chapter 07.
    """
    dtype = compute_dtype(k, v, beta, gc, A)
    T, HV = v.shape[1:3]
    C = A.shape[-1]
    write = beta if write is None else write
    K, V, b, W, gc, A = (
        to_chunks(x.to(dtype), C)
        for x in (
            repeat_heads(k, HV), v, by_channel(beta), by_channel(write), pad_gate(gc, C), A
        )
    )  # fmt: skip
    gated, Au = (), A
    if gc.ndim == 5:
        # eq:kda-w   w = A diag(beta) (2^gc * K)
        w = A @ (b * torch.exp2(gc) * K)
        # eq:kda-kg   kg = 2^(gc_last - gc) * K
        kg = torch.exp2(gc[:, :, :, -1:] - gc) * K
        # eq:kda-qg   qg = 2^gc * Q
        gated = kg, torch.exp2(gc) * to_chunks(repeat_heads(q, HV).to(dtype), C)
    else:
        # eq:delta-w   w = diag(2^gc) A diag(beta) K
        w = torch.exp2(gc)[..., None] * (A @ (b * K))
        Au = A * decay_matrix(gc)
    # eq:kda-u   u = A diag(beta) V
    # eq:delta-u   u = (A * G) diag(beta) V
    u = Au @ (W * V)
    return tuple(from_chunks(x, T).to(k.dtype) for x in (w, u, *gated))
