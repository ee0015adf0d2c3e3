"""The backward pass in three fused stages: the states again, their gradients, all that is left."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.delta.wy_bwd import last_tokens
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def scan_states(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    AG: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What scan did not keep: the state that enters each chunk, and what the chunk writes.

        v_new = (A * G) diag(beta) (V - diag(2^gc) K S)
        S    <- 2^(gc_last) S + (diag(2^(gc_last - gc)) K)^T v_new

    Args:
        k, v, beta, gc, initial_state: the arguments of the forward pass. AG: [B, T, HV, C], A * G,
            from intra_chunk.
    Returns:
        h [B, NT, HV, K, V] and v_new [B, T, HV, V] in k.dtype, as of state.
    Source: chapter 12.
    """
    dtype = compute_dtype(k, v, beta, gc, initial_state)
    T, HV = gc.shape[1:]
    C = AG.shape[-1]
    K, V, b, gc, AG = (
        to_chunks(x.to(dtype), C)
        for x in (repeat_heads(k, HV), v, beta[..., None], pad_gate(gc, C), AG)
    )
    B, _, NT, _, DK = K.shape
    S = K.new_zeros(B, HV, DK, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    h, v_new = [], []
    for c in range(NT):
        h.append(S)
        # eq:delta-residual   W = V - diag(2^gc) K S
        W = V[:, :, c] - torch.exp2(gc[:, :, c])[..., None] * (K[:, :, c] @ S)
        # eq:delta-v-new   v_new = (A * G) diag(beta) W
        v_new.append(AG[:, :, c] @ (b[:, :, c] * W))
        # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
        last = gc[:, :, c, -1:]
        decayed = torch.exp2(last - gc[:, :, c])[..., None] * v_new[-1]
        S = torch.exp2(last)[..., None] * S + K[:, :, c].mT @ decayed
    return torch.stack(h, 1).to(k.dtype), from_chunks(torch.stack(v_new, 2), T).to(k.dtype)


def scan_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Carry dS from the last chunk to the first. No state and no value is read.

        dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
        Z      = (A * G)^T dv_new,  dV = diag(beta) Z
        dS    <- 2^(gc_last) dS + scale (diag(2^gc) Q)^T dO - (diag(2^gc) K)^T dV

    Args:
        q, k, beta, gc: the arguments of the forward pass. P, AG: from intra_chunk.
        do: [B, T, HV, V], gradient of o.
        dht: [B, HV, K, V], gradient of the final state, zero if None.
    Returns:
        dh [B, NT, HV, K, V] in q.dtype, the gradient of the state leaving each chunk;
        Z and dv [B, T, HV, V] in q.dtype; dh0 [B, HV, K, V] in fp32 (fp64 for fp64 input), the
        gradient of the initial state.
    Source: chapter 12.
    """
    dtype = compute_dtype(q, k, beta, gc, do, dht)
    T, HV = gc.shape[1:]
    C = AG.shape[-1]
    Q, K, b, dO, gc, P, AG = (
        to_chunks(x.to(dtype), C)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), beta[..., None], do, pad_gate(gc, C), P, AG,
        )
    )  # fmt: skip
    B, _, NT, _, DK = Q.shape
    dS = Q.new_zeros(B, HV, DK, do.shape[-1]) if dht is None else dht.to(dtype)
    dh, Z, dv = [], [], []
    for c in reversed(range(NT)):
        dh.append(dS)
        last, decay = gc[:, :, c, -1:], torch.exp2(gc[:, :, c])[..., None]
        # eq:delta-dv-new   dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
        dv_new = torch.exp2(last - gc[:, :, c])[..., None] * (K[:, :, c] @ dS)
        dv_new = dv_new + scale * P[:, :, c].mT @ dO[:, :, c]
        # eq:delta-z   Z = (A * G)^T dv_new
        Z.append(AG[:, :, c].mT @ dv_new)
        # eq:delta-dv   dV = diag(beta) Z
        dv.append(b[:, :, c] * Z[-1])
        # eq:fused-ds   dS <- 2^gc_last dS + (diag(2^gc) Q)^T scale dO - (diag(2^gc) K)^T dV
        dS = torch.exp2(last)[..., None] * dS + Q[:, :, c].mT @ (scale * decay * dO[:, :, c])
        dS = dS - K[:, :, c].mT @ (decay * dv[-1])
    Z, dv = (from_chunks(torch.stack(x[::-1], 2), T).to(q.dtype) for x in (Z, dv))
    return torch.stack(dh[::-1], 1).to(q.dtype), Z, dv, dS


def scans(
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
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """scan_states and scan_bwd, which read nothing of each other: the kernels run them at once.

    Args:
        Those of the two.
    Returns:
        h and v_new of scan_states; dh, Z, dv and dh0 of scan_bwd.
    Source: chapter 12.
    """
    forth = scan_states(k, v, beta, gc, AG, initial_state)
    return *forth, *scan_bwd(q, k, beta, gc, P, AG, do, dht, scale=scale)


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
    Returns:
        dq and dk [B, T, H, K] in q.dtype, dbeta [B, T, HV] in beta.dtype, dgc [B, T, HV] in fp32
        (fp64 for fp64 input) and natural units: the whole gradients.
    Source: chapter 12.
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
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """scans and then intra_chunk_bwd. No head reads what another has, except that value heads of
    one key head are added up: so the kernels may take some heads after the others, and hold the
    states of those alone.

    Args:
        Those of scans.
    Returns:
        dq, dk, dv, dbeta, dgc and dh0: of scans and intra_chunk_bwd what is a gradient.
    Source: chapter 24.
    """
    h, v_new, dh, Z, dv, dh0 = scans(q, k, v, beta, gc, P, AG, do, initial_state, dht, scale=scale)
    dq, dk, dbeta, dgc = intra_chunk_bwd(
        q, k, v, beta, gc, h, v_new, do, dh, Z, scale=scale, chunk_size=AG.shape[-1]
    )
    return dq, dk, dv, dbeta, dgc, dh0


def scan_map_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    transition: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What a piece makes of the gradient of the state that leaves it, as piece_map_bwd.

        dS_in = dM dS_out + dS_ext

    Args:
        q, k, beta, gc, P, AG, do: the arguments of scan_bwd.
        dht: [B, HV, K, V]: the gradient itself where it is known; dS_ext starts from it.
        transition: Whether to compute dM.
    Returns:
        dS_ext [B, HV, K, V], and dM [B, HV, K, K] or None, in fp32 (fp64 for fp64 input).
    Source: chapter 22.
    """
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    ends = [(do, dht)]
    if transition:
        B, T, HV = gc.shape
        K = k.shape[-1]
        eye = torch.eye(K, dtype=compute_dtype(q, gc), device=k.device)
        # eq:cp-transition-bwd   dM: the same with dO = 0, from I
        ends.append((do.new_zeros(B, T, HV, K), eye.expand(B, HV, K, K)))
    maps = [scan_bwd(q, k, beta, gc, P, AG, *end, scale=scale)[-1] for end in ends]
    return maps[0], maps[1] if transition else None
