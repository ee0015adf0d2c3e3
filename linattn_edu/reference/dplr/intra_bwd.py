"""Stages dplr_rows_bwd and dplr_intra_bwd: from the scans' gradients to those of all tensors."""

import torch
from torch import Tensor

from linattn_edu.reference.delta.kda_intra import pair_decay
from linattn_edu.reference.delta.wy_bwd import last_tokens
from linattn_edu.reference.dplr.intra import before, read_before
from linattn_edu.reference.tiles import compute_dtype, from_chunks, pad_gate, to_chunks


def dplr_rows_bwd(
    v: Tensor, e: Tensor, do: Tensor, dx: Tensor, h: Tensor, dh: Tensor,
    *, scale: float, chunk_size: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the scores and of the gated rows.

        dab = tril(dx e^T, -1),        dak = tril(dx v^T, -1)
        dqb = scale tril(dO e^T),      dqk = scale tril(dO v^T)
        dqg = scale dO h^T,  dkg = v dh^T,  dag = dx h^T,  dbg = e dh^T
        dgl = rowsum(dh * h)

    Args:
        v, do: [B, T, H, V]. h, e: from dplr_states. dh, dx: from dplr_scan_bwd.
    Returns:
        dab, dak, dqb, dqk [B, T, H, C] and dqg, dkg, dag, dbg [B, T, H, K] in v.dtype;
        dgl [B, NT, H, K] in fp32 (fp64 for fp64 input).
    Source: the adjoint of dplr_scan, chapter 12e.
    """
    dtype, T = compute_dtype(v, e, do, dx, h, dh), v.shape[1]
    V, e, dO, dx = (to_chunks(x.to(dtype), chunk_size) for x in (v, e, do, dx))
    h, dh = (x.to(dtype).transpose(1, 2) for x in (h, dh))
    dO = scale * dO
    # eq:dplr-dab   dab = tril(dx e^T, -1), dak = tril(dx v^T, -1)
    dab, dak = ((dx @ x.mT).tril(-1) for x in (e, V))
    # eq:dplr-dqb   dqb = scale tril(dO e^T), dqk = scale tril(dO v^T)
    dqb, dqk = ((dO @ x.mT).tril() for x in (e, V))
    # eq:kda-dgl   dgl = rowsum(dS * S)
    dgl = (dh * h).sum(-1).transpose(1, 2).contiguous()
    # eq:dplr-drows   dqg = scale dO h^T, dkg = v dh^T, dag = dx h^T, dbg = e dh^T
    rows = dO @ h.mT, V @ dh.mT, dx @ h.mT, e @ dh.mT
    return *(from_chunks(x, T).to(v.dtype) for x in (dab, dak, dqb, dqk, *rows)), dgl


def dplr_intra_bwd(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, gc: Tensor,
    dab: Tensor, dak: Tensor, dqb: Tensor, dqk: Tensor,
    dqg: Tensor, dkg: Tensor, dag: Tensor, dbg: Tensor, dgl: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gather what the scores and the gated rows say about q, k, a, b and the accumulated gate.

        dQ   = 2^gc * dqg + sum over j < i of (dqb_ij b_j + dqk_ij k_j) 2^(gc_i - gc_j)
        dA   = 2^gp * dag + sum over j < i of (dab_ij b_j + dak_ij k_j) 2^(gp_i - gc_j)
        dB   = 2^(gc_last - gc) * dbg
               + sum over i > j of dqb_ij q_i 2^(gc_i - gc_j) + dab_ij a_i 2^(gp_i - gc_j)
        dK   likewise, of dkg, dqk and dak
        dq   = dQ + diag(dqb) B + diag(dqk) K,  db = dB + diag(dqb) Q,  dk = dK + diag(dqk) Q
        dgc  = Q * dQ - K * dK - B * dB, with A * dA of the token behind, and what goes through
               gc_last

    The diagonals have no gate.

    Args:
        q, k, a, b, gc: as in dplr_intra; the others from dplr_rows_bwd.
    Returns:
        dq, dk, da, db [B, T, H, K] in q.dtype; dgc [B, T, H, K], natural units, in fp32 (fp64 for
        fp64 input).
    Source: the adjoint of dplr_intra, chapter 12e.
    """
    dtype, T, C = compute_dtype(q, k, a, b, gc, dab, dqg, dgl), q.shape[1], dab.shape[-1]
    Q, K, A, B, gc, dab, dak, dqb, dqk, dqg, dkg, dag, dbg = (
        to_chunks(x.to(dtype), C)
        for x in (q, k, a, b, pad_gate(gc, C), dab, dak, dqb, dqk, dqg, dkg, dag, dbg)
    )
    gp, last = before(gc), gc[..., -1:, :]
    own_b, own_k = (x.diagonal(dim1=-2, dim2=-1)[..., None] for x in (dqb, dqk))
    dqb, dqk = dqb.tril(-1), dqk.tril(-1)
    dQ, dA, dB, dK = torch.zeros_like(Q), torch.zeros_like(A), [], []
    for j in range(C):
        read, erased, one = pair_decay(gc, j), read_before(gc, gp, j), slice(j, j + 1)
        # eq:dplr-writers   dB_j += sum_i>j (dqb_ij q_i 2^gc_i + dab_ij a_i 2^gp_i) 2^-gc_j
        dB.append((read * dqb[..., one] * Q + erased * dab[..., one] * A).sum(-2))
        dK.append((read * dqk[..., one] * Q + erased * dak[..., one] * A).sum(-2))
        # eq:dplr-readers   dQ_i += sum_j<i (dqb_ij b_j + dqk_ij k_j) 2^(gc_i - gc_j)
        dQ = dQ + read * (dqb[..., one] * B[..., one, :] + dqk[..., one] * K[..., one, :])
        dA = dA + erased * (dab[..., one] * B[..., one, :] + dak[..., one] * K[..., one, :])
    dB, dK = torch.stack(dB, -2), torch.stack(dK, -2)
    # eq:dplr-outer   dQ = 2^gc * dqg, dA = 2^gp * dag, dB = 2^(gc_last - gc) * dbg; dK likewise
    dQ, dA = dQ + torch.exp2(gc) * dqg, dA + torch.exp2(gp) * dag
    dB_outer, dK_outer = (torch.exp2(last - gc) * x for x in (dbg, dkg))
    end = last_tokens(T, C, q.device)[..., None]
    outer = (B * dB_outer + K * dK_outer).masked_fill(end, 0)  # its own part would cancel
    # eq:dplr-dgc   dgc = Q * dQ - K * dK - B * dB, and A * dA of the token behind
    dgc = Q * dQ - outer - B * dB - K * dK
    # eq:dplr-dgc-last   dgc_last += colsum(B * dB_outer + K * dK_outer) + 2^gc_last dgl
    through = outer.sum(-2) + torch.exp2(last[..., 0, :]) * dgl.to(dtype).transpose(1, 2)
    dgc = dgc + end * through[..., None, :]
    dgc[..., :-1, :] += (A * dA)[..., 1:, :]
    dq, da = dQ + own_b * B + own_k * K, dA
    db, dk = dB + dB_outer + own_b * Q, dK + dK_outer + own_k * Q
    grads = (from_chunks(x, T).to(q.dtype) for x in (dq, dk, da, db))
    return *grads, from_chunks(dgc, T)
