"""The scans of the fused backward pass: the states again, and their gradients, side by side."""

import torch
from torch import Tensor

from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    halves,
    pad_gate,
    repeat_heads,
    to_chunks,
)


def scan_states(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    AG: Tensor,
    initial_state: Tensor | None = None,
    AG_low: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """What scan did not keep: the state that enters each chunk, and what the chunk writes.

        v_new = (A * G) diag(beta) (V - diag(2^gc) K S)
        S    <- 2^(gc_last) S + (diag(2^(gc_last - gc)) K)^T v_new

    Args:
        k, v, beta, gc, initial_state: the arguments of the forward pass. AG: [B, T, HV, C], A * G,
            from intra_chunk. AG_low: with AG from intra_halves, its low half.
    Returns:
        h [B, NT, HV, K, V] and v_new [B, T, HV, V] in k.dtype, as of state; with AG_low also what
        rounding has cut off from v_new.
    Source: chapter 12c.
    """
    dtype = compute_dtype(k, v, beta, gc, initial_state)
    T, HV = gc.shape[1:]
    C = AG.shape[-1]
    K, V, b, gc, AG = (
        to_chunks(x.to(dtype), C)
        for x in (repeat_heads(k, HV), v, beta[..., None], pad_gate(gc, C), AG)
    )
    if AG_low is not None:
        AG = AG + to_chunks(AG_low.to(dtype), C)
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
    v_new, low = halves(from_chunks(torch.stack(v_new, 2), T), k.dtype)
    made = torch.stack(h, 1).to(k.dtype), v_new
    return made if AG_low is None else (*made, low)


def scan_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    AG: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    low: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """Carry dS from the last chunk to the first. No state and no value is read.

        dv_new = scale P^T dO + diag(2^(gc_last - gc)) K dS
        Z      = (A * G)^T dv_new,  dV = diag(beta) Z
        dS    <- 2^(gc_last) dS + scale (diag(2^gc) Q)^T dO - (diag(2^gc) K)^T dV

    Args:
        q, k, beta, gc: the arguments of the forward pass. P, AG: from intra_chunk.
        do: [B, T, HV, V], gradient of o.
        dht: [B, HV, K, V], gradient of the final state, zero if None.
        low: with P and AG from intra_halves, their low halves.
    Returns:
        dh [B, NT, HV, K, V] in q.dtype, the gradient of the state leaving each chunk;
        Z and dv [B, T, HV, V] in q.dtype; dh0 [B, HV, K, V] in fp32 (fp64 for fp64 input), the
        gradient of the initial state; with low also what rounding has cut off from Z.
    Source: chapter 12c.
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
    if low is not None:
        P, AG = (x + to_chunks(y.to(dtype), C) for x, y in zip((P, AG), low, strict=True))
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
    Z, dv = (from_chunks(torch.stack(x[::-1], 2), T) for x in (Z, dv))
    Z, Z_low = halves(Z, q.dtype)
    made = torch.stack(dh[::-1], 1).to(q.dtype), Z, dv.to(q.dtype), dS
    return made if low is None else (*made, Z_low)


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
    low: tuple[Tensor, Tensor] | None = None,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """scan_states and scan_bwd, which read nothing of each other: the kernels run them at once.

    Args:
        Those of the two.
    Returns:
        h and v_new of scan_states; dh, Z, dv and dh0 of scan_bwd; with low the low halves of v_new
        and Z.
    Source: chapter 12c.
    """
    h, v_new, *v_low = scan_states(k, v, beta, gc, AG, initial_state, low and low[1])
    dh, Z, dv, dh0, *Z_low = scan_bwd(q, k, beta, gc, P, AG, do, dht, low, scale=scale)
    return h, v_new, dh, Z, dv, dh0, *v_low, *Z_low


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
    maps = [scan_bwd(q, k, beta, gc, P, AG, *end, scale=scale)[3] for end in ends]
    return maps[0], maps[1] if transition else None
