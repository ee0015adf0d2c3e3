"""Mamba-2 (SSD)."""

from linattn_edu.ops.ssd.chunk import (
    FusedStages,
    Stages,
    backward,
    forward,
    fused_stages,
    mamba_chunk_scan_combined,
    stages,
)
from linattn_edu.ops.ssd.replay import replay_selective_state_update
from linattn_edu.ops.ssd.split import mamba_split_conv1d_scan_combined
from linattn_edu.ops.ssd.step import selective_state_update

__all__ = [
    "FusedStages",
    "Stages",
    "backward",
    "forward",
    "fused_stages",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "replay_selective_state_update",
    "selective_state_update",
    "stages",
]
