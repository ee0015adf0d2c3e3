"""The stages of kernels/dplr."""

from stages.record import Stage, call

STAGES = [
    Stage("dplr/recurrent", "dplr", call("q k v a b gk", initial_state="initial_state"),
          "dplr_recurrent",
          more=[call("q k v a b gk"), call("q k v a b gk", initial_state="initial_state",
                                           reverse=True)]),
    Stage("dplr/recurrent", "dplr",
          call("q k v a b gk do dht", initial_state="initial_state"), "dplr_recurrent_bwd",
          more=[call("q k v a b gk do", reverse=True)]),
]  # fmt: skip
