"""What is lent: the modules of fla, mamba_ssm and causal_conv1d, and ours under their names."""

from typing import Any

from linattn_edu.cp.context import CPContext, get_cp_cu_seqlens
from linattn_edu.integrations import calls, convolutions, layers, naive, norms, padding
from linattn_edu.layers import ShortConvolution
from linattn_edu.ops import names
from linattn_edu.ops.cumsum import chunk_global_cumsum, chunk_local_cumsum
from linattn_edu.ops.gdn import fused_gdn_gate
from linattn_edu.ops.kda import fused_kda_gate
from linattn_edu.ops.l2norm import l2norm
from linattn_edu.ops.solve_tril import solve_tril


def _of(module: Any, *among: str) -> dict[str, Any]:
    """Names of a module."""
    return {name: getattr(module, name) for name in among}


CHUNK_DELTA = {
    "chunk_gated_delta_rule": calls.chunk_gated_delta_rule,
    "chunk_gdn": calls.chunk_gated_delta_rule,
}
RECURRENT_DELTA = {
    "fused_recurrent_gated_delta_rule": calls.fused_recurrent_gated_delta_rule,
    "fused_recurrent_gdn": calls.fused_recurrent_gated_delta_rule,
    "recurrent_gated_delta_rule": calls.fused_recurrent_gated_delta_rule,
}
DELTA = CHUNK_DELTA | RECURRENT_DELTA
DELTA_NAIVE = _of(names, "naive_recurrent_gated_delta_rule") | _of(
    naive, "naive_chunk_gated_delta_rule"
)
DELTA_GATE = {"fused_gdn_gate": fused_gdn_gate} | _of(naive, "naive_gdn_gate")
CHUNK_KDA = {"chunk_kda": calls.chunk_kda}
RECURRENT_KDA = {"fused_recurrent_kda": calls.fused_recurrent_kda}
KDA = CHUNK_KDA | RECURRENT_KDA
CHUNK_GDN2 = {"chunk_gdn2": calls.chunk_gdn2}
RECURRENT_GDN2 = {"fused_recurrent_gdn2": calls.fused_recurrent_gdn2}
GDN2 = CHUNK_GDN2 | RECURRENT_GDN2
CHUNK_DPLR = _of(calls, "chunk_dplr_delta_rule")
RECURRENT_DPLR = _of(calls, "fused_recurrent_dplr_delta_rule")
DPLR = CHUNK_DPLR | RECURRENT_DPLR
CHUNK_RWKV7 = _of(calls, "chunk_rwkv7")
RECURRENT_RWKV7 = _of(calls, "fused_recurrent_rwkv7", "fused_mul_recurrent_rwkv7")
RWKV7 = CHUNK_RWKV7 | RECURRENT_RWKV7
CHUNK_PLAIN = _of(calls, "chunk_delta_rule")
RECURRENT_PLAIN = _of(calls, "fused_recurrent_delta_rule")
# not those over chunks: they are kernels that can more, and who is lent these wants no slower
# training
SIMPLE_GLA = _of(calls, "fused_recurrent_simple_gla")
LIGHTNING = _of(calls, "fused_recurrent_lightning_attn")
PRODUCT = _of(calls, "chunk_gated_delta_product")
KDA_NAIVE = _of(names, "naive_recurrent_kda") | _of(naive, "naive_chunk_kda")
KDA_GATE = (
    {"fused_kda_gate": fused_kda_gate}
    | _of(names, "naive_kda_gate")
    | _of(naive, "naive_kda_lowerbound_gate")
)
CP = {
    "build_cp_context": calls.build_cp_context,
    "get_cp_cu_seqlens": get_cp_cu_seqlens,
    "FLACPContext": CPContext,
}
CUMSUM = {"chunk_local_cumsum": chunk_local_cumsum, "chunk_global_cumsum": chunk_global_cumsum}
SOLVE = {"solve_tril": solve_tril}
PREPARE = _of(names, "prepare_chunk_indices") | _of(
    padding, "prepare_lens", "prepare_lens_from_mask", "prepare_cu_seqlens_from_lens",
    "prepare_cu_seqlens_from_mask", "prepare_token_indices", "prepare_sequence_ids",
    "prepare_position_ids", "prepare_chunk_offsets",
)  # fmt: skip
UNPAD = _of(
    padding, "get_unpad_data", "index_first_axis", "index_put_first_axis", "pad_input",
    "unpad_input", "get_layer_cache", "update_layer_cache",
)  # fmt: skip
FLA_LAYERS = _of(layers, "GatedDeltaNet", "GatedDeltaNet2", "KimiDeltaAttention")
MAMBA_LAYER = _of(layers, "Mamba2")
CONVOLUTION = {"ShortConvolution": ShortConvolution} | _of(
    convolutions, "causal_conv1d", "causal_conv1d_update"
)
L2NORM = {"l2norm": l2norm, "l2_norm": l2norm, "L2Norm": names.L2Norm}
FLA_NORMS = _of(
    norms, "FusedRMSNormGated", "FusedLayerNormGated", "FusedRMSNormSwishGate",
    "FusedLayerNormSwishGate", "FusedRMSNormSwishGateLinear", "FusedLayerNormSwishGateLinear",
)  # fmt: skip
SSD = {
    "mamba_chunk_scan_combined": calls.mamba_chunk_scan_combined,
    "mamba_split_conv1d_scan_combined": calls.mamba_split_conv1d_scan_combined,
}
STEP = {"selective_state_update": calls.selective_state_update}
MAMBA_NORMS = _of(norms, "rmsnorm_fn", "layernorm_fn", "RMSNorm", "LayerNorm")
DAO_CONVOLUTION = {
    "causal_conv1d_fn": calls.causal_conv1d_fn,
    "causal_conv1d_update": calls.causal_conv1d_update,
}
VARLEN = _of(convolutions, "causal_conv1d_varlen_states")
# Each module and what is in it; submodules are attributes of their packages from the start.
MODULES: dict[str, dict[str, Any]] = {
    "fla": {},
    "fla.layers": FLA_LAYERS,
    "fla.layers.gated_deltanet": _of(layers, "GatedDeltaNet"),
    "fla.layers.gdn2": _of(layers, "GatedDeltaNet2"),
    "fla.layers.kda": _of(layers, "KimiDeltaAttention"),
    "fla.layers.utils": UNPAD,
    "fla.modules": {
        "ShortConvolution": ShortConvolution,
        "L2Norm": names.L2Norm,
        "RMSNorm": norms.FlaRMSNorm,
    }
    | FLA_NORMS,
    "fla.modules.layernorm": {"RMSNorm": norms.FlaRMSNorm},
    "fla.modules.convolution": CONVOLUTION,
    "fla.modules.causal_conv1d": CONVOLUTION,
    "fla.modules.fused_norm_gate": FLA_NORMS,
    "fla.modules.l2norm": L2NORM,
    "fla.ops": DELTA | KDA | GDN2 | DPLR | RWKV7 | SIMPLE_GLA | LIGHTNING | PRODUCT,
    "fla.ops.cp": CP,
    "fla.ops.delta_rule": CHUNK_PLAIN | RECURRENT_PLAIN,
    "fla.ops.delta_rule.chunk": CHUNK_PLAIN,
    "fla.ops.delta_rule.fused_recurrent": RECURRENT_PLAIN,
    "fla.ops.delta_rule.naive": _of(naive, "delta_rule_recurrence", "delta_rule_chunkwise"),
    "fla.ops.gated_delta_rule": DELTA,
    "fla.ops.gated_delta_rule.chunk": CHUNK_DELTA,
    "fla.ops.gated_delta_rule.fused_recurrent": RECURRENT_DELTA,
    "fla.ops.gated_delta_rule.gate": DELTA_GATE,
    "fla.ops.gated_delta_rule.naive": DELTA_NAIVE,
    "fla.ops.gated_delta_product": PRODUCT,
    "fla.ops.gated_delta_product.chunk": PRODUCT,
    "fla.ops.gated_delta_product.chunk_ref": _of(naive, "chunk_gated_delta_product_ref"),
    "fla.ops.gated_delta_product.naive": _of(naive, "naive_recurrent_gated_delta_product"),
    "fla.ops.gdn2": GDN2,
    "fla.ops.gdn2.chunk": CHUNK_GDN2,
    "fla.ops.gdn2.fused_recurrent": RECURRENT_GDN2,
    "fla.ops.gdn2.naive": _of(naive, "naive_recurrent_gdn2"),
    "fla.ops.generalized_delta_rule": DPLR,
    "fla.ops.generalized_delta_rule.dplr": DPLR,
    "fla.ops.generalized_delta_rule.dplr.chunk": CHUNK_DPLR,
    "fla.ops.generalized_delta_rule.dplr.fused_recurrent": RECURRENT_DPLR,
    "fla.ops.generalized_delta_rule.dplr.naive": _of(naive, "dplr_recurrence", "dplr_chunkwise"),
    "fla.ops.kda": KDA,
    "fla.ops.kda.chunk": CHUNK_KDA,
    "fla.ops.kda.fused_recurrent": RECURRENT_KDA,
    "fla.ops.kda.gate": KDA_GATE,
    "fla.ops.kda.naive": KDA_NAIVE,
    "fla.ops.lightning_attn": LIGHTNING,
    "fla.ops.lightning_attn.fused_recurrent": LIGHTNING,
    "fla.ops.rwkv7": RWKV7,
    "fla.ops.rwkv7.chunk": CHUNK_RWKV7,
    "fla.ops.rwkv7.fused_recurrent": RECURRENT_RWKV7,
    "fla.ops.simple_gla": SIMPLE_GLA,
    "fla.ops.simple_gla.fused_recurrent": SIMPLE_GLA,
    "fla.ops.simple_gla.naive": _of(naive, "naive_recurrent_simple_gla"),
    "fla.ops.utils": CUMSUM | SOLVE | PREPARE,
    "fla.ops.utils.cumsum": CUMSUM,
    "fla.ops.utils.index": PREPARE,
    "fla.ops.utils.solve_tril": SOLVE,
    "fla.utils": _of(padding, "tensor_cache"),
    "mamba_ssm": {},
    "mamba_ssm.modules": {},
    "mamba_ssm.modules.mamba2": MAMBA_LAYER,
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": MAMBA_NORMS,
    "mamba_ssm.ops.triton.selective_state_update": STEP,
    "mamba_ssm.ops.triton.ssd_combined": SSD,
    "causal_conv1d": DAO_CONVOLUTION,
    "causal_conv1d.causal_conv1d_interface": DAO_CONVOLUTION,
    "causal_conv1d.causal_conv1d_varlen": VARLEN,
}
# The versions whose arguments these functions take.
VERSIONS = {"fla": "0.6.0", "mamba_ssm": "2.3.2", "causal_conv1d": "1.6.0"}
DISTRIBUTIONS = {
    "fla": "fla",
    "fla-core": "fla",
    "flash-linear-attention": "fla",
    "mamba-ssm": "mamba_ssm",
    "causal-conv1d": "causal_conv1d",
}
