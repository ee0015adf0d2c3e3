"""The stages of kernels/fused, and others as the fused sets call them."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from stages.delta import fine, two_heads, with_gates
from stages.record import SCALE, Stage, Table, call


def held(r):
    """Whether a multiprocessor holds what the fused stages keep."""
    return r.held


def halved(r):
    """Whether it holds them in halves."""
    return r.halved


def held_bf16(r):
    return r.held and r.q.dtype == torch.bfloat16


def some(r):
    """Whether some heads may be kept in halves of rows with the gate in them."""
    return r.some


def pair(x):
    """Both halves of x in bfloat16, the high ones and then the low ones."""
    high = x.bfloat16()
    return torch.cat([high, (x - high).bfloat16()], -1)


ROUNDED, PAIRS = "q k v do qg h dh", "kd kg v_new Z"


def paired(f):
    """The call in halves, with what a user gives, and dO and states in bfloat16."""

    def of(r):
        known = {n: x for n, x in vars(r).items() if isinstance(x, torch.Tensor)}
        halves = {n: pair(known[n]) for n in PAIRS.split() if n in known}
        rounded = {n: known[n].bfloat16() for n in ROUNDED.split() if n in known}
        args, named = f(SimpleNamespace(**vars(r) | halves | rounded))
        return args, named | {"fine": True}

    return of


_finding = call("q k beta g", "chunks", cancelling=True)
_intra_bwd = call("q k v beta gc h v_new do dh Z", "scaled")

STAGES = [
    # Gated DeltaNet
    Stage("fused/gdn_intra", "gdn_fused",
          call("q k beta gc", "chunks", return_inverse=True), "intra_chunk",
          tables=(Table("scores", "SCORES_CONFIGS", run=("fused",)),
                  Table("resolvent", "RESOLVENT_CONFIGS", run=("fused",)))),
    Stage("fused/gdn_intra", "gdn_fused",
          call("q k beta gc", "chunks", return_inverse=True, gated=True), "intra_chunk", when=held),
    Stage("fused/gdn_fwd", "gdn_fused",
          call("q k v gc P R h0", scale=SCALE, output_final_state=True), "scan", pieces=True,
          tables=(Table("scan", "SCAN_CONFIGS", "dim", ("fused",)),)),
    Stage("fused/gdn_fwd", "gdn_fused",
          call("q k v beta gc h0", "chunks", scale=SCALE, output_final_state=True, keep=True),
          "chunk_fwd", when=held, pieces=True,
          more=[call("q k v beta gc h0", "chunks", scale=SCALE, cancelling=True)]),
    Stage("fused/gdn_fwd", "gdn_fused", call("k v gc AG h0"), "scan_map",
          tables=(Table("scan_map", "SCAN_CONFIGS", "dim", ("fused", "pieces")),)),
    Stage("fused/gdn_fwd", "gdn_fused", call("k v gc AG h0 beta"), "scan_map", when=held),
    Stage("fused/gdn_scans", "gdn_fused", call("k v beta gc AG h0"), "scan_states", when=held,
          pieces=True),
    Stage("fused/gdn_scans", "gdn_fused", call("q k beta gc P AG do dht", scale=SCALE), "scan_bwd",
          when=held, pieces=True),
    Stage("fused/gdn_scans", "gdn_fused", call("q k v beta gc P AG do h0 dht", scale=SCALE),
          "scans", when=held, pieces=True),
    Stage("fused/gdn_scans", "gdn_fused", call("q k beta gc P AG do dht", scale=SCALE),
          "scan_map_bwd", when=held),
    Stage("fused/gdn_bwd", "gdn_fused", _intra_bwd, "intra_chunk_bwd", when=held,
          more=[two_heads(_intra_bwd)]),
    Stage("fused/gdn_bwd", "gdn_fused", call("q k v beta gc P AG do h0 dht", scale=SCALE),
          "chunk_bwd", when=held),
    # the same with low halves
    Stage("fused/cancel", "gdn_fused", call("P AG beta", heads=1), "cancels", when=held),
    Stage("fused/cancel", "gdn_fused", call("cancels k", "chunks"), "those", when=held),
    Stage("fused/gdn_intra", "gdn_fused", call("q k beta gc", "chunks"), "intra_halves",
          when=halved, more=[call("q k beta gc only halves", "chunks")]),
    Stage("fused/gdn_fwd", "gdn_fused",
          call("q k v gc P AG h0 beta halves", scale=SCALE, output_final_state=True), "scan",
          when=halved, more=[call("q k v gc P AG h0 beta halves ways put", scale=SCALE)]),
    Stage("fused/gdn_scans", "gdn_fused", call("q k v beta gc P AG do h0 dht halves", scale=SCALE),
          "scans", when=halved),
    Stage("fused/gdn_bwd", "gdn_fused", call("q k v beta gc h v_new do dh Z low", "scaled"),
          "intra_chunk_bwd", when=halved),
    Stage("fused/gdn_bwd", "gdn_fused",
          call("q k v beta gc P AG do h0 dht halves cancels", scale=SCALE), "chunk_bwd",
          when=halved),
    # Kimi Delta Attention
    Stage("fused/kda_scans", "kda_fused", call("q k g", "chunks"), "kda_gates",
          more=with_gates("q k g"), when=held),
    Stage("fused/kda_fwd", "kda_fused", call("q k beta gc", "chunks"), "kda_prepare", when=held,
          more=[call("q k beta gc", "chunks", lower_bound=-5.0)]),
    Stage("fused/kda_fwd", "kda_fused", call("q k beta g", "chunks"), "kda_gate_prepare",
          when=held, more=[*with_gates("q k beta g"), _finding]),
    Stage("fused/kda_fwd", "kda_fused",
          call("qg kg kd v beta gc P A h0", scale=SCALE, output_final_state=True), "kda_fused_scan",
          when=held),
    Stage("fused/kda_fwd", "kda_fused", call("kg kd v beta gc A h0"), "kda_fused_scan_map",
          when=held),
    Stage("fused/kda_scans", "kda_fused", call("qg kg kd v beta gc P A do h0 dht", scale=SCALE),
          "kda_fused_scans", when=held),
    Stage("fused/kda_scans", "kda_fused", call("qg kg kd beta gc P A do dht", scale=SCALE),
          "kda_fused_scan_map_bwd", when=held),
    Stage("fused/kda_bwd", "kda_fused", call("v h v_new do dh Z", "scaled"), "kda_outer_bwd",
          when=held_bf16),
    Stage("fused/kda_bwd", "kda_fused", _intra_bwd, "kda_fused_intra_bwd", adds=1,
          when=held_bf16, more=[two_heads(_intra_bwd)]),
    Stage("fused/kda_bwd", "kda_fused", call("q k v beta gc h v_new do dh Z g", "scaled"),
          "kda_intra_gate_bwd", adds=2, when=held_bf16),
    # the same with gates of channels: an erase gate in the place of beta with keys, a write gate
    # with values
    Stage("fused/kda_scans", "gdn2_fused", call("q k g - - beta", "chunks"), "kda_gates",
          when=held),
    Stage("fused/kda_fwd", "gdn2_fused", call("q k beta gc", "chunks"), "kda_prepare", when=held),
    Stage("fused/kda_fwd", "gdn2_fused", call("q k beta g", "chunks"), "kda_gate_prepare",
          when=held, more=[_finding]),
    Stage("fused/kda_fwd", "gdn2_fused",
          call("qg kg kd v write gc P A h0", scale=SCALE, output_final_state=True),
          "kda_fused_scan", when=held),
    Stage("fused/kda_fwd", "gdn2_fused", call("kg kd v write gc A h0"), "kda_fused_scan_map",
          when=held),
    Stage("fused/kda_scans", "gdn2_fused", call("qg kg kd v write gc P A do h0 dht", scale=SCALE),
          "kda_fused_scans", when=held),
    Stage("fused/kda_scans", "gdn2_fused", call("qg kg kd write gc P A do dht", scale=SCALE),
          "kda_fused_scan_map_bwd", when=held),
    Stage("fused/kda_bwd", "gdn2_fused", call("v h v_new do dh Z write", "scaled"),
          "kda_outer_bwd", when=held_bf16),
    Stage("fused/kda_bwd", "gdn2_fused", call("q k v beta gc h v_new do dh Z write", "scaled"),
          "kda_fused_intra_bwd", adds=2, when=held_bf16),
    Stage("fused/kda_bwd", "gdn2_fused",
          call("q k v beta gc h v_new do dh Z g - - write", "scaled"), "kda_intra_gate_bwd",
          adds=5, when=held_bf16),
    # in halves where numbers cancel
    Stage("fused/kda_halves", "kda_fused", call("q items", "chunks"), "unit_rows", when=held),
    Stage("fused/kda_halves", "kda_fused", call("q k v beta g - - - h0", "chunks", scale=SCALE),
          when=some, more=[call("q k v beta g - - - h0 raw", "chunks", scale=SCALE)]),
    Stage("fused/kda_halves", "kda_fused",
          call("q k v beta g inner whole cancels do - - - h0 dht", "scaled"), "kda_halves_bwd",
          when=some,
          more=[call("q k v beta g inner whole cancels do - - - h0 dht raw", "scaled")]),
    Stage("fused/kda_halves", "gdn2_fused",
          call("q k v beta g - - write h0", "chunks", scale=SCALE), when=some),
    Stage("fused/kda_halves", "gdn2_fused",
          call("q k v beta g inner whole cancels do - - write h0 dht", "scaled"),
          "kda_halves_bwd", when=some),
    # Mamba-2, and the stages that its fused sets share with the delta rule and the staged
    Stage("ssd/chunk_cumsum", "ssd_fused", call("dt A dt_bias", "chunks", softplus=True),
          "chunk_cumsum_log"),
    Stage("ssd/chunk_cumsum_bwd", "ssd_fused",
          call("gc dlast step dt A dt_bias step", "chunks", softplus=True)),
    Stage("fused/ssd_fwd", "ssd_fused", call("C B seq_idx", "chunks"), "chunk_scores"),
    Stage("fused/ssd_fwd", "ssd_fused",
          call("C B scores x gs gc h0 D z seq_idx", output_final_state="ends"),
          more=[call("long.C long.C scores long.x long.gc long.gc dht D z seq_idx",
                     output_final_state=True)]),
    Stage("delta/state", "ssd_fused",
          call("B - x gc dht gs seq_idx", "chunks", output_final_state=True)),
    Stage("delta/state_bwd", "ssd_fused", call("C - - gc dy - dht seq_idx", "scaled")),
    Stage("fused/ssd_states", "ssd_fused", call("B x gs gc h0 seq_idx", "chunks")),
    Stage("fused/ssd_states", "ssd_fused", call("C gc dy dht seq_idx", "chunks"), "ssd_states_bwd"),
    Stage("fused/ssd_fwd", "ssd_fused", call("B x gs gc", "chunks", piece="piece"), "ssd_ends"),
    Stage("fused/ssd_bwd", "ssd_fused", call("C gc dy", "chunks", piece="piece"), "ssd_ends_bwd"),
    Stage("delta/cp_merge", "ssd_fused", call("B - x gc dht gs", "chunks"), "piece_map"),
    Stage("delta/cp_merge_bwd", "ssd_fused", call("C - - gc dy - dht", "scaled"), "piece_map_bwd"),
    Stage("fused/ssd_bwd_dc", "ssd_fused", call("C gc h dh dy seq_idx", "chunks")),
    Stage("fused/ssd_bwd", "ssd_fused", call("C B x gs gc dh dy inter dgc D seq_idx", "chunks"),
          "ssd_bwd_dx"),
]  # fmt: skip

# the same stages on rows of both halves
IN_HALVES = (
    "kda_gates", "kda_fused_scan", "kda_fused_scan_map", "kda_fused_scans",
    "kda_fused_scan_map_bwd", "kda_outer_bwd", "kda_fused_intra_bwd", "kda_intra_gate_bwd",
)  # fmt: skip
STAGES += [
    replace(s, call=paired(s.call), more=[paired(f) for f in s.more], when=fine)
    for s in STAGES
    if s.name in IN_HALVES
]
