"""Linear attention, from the recurrence to the kernels: the library of the book linattn_edu."""

from linattn_edu.ops.gdn import chunk_gated_delta_rule
from linattn_edu.ops.gdn_recurrent import fused_recurrent_gated_delta_rule
from linattn_edu.ops.helpers import chunk_local_cumsum, solve_tril
from linattn_edu.ops.kda import chunk_kda
from linattn_edu.ops.kda_recurrent import fused_recurrent_kda
from linattn_edu.ops.kernel_delta_attention import kda, kda_decay, kernel_delta_attention
from linattn_edu.ops.l2norm import l2norm

__version__ = "0.1.0"
__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_local_cumsum",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "kda",
    "kda_decay",
    "kernel_delta_attention",
    "l2norm",
    "solve_tril",
]
