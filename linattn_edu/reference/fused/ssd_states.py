"""The states of Mamba-2 between its chunks, and their gradients, for the backward pass."""

from torch import Tensor

from linattn_edu.reference.delta.state import state
from linattn_edu.reference.delta.state_bwd import state_bwd


def ssd_states(
    B: Tensor,
    x: Tensor,
    gs: Tensor,
    gc: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> Tensor:
    """The state before each chunk: `state` without a correction.

        h <- a h + (diag(r * step) B)^T X

    Args:
        B, x, gs, gc, seq_idx: as in ssd_fwd.  initial_state: [B, H, N, P], zero if None.
    Returns:
        h [B, NT, H, N, P] in the dtype of B.
    Source: chapters 15 and 13.
    """
    # eq:ssd-scan   h <- a h + (diag(r * step) B)^T X
    return state(B, None, x, gc, initial_state, gs, seq_idx, chunk_size=chunk_size)[0]


def ssd_states_bwd(
    C: Tensor,
    gc: Tensor,
    dy: Tensor,
    dht: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """The gradient of the state after each chunk: `state_bwd` without a correction.

        dh <- a dh + (diag(e) C)^T dY

    Args:
        C, gc, seq_idx: as in ssd_fwd.  dy: [B, T, H, P], gradient of y.
        dht: [B, H, N, P], gradient of the final state, zero if None.
    Returns:
        dh [B, NT, H, N, P] in the dtype of C; and dh0 [B, H, N, P], that of the initial state, in
        fp32 (fp64 for fp64 input).
    Source: chapters 15 and 09.
    """
    args, options = (C, None, None, gc, dy, None, dht, seq_idx), {"chunk_size": chunk_size}
    # eq:delta-ds   dh <- a dh + (diag(e) C)^T dY
    dh, _, dh0 = state_bwd(*args, scale=1.0, **options)
    return dh, dh0
