"""The forward pass of Kimi Delta Attention in fused stages: the gate goes into the rows once."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.fused.cancel import cancels
from linattn_edu.reference.fused.kda_scans import kda_gated, of_heads, written
from linattn_edu.reference.tiles import compute_dtype, from_chunks, pad_gate, to_chunks


def kda_prepare(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    *,
    chunk_size: int,
    lower_bound: float | None = None,
) -> tuple[Tensor, ...]:
    """All that needs no state: kda_intra, and the gated rows that read and write the state.

        P, A of kda_intra,  kd = 2^gc * K,  kg = 2^(gc_last - gc) * K,  qg = 2^gc * Q

    Args:
        q, k: [B, T, H, K]. gc: [B, T, HV, K] from gate_cumsum (log2).
        beta: [B, T, HV]; or the erase gate [B, T, HV, K], by which kd is multiplied.
        lower_bound: as in kda_intra.
    Returns:
        P and A [B, T, HV, C], kd, kg and qg [B, T, HV, K], all in k.dtype.
    Source: chapters 12d and 24.
    """
    P, A = kda_intra(q, k, beta, gc, chunk_size=chunk_size, lower_bound=lower_bound)
    erase = None if beta.ndim == 3 else beta
    return P, A, *kda_gated(q, k, gc, erase, chunk_size=chunk_size)


def kda_gate_prepare(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    safe_bound: float | None = None,
    chunk_size: int,
    cancelling: bool = False,
) -> tuple[Tensor, ...]:
    """gate_cumsum and then kda_prepare. What the first makes is read by the second, which may have
    it on the chip.

    Args:
        q, k, beta: as in kda_prepare.  g, A_log, dt_bias, lower_bound: as in gate_cumsum.
        safe_bound: lower_bound of kda_prepare.
        cancelling: Whether to find the heads that cancel, too.
    Returns:
        gc of gate_cumsum, what kda_prepare returns, and with cancelling what `cancels` does.
    Source: chapter 24.
    """
    gc = gate_cumsum(g, A_log, dt_bias, lower_bound=lower_bound, chunk_size=chunk_size)
    P, A, *rows = kda_prepare(q, k, beta, gc, chunk_size=chunk_size, lower_bound=safe_bound)
    found = (cancels(P, A, beta if beta.ndim == 3 else None, q.shape[2]),) if cancelling else ()
    return gc, P, A, *rows, *found


def kda_fused_scan(
    qg: Tensor,
    kg: Tensor,
    kd: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    P: Tensor,
    A: Tensor,
    initial_state: Tensor | None = None,
    *,
    scale: float,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Carry the state through the chunks and read the output on the way, without w and u.

        v_new = A diag(beta) (V - kd S)
        o     = scale (qg S + P v_new)
        S    <- diag(2^gc_last) S + kg^T v_new

    With a write gate w, v_new = A (w * V - kd S).

    Args:
        qg, kg, kd: [B, T, HV, K], P, A: [B, T, HV, C], from kda_prepare. v: [B, T, HV, V].
        beta: [B, T, HV]; or the write gate [B, T, HV, V], where kd has an erase gate.
        gc: [B, T, HV, K] (log2), of which it reads the last token of each chunk.
        initial_state: [B, HV, K, V], zero if None.
    Returns:
        o [B, T, HV, V] in v.dtype; the final state [B, HV, K, V] in fp32 (fp64 for fp64 input)
        or None.
    Source: chapters 12d and 24.
    """
    dtype = compute_dtype(qg, kg, kd, v, beta, gc, P, A, initial_state)
    T, C = v.shape[1], A.shape[-1]
    values, beta = written(v.to(dtype), beta.to(dtype))
    QG, KG, KD, V, b, gc, P, A = (
        to_chunks(x.to(dtype), C)
        for x in (qg, kg, kd, values, beta[..., None], pad_gate(gc, C), P, A)
    )
    B, HV, NT, _, DK = KG.shape
    S = KG.new_zeros(B, HV, DK, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    o = []
    for c in range(NT):
        # eq:delta-residual   W = V - kd S
        W = V[:, :, c] - KD[:, :, c] @ S
        # eq:delta-v-new   v_new = A diag(beta) W
        v_new = A[:, :, c] @ (b[:, :, c] * W)
        # eq:delta-inter   qg S
        inter = QG[:, :, c] @ S
        # eq:delta-output   o = scale (inter + P v_new)
        o.append(scale * (inter + P[:, :, c] @ v_new))
        # eq:delta-state   S <- diag(2^gc_last) S + kg^T v_new
        S = torch.exp2(gc[:, :, c, -1])[..., None] * S + KG[:, :, c].mT @ v_new
    return from_chunks(torch.stack(o, 2), T).to(v.dtype), S if output_final_state else None


def kda_fused_scan_map(
    kg: Tensor,
    kd: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    A: Tensor,
    initial_state: Tensor | None = None,
    *,
    transition: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """What a piece makes of the state that enters it, as piece_map, from what kda_fused_scan takes.

        S_out = M S_in + S_ext

    Args:
        kg, kd, v, beta, gc, A: as in kda_fused_scan.
        initial_state: [B, HV, K, V]: the state itself where it is known; S_ext starts from it.
        transition: Whether to compute M.
    Returns:
        S_ext [B, HV, K, V], and M [B, HV, K, K] or None, in fp32 (fp64 for fp64 input).
    Source: chapter 21.
    """
    options = {"scale": 1.0, "output_final_state": True}
    nothing = torch.zeros_like(A)
    # eq:cp-ext   S_ext: the state after the piece, from zero
    _, S_ext = kda_fused_scan(kg, kg, kd, v, beta, gc, nothing, A, initial_state, **options)
    if not transition:
        return S_ext, None
    B, T, HV, K = kg.shape
    eye = torch.eye(K, dtype=S_ext.dtype, device=kg.device).expand(B, HV, K, K)
    # eq:cp-transition   M: the same with v = 0, from I
    none = v.new_zeros(B, T, HV, K)
    _, M = kda_fused_scan(kg, kg, kd, none, of_heads(beta), gc, nothing, A, eye, **options)
    return S_ext, M
