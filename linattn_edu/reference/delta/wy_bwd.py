"""Stage wy_bwd: the adjoint of what a chunk writes, and of the keys that go through the state."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.gate_cumsum import decay_matrix
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    pad_gate,
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

    The values a chunk writes solve a triangular system,

        (I + L * G) v_new = diag(beta) W,  W = V - diag(2^gc) K S,  L = diag(beta) tril(K K^T, -1)

    and the adjoint of a system is the transposed system:

        Z  = (A * G)^T dv_new
        dV = diag(beta) Z
        dL = -tril(Z v_new^T, -1) * G
        dbeta = rowsum(Z * W) + rowsum(dL * K K^T)
        dK += diag(2^(gc_last - gc)) v_new dS^T - diag(beta 2^gc) Z S^T + (N + N^T) K

    with N = diag(beta) dL. Nothing is divided by beta.

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
    # eq:delta-z   Z = (A * G)^T dv_new
    Z = (A * G).mT @ dv_new
    # eq:delta-dv   dV = diag(beta) Z
    dV = b * Z
    # eq:delta-dl   dL = -tril(Z v_new^T, -1) * G
    dL = -(Z @ v_new.mT).tril(-1) * G
    # eq:delta-dbeta   dbeta = rowsum(Z * W) + rowsum(X), W = V - diag(2^gc) K S, X = dL * K K^T
    X = dL * (K @ K.mT)
    dbeta = (Z * V).sum(-1) + X.sum(-1)
    # eq:delta-dgc-wy   dgc += k dk_read + rowsum(diag(beta) X) - colsum(diag(beta) X)
    X = b * X
    dgc = dgc + X.sum(-1) - X.sum(-2)
    # eq:delta-dk-state   dK = diag(2^(gc_last - gc)) v_new dS^T
    dK_state = torch.exp2(last - gc)[..., None] * (v_new @ dS.mT)
    # eq:delta-dk-read   dK = -diag(beta 2^gc) Z S^T
    ZS = e * (Z @ S.mT)
    dK_read = -b * ZS
    read = (K * ZS).sum(-1)
    dbeta, dgc = dbeta - read, dgc - b[..., 0] * read
    # eq:delta-dgc-state   dgc_i -= k_i dk_i; dgc_last += sum k_i dk_i + 2^gc_last <dS, S>
    end = last_tokens(T, C, gc.device)
    t = (K * dK_state).sum(-1).masked_fill(end, 0)  # for i = last the two would cancel
    through = t.sum(-1) + torch.exp2(last[..., 0]) * (dS * S).sum((-1, -2))
    dgc = dgc - t + end * through[..., None]
    # eq:delta-dk   dK += dK_state + dK_read + (N + N^T) K, N = diag(beta) dL
    N = b * dL
    dK = dK_state + dK_read + (N + N.mT) @ K
    dk = (dk.to(dtype) + sum_heads(from_chunks(dK, T), H)).to(k.dtype)
    return dk, from_chunks(dV, T).to(k.dtype), from_chunks(dbeta, T), from_chunks(dgc, T)


def last_tokens(T: int, chunk_size: int, device: torch.device) -> Tensor:
    """[NT, C]: whether a token is the last of its chunk, which may be short."""
    i = torch.arange(chunk_size, device=device)
    first = torch.arange(0, T, chunk_size, device=device)[:, None]
    return i == (T - first).clamp(max=chunk_size) - 1
