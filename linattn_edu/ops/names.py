"""Functions under other names: a short one, and those that fla-core 0.6 has for them."""

import functools
import inspect

import torch
from torch import Tensor, nn

from linattn_edu.ops import check
from linattn_edu.ops.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from linattn_edu.ops.gdn.kernel_delta_attention import kernel_delta_attention
from linattn_edu.ops.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda
from linattn_edu.ops.l2norm import l2norm
from linattn_edu.ops.tensors import traced
from linattn_edu.packing import pack

chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
l2_norm = l2norm
_EJKERNEL = {*inspect.signature(kernel_delta_attention).parameters}
_EJKERNEL -= {*inspect.signature(chunk_kda).parameters}


@functools.wraps(chunk_kda, assigned=("__annotations__",), updated=())
def kda(*args, **options):
    """:func:`chunk_kda`, Kimi Delta Attention.

    Raises:
        TypeError: the arguments are those of ejkernel's function of this name, which is
            :func:`kernel_delta_attention` here.
    """
    theirs = [name for name in options if name in _EJKERNEL]
    if len(args) > 3 and getattr(args[3], "ndim", None) == 3:  # beta, where g has channels
        theirs.append("beta in the fourth place")
    if theirs:
        raise TypeError(
            "kda is Kimi Delta Attention and takes the arguments of chunk_kda; ejkernel's function "
            f"of this name is kernel_delta_attention, which has these: {', '.join(theirs)}"
        )
    return chunk_kda(*args, **options)


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet, :func:`chunk_gated_delta_rule` without a decay: g is zero there."""
    if not isinstance(beta, Tensor):
        raise TypeError(f"beta must be a torch.Tensor [B, T, HV], got {type(beta).__name__}")
    return chunk_gated_delta_rule(
        q, k, v, torch.zeros_like(beta, dtype=torch.float32), beta, scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu, chunk_size=chunk_size, impl=impl,
    )  # fmt: skip


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """DeltaNet, :func:`fused_recurrent_gated_delta_rule` without a decay."""
    return fused_recurrent_gated_delta_rule(
        q, k, v, beta=beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens, impl=impl,
    )  # fmt: skip


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
    cu_seqlens_cpu, a cu_seqlens on a GPU is read, and the call waits for the device. In a graph
    that is traced its numbers are not looked at, and the graph serves all.
    """
    check.boundaries("cu_seqlens", cu_seqlens)
    check.positive(chunk_size=chunk_size)
    numbers = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if traced(numbers):
        return _traced_chunk_indices(cu_seqlens, chunk_size)
    lengths = numbers.tolist()
    packing = pack(
        cu_seqlens, chunk_size, lengths=check.lengths("cu_seqlens", lengths, lengths[-1])
    )
    return packing.chunk_indices.to(cu_seqlens.dtype)


def _traced_chunk_indices(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """The same, of as many rows as the numbers will say."""
    counts = (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor").long()
    total = counts.sum().item()
    torch._check(total >= 0)
    i = torch.arange(total, device=counts.device)
    sequence = torch.searchsorted(counts.cumsum(0), i, right=True)
    number = i - (counts.cumsum(0) - counts)[sequence]
    return torch.stack([sequence, number], 1).to(cu_seqlens.dtype)


class L2Norm(nn.Module):
    """:func:`l2norm` as a module."""

    def __init__(self, eps: float = 1e-6, output_dtype: torch.dtype | None = None):
        super().__init__()
        self.eps, self.output_dtype = eps, output_dtype

    def forward(self, x: Tensor) -> Tensor:
        return l2norm(x, self.eps, self.output_dtype)
