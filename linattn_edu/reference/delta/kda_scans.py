"""Stage kda_scans: the states again, and their gradients, which read nothing of each other."""

from torch import Tensor

from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd


def kda_scans(
    qg: Tensor,
    kg: Tensor,
    w: Tensor,
    u: Tensor,
    gc: Tensor,
    P: Tensor,
    do: Tensor,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """state and state_bwd with a gate for each channel: the kernel runs them at once.

        v_new  = u - w S
        S     <- diag(2^gc_last) S + kg^T v_new
        dv_new = scale P^T dO + kg dS
        dS    <- diag(2^gc_last) dS + scale qg^T dO - w^T dv_new

    Args:
        qg, kg, w, u: from wy. gc: [B, T, HV, K] log2. P: from kda_intra.
        initial_state: [B, HV, K, V], zero if None.
        do: [B, T, HV, V], gradient of o. dht: [B, HV, K, V], of the final state, zero if None.
    Returns:
        h [B, NT, HV, K, V] and v_new [B, T, HV, V] of state; dh like h, dv_new like v_new and dh0
        [B, HV, K, V] of state_bwd.
    Source: chapter 12b.
    """
    options = {"chunk_size": P.shape[-1]}
    # eq:kda-dv-out   dv_new = scale P^T dO
    # eq:delta-dv-new   dv_new += diag(2^(gc_last - gc)) K dS
    # eq:delta-ds   dS <- 2^gc_last dS + scale (diag(2^gc) Q)^T dO - w^T dv_new
    back = state_bwd(qg, kg, w, gc, do, None, dht, P=P, scale=scale, **options)
    # eq:delta-v-new   v_new = u - w S
    # eq:delta-state   S <- 2^gc_last S + (diag(2^(gc_last - gc)) K)^T v_new
    h, v_new, _ = state(kg, w, u, gc, initial_state, **options)
    return h, v_new, *back
