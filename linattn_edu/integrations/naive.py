"""The functions that fla's own tests compare with, in PyTorch: ours with impl="reference"."""

from collections.abc import Callable

import torch
from torch import Tensor

from linattn_edu.ops.dplr import chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule
from linattn_edu.ops.gdn import chunk_gated_delta_rule, fused_gdn_gate
from linattn_edu.ops.gdn2 import fused_recurrent_gdn2
from linattn_edu.ops.gla import chunk_gated_delta_product, fused_recurrent_simple_gla
from linattn_edu.ops.kda import chunk_kda, fused_kda_gate
from linattn_edu.ops.names import chunk_delta_rule, fused_recurrent_delta_rule


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


def naive_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.fused_recurrent_gdn2`; one state may be that of every sequence."""
    return fused_recurrent_gdn2(
        q, k, v, g, b, w, scale=scale, initial_state=_of_each(initial_state, q),
        output_final_state=output_final_state, impl="reference",
    )  # fmt: skip


def naive_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.fused_recurrent_simple_gla`; one state may be that of every sequence."""
    return fused_recurrent_simple_gla(
        q, k, v, g, None, scale, _of_each(initial_state, q), output_final_state, impl="reference"
    )


def _of_each(state: Tensor | None, q: Tensor) -> Tensor | None:
    """States of all sequences, of those or of one [H, K, V]."""
    return state if state is None or state.ndim == 4 else state.expand(len(q), *state.shape)


def naive_recurrent_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    scale: float | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    num_householder: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.chunk_gated_delta_product`."""
    return chunk_gated_delta_product(
        q, k, v, g, beta, num_householder, scale, initial_state, output_final_state,
        cu_seqlens=cu_seqlens, impl="reference",
    )  # fmt: skip


def chunk_gated_delta_product_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.chunk_gated_delta_product`."""
    return chunk_gated_delta_product(
        q, k, v, g, beta, num_householder, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens, impl="reference",
    )  # fmt: skip


def _heads_first(operator: Callable, *tensors: Tensor, **options) -> tuple[Tensor, Tensor | None]:
    """Of tensors [B, H, T, ...], with the scale K ** -0.5."""
    o, state = operator(*(x.transpose(1, 2) for x in tensors), impl="reference", **options)
    return o.transpose(1, 2), state


def dplr_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.fused_recurrent_dplr_delta_rule`, heads first."""
    states = {"initial_state": initial_state, "output_final_state": output_final_state}
    return _heads_first(fused_recurrent_dplr_delta_rule, q, k, v, alpha, beta, gk, **states)


def dplr_chunkwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: Tensor,
    beta: Tensor,
    gk: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    chunk_size: int = 32,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.chunk_dplr_delta_rule`, heads first."""
    states = {"initial_state": initial_state, "output_final_state": output_final_state}
    tensors = q, k, v, alpha, beta, gk
    return _heads_first(chunk_dplr_delta_rule, *tensors, chunk_size=chunk_size, **states)


def delta_rule_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """:func:`linattn_edu.fused_recurrent_delta_rule`, heads first."""
    states = {"initial_state": initial_state, "output_final_state": output_final_state}
    return _heads_first(fused_recurrent_delta_rule, q, k, v, beta, **states)


def delta_rule_chunkwise(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, chunk_size: int = 32
) -> tuple[Tensor, Tensor]:
    """:func:`linattn_edu.chunk_delta_rule`, heads first."""
    options = {"output_final_state": True, "chunk_size": chunk_size}
    return _heads_first(chunk_delta_rule, q, k, v, beta, **options)
