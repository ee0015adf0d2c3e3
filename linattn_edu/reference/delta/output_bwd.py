"""Stage output_bwd: the adjoint of output."""

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


def output_bwd(
    q: Tensor,
    k: Tensor,
    v_new: Tensor,
    h: Tensor,
    gc: Tensor,
    do: Tensor,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the output's gradient says about q, k, v_new and the decay.

        dM  = scale (dO v_new^T) * G,  M = Q K^T
        dQ  = scale diag(2^gc) dO h^T + dM K
        dK  = dM^T Q
        dv_new = scale P^T dO
        dgc = rowsum(Q * scale diag(2^gc) dO h^T) + rowsum(dM * M) - colsum(dM * M)

    The gradient of h, scale (diag(2^gc) Q)^T dO, is formed where it is used: in state_bwd.

    Args:
        q, k, v_new, h, gc: the arguments of output. do: [B, T, HV, V], gradient of o.
    Returns:
        dq and dk [B, T, H, K], summed over the value heads of each q/k head; dk is the part that
        comes through the output. In q.dtype, but dk in fp32 where H < HV. dv_new [B, T, HV, V] in
        q.dtype, likewise a part.
        dgc [B, T, HV] in fp32 (fp64 for fp64 input): gradient by ln(2) gc, natural units.
    Source: chapter 08.
    """
    dtype = compute_dtype(q, k, v_new, h, gc, do)
    (T, H), HV = q.shape[1:3], gc.shape[2]
    Q, K, V, dO, gc = (
        to_chunks(x.to(dtype), chunk_size)
        for x in (repeat_heads(q, HV), repeat_heads(k, HV), v_new, do, pad_gate(gc, chunk_size))
    )
    G = decay_matrix(gc)
    M = Q @ K.mT
    # eq:delta-dv-out   dv_new = scale P^T dO
    dV = scale * (M * G).mT @ dO
    # eq:delta-dm   dM = scale (dO v_new^T) * G
    dM = scale * (dO @ V.mT) * G
    # eq:delta-dq-inter   scale diag(2^gc) dO h^T
    inter = scale * torch.exp2(gc)[..., None] * (dO @ h.to(dtype).transpose(1, 2).mT)
    # eq:delta-dgc-out   dgc = rowsum(Q * inter) + rowsum(dM * M) - colsum(dM * M)
    flow = (dM * M).tril(-1)  # the diagonal is in both sums and would only be rounded
    dgc = (Q * inter).sum(-1) + flow.sum(-1) - flow.sum(-2)
    # eq:delta-dq   dQ = inter + dM K
    dQ = inter + dM @ K
    # eq:delta-dk-out   dK = dM^T Q
    dK = dM.mT @ Q
    dq, dk = (sum_heads(from_chunks(x, T), H) for x in (dQ, dK))
    dk = dk if H < HV else dk.to(q.dtype)
    return dq.to(q.dtype), dk, from_chunks(dV, T).to(q.dtype), from_chunks(dgc, T)
