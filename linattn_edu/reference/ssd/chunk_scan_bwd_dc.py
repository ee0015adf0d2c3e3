"""Stage chunk_scan_bwd_dc: the adjoint of chunk_scan by C, and what the scores give to B."""

from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays
from linattn_edu.reference.tiles import compute_dtype, from_chunks, repeat_heads, to_chunks


def chunk_scan_bwd_dc(
    C: Tensor,
    B: Tensor,
    x: Tensor,
    step: Tensor,
    gc: Tensor,
    h: Tensor,
    dy: Tensor,
    dB_state: Tensor,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of C and B, and of gc through diag(e) C h.

        inter   = diag(e) dY h^T,   dgc_i = C_i . inter_i
        dscores = sum over the heads of a group of dY X^T * G * step
        dC      = sum over the heads of a group of inter + dscores B
        dB      = dB_state + dscores^T C

    Args:
        C, B, x, step, gc, h, seq_idx: as in chunk_scan.  dy: [B, T, H, P], gradient of y.
        dB_state: [B, T, G, N] of chunk_state_bwd_db.
    Returns:
        dC and dB [B, T, G, N] in C.dtype and B.dtype; dgc [B, T, H] in natural units, fp32 (fp64
        for fp64 input).
    Source: chapter 17.
    """
    dtype = compute_dtype(C, B, x, step, gc, h, dy, dB_state)
    T, H = x.shape[1:3]
    G = C.shape[2]
    e, decay, _, _ = decays(gc.to(dtype), seq_idx, chunk_size)
    C_, B_, dB, X, dY, step = (
        to_chunks(y.to(dtype), chunk_size) for y in (C, B, dB_state, x, dy, step)
    )
    # eq:ssd-dc-inter   inter = diag(e) dY h^T
    inter = e * (dY @ h.to(dtype).transpose(1, 2).mT)
    # eq:ssd-dgc-inter   dgc_i = C_i . inter_i
    dgc = (to_chunks(repeat_heads(C.to(dtype), H), chunk_size) * inter).sum(-1)
    # eq:ssd-dscores   dscores = sum over heads of dY X^T * G * step
    dscores = (dY @ X.mT) * decay * step[..., None, :]
    dscores, inter = (y.unflatten(1, (G, -1)).sum(2) for y in (dscores, inter))
    # eq:ssd-dc   dC = inter + dscores B
    dC = inter + dscores @ B_
    # eq:ssd-db   dB = dB_state + dscores^T C
    dB = dB + dscores.mT @ C_
    return from_chunks(dC, T).to(C.dtype), from_chunks(dB, T).to(B.dtype), from_chunks(dgc, T)
