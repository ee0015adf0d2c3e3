"""Stage wy_bwd: the adjoint of solve and wy, and of the keys that went through the state."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.delta.state import pad_gate
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def wy_bwd(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    gc: Tensor,
    A: Tensor,
    h: Tensor,
    v_new: Tensor,
    dh: Tensor,
    dv_new: Tensor,
    dk: Tensor,
    dgc: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From the gradients of v_new and of the states to those of k, v, beta and the decay.

        dw  = -dv_new h^T
        E   = diag(2^gc) dw K^T + (dv_new V^T) * G,  dA = E diag(beta)
        dL  = -tril(A^T dA A^T, -1)
        dK += diag(2^(gc_last - gc)) v_new dh^T + diag(beta) A^T diag(2^gc) dw
        dK += (diag(beta) dL + dL^T diag(beta)) K
        dV  = diag(beta) (A * G)^T dv_new
        dbeta = colsum(A * E) + rowsum(dL * K K^T)

    Args:
        k, v, beta, gc, A: the arguments of wy. h, v_new: from state. dh, dv_new: from state_bwd.
        dk: [B, T, H, K] and dgc: [B, T, HV], what output_bwd found.
    Returns:
        dk [B, T, H, K] and dv [B, T, HV, V] in k.dtype; dbeta and dgc [B, T, HV] in fp32 (fp64
        for fp64 input), dgc in natural units: the whole gradients.
    Source: chapter 10; the decay's terms: chapter 12.
    """
    dtype = compute_dtype(k, v, beta, gc, A, h, v_new, dh, dv_new, dk, dgc)
    (T, H), HV = k.shape[1:3], gc.shape[2]
    C = A.shape[-1]
    K, V, b, gc, A, v_new, dv_new, dgc = (
        to_chunks(x.to(dtype), C)
        for x in (
            repeat_heads(k, HV), v, beta[..., None], pad_gate(gc, C), A, v_new, dv_new, dgc,
        )
    )  # fmt: skip
    S, dS = (x.to(dtype).transpose(1, 2) for x in (h, dh))
    G, e, last = decay_matrix(gc), torch.exp2(gc)[..., None], gc[..., -1:]
    # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
    dK_state = torch.exp2(last - gc)[..., None] * (v_new @ dS.mT)
    # eq:delta-dw   dw = -dv_new S^T
    edw = e * -(dv_new @ S.mT)
    # eq:delta-dv   dV = diag(beta) (A * G)^T dv_new
    dV = b * ((A * G).mT @ dv_new)
    # eq:delta-dgc-state   dgc_i -= k_i dk_i;  dgc_last += sum_i k_i dk_i + 2^gc_last <dS, S>
    t = (K * dK_state).sum(-1)
    through = t.sum(-1) + torch.exp2(last[..., 0]) * (dS * S).sum((-1, -2))
    # eq:delta-da   dA = E diag(beta), E = diag(2^gc) dw K^T + (dv_new V^T) * G
    E1, E2 = edw @ K.mT, (dv_new @ V.mT) * G
    dA = (E1 + E2) * b.mT
    # eq:delta-dl   dL = -tril(A^T dA A^T, -1)
    dL = -(A.mT @ dA @ A.mT).tril(-1)
    # eq:delta-dbeta   dbeta = colsum(A * E) + rowsum(dL * K K^T)
    dbeta = (A * (E1 + E2)).sum(-2) + (dL * (K @ K.mT)).sum(-1)
    # eq:delta-dgc-wy   dgc += rowsum(A * dA) - colsum(A * G-part of dA)
    dgc = dgc - t + (A * dA).sum(-1) - (A * E2 * b.mT).sum(-2)
    # eq:delta-dk   dK += dK_state + diag(beta) A^T diag(2^gc) dw + (N + N^T) K, N = diag(beta) dL
    N = b * dL
    dK = dK_state + b * (A.mT @ edw) + (N + N.mT) @ K
    dk = (dk.to(dtype) + sum_heads(from_chunks(dK, T), H)).to(k.dtype)
    dgc = from_chunks(dgc, T)
    dgc = dgc + at_last_token(through, T, C)
    return dk, from_chunks(dV, T).to(k.dtype), from_chunks(dbeta, T), dgc


def at_last_token(x: Tensor, T: int, chunk_size: int) -> Tensor:
    """[B, HV, NT], one number a chunk -> [B, T, HV], at the chunk's last token, else 0."""
    B, HV, NT = x.shape
    out = x.new_zeros(B, T, HV)
    last = torch.arange(1, NT + 1, device=x.device).mul(chunk_size).clamp(max=T) - 1
    out[:, last] = x.transpose(1, 2)
    return out
