"""Kimi Delta Attention."""

from linattn_edu.ops.kda.chunk import (
    FusedStages,
    Residuals,
    Stages,
    backward,
    chunk_kda,
    forward,
    fused_stages,
    stages,
)
from linattn_edu.ops.kda.gate import fused_kda_gate
from linattn_edu.ops.kda.recurrent import fused_recurrent_kda
from linattn_edu.ops.kda.replay import replay_kda

__all__ = [
    "FusedStages",
    "Residuals",
    "Stages",
    "backward",
    "chunk_kda",
    "forward",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "fused_stages",
    "replay_kda",
    "stages",
]
