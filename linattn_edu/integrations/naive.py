"""The functions that fla's own tests compare with, in PyTorch: ours with impl="reference"."""

import torch
from torch import Tensor

from linattn_edu.ops.gdn import chunk_gated_delta_rule, fused_gdn_gate
from linattn_edu.ops.kda import chunk_kda, fused_kda_gate


def naive_chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.chunk_gated_delta_rule`."""
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size=chunk_size,
        impl="reference",
    )  # fmt: skip


def naive_chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.chunk_kda`."""
    return chunk_kda(
        q, k, v, g, beta, scale, initial_state, output_final_state, chunk_size=chunk_size,
        impl="reference",
    )  # fmt: skip


def naive_gdn_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`linattn_edu.fused_gdn_gate`."""
    return fused_gdn_gate(g, A_log, dt_bias, output_dtype, impl="reference")


def naive_kda_lowerbound_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`linattn_edu.fused_kda_gate` with a bound."""
    return fused_kda_gate(g, A_log, dt_bias, lower_bound, output_dtype, impl="reference")
