"""A small call of every function, with all its tensors."""

import torch
from torch import Tensor

import linattn_edu
from linattn_edu.testing import gdn_inputs, kda_inputs


def randn(*shape):
    return torch.randn(*shape)


GDN = gdn_inputs(1, 20, 1, 2, 8, 6, initial_state=True).asdict()
KDA = kda_inputs(1, 20, 1, 2, 8, 6, initial_state=True).asdict()
GDN2 = {n: x for n, x in KDA.items() if n != "beta"}
GDN2 |= {"b": torch.rand(1, 20, 2, 8), "w": torch.rand(1, 20, 2, 6)}
DPLR = {n: randn(1, 20, 2, 8) / 4 for n in "qkab"} | {"v": randn(1, 20, 2, 6)}
DPLR |= {"gk": -torch.rand(1, 20, 2, 8), "initial_state": randn(1, 2, 8, 6)}
RAW = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
GATE = {"use_gate_in_kernel": True}
UNIT = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
HEADS = {"A_log": randn(2), "dt_bias": randn(2)}
CHANNELS = {"A_log": randn(2), "dt_bias": randn(16)}
SSD = {
    "x": randn(1, 20, 2, 4), "dt": randn(1, 20, 2), "A": -torch.rand(2), "B": randn(1, 20, 1, 8),
    "C": randn(1, 20, 1, 8), "D": randn(2), "z": randn(1, 20, 2, 4), "dt_bias": randn(2),
    "initial_states": randn(1, 2, 4, 8), "seq_idx": torch.zeros(1, 20, dtype=torch.int32),
}  # fmt: skip
STEP = {
    "state": randn(3, 2, 4, 8), "x": randn(3, 2, 4), "dt": randn(3, 2, 4), "A": -randn(2, 4, 8),
    "B": randn(3, 1, 8), "C": randn(3, 1, 8), "D": randn(2, 4), "z": randn(3, 2, 4),
    "dt_bias": randn(2, 4), "state_batch_indices": torch.arange(3),
}  # fmt: skip
CONV = {"weight": randn(4, 3), "bias": randn(4), "activation": "silu"}
LAST = {"output_final_state": True}
CALLS = {
    "chunk_gated_delta_rule": GDN | UNIT,
    "chunk_gated_delta_rule of a layer": GDN | RAW | UNIT | HEADS | {"state_v_first": True}
    | {"initial_state": randn(1, 2, 6, 8)},
    "chunk_kda": KDA | UNIT | {"safe_gate": True, "g": -torch.rand(1, 20, 2, 8)},
    "chunk_kda of a layer": KDA | RAW | UNIT | CHANNELS,
    "chunk_gdn2": GDN2 | UNIT | {"safe_gate": True, "g": -torch.rand(1, 20, 2, 8)},
    "chunk_gdn2 of a layer": GDN2 | GATE | UNIT | CHANNELS,
    "fused_recurrent_gated_delta_rule": GDN | UNIT
    | {"gk": -torch.rand(1, 20, 2, 8), "gv": -torch.rand(1, 20, 2, 6)},
    "fused_recurrent_gated_delta_rule of a layer": GDN | RAW | UNIT | HEADS,
    "fused_recurrent_kda of a layer": KDA | RAW | UNIT | CHANNELS,
    "fused_recurrent_kda in place": KDA | RAW | UNIT | CHANNELS | {"inplace_final_state": True}
    | {"ssm_state_indices": torch.zeros(1, dtype=torch.int32)},
    "fused_recurrent_gdn2 of a layer": GDN2 | GATE | UNIT | CHANNELS,
    "fused_recurrent_gdn2 in place": GDN2 | GATE | UNIT | CHANNELS | {"inplace_final_state": True}
    | {"ssm_state_indices": torch.zeros(1, dtype=torch.int32)},
    "fused_recurrent_dplr_delta_rule": DPLR | LAST,
    "chunk_dplr_delta_rule": DPLR | LAST | {"chunk_size": 16},
    "mamba_chunk_scan_combined": SSD | {"chunk_size": 16, "return_final_states": True},
    "selective_state_update": STEP,
    "ema_scan": {"x": randn(1, 20, 3), "g": -torch.rand(1, 20), "weight": torch.rand(1, 20)}
    | {"initial_state": randn(1, 3)} | LAST,
    "causal_conv1d": CONV | {"x": randn(1, 20, 4), "residual": randn(1, 20, 4)}
    | {"initial_state": randn(1, 4, 3)} | LAST,
    "causal_conv1d_fn": CONV | {"x": randn(1, 4, 20), "seq_idx": SSD["seq_idx"]}
    | {"initial_states": randn(1, 4, 2), "return_final_states": True},
    "causal_conv1d_update": CONV | {"x": randn(2, 4), "conv_state": randn(2, 4, 2)}
    | {"conv_state_indices": torch.arange(2)},
    "rms_norm_gated": {"x": randn(2, 8), "weight": randn(8), "bias": randn(8), "z": randn(2, 8)},
    "l2norm": {"x": randn(2, 8)},
    "solve_tril": {"A": randn(1, 20, 1, 16)},
    "chunk_local_cumsum": {"g": randn(1, 20, 2), "chunk_size": 16},
    "chunk_global_cumsum": {"s": randn(1, 20, 2)},
    "fused_gdn_gate": {"g": randn(1, 20, 2), **HEADS},
    "fused_kda_gate": {"g": randn(1, 20, 2, 8), **CHANNELS},
}  # fmt: skip


IN_PLACE = (
    "fused_recurrent_kda in place", "fused_recurrent_gdn2 in place", "selective_state_update",
    "causal_conv1d_update",
)  # fmt: skip


def call(name: str, device: torch.device | str = "cpu"):
    """(function, its tensors, its other arguments). Tensors of their own: some are written to."""
    given = {
        n: x.to(device, copy=True) if isinstance(x, Tensor) else x for n, x in CALLS[name].items()
    }
    tensors = {n: x for n, x in given.items() if isinstance(x, Tensor)}
    options = {n: x for n, x in given.items() if n not in tensors}
    return getattr(linattn_edu, name.split()[0]), tensors, options
