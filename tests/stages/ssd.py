"""The stages of kernels/ssd."""

from stages.record import Stage, call

STAGES = [
    Stage("ssd/chunk_cumsum", "ssd", call("dt A dt_bias", "chunks", softplus="softplus")),
    Stage("ssd/chunk_cumsum_bwd", "ssd",
          call("gc dlast step dt A dt_bias", "chunks", softplus="softplus")),
    Stage("ssd/chunk_state", "ssd", call("B x step gc seq_idx", "chunks")),
    Stage("ssd/state_passing", "ssd",
          call("s gc h0 seq_idx", "chunks", output_final_state="ends")),
    Stage("ssd/chunk_scan", "ssd", call("C B x step gc h D z seq_idx", "chunks")),
    Stage("ssd/chunk_scan_chunk_state_bwd_dx", "ssd",
          call("C B x step gc ds dy D seq_idx", "chunks")),
    Stage("ssd/chunk_scan_bwd_da_cs", "ssd", call("C B x step gc dy seq_idx", "chunks")),
    Stage("ssd/chunk_scan_bwd_dstates", "ssd", call("C gc dy seq_idx", "chunks")),
    Stage("ssd/chunk_state_bwd_db", "ssd", call("B x step gc ds seq_idx", "chunks")),
    Stage("ssd/chunk_scan_bwd_dc", "ssd", call("C B x step gc h dy dB_state seq_idx", "chunks")),
    Stage("ssd/state_passing_bwd", "ssd", call("dh_out gc h dht seq_idx", "chunks")),
    Stage("ssd/selective_state_update", "ssd",
          call("one.state one.x one.dt one.A one.B one.B one.D one.x one.bias", softplus=True),
          more=[call("all.state all.x all.x all.A all.B all.B", indices="slots"),
                call("one.state one.x one.dt one.A one.B one.B one.D one.x one.bias drafts - "
                     "bounds", softplus=True),
                call("all.state all.x all.x all.A all.B all.B - - - drafts slots bounds")]),
    Stage("ssd/replay", "ssd", call("x dt A B C skip z dt_bias", "ring", softplus="softplus"),
          more=[call("x dt A B C skip z dt_bias", "ring", indices="slots", accepted="slots")]),
    # averages
    Stage("ssd/ema", "ema", call("x g gc weight h0", "chunks wanted")),
    Stage("ssd/ema_bwd", "ema", call("x g gc weight h dy dht", "chunks")),
]  # fmt: skip
