"""The stages of kernels/delta."""

from types import SimpleNamespace

import torch

from stages.record import SCALE, Stage, Table, call


def gates(r):
    bias = {"A_log": r.one, "dt_bias": r.bias}
    return bias, {**bias, "lower_bound": -5.0}, {"dt_bias": r.bias, "lower_bound": -5.0}


def with_gates(*names):
    """The calls of a stage that reads these parts and then a gate of each kind."""

    def calls(r):
        args = [getattr(r, n) for n in names]
        return [call(*args, **given, **r.chunks) for given in gates(r)]

    return calls


def layer_gates(*names):
    """The same where the gate is all there is."""
    return lambda r: [
        call(*(getattr(r, n) for n in names), **{"A_log": None, **g}) for g in gates(r)
    ]


def two_heads(f):
    """The call again with two value heads on each q/k head."""

    def calls(r):
        double = {
            n: torch.cat([x, x], 2) for n, x in vars(r).items()
            if isinstance(x, torch.Tensor) and x.ndim > 2 and n not in ("q", "k")
        }  # fmt: skip
        return [f(SimpleNamespace(**{**vars(r), **double}))]

    return calls


def _recurrent(r):
    layer = {"gk": r.gk, "A_log": r.one, "dt_bias": r.bias, "initial_state": r.h0}
    pool = {"indices": r.slots, "accepted": r.slots[:, 0]}
    return [
        call(r.q, r.k, r.v, None, r.beta, **layer),
        call(r.q, r.k, r.v, None, r.beta, **layer, **pool, lower_bound=-5.0, normalise=True,
             v_first=True, inplace=True),
    ]  # fmt: skip


def _kda_intra_bwd(r):
    args = r.q, r.k, r.beta, r.gc, r.dP, r.dL, r.dqg, r.dkb, r.dkg, r.dgl, r.dbeta
    return call(*args)


def _convolution_bwd(r, *numbers):
    given = r.x, r.weight, r.bias, r.state, r.x, r.state, *numbers
    return call(*given, activation=r.activation)


def _convolution(r, *numbers):
    given = r.x, r.weight, r.bias, r.state, *numbers
    return call(*given, output_final_state=r.state is not None, activation=r.activation)


def _with_numbers(f):
    """Of sequences one behind the other in a row, no wide filter."""
    return lambda r: [f(r, r.seq_idx)] * (r.width < 8)


def _convolution_updates(r):
    slots = r.seq_idx[0, :1] if r.state is not None else None
    given, options = (r.x, r.weight, r.bias), {"activation": r.activation}
    return [
        call(r.pool[:1], *given, slots, **options),
        call(r.pool, *given, None, slots, **options),
    ]


STAGES = [
    # with one gate a head
    Stage("delta/gate_cumsum", "gdn", lambda r: call(r.g, **r.chunks)),
    Stage(
        "delta/solve", "gdn", lambda r: call(r.k, r.beta, **r.chunks),
        tables=(Table("solve"),),
    ),
    Stage("delta/solve", "gdn", lambda r: call(r.A), "solve_tril"),
    Stage(
        "delta/wy", "gdn", lambda r: call(r.k, r.v, r.beta, r.gc, r.A), tables=(Table("wy"),)
    ),
    Stage(
        "delta/state", "gdn",
        lambda r: call(r.k, r.w, r.u, r.gc, r.h0, **r.chunks, output_final_state=True),
        tables=(Table("state", by="dim"),),
    ),
    Stage(
        "delta/output", "gdn",
        lambda r: call(r.q, r.k, r.v_new, r.h, r.gc, **r.scaled),
        tables=(Table("output"),),
    ),
    Stage(
        "delta/output_bwd", "gdn",
        lambda r: call(r.q, r.k, r.v_new, r.h, r.gc, r.do, **r.scaled),
        tables=(Table("output_bwd", by="value", run=("backward",)),),
    ),
    Stage(
        "delta/state_bwd", "gdn",
        lambda r: call(r.q, r.k, r.w, r.gc, r.do, r.dv_out, r.dht, **r.scaled),
        tables=(Table("state_bwd", by="dim", run=("backward",)),),
    ),
    Stage(
        "delta/wy_bwd", "gdn",
        lambda r: call(r.k, r.v, r.beta, r.gc, r.A, r.h, r.v_new, r.dh, r.dv_new, r.dk_out,
                       r.dgc_out),
        adds=2, tables=(Table("wy_bwd", by="value", run=("backward",)),),
    ),
    Stage("delta/gate_bwd", "gdn", lambda r: call(r.gc, r.g, r.one, r.one, **r.chunks)),
    Stage("delta/gate", "gdn", lambda r: call(r.g, r.one, r.one)),
    Stage("delta/gate", "gdn", lambda r: call(r.gc, r.g, r.one, r.one), "layer_gate_bwd"),
    Stage(
        "delta/cumsum", "gdn", lambda r: call(r.g, **r.chunks),
        more=lambda r: [call(r.g, chunk_size=n) for n in (1, 512)],
    ),
    Stage(
        "delta/cumsum", "gdn", lambda r: call(r.g), "global_cumsum",
        more=lambda r: [call(r.g, reverse=True)],
    ),
    Stage("delta/l2norm", "gdn", lambda r: call(r.q)),
    Stage("delta/l2norm", "gdn", lambda r: call(r.q, r.rstd, r.k), "l2norm_bwd"),
    Stage(
        "delta/cp_merge", "gdn",
        lambda r: call(r.k, r.w, r.u, r.gc, r.h0, **r.chunks), "piece_map",
        tables=(Table("piece_map", "MAP_CONFIGS", "dim", ("pieces",)),),
    ),
    Stage(
        "delta/cp_merge", "gdn", lambda r: call(r.S, r.M),
        more=lambda r: [call(r.S, r.M[..., 0, 0])],
    ),
    Stage(
        "delta/cp_merge_bwd", "gdn",
        lambda r: call(r.q, r.k, r.w, r.gc, r.do, r.dv_out, r.dht, **r.scaled),
        "piece_map_bwd",
        tables=(Table("piece_map_bwd", "MAP_CONFIGS", "dim", ("backward", "pieces")),),
    ),
    Stage(
        "delta/cp_merge_bwd", "gdn", lambda r: call(r.S, r.M),
        more=lambda r: [call(r.S, r.M[..., 0, 0])],
    ),
    Stage(
        "delta/recurrent", "recurrent",
        lambda r: call(r.q, r.k, r.v, r.g, r.beta, initial_state=r.h0), more=_recurrent,
    ),
    Stage(
        "delta/recurrent", "recurrent",
        lambda r: call(r.q, r.k, r.v, r.g, r.beta, r.v, r.h0, gk=r.gk.float(), gv=r.v.float(),
                       initial_state=r.h0),
        "recurrent_bwd",
    ),
    # with a gate for each channel
    Stage(
        "delta/gate_cumsum", "kda", lambda r: call(r.g, **r.chunks),
        more=with_gates("g"),
    ),
    Stage(
        "delta/gate_bwd", "kda", lambda r: call(r.gc, r.g, **r.chunks),
        more=with_gates("gc", "g"),
    ),
    Stage("delta/gate", "kda", lambda r: layer_gates("g")(r)[0], more=layer_gates("g")),
    Stage(
        "delta/gate", "kda", lambda r: layer_gates("gc", "g")(r)[0], "layer_gate_bwd",
        more=layer_gates("gc", "g"),
    ),
    Stage(
        "delta/kda_intra", "kda",
        lambda r: call(r.q, r.k, r.beta, r.gc, **r.chunks),
        more=lambda r: [call(r.q, r.k, r.beta, r.gc, **r.chunks, lower_bound=-5.0)],
        tables=(Table("kda_intra"),),
    ),
    Stage(
        "delta/wy", "kda", lambda r: call(r.k, r.v, r.beta, r.gc, r.A, r.q),
        tables=(Table("kda_wy", "CHANNEL_CONFIGS"),),
    ),
    Stage(
        "delta/state", "kda",
        lambda r: call(r.kg, r.w, r.u, r.gc, r.h0, **r.chunks,
                       output_final_state=True),
        tables=(Table("kda_state", by="dim"),),
    ),
    Stage(
        "delta/output", "kda",
        lambda r: call(r.qg, r.kg, r.v_new, r.h, r.gc, r.P, **r.scaled),
        tables=(Table("kda_output"),),
    ),
    Stage(
        "delta/kda_scan", "kda",
        lambda r: call(r.qg, r.kg, r.w, r.u, r.gc, r.P, r.h0, scale=SCALE,
                       output_final_state=True),
        tables=(Table("kda_scan", by="dim"),),
    ),
    Stage(
        "delta/kda_bwd", "kda",
        lambda r: call(r.v_new, r.h, r.do, **r.scaled),
        "kda_output_bwd", tables=(Table("kda_bwd", by="value", run=("backward",)),),
    ),
    Stage(
        "delta/kda_bwd", "kda",
        lambda r: call(r.v, r.beta, r.A, r.h, r.v_new, r.dh, r.dv_new), "kda_wy_bwd",
    ),
    Stage(
        "delta/kda_scans", "kda",
        lambda r: call(r.qg, r.kg, r.w, r.u, r.gc, r.P, r.do, r.h0, r.dht, scale=SCALE),
        tables=(Table("kda_scans", by="dim", run=("backward",)),),
    ),
    Stage(
        "delta/state_bwd", "kda",
        lambda r: call(r.qg, r.kg, r.w, r.gc, r.do, None, r.dht, P=r.P, **r.scaled),
        tables=(Table("kda_state_bwd", "CHANNEL_CONFIGS", "dim", ("backward",)),),
    ),
    Stage(
        "delta/kda_intra_bwd", "kda", _kda_intra_bwd, adds=1, more=two_heads(_kda_intra_bwd),
        tables=(Table("kda_intra_bwd", run=("backward",)),),
    ),
    Stage(
        "delta/cp_merge", "kda",
        lambda r: call(r.kg, r.w, r.u, r.gc, r.h0, **r.chunks), "piece_map",
        tables=(Table("kda_piece_map", "MAP_CONFIGS", "dim", ("pieces",)),),
    ),
    Stage(
        "delta/cp_merge_bwd", "kda",
        lambda r: call(r.qg, r.kg, r.w, r.gc, r.do, None, r.dht, r.P, **r.scaled),
        "piece_map_bwd",
        tables=(
            Table("kda_piece_map_bwd", "MAP_CHANNEL_CONFIGS", "dim", ("backward", "pieces")),
        ),
    ),
    # what a layer has beside
    Stage(
        "delta/causal_conv1d", "convolution", _convolution, more=_with_numbers(_convolution)
    ),
    Stage(
        "delta/causal_conv1d", "convolution", _convolution_bwd, "causal_conv1d_bwd",
        more=_with_numbers(_convolution_bwd),
    ),
    Stage(
        "delta/causal_conv1d_update", "convolution", lambda r: _convolution_updates(r)[0],
        more=lambda r: _convolution_updates(r)[1:], when=lambda r: r.width < 8,
    ),
    Stage(
        "delta/rms_norm_gated", "norm",
        lambda r: call(r.x, r.weight, r.weight, r.z, **r.kinds),
    ),
    Stage(
        "delta/rms_norm_gated", "norm",
        lambda r: call(r.x, r.weight, r.weight, r.z, r.rstd, r.x, **r.kinds),
        "rms_norm_gated_bwd",
    ),
]  # fmt: skip
