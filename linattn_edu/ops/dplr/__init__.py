"""The general delta rule, DPLR, of which RWKV-7 is one: what is read, erased and written apart."""

from linattn_edu.ops.dplr.chunk import chunk_dplr_delta_rule, chunk_rwkv7
from linattn_edu.ops.dplr.recurrent import (
    Stages,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_rwkv7,
    stages,
)

__all__ = [
    "Stages",
    "chunk_dplr_delta_rule",
    "chunk_rwkv7",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_rwkv7",
    "stages",
]
