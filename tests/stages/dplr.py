"""The stages of kernels/dplr."""

from linattn_edu.kernels.routes import limits
from stages.record import SCALE, Stage, Table, call


def in_chunks(r):
    """Whether chunks hold the keys."""
    return r.q.shape[-1] <= limits.DPLR


STAGES = [
    Stage("dplr/recurrent", "dplr", call("q k v a b gk", initial_state="initial_state"),
          "dplr_recurrent",
          more=[call("q k v a b gk"), call("q k v a b gk", initial_state="initial_state",
                                           reverse=True)]),
    Stage("dplr/recurrent", "dplr",
          call("q k v a b gk do dht", initial_state="initial_state"), "dplr_recurrent_bwd",
          more=[call("q k v a b gk do", reverse=True)]),
    Stage("dplr/intra", "dplr", call("q k a b gc", "chunks"), "dplr_intra", when=in_chunks,
          tables=(Table("dplr_intra", run=("rank one",)),)),
    Stage("dplr/scan", "dplr",
          call("qg kg ag bg v gc M ak qb qk initial_state", scale=SCALE, output_final_state=True),
          "dplr_scan", when=in_chunks, tables=(Table("dplr_scan", by="dim", run=("rank one",)),)),
    Stage("dplr/scan", "dplr", call("kg ag bg v gc M ak initial_state"), "dplr_states",
          when=in_chunks),
    Stage("dplr/scan", "dplr", call("kg ag bg v gc M ak initial_state"), "dplr_map",
          when=in_chunks, more=[call("kg ag bg v gc M ak -", transition=False)]),
    Stage("dplr/scan_bwd", "dplr", call("qg kg ag bg gc M ak qb qk do dht", scale=SCALE),
          "dplr_scan_bwd", when=in_chunks),
    Stage("dplr/scan_bwd", "dplr", call("qg kg ag bg gc M ak qb qk do dht", scale=SCALE),
          "dplr_map_bwd", when=in_chunks,
          more=[call("qg kg ag bg gc M ak qb qk do -", scale=SCALE, transition=False)]),
    Stage("dplr/intra_bwd", "dplr", call("v e do dx h dh", "chunks", scale=SCALE),
          "dplr_rows_bwd", when=in_chunks,
          tables=(Table("dplr_rows_bwd", "ROWS", run=("rank one", "backward")),)),
    Stage("dplr/intra_bwd", "dplr", call("q k a b gc dab dak dqb dqk dqg dkg dag dbg dgl"),
          "dplr_intra_bwd", when=in_chunks,
          tables=(Table("dplr_intra_bwd", run=("rank one", "backward")),)),
]  # fmt: skip
