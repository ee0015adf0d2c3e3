"""Reference stages of the gated delta rule, one file a stage."""
