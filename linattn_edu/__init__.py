"""Linear attention, from the recurrence to the kernels: the library of the book linattn_edu."""

from linattn_edu.cp.context import build_cp_context
from linattn_edu.dry_run import route
from linattn_edu.ops.causal_conv1d import causal_conv1d, causal_conv1d_fn
from linattn_edu.ops.causal_conv1d_update import causal_conv1d_update
from linattn_edu.ops.cumsum import chunk_global_cumsum, chunk_local_cumsum
from linattn_edu.ops.dplr import (
    chunk_dplr_delta_rule,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_rwkv7,
)
from linattn_edu.ops.ema import ema_scan
from linattn_edu.ops.gdn import (
    chunk_gated_delta_rule,
    fused_gdn_gate,
    fused_recurrent_gated_delta_rule,
    replay_gated_delta_rule,
)
from linattn_edu.ops.gdn.kernel_delta_attention import kda_decay, kernel_delta_attention
from linattn_edu.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from linattn_edu.ops.gla import (
    chunk_gated_delta_product,
    chunk_lightning_attn,
    chunk_simple_gla,
    fused_recurrent_lightning_attn,
    fused_recurrent_simple_gla,
)
from linattn_edu.ops.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda, replay_kda
from linattn_edu.ops.l2norm import l2norm
from linattn_edu.ops.names import (
    L2Norm,
    chunk_delta_rule,
    chunk_gdn,
    fused_recurrent_delta_rule,
    fused_recurrent_gdn,
    kda,
    l2_norm,
    naive_kda_gate,
    naive_recurrent_gated_delta_rule,
    naive_recurrent_kda,
    prepare_chunk_indices,
)
from linattn_edu.ops.ring import Ring, commit_ring, make_ring
from linattn_edu.ops.rms_norm_gated import rms_norm_gated
from linattn_edu.ops.solve_tril import solve_tril
from linattn_edu.ops.ssd import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    replay_selective_state_update,
    selective_state_update,
)

__version__ = "0.2.0"
__all__ = [
    "L2Norm",
    "Ring",
    "build_cp_context",
    "causal_conv1d",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gdn2",
    "chunk_global_cumsum",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_local_cumsum",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "commit_ring",
    "ema_scan",
    "fused_gdn_gate",
    "fused_kda_gate",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
    "kda",
    "kda_decay",
    "kernel_delta_attention",
    "l2_norm",
    "l2norm",
    "make_ring",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "naive_kda_gate",
    "naive_recurrent_gated_delta_rule",
    "naive_recurrent_kda",
    "prepare_chunk_indices",
    "replay_gated_delta_rule",
    "replay_kda",
    "replay_selective_state_update",
    "rms_norm_gated",
    "route",
    "selective_state_update",
    "solve_tril",
]
