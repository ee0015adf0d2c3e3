"""Stage state_passing_bwd: carry the gradient of the state back from chunk to chunk."""

import torch
from torch import Tensor

from linattn_edu.reference.ssd.chunk_cumsum import decays


def state_passing_bwd(
    dh_out: Tensor,
    gc: Tensor,
    h: Tensor,
    dht: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of what each chunk adds, and of its decay.

        ds_c = dh_(c+1),   dh_c = dh_out_c + a_c dh_(c+1),   dlast_c = a_c <h_c, dh_(c+1)>

    from dh_NT = dht; dlast is the gradient of the chunk's log decay, gc_last in natural units.

    Args:
        dh_out: [B, NT, H, N, P] of chunk_scan_bwd_dstates.  gc: [B, T, H] (log2).
        h: [B, NT, H, N, P] of state_passing.  dht: [B, H, N, P], zero if None.
        seq_idx: as in chunk_state.
    Returns:
        ds like dh_out; dlast [B, NT, H]; dh0 [B, H, N, P], the gradient of the initial state.
    Source: chapter 15.
    """
    _, _, _, a = decays(gc.to(dh_out.dtype), seq_idx, chunk_size)
    dS = torch.zeros_like(dh_out[:, 0]) if dht is None else dht.to(dh_out.dtype)
    ds, dlast = [], []
    for c in reversed(range(dh_out.shape[1])):
        # eq:ssd-ds   ds_c = dh_(c+1)
        ds.append(dS)
        # eq:ssd-dlast   dlast_c = a_c <h_c, dh_(c+1)>
        dlast.append((a[:, :, c] * h[:, c] * dS).sum((-1, -2)))
        # eq:ssd-dh   dh_c = dh_out_c + a_c dh_(c+1)
        dS = dh_out[:, c] + a[:, :, c] * dS
    return torch.stack(ds[::-1], 1), torch.stack(dlast[::-1], 1), dS
