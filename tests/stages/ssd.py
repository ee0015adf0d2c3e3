"""The stages of kernels/ssd."""

import torch

from stages.record import Stage, call


def _update(r):
    """A token of each sequence, with one number a head; with a number for each row and entry, in
    a pool."""
    x, dt, B = r.x[0], r.dt[0], r.B[0]
    A, D = r.A, r.rows
    (n, H, P), N = x.shape, B.shape[2]
    state, rates = torch.empty(n, H, P, N), torch.empty(H, P, N)
    one = dt[..., None], A[:, None, None], B, B, D[:, :1], x, A[:, None]
    slots = torch.empty(n, dtype=torch.int32)
    return [
        call(state, x, *one, softplus=True),
        call(state.to(x.dtype), x, x, rates, B, B, indices=slots),
    ]


STAGES = [
    Stage(
        "ssd/chunk_cumsum", "ssd",
        lambda r: call(r.dt, r.A, r.dt_bias, softplus=r.softplus, **r.chunks),
    ),
    Stage(
        "ssd/chunk_cumsum_bwd", "ssd",
        lambda r: call(r.gc, r.dlast, r.step, r.dt, r.A, r.dt_bias, softplus=r.softplus,
                       **r.chunks),
    ),
    Stage(
        "ssd/chunk_state", "ssd",
        lambda r: call(r.B, r.x, r.step, r.gc, r.seq_idx, **r.chunks),
    ),
    Stage(
        "ssd/state_passing", "ssd",
        lambda r: call(r.s, r.gc, r.h0, r.seq_idx, **r.chunks,
                       output_final_state=r.h0 is not None),
    ),
    Stage(
        "ssd/chunk_scan", "ssd",
        lambda r: call(r.C, r.B, r.x, r.step, r.gc, r.h, r.D, r.z, r.seq_idx,
                       **r.chunks),
    ),
    Stage(
        "ssd/chunk_scan_chunk_state_bwd_dx", "ssd",
        lambda r: call(r.C, r.B, r.x, r.step, r.gc, r.ds, r.dy, r.D, r.seq_idx,
                       **r.chunks),
    ),
    Stage(
        "ssd/chunk_scan_bwd_da_cs", "ssd",
        lambda r: call(r.C, r.B, r.x, r.step, r.gc, r.dy, r.seq_idx, **r.chunks),
    ),
    Stage(
        "ssd/chunk_scan_bwd_dstates", "ssd",
        lambda r: call(r.C, r.gc, r.dy, r.seq_idx, **r.chunks),
    ),
    Stage(
        "ssd/chunk_state_bwd_db", "ssd",
        lambda r: call(r.B, r.x, r.step, r.gc, r.ds, r.seq_idx, **r.chunks),
    ),
    Stage(
        "ssd/chunk_scan_bwd_dc", "ssd",
        lambda r: call(r.C, r.B, r.x, r.step, r.gc, r.h, r.dy, r.dB_state, r.seq_idx,
                       **r.chunks),
    ),
    Stage(
        "ssd/state_passing_bwd", "ssd",
        lambda r: call(r.dh_out, r.gc, r.h, r.dht, r.seq_idx, **r.chunks),
    ),
    Stage(
        "ssd/selective_state_update", "ssd", lambda r: _update(r)[0],
        more=lambda r: _update(r)[1:],
    ),
    # averages
    Stage(
        "ssd/ema", "ema",
        lambda r: call(r.x, r.g, r.gc, r.weight, r.h0, **r.chunks, **r.wanted),
    ),
    Stage(
        "ssd/ema_bwd", "ema",
        lambda r: call(r.x, r.g, r.gc, r.weight, r.h, r.dy, r.dht, **r.chunks),
    ),
]  # fmt: skip
