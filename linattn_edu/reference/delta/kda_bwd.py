"""The adjoints of output and of wy where their operands have the gate in them already."""

from torch import Tensor

from linattn_edu.reference.tiles import by_channel, compute_dtype, from_chunks, to_chunks


def kda_output_bwd(
    v_new: Tensor, h: Tensor, do: Tensor, *, scale: float, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """What the output's gradient says about qg and P, o = scale (qg h + P v_new).

        dqg = scale dO h^T,  dP = scale tril(dO v_new^T)

    What it says about v_new, scale P^T dO, is made where it is added up: in state_bwd.

    Args:
        v_new, h: as in the forward stages. do: [B, T, HV, V], gradient of o.
    Returns:
        dqg [B, T, HV, K] in v_new.dtype; dP [B, T, HV, C], which sums over keys that are alike
        multiply, in fp32 (fp64 for fp64 input).
    Source: chapter 11.
    """
    dtype = compute_dtype(v_new, h, do)
    T = v_new.shape[1]
    V, dO = (to_chunks(x.to(dtype), chunk_size) for x in (v_new, do))
    # eq:kda-dp   dP = scale tril(dO v_new^T)
    dP = scale * (dO @ V.mT).tril()
    # eq:kda-dqg   dqg = scale dO h^T
    dqg = scale * dO @ h.to(dtype).transpose(1, 2).mT
    return from_chunks(dqg, T).to(v_new.dtype), from_chunks(dP, T)


def kda_wy_bwd(
    v: Tensor, beta: Tensor, A: Tensor, h: Tensor, v_new: Tensor, dh: Tensor, dv_new: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The adjoint of what a chunk writes, and of what it leaves in the state.

        (I + L) v_new = diag(beta) V - kb S,  S <- diag(2^gc_last) S + kg^T v_new

    give

        Z   = A^T dv_new
        dV  = diag(beta) Z,      dkb = -Z S^T,          dL = -tril(Z v_new^T, -1)
        dkg = v_new dS^T,        dgl = rowsum(dS * S)

    kb = diag(beta) (2^gc * K) are the keys that read the state. With a gate for each channel of
    the value beta * V stands for diag(beta) V, and its gradient is Z * V.

    Args:
        v, A, h, v_new: as in the forward stages. beta: [B, T, HV], or the write gate
            [B, T, HV, V]. dh and dv_new: from state_bwd.
    Returns:
        dkg [B, T, HV, K], dv [B, T, HV, V], dL [B, T, HV, C] in v.dtype; dkb [B, T, HV, K], of
        which and of dbeta a large part may cancel, dbeta [B, T, HV], the part rowsum(Z * V), and
        dgl [B, NT, HV, K], the gradient of 2^gc_last, in fp32 (fp64 for fp64 input); of a write
        gate dbeta is the whole gradient, in its shape and dtype. The order is dkb, dkg, dv, dL,
        dbeta, dgl.
    Source: chapter 11.
    """
    dtype = compute_dtype(v, beta, A, h, v_new, dh, dv_new)
    T = beta.shape[1]
    V, b, A, Vn, dVn = (
        to_chunks(x.to(dtype), A.shape[-1]) for x in (v, by_channel(beta), A, v_new, dv_new)
    )
    S, dS = (x.to(dtype).transpose(1, 2) for x in (h, dh))
    # eq:kda-z   Z = A^T dv_new
    Z = A.mT @ dVn
    # eq:kda-dv   dV = diag(beta) Z
    dV = b * Z
    # eq:kda-dl   dL = -tril(Z v_new^T, -1)
    dL = -(Z @ Vn.mT).tril(-1)
    # eq:kda-dkb   dkb = -Z S^T
    dkb = -Z @ S.mT
    # eq:kda-dkg   dkg = v_new dS^T
    dkg = Vn @ dS.mT
    # eq:kda-dgl   dgl = rowsum(dS * S)
    dgl = (dS * S).sum(-1).transpose(1, 2).contiguous()
    dbeta = from_chunks((Z * V).sum(-1) if beta.ndim == 3 else Z * V, T)
    dbeta = dbeta if beta.ndim == 3 else dbeta.to(beta.dtype)
    dkb = from_chunks(dkb, T)
    dkg, dV, dL = (from_chunks(x, T).to(v.dtype) for x in (dkg, dV, dL))
    return dkb, dkg, dV, dL, dbeta, dgl
