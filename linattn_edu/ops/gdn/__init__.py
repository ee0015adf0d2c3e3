"""Gated DeltaNet."""

from linattn_edu.ops.gdn.chunk import (
    FusedStages,
    Residuals,
    Stages,
    backward,
    chunk_gated_delta_rule,
    forward,
    fused_stages,
    stages,
)
from linattn_edu.ops.gdn.gate import fused_gdn_gate
from linattn_edu.ops.gdn.recurrent import fused_recurrent_gated_delta_rule
from linattn_edu.ops.gdn.replay import replay_gated_delta_rule

__all__ = [
    "FusedStages",
    "Residuals",
    "Stages",
    "backward",
    "chunk_gated_delta_rule",
    "forward",
    "fused_gdn_gate",
    "fused_recurrent_gated_delta_rule",
    "fused_stages",
    "replay_gated_delta_rule",
    "stages",
]
