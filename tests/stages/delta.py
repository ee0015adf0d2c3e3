"""The stages of kernels/delta."""

from types import SimpleNamespace

import torch

from stages.record import SCALE, Stage, Table, call

# what a layer may give of its gate
GATES = (
    {"A_log": "one", "dt_bias": "bias"},
    {"A_log": "one", "dt_bias": "bias", "lower_bound": -5.0},
    {"dt_bias": "bias", "lower_bound": -5.0},
)
LAYER = {"gk": "gk", **GATES[0], "initial_state": "h0"}
POOL = {
    "indices": "slots", "accepted": "accepted", "lower_bound": -5.0, "normalise": True,
    "v_first": True, "inplace": True,
}  # fmt: skip
RING = {
    "gk": "gk", **GATES[0], "lower_bound": -5.0, "normalise": True, "sigmoid": 2,
}  # fmt: skip
CONVOLUTION = {"activation": "activation"}


def with_gates(names):
    """A call of these parts with the gate of a layer, in each of its forms."""
    return [call(names, "chunks", **g) for g in GATES]


def layer_gates(names):
    """The same where there are no chunks."""
    return [call(names, **{"A_log": None, **g}) for g in GATES]


def two_heads(f):
    """The call with two value heads on each q/k head."""

    def double(n, x):
        cut = isinstance(x, torch.Tensor) and x.ndim > 2 and n not in ("q", "k")
        return torch.cat([x, x], 2) if cut else x

    return lambda r: f(SimpleNamespace(**{n: double(n, x) for n, x in vars(r).items()}))


def narrow(r):
    """Whether a filter is one that a token's update knows."""
    return r.width < 8


def fine(r):
    """Whether stages with a gate for each channel take these heads in halves of bfloat16."""
    return r.fine


def halved(f):
    """The call in halves."""

    def of(r):
        args, named = f(r)
        return args, named | {"precision": "halves"}

    return of


def in_16(f):
    """The call in halves with what a user gives, and dO, in bfloat16."""

    def rounded(r):
        given = {n: getattr(r, n).bfloat16() for n in ("q", "k", "v", "do")}
        return halved(f)(SimpleNamespace(**vars(r) | given))

    return rounded


_kda_intra_bwd = call("q k beta gc dP dL dqg dkb dkg dgl dbeta")

STAGES = [
    # with one gate a head
    Stage("delta/gate_cumsum", "gdn", call("g", "chunks")),
    Stage("delta/solve", "gdn", call("k beta", "chunks"), tables=(Table("solve"),)),
    Stage("delta/solve", "gdn", call("A"), "solve_tril"),
    Stage("delta/wy", "gdn", call("k v beta gc A"), tables=(Table("wy"),)),
    Stage("delta/state", "gdn", call("k w u gc h0", "chunks", output_final_state=True),
          tables=(Table("state", by="dim"),)),
    Stage("delta/output", "gdn", call("q k v_new h gc", "scaled"), tables=(Table("output"),)),
    Stage("delta/output_bwd", "gdn", call("q k v_new h gc do", "scaled"),
          tables=(Table("output_bwd", by="value", run=("backward",)),)),
    Stage("delta/state_bwd", "gdn", call("q k w gc do dv_out dht", "scaled"),
          tables=(Table("state_bwd", by="dim", run=("backward",)),)),
    Stage("delta/wy_bwd", "gdn", call("k v beta gc A h v_new dh dv_new dk_out dgc_out"), adds=2,
          tables=(Table("wy_bwd", by="value", run=("backward",)),)),
    Stage("delta/gate_bwd", "gdn", call("gc g one one", "chunks")),
    Stage("delta/gate", "gdn", call("g one one")),
    Stage("delta/gate", "gdn", call("gc g one one"), "layer_gate_bwd"),
    Stage("delta/cumsum", "gdn", call("g", "chunks"),
          more=[call("g", chunk_size=1), call("g", chunk_size=512)]),
    Stage("delta/cumsum", "gdn", call("g"), "global_cumsum", more=[call("g", reverse=True)]),
    Stage("delta/l2norm", "gdn", call("q")),
    Stage("delta/l2norm", "gdn", call("q rstd k"), "l2norm_bwd"),
    Stage("delta/cp_merge", "gdn", call("k w u gc h0", "chunks"), "piece_map",
          tables=(Table("piece_map", "MAP_CONFIGS", "dim", ("pieces",)),)),
    Stage("delta/cp_merge", "gdn", call("S M"), more=[call("S number")]),
    Stage("delta/cp_merge", "gdn", call("S number h0"), "cp_join"),
    Stage("delta/cp_merge_bwd", "gdn", call("q k w gc do dv_out dht", "scaled"), "piece_map_bwd",
          tables=(Table("piece_map_bwd", "MAP_CONFIGS", "dim", ("backward", "pieces")),)),
    Stage("delta/cp_merge_bwd", "gdn", call("S M"), more=[call("S number")]),
    Stage("delta/cp_merge_bwd", "gdn", call("S number h0"), "cp_join_bwd"),
    Stage("delta/recurrent", "recurrent", call("q k v g beta", initial_state="h0"),
          more=[call("q k v - beta", **LAYER), call("q k v - beta", **LAYER, **POOL)]),
    Stage("delta/recurrent", "recurrent",
          call("q k v g beta v h0", gk="gk_wide", gv="gv_wide", initial_state="h0"),
          "recurrent_bwd"),
    Stage("delta/replay", "recurrent",
          call("q k v g beta h0 keys writes decays counts", length=16, normalise=True),
          more=[call("q k v - beta h0 keys writes decays_wide counts accepted accepted",
                     length=16, **RING),
                call("q k v - beta h0 keys keys decays_wide counts", length=16, v_first=True,
                     **RING)]),
    Stage("delta/replay", "recurrent", call("h0 keys writes decays counts accepted"), "commit",
          more=[call("h0 keys writes decays_wide counts accepted accepted", v_first=True)]),
    # with a gate for each channel
    Stage("delta/gate_cumsum", "kda", call("g", "chunks"), more=with_gates("g")),
    Stage("delta/gate_bwd", "kda", call("gc g", "chunks"), more=with_gates("gc g")),
    Stage("delta/gate", "kda", layer_gates("g")[0], more=layer_gates("g")),
    Stage("delta/gate", "kda", layer_gates("gc g")[0], "layer_gate_bwd",
          more=layer_gates("gc g")),
    Stage("delta/kda_intra", "kda", call("q k beta gc", "chunks"),
          more=[call("q k beta gc", "chunks", lower_bound=-5.0)], tables=(Table("kda_intra"),)),
    Stage("delta/wy", "kda", call("k v beta gc A q"), tables=(Table("kda_wy", "CHANNEL_CONFIGS"),)),
    Stage("delta/state", "kda", call("kg w u gc h0", "chunks", output_final_state=True),
          tables=(Table("kda_state", by="dim"),)),
    Stage("delta/output", "kda", call("qg kg v_new h gc P", "scaled"),
          tables=(Table("kda_output"),)),
    Stage("delta/kda_scan", "kda", call("qg kg w u gc P h0", scale=SCALE, output_final_state=True),
          tables=(Table("kda_scan", by="dim"),)),
    Stage("delta/kda_bwd", "kda", call("v_new h do", "scaled"), "kda_output_bwd",
          tables=(Table("kda_bwd", by="value", run=("backward",)),)),
    Stage("delta/kda_bwd", "kda", call("v beta A h v_new dh dv_new"), "kda_wy_bwd"),
    Stage("delta/kda_scans", "kda", call("qg kg w u gc P do h0 dht", scale=SCALE),
          tables=(Table("kda_scans", by="dim", run=("backward",)),)),
    Stage("delta/state_bwd", "kda", call("qg kg w gc do - dht", "scaled", P="P"),
          tables=(Table("kda_state_bwd", "CHANNEL_CONFIGS", "dim", ("backward",)),)),
    Stage("delta/kda_intra_bwd", "kda", _kda_intra_bwd, adds=1, more=[two_heads(_kda_intra_bwd)],
          tables=(Table("kda_intra_bwd", run=("backward",)),)),
    Stage("delta/cp_merge", "kda", call("kg w u gc h0", "chunks"), "piece_map",
          tables=(Table("kda_piece_map", "MAP_CONFIGS", "dim", ("pieces",)),)),
    Stage("delta/cp_merge_bwd", "kda", call("qg kg w gc do - dht P", "scaled"), "piece_map_bwd",
          tables=(
              Table("kda_piece_map_bwd", "MAP_CHANNEL_CONFIGS", "dim", ("backward", "pieces")),
          )),
    # with gates of channels for what is erased, as beta, and written
    Stage("delta/kda_intra", "gdn2", call("q k beta gc", "chunks"),
          more=[call("q k beta gc", "chunks", lower_bound=-5.0)]),
    Stage("delta/wy", "gdn2", call("k v beta gc A q write")),
    Stage("delta/kda_bwd", "gdn2", call("v write A h v_new dh dv_new"), "kda_wy_bwd"),
    Stage("delta/kda_intra_bwd", "gdn2", call("q k beta gc dP dL dqg dkb dkg dgl")),
    Stage("delta/recurrent", "gdn2", call("q k v - beta", gk="g", write="write",
                                          initial_state="h0"),
          more=[call("q k v - beta", **{**LAYER, "gk": "k"}, write="write", **POOL)]),
    Stage("delta/recurrent", "gdn2",
          call("q k v - beta v h0", gk="g", write="write", initial_state="h0"), "recurrent_bwd"),
    # the same where fp32 is multiplied in halves
    Stage("delta/kda_intra", "kda", in_16(call("q k beta gc", "chunks")), when=fine,
          more=[halved(call("q k beta gc", "chunks"))]),
    Stage("delta/kda_intra_bwd", "kda", in_16(_kda_intra_bwd), adds=1, when=fine,
          more=[halved(_kda_intra_bwd)]),
    Stage("delta/kda_intra", "gdn2", in_16(call("q k beta gc", "chunks")), when=fine),
    Stage("delta/kda_intra_bwd", "gdn2",
          in_16(call("q k beta gc dP dL dqg dkb dkg dgl")), when=fine),
    # what a layer has beside
    Stage("delta/causal_conv1d", "convolution",
          call("x weight bias state", output_final_state="ends", **CONVOLUTION)),
    Stage("delta/causal_conv1d", "convolution",
          call("x weight bias state seq_idx", output_final_state="ends", **CONVOLUTION),
          when=narrow),
    Stage("delta/causal_conv1d", "convolution",
          call("x weight bias state x state", **CONVOLUTION), "causal_conv1d_bwd"),
    Stage("delta/causal_conv1d", "convolution",
          call("x weight bias state x state seq_idx", **CONVOLUTION), "causal_conv1d_bwd",
          when=narrow),
    Stage("delta/causal_conv1d_update", "convolution",
          call("own x weight bias slots", **CONVOLUTION), when=narrow,
          more=[call("pool x weight bias - slots", **CONVOLUTION)]),
    Stage("delta/rms_norm_gated", "norm", call("x weight weight z", "kinds")),
    Stage("delta/rms_norm_gated", "norm", call("x weight weight z rstd x", "kinds"),
          "rms_norm_gated_bwd"),
]  # fmt: skip
