"""What is left of Kimi Delta Attention's backward pass when states and gradients are carried."""

from torch import Tensor

from linattn_edu.reference.delta.gate_bwd import gate_bwd
from linattn_edu.reference.delta.kda_intra_bwd import kda_intra_bwd
from linattn_edu.reference.tiles import (
    compute_dtype,
    from_chunks,
    to_chunks,
)


def kda_outer_bwd(
    v: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dh: Tensor,
    Z: Tensor,
    write: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    """kda_output_bwd and kda_wy_bwd where Z and dV are known: what kda_intra_bwd reads.

        dP  = scale tril(dO v_new^T),  dL  = -tril(Z v_new^T, -1)
        dqg = scale dO h^T,            dkb = -Z h^T
        dkg = v_new dS^T,              dgl = rowsum(dS * S)

    Args:
        v: the argument of the forward pass. h, v_new, dh, Z: from kda_fused_scans.
        do: [B, T, HV, V], gradient of o. write: the write gate [B, T, HV, V], or None.
    Returns:
        dP, dL [B, T, HV, C], dqg, dkb, dkg [B, T, HV, K], dgl [B, NT, HV, K], rowsum(Z * V), to
        which kda_intra_bwd adds, and rowsum(Z * v_new), beta times the whole of it, in fp32 (fp64
        for fp64 input), but dL in v.dtype; or with write None in the place of both sums, then
        dv = write * Z and its gradient Z * V, in the dtypes of v and write.
    Source: chapters 12d and 24.
    """
    dtype, T = compute_dtype(v, h, v_new, do, dh, Z), v.shape[1]
    V, V_new, dO, Z = (to_chunks(x.to(dtype), chunk_size) for x in (v, v_new, do, Z))
    S, dS = (x.to(dtype).transpose(1, 2) for x in (h, dh))
    # eq:kda-dp   dP = scale tril(dO v_new^T)
    dP = scale * (dO @ V_new.mT).tril()
    # eq:kda-dl   dL = -tril(Z v_new^T, -1)
    dL = -(Z @ V_new.mT).tril(-1)
    # eq:kda-dqg   dqg = scale dO h^T
    # eq:kda-dkb   dkb = -Z S^T
    # eq:kda-dkg   dkg = v_new dS^T
    rows = scale * dO @ S.mT, -Z @ S.mT, V_new @ dS.mT
    # eq:kda-dgl   dgl = rowsum(dS * S)
    dgl = (dS * S).sum(-1).transpose(1, 2).contiguous()
    dP, dL, *rows = (from_chunks(x, T) for x in (dP, dL, *rows))
    found = dP, dL.to(v.dtype), *rows, dgl
    if write is None:
        return *found, *(from_chunks((Z * x).sum(-1), T) for x in (V, V_new))
    dV, dwrite = write.to(dtype) * from_chunks(Z, T), from_chunks(Z * V, T)
    return *found, None, dV.to(v.dtype), dwrite.to(write.dtype)


def kda_fused_intra_bwd(
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
    write: Tensor | None = None,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, ...]:
    """All that is left, for each chunk by itself: kda_outer_bwd, then kda_intra_bwd.

    Args:
        q, k, v, beta, gc: the arguments of the forward pass. h, v_new, dh, Z: from kda_fused_scans.
        do: [B, T, HV, V], gradient of o. write: the write gate [B, T, HV, V], where beta is an
            erase gate.
    Returns:
        dq, dk, dbeta and dgc of kda_intra_bwd; with write also dv = write * Z and its gradient
        Z * V, in the dtypes of v and write.
    Source: chapters 12d and 24.
    """
    outer = kda_outer_bwd(v, h, v_new, do, dh, Z, write, scale=scale, chunk_size=chunk_size)
    rows = (x.to(v.dtype) for x in outer[:5])
    gates = () if write is None else outer[7:]
    return *kda_intra_bwd(q, k, beta, gc, *rows, *outer[5:7]), *gates


def kda_intra_gate_bwd(
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
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    write: Tensor | None = None,
    *,
    scale: float,
    lower_bound: float | None = None,
    chunk_size: int,
) -> tuple[Tensor | None, ...]:
    """kda_fused_intra_bwd and then gate_bwd: dgc need not go to memory.

    Args:
        Those of kda_fused_intra_bwd.  g, A_log, dt_bias, lower_bound: as in gate_bwd.
    Returns:
        dq, dk, dbeta; dg, dA_log and ddt_bias of gate_bwd; with write dv and its gradient.
    Source: chapters 12d and 24.
    """
    dq, dk, dbeta, dgc, *more = kda_fused_intra_bwd(
        q, k, v, beta, gc, h, v_new, do, dh, Z, write, scale=scale, chunk_size=chunk_size
    )
    gate = gate_bwd(dgc, g, A_log, dt_bias, lower_bound=lower_bound, chunk_size=chunk_size)
    return dq, dk, dbeta, *gate, *more
