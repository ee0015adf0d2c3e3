"""Small models of transformers with random weights: one of each kind that `use` serves.

A name that transformers does not have is left out: older ones have fewer of them.
"""

import copy
import functools

import torch
import transformers

VOCABULARY = 97
ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 2}
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 96, "initializer_range": 0.1,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {
    **COMMON, **ATTENTION, **HYBRID, "intermediate_size": 48, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
LATENT = {  # latent attention
    **COMMON, **ATTENTION, **HYBRID, "intermediate_size": 48, "moe_intermediate_size": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 16, "num_experts_per_tok": 2,
    "linear_head_dim": 16, "linear_num_heads": 2, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
MAMBA = {
    **COMMON, **ATTENTION, "intermediate_size": 48, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 16, "mamba_chunk_size": 32,
}  # fmt: skip

# model_type -> class of the configuration, of the model, arguments of the configuration
MODELS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**DELTA, "num_experts": 0}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM",
        {**DELTA, **EXPERTS, "num_experts_per_tok": 2}),
    "qwen4_exp": ("Qwen4ExpTextConfig", "Qwen4ExpForCausalLM", {
        **DELTA, **EXPERTS, "num_experts_per_tok": 2, "hc_count": 2, "hc_lowrank": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 256,
        "indexer_compress_ratio": 4,
    }),
    "lara_mini": ("LaraMiniConfig", "LaraMiniForCausalLM", {
        **{n: x for n, x in DELTA.items() if n != "intermediate_size"}, **EXPERTS,
        "num_experts_per_tok": 2,
    }),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", DELTA),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM",
        {**LATENT, "qk_rope_head_dim": 8, "num_local_experts": 4}),
    "glm5_next": ("Glm5NextTextConfig", "Glm5NextTextModel", {
        **LATENT, "n_routed_experts": 4, "q_lora_rank": 16, "index_topk": 256, "index_head_dim": 16,
        "index_n_heads": 2, "hc_mult": 2, "hc_sinkhorn_iters": 2,
    }),
    "bailing_hybrid": ("BailingHybridConfig", "BailingHybridForCausalLM", {
        **LATENT, "head_dim": 16, "qk_rope_head_dim": 8, "num_local_experts": 4,
        "mlp_layer_types": ["dense", "dense"], "n_group": 2, "topk_group": 1, "num_mtp_layers": 0,
    }),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", {
        **COMMON, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 32,
    }),
    "bamba": ("BambaConfig", "BambaForCausalLM", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM",
        {**MAMBA, "mamba_d_ssm": 64, "mamba_n_groups": 2, "mamba_rms_norm": True, "head_dim": 16}),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM",
        {**MAMBA, **HYBRID, "shared_intermediate_size": 16, "num_local_experts": 2}),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM", {
        **COMMON, **ATTENTION,
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        "num_hidden_layers": 4, "intermediate_size": 48, "head_dim": 16, "ssm_state_size": 16,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 32,
    }),
    "zamba2": ("Zamba2Config", "Zamba2ForCausalLM", {
        **COMMON, **ATTENTION, "layers_block_type": ["mamba", "hybrid"], "intermediate_size": 48,
        "n_mamba_heads": 8, "mamba_d_state": 16, "mamba_ngroups": 2, "chunk_size": 32,
        "adapter_rank": 4,
    }),
}  # fmt: skip
_THERE = {*dir(transformers)}  # asked for one by one, they would be loaded
NAMES = [name for name, (_, kind, _) in MODELS.items() if kind in _THERE]
WITH_HEAD = [name for name in NAMES if MODELS[name][1].endswith("ForCausalLM")]


@functools.cache
def build(name: str, linear_only: bool = False, **more) -> torch.nn.Module:
    """A model in evaluation mode, with more arguments; tests leave it as it was."""
    config, kind, arguments = MODELS[name]
    if linear_only:
        more["layer_types"] = ["linear_attention"] * arguments["num_hidden_layers"]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**(arguments | more))).eval()
    for name, parameter in model.named_parameters():  # decays that leave a memory of some tokens
        if name.endswith("A_log"):
            torch.nn.init.uniform_(parameter, -1, 1)
        elif name.endswith("dt_bias"):
            torch.nn.init.uniform_(parameter, -4, -2)
    return model


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """A copy in float64; its experts are multiplied one by one, as grouped they have no float64."""
    copied = copy.deepcopy(model).double()
    copied.set_experts_implementation("eager")
    return copied
