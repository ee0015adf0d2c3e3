"""Functions under the other names that fla-core 0.6 has for them."""

import torch
from torch import Tensor, nn

from linattn_edu.ops import check
from linattn_edu.ops.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from linattn_edu.ops.kda import fused_kda_gate, fused_recurrent_kda
from linattn_edu.ops.l2norm import l2norm
from linattn_edu.packing import pack

chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
l2_norm = l2norm


def naive_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fused_recurrent_gated_delta_rule` in PyTorch; beta comes before g here."""
    return fused_recurrent_gated_delta_rule(
        q, k, v, g, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, impl="reference",
    )  # fmt: skip


def naive_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """:func:`fused_recurrent_kda` in PyTorch."""
    return fused_recurrent_kda(
        q, k, v, g, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, impl="reference",
    )  # fmt: skip


def naive_kda_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """:func:`fused_kda_gate` in PyTorch."""
    return fused_kda_gate(g, A_log, dt_bias, output_dtype=output_dtype, impl="reference")


def prepare_chunk_indices(
    cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None
) -> Tensor:
    """The chunk_indices of :func:`chunk_gated_delta_rule`: ``[NT, 2]``, of cu_seqlens' dtype.

    Sequence of every chunk of chunk_size tokens, and its number in the sequence. Without
    cu_seqlens_cpu, a cu_seqlens on a GPU is read, and the call waits for the device.
    """
    check.boundaries("cu_seqlens", cu_seqlens)
    known = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    lengths = known.tolist()
    packing = pack(
        cu_seqlens, chunk_size, lengths=check.lengths("cu_seqlens", lengths, lengths[-1])
    )
    return packing.chunk_indices.to(cu_seqlens.dtype)


class L2Norm(nn.Module):
    """:func:`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)
