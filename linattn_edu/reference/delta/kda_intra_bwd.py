"""Stage kda_intra_bwd: gradients of q, k, beta and the gate, from those of all that is gated."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.kda_intra import pair_decay
from linattn_edu.reference.delta.wy_bwd import last_tokens
from linattn_edu.reference.tiles import (
    by_channel,
    compute_dtype,
    from_chunks,
    pad_gate,
    repeat_heads,
    sum_heads,
    to_chunks,
)


def kda_intra_bwd(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    gc: Tensor,
    dP: Tensor,
    dL: Tensor,
    dqg: Tensor,
    dkb: Tensor,
    dkg: Tensor,
    dgl: Tensor,
    dbeta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather what P, L, qg, kb and kg say about q, k, beta and the accumulated gate.

        dQ    = 2^gc * dqg + sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
        Y     = 2^gc * dkb + sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
        R     = 2^(gc_last - gc) * dkg + sum over i > j of D_ij
        D_ij  = (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
        dq    = dQ + diag(dP) K
        dk    = diag(beta) Y + R + diag(dP) Q
        dbeta = dbeta + rowsum(K * Y)
        dgc   = Q * dQ + K * (diag(beta) Y - R), and what goes through gc_last

    Y multiplies a gate with a plus in its exponent, R one with a minus. The diagonal of P has no
    gate and is left out of dgc, where its two parts would cancel. With an erase gate for each
    channel beta * Y stands for diag(beta) Y, and dbeta = K * Y.

    Args:
        q, k, beta, gc: as in kda_intra. dP, dqg: from kda_output_bwd.
        dL, dkb, dkg, dgl, dbeta: from kda_wy_bwd; no dbeta with an erase gate.
    Returns:
        dq, dk [B, T, H, K] in q.dtype; dbeta [B, T, HV] and dgc [B, T, HV, K], natural units, in
        fp32 (fp64 for fp64 input); of an erase gate dbeta in its shape and dtype.
    Source: chapter 11.
    """
    dtype = compute_dtype(q, k, beta, gc, dP, dL, dqg, dkb, dkg, dgl, dbeta)
    (T, H), (HV, C) = q.shape[1:3], dP.shape[2:]
    Q, K, b, gc, dP, dL, dqg, dkb, dkg = (
        to_chunks(x.to(dtype), C)
        for x in (
            repeat_heads(q, HV), repeat_heads(k, HV), by_channel(beta), pad_gate(gc, C),
            dP, dL, dqg, dkb, dkg,
        )
    )  # fmt: skip
    dP_diagonal, dP = dP.diagonal(dim1=-2, dim2=-1)[..., None], dP.tril(-1)
    dQ, Y, R = torch.zeros_like(Q), torch.zeros_like(K), []
    for j in range(C):
        decay, k_j = pair_decay(gc, j), K[..., j : j + 1, :]
        dP_j, dL_j = dP[..., j : j + 1], dL[..., j : j + 1]
        # eq:kda-r   R_j += sum over i > j of (dP_ij q_i + beta_i dL_ij k_i) 2^(gc_i - gc_j)
        R.append((decay * (dP_j * Q + b * dL_j * K)).sum(-2))
        # eq:kda-dq   dQ_i += sum over j < i of dP_ij k_j 2^(gc_i - gc_j)
        dQ = dQ + dP_j * k_j * decay
        # eq:kda-y   Y_i += sum over j < i of dL_ij k_j 2^(gc_i - gc_j)
        Y = Y + dL_j * k_j * decay
    # eq:kda-outer   dQ += 2^gc * dqg, Y += 2^gc * dkb, R += 2^(gc_last - gc) * dkg
    last = gc[..., -1:, :]
    dQ, Y = dQ + torch.exp2(gc) * dqg, Y + torch.exp2(gc) * dkb
    R_inner, R_outer = torch.stack(R, -2), torch.exp2(last - gc) * dkg
    # eq:kda-dgc-last   dgc_last += colsum(K * R) + 2^gc_last dgl
    end = last_tokens(T, C, q.device)[..., None]
    R_gate = R_outer.masked_fill(end, 0)  # the last token's own part would cancel
    through = (K * R_gate).sum(-2) + torch.exp2(last[..., 0, :]) * dgl.to(dtype).transpose(1, 2)
    # eq:kda-dgc   dgc = Q * dQ + K * (diag(beta) Y - R)
    dgc = Q * dQ + K * (b * Y - R_gate - R_inner) + end * through[..., None, :]
    # eq:kda-dbeta   dbeta += rowsum(K * Y)
    if beta.ndim == 3:
        dbeta = dbeta.to(dtype) + from_chunks((K * Y).sum(-1), T)
    else:
        dbeta = from_chunks(K * Y, T).to(beta.dtype)
    # eq:kda-dk   dk = diag(beta) Y + R + diag(dP) Q
    dk = b * Y + R_inner + R_outer + dP_diagonal * Q
    dq = dQ + dP_diagonal * K
    dq, dk = (sum_heads(from_chunks(x, T), H).to(q.dtype) for x in (dq, dk))
    return dq, dk, dbeta, from_chunks(dgc, T)
