"""The stages of kernels/fused, and others as the fused sets call them."""

import torch

from stages.delta import two_heads, with_gates
from stages.record import SCALE, Stage, Table, call


def held(r):
    """Whether a multiprocessor holds what the fused stages keep."""
    return r.held


def held_bf16(r):
    return r.held and r.q.dtype == torch.bfloat16


def _scan_call(r):
    args = r.q, r.k, r.v, r.gc, r.P, r.A, r.h0
    return call(*args, scale=SCALE, output_final_state=True)


def _intra_bwd(r):
    args = r.q, r.k, r.v, r.beta, r.gc, r.h, r.do, r.v_new, r.dh, r.dv_new
    return call(*args, **r.scaled)


STAGES = [
    # Gated DeltaNet
    Stage(
        "fused/gdn_intra", "gdn",
        lambda r: call(r.q, r.k, r.beta, r.gc, **r.chunks, return_inverse=True),
        "intra_chunk",
        more=lambda r: [
            call(r.q, r.k, r.beta, r.gc, **r.chunks, return_inverse=True, gated=True)
        ] * r.held,
        tables=(
            Table("scores", "SCORES_CONFIGS", run=("fused",)),
            Table("resolvent", "RESOLVENT_CONFIGS", run=("fused",)),
        ),
    ),
    Stage(
        "fused/gdn_fwd", "gdn", _scan_call, "scan", pieces=True,
        tables=(Table("scan", "SCAN_CONFIGS", "dim", ("fused",)),),
    ),
    Stage(
        "fused/gdn_fwd", "gdn", lambda r: call(r.k, r.v, r.gc, r.A, r.h0), "scan_map",
        more=lambda r: [call(r.k, r.v, r.gc, r.A, r.h0, r.g)] * r.held,
        tables=(Table("scan_map", "SCAN_CONFIGS", "dim", ("fused", "pieces")),),
    ),
    Stage(
        "fused/gdn_scans", "gdn", lambda r: call(r.k, r.v, r.beta, r.gc, r.A, r.h0),
        "scan_states", when=held, pieces=True,
    ),
    Stage(
        "fused/gdn_scans", "gdn",
        lambda r: call(r.q, r.k, r.beta, r.gc, r.P, r.A, r.do, r.dht, scale=SCALE),
        "scan_bwd", when=held, pieces=True,
    ),
    Stage(
        "fused/gdn_scans", "gdn",
        lambda r: call(r.q, r.k, r.v, r.beta, r.gc, r.P, r.A, r.do, r.h0, r.dht, scale=SCALE),
        "scans", when=held, pieces=True,
    ),
    Stage(
        "fused/gdn_scans", "gdn",
        lambda r: call(r.q, r.k, r.beta, r.gc, r.P, r.A, r.do, r.dht, scale=SCALE),
        "scan_map_bwd", when=held,
    ),
    Stage(
        "fused/gdn_bwd", "gdn", _intra_bwd, "intra_chunk_bwd", when=held,
        more=two_heads(_intra_bwd),
    ),
    # Kimi Delta Attention
    Stage(
        "fused/kda_scans", "kda", lambda r: call(r.q, r.k, r.g, **r.chunks),
        "kda_gates", more=with_gates("q", "k", "g"), when=held,
    ),
    Stage(
        "fused/kda_fwd", "kda", lambda r: call(r.q, r.k, r.beta, r.gc, **r.chunks),
        "kda_prepare", when=held,
        more=lambda r: [call(r.q, r.k, r.beta, r.gc, **r.chunks, lower_bound=-5.0)],
    ),
    Stage(
        "fused/kda_fwd", "kda",
        lambda r: call(r.qg, r.kg, r.k, r.v, r.beta, r.gc, r.P, r.A, r.h0, scale=SCALE,
                       output_final_state=True),
        "kda_fused_scan", when=held,
    ),
    Stage(
        "fused/kda_fwd", "kda", lambda r: call(r.kg, r.k, r.v, r.beta, r.gc, r.A, r.h0),
        "kda_fused_scan_map", when=held,
    ),
    Stage(
        "fused/kda_scans", "kda",
        lambda r: call(r.qg, r.kg, r.k, r.v, r.beta, r.gc, r.P, r.A, r.do, r.h0, r.dht,
                       scale=SCALE),
        "kda_fused_scans", when=held,
    ),
    Stage(
        "fused/kda_scans", "kda",
        lambda r: call(r.qg, r.kg, r.k, r.beta, r.gc, r.P, r.A, r.do, r.dht, scale=SCALE),
        "kda_fused_scan_map_bwd", when=held,
    ),
    Stage(
        "fused/kda_bwd", "kda", _intra_bwd, "kda_fused_intra_bwd", when=held_bf16,
        more=two_heads(_intra_bwd),
    ),
    # Mamba-2, and the stages that its fused sets share with the delta rule and the staged
    Stage(
        "ssd/chunk_cumsum", "ssd_fused",
        lambda r: call(r.dt, r.A, r.dt_bias, softplus=True, **r.chunks),
        "chunk_cumsum_log",
    ),
    Stage(
        "ssd/chunk_cumsum_bwd", "ssd_fused",
        lambda r: call(r.gc, r.dlast, r.step, r.dt, r.A, r.dt_bias, r.step, softplus=True,
                       **r.chunks),
    ),
    Stage(
        "fused/ssd_fwd", "ssd_fused", lambda r: call(r.C, r.B, **r.chunks),
        "chunk_scores", more=lambda r: [call(r.C, r.B, r.ids, **r.chunks)],
    ),
    Stage(
        "fused/ssd_fwd", "ssd_fused",
        lambda r: call(r.C, r.B, r.scores, r.x, r.gs, r.gc, None, r.D, r.z, r.seq_idx),
        more=lambda r: [
            call(r.long.C, r.long.C, r.scores, r.long.x, r.long.gc, r.long.gc, r.dht, r.D,
                 r.long.z, r.seq_idx, output_final_state=True)
        ],
    ),
    Stage(
        "delta/state", "ssd_fused",
        lambda r: call(r.B, None, r.x, r.gc, r.dht, r.gs, r.seq_idx, output_final_state=True,
                       **r.chunks),
    ),
    Stage(
        "delta/state_bwd", "ssd_fused",
        lambda r: call(r.C, None, None, r.gc, r.dy, None, r.dht, r.seq_idx, r.h, **r.scaled),
    ),
    Stage(
        "delta/cp_merge", "ssd_fused",
        lambda r: call(r.B, None, r.x, r.gc, r.dht, r.gs, **r.chunks), "piece_map",
    ),
    Stage(
        "delta/cp_merge_bwd", "ssd_fused",
        lambda r: call(r.C, None, None, r.gc, r.dy, None, r.dht, **r.scaled),
        "piece_map_bwd",
    ),
    Stage(
        "fused/ssd_bwd", "ssd_fused",
        lambda r: call(r.C, r.B, r.x, r.gs, r.gc, r.h, r.h, r.dy, r.seq_idx,
                       **r.chunks),
        "ssd_bwd_bc",
    ),
    Stage(
        "fused/ssd_bwd", "ssd_fused",
        lambda r: call(r.C, r.B, r.x, r.gs, r.gc, r.h, r.dy, r.step, r.step, r.D, r.seq_idx,
                       **r.chunks),
        "ssd_bwd_dx",
    ),
]  # fmt: skip
