"""The backward pass of Kimi Delta Attention in fused stages, on rows that have the gate in them."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    to_chunks,
)


def kda_gated(
    q: Tensor, k: Tensor, gc: Tensor, erase: Tensor | None = None, *, chunk_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that read and write the state, each channel faded by its gate.

        kd = 2^gc * K,  kg = 2^(gc_last - gc) * K,  qg = 2^gc * Q

    Args:
        q, k: [B, T, H, K]. gc: [B, T, HV, K] from gate_cumsum (log2).
        erase: the erase gate [B, T, HV, K], by which kd is multiplied, or None.
    Returns:
        kd, kg, qg [B, T, HV, K] in k.dtype.
    Source: chapters 12d and 24.
    """
    dtype = compute_dtype(q, k, gc, erase)
    T, HV = gc.shape[1:3]
    Q, K, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), pad_gate(gc, chunk_size))
    )
    # eq:kda-kd   kd = 2^gc * K
    kd = torch.exp2(gc) * K
    kd = kd if erase is None else to_chunks(erase.to(dtype), chunk_size) * kd
    # eq:kda-kg   kg = 2^(gc_last - gc) * K
    kg = torch.exp2(gc[..., -1:, :] - gc) * K
    # eq:kda-qg   qg = 2^gc * Q
    qg = torch.exp2(gc) * Q
    return tuple(from_chunks(x, T).to(k.dtype) for x in (kd, kg, qg))


def kda_gates(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    erase: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gate_cumsum, and kda_gated of what it finds.

    Args:
        q, k: [B, T, H, K]. g, A_log, dt_bias, lower_bound: as in gate_cumsum.
        erase: as in kda_gated.
    Returns:
        gc [B, T, HV, K] of gate_cumsum, kd, kg and qg of kda_gated.
    Source: chapter 24.
    """
    # eq:delta-gate-cumsum   gc = log2(e) cumsum(g)
    gc = gate_cumsum(g, A_log, dt_bias, lower_bound=lower_bound, chunk_size=chunk_size)
    return gc, *kda_gated(q, k, gc, erase, chunk_size=chunk_size)


def of_heads(beta: Tensor) -> Tensor:
    """beta; 1 in the place of a write gate."""
    return beta if beta.ndim == 3 else torch.ones_like(beta[..., 0])


def written(v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """v and beta; of a write gate w * v and 1."""
    return v if beta.ndim == 3 else beta * v, of_heads(beta)


def kda_fused_scans(
    qg: Tensor,
    kg: Tensor,
    kd: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    A: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, ...]:
    """The states again, and their gradients, which read nothing of each other.

        v_new  = A diag(beta) (V - kd S)
        S     <- diag(2^gc_last) S + kg^T v_new
        dv_new = scale P^T dO + kg dS,  Z = A^T dv_new,  dV = diag(beta) Z
        dS    <- diag(2^gc_last) dS + scale qg^T dO - kd^T dV

    With a write gate w, v_new = A (w * V - kd S), and Z stands for dV in the last line.

    Args:
        qg, kg, kd: from kda_gates. v, gc: the arguments of the forward pass. P, A: from kda_intra.
        beta: [B, T, HV]; or the write gate [B, T, HV, V], where kd has an erase gate.
        do: [B, T, HV, V], gradient of o.
        initial_state: [B, HV, K, V], zero if None. dht: of its shape, gradient of the final state.
    Returns:
        h [B, NT, HV, K, V], the state entering each chunk, and v_new [B, T, HV, V]; dh like h, the
        gradient of the state leaving each chunk; Z and dv like v_new, with a write gate no dv
        (kda_fused_intra_bwd has it); all in kg.dtype. dh0 [B, HV, K, V] in fp32 (fp64 for fp64
        input), the gradient of the initial state.
    Source: chapters 12d and 24.
    """
    forth = _forth(kg, kd, v, beta, gc, A, initial_state)
    return *forth, *_back(qg, kg, kd, beta, gc, P, A, do, dht, scale)


def _forth(
    kg: Tensor, kd: Tensor, v: Tensor, beta: Tensor, gc: Tensor, A: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """h and v_new."""
    dtype = compute_dtype(kg, kd, v, beta, gc, A, state)
    T, C = v.shape[1], A.shape[-1]
    v, beta = written(v.to(dtype), beta.to(dtype))
    KG, KD, V, b, gc, A = (
        to_chunks(x.to(dtype), C) for x in (kg, kd, v, beta[..., None], pad_gate(gc, C), A)
    )
    B, HV, NT, _, DK = KG.shape
    S = KG.new_zeros(B, HV, DK, v.shape[-1]) if state is None else state.to(dtype)
    h, v_new = [], []
    for c in range(NT):
        h.append(S)
        # eq:delta-residual   W = V - kd S
        W = V[:, :, c] - KD[:, :, c] @ S
        # eq:delta-v-new   v_new = A diag(beta) W
        v_new.append(A[:, :, c] @ (b[:, :, c] * W))
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        S = torch.exp2(gc[:, :, c, -1])[..., None] * S + KG[:, :, c].mT @ v_new[-1]
    return torch.stack(h, 1).to(kg.dtype), from_chunks(torch.stack(v_new, 2), T).to(kg.dtype)


def _back(
    qg: Tensor,
    kg: Tensor,
    kd: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dh, Z, dv and dh0."""
    dtype = compute_dtype(qg, kg, kd, beta, gc, P, A, do, dht)
    T, C, gated = do.shape[1], A.shape[-1], beta.ndim > 3
    beta = of_heads(beta)
    QG, KG, KD, b, gc, P, A, dO = (
        to_chunks(x.to(dtype), C) for x in (qg, kg, kd, beta[..., None], pad_gate(gc, C), P, A, do)
    )
    B, HV, NT, _, DK = KG.shape
    dS = KG.new_zeros(B, HV, DK, do.shape[-1]) if dht is None else dht.to(dtype)
    dh, Z, dv = [], [], []
    for c in reversed(range(NT)):
        dh.append(dS)
        # eq:kda-dv-out   dv_new = scale P^T dO
        dv_new = scale * (P[:, :, c].mT @ dO[:, :, c])
        # eq:delta-dv-new   dv_new += kg dS
        dv_new = dv_new + KG[:, :, c] @ dS
        # eq:kda-z   Z = A^T dv_new
        Z.append(A[:, :, c].mT @ dv_new)
        # eq:kda-dv   dV = diag(beta) Z
        dv.append(b[:, :, c] * Z[-1])
        # eq:fused-ds   dS <- diag(2^gc_last) dS + qg^T scale dO - kd^T dV
        dS = torch.exp2(gc[:, :, c, -1])[..., None] * dS + QG[:, :, c].mT @ (scale * dO[:, :, c])
        dS = dS - KD[:, :, c].mT @ dv[-1]
    Z, dv = (from_chunks(torch.stack(x[::-1], 2), T).to(kg.dtype) for x in (Z, dv))
    return torch.stack(dh[::-1], 1).to(kg.dtype), Z, None if gated else dv, dS


def kda_fused_scan_map_bwd(
    qg: Tensor,
    kg: Tensor,
    kd: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    transition: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What a piece makes of the gradient of the state that leaves it, as piece_map_bwd.

        dS_in = dM dS_out + dS_ext

    Args:
        qg, kg, kd, beta, gc, P, A, do: the arguments of kda_fused_scans.
        dht: [B, HV, K, V]: the gradient itself where it is known; dS_ext starts from it.
        transition: Whether to compute dM.
    Returns:
        dS_ext [B, HV, K, V], and dM [B, HV, K, K] or None, in fp32 (fp64 for fp64 input).
    Source: chapter 22.
    """
    # eq:cp-ext-bwd   dS_ext: the gradient before the piece, from zero
    ends = [(do, dht)]
    if transition:
        B, T, HV, K = kg.shape
        eye = torch.eye(K, dtype=compute_dtype(kg, gc), device=kg.device)
        # eq:cp-transition-bwd   dM: the same with dO = 0, from I
        ends.append((do.new_zeros(B, T, HV, K), eye.expand(B, HV, K, K)))
    maps = [_back(qg, kg, kd, beta, gc, P, A, *end, scale)[-1] for end in ends]
    return maps[0], maps[1] if transition else None
