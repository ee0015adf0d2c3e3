"""The backward pass in three fused stages: the states again, their gradients, all that is left."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.delta.wy_bwd import last_tokens
from linattn_edu.reference.fused.gdn_scans import scans
from linattn_edu.reference.tiles import (
    chosen,
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def intra_chunk_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    low: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All that is left, for each chunk by itself: the gradients of q, k, beta and the decay.

        dM = scale (dO v_new^T) * G,  dL = -tril(Z v_new^T, -1) * G
        dQ = scale diag(2^gc) dO S^T + dM K
        F  = dL K - diag(2^gc) Z S^T                                      keys that read
        D  = diag(2^(gc_last - gc)) v_new dS^T + dM^T Q + (diag(beta) dL)^T K   keys that write
        dK = diag(beta) F + D
        dbeta = rowsum(Z * V) + rowsum(K * F)
        dgc   = rowsum(Q * dQ) + diag(beta) rowsum(K * F) - rowsum(K * D)

    and dgc_last += <dS, the state that leaves>.

    Args:
        q, k, v, beta, gc: the arguments of the forward pass. h, v_new: from scan_states.
        do: [B, T, HV, V], gradient of o. dh, Z: from scan_bwd.
        low: of v_new and Z the low halves, if they have any.
    Returns:
        dq and dk [B, T, H, K] in q.dtype, dbeta [B, T, HV] in beta.dtype, dgc [B, T, HV] in fp32
        (fp64 for fp64 input) and natural units: the whole gradients.
    Source: chapter 12c.
    """
    dtype = compute_dtype(q, k, v, beta, gc, h, v_new, do, dh, Z)
    (T, H), HV, C = q.shape[1:3], gc.shape[2], chunk_size
    Q, K, V, b, gc, v_new, dO, Z = (
        to_chunks(x.to(dtype), C)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), v, beta[..., None], pad_gate(gc, C), v_new,
            do, Z,
        )
    )  # fmt: skip
    if low is not None:
        v_new, Z = (x + to_chunks(y.to(dtype), C) for x, y in zip((v_new, Z), low, strict=True))
    S, dS = (x.to(dtype).transpose(1, 2) for x in (h, dh))
    G, e, last = decay_matrix(gc), torch.exp2(gc)[..., None], gc[..., -1:]
    # eq:delta-dm   dM = scale (dO v_new^T) * G
    dM = scale * (dO @ v_new.mT) * G
    own = dM.diagonal(dim1=-2, dim2=-1)[..., None]  # no decay acts on it: dgc is without
    dM = dM.tril(-1)
    # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
    dL = -(Z @ v_new.mT).tril(-1) * G
    # eq:delta-dq   dQ = scale diag(2^gc) dO S^T + dM K
    dQ = scale * e * (dO @ S.mT) + dM @ K
    read = (Q * dQ).sum(-1)
    dQ = dQ + own * K
    # eq:fused-read   F = dL K - diag(2^gc) Z S^T
    F = dL @ K - e * (Z @ S.mT)
    # eq:fused-dbeta   dbeta = rowsum(Z * V) + rowsum(K * F)
    KF = (K * F).sum(-1)
    dbeta = (Z * V).sum(-1) + KF
    # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
    dK_state = torch.exp2(last - gc)[..., None] * (v_new @ dS.mT)
    end = last_tokens(T, C, gc.device)
    t = (K * dK_state).sum(-1).masked_fill(end, 0)  # for i = last the two would cancel
    through = t.sum(-1) + torch.exp2(last[..., 0]) * (dS * S).sum((-1, -2))
    # eq:fused-write   D = dK_state + dM^T Q + (diag(beta) dL)^T K
    D = dM.mT @ Q + (b * dL).mT @ K
    # eq:fused-dk   dK = diag(beta) F + D
    dK = b * F + D + dK_state + own * Q
    # eq:fused-dgc   dgc = q dq + beta k f - k d; dgc_last += sum k dk + 2^gc_last <dS, S>
    dgc = read + b[..., 0] * KF - (K * D).sum(-1) - t + end * through[..., None]
    dq, dk = (sum_heads(from_chunks(x, T), H).to(q.dtype) for x in (dQ, dK))
    return dq, dk, from_chunks(dbeta, T).to(beta.dtype), from_chunks(dgc, T)


def chunk_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    cancels: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """scans and then intra_chunk_bwd. No head reads what another has, except that value heads of
    one key head are added up: so the kernels may take some heads after the others, and hold the
    states of those alone.

    Args:
        Those of scans.
        cancels: [B, HV], with low: -1 for the heads that have low halves; None: all have.
    Returns:
        dq, dk, dv, dbeta, dgc and dh0: of scans and intra_chunk_bwd what is a gradient.
    Source: chapter 24.
    """
    given = q, k, v, beta, gc, P, AG, do, initial_state, dht
    h, v_new, dh, Z, dv, dh0, *low = scans(*given, low, scale=scale)
    dq, dk, dbeta, dgc = intra_chunk_bwd(
        q, k, v, beta, gc, h, v_new, do, dh, Z, low or None, scale=scale, chunk_size=AG.shape[-1]
    )
    made = dq, dk, dv, dbeta, dgc, dh0
    if cancels is None:
        return made
    others = chunk_bwd(*given, scale=scale)
    axes = 2, 2, 2, 2, 2, 1
    return tuple(map(chosen, [-1 - cancels] * 6, made, others, axes))
