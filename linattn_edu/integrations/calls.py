"""The operators as a layer of transformers calls them.

A layer hands the keywords of its model on to these functions: the boundaries of packed sequences,
under three names, and flags of softmax attention. Here the boundaries get the name that an operator
knows, and what it does not know is dropped; the operators themselves refuse it. Names and order of
the arguments are those of fla, mamba_ssm and causal_conv1d.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from linattn_edu.cp import context
from linattn_edu.cp.context import CPContext
from linattn_edu.integrations import rings
from linattn_edu.ops import check, dplr, gdn, gdn2, gla, kda, names, ssd
from linattn_edu.ops.causal_conv1d import causal_conv1d
from linattn_edu.ops.causal_conv1d import causal_conv1d_fn as convolve
from linattn_edu.ops.causal_conv1d_update import causal_conv1d_update as convolve_one
from linattn_edu.ops.rms_norm_gated import rms_norm_gated

# What a model may call the boundaries of packed sequences: the first two are [N + 1], the last
# has each token's sequence.
BOUNDARIES = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


def serves(operator: Callable, *more: str) -> Callable:
    """Give a function the signature of its operator and the names of boundaries.

    transformers reads it to choose the keywords that it hands on; so does known().
    """

    def decorate(function: Callable) -> Callable:
        signature = inspect.signature(operator)
        named = list(signature.parameters.values())
        named += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in (*BOUNDARIES, *more)
            if name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=named)
        KNOWN[function.__name__] = frozenset(signature.parameters)
        return function

    return decorate


KNOWN: dict[str, frozenset[str]] = {}  # of each function below, the keywords of its operator


def known(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords that the operator of a function knows."""
    return {key: x for key, x in kwargs.items() if key in KNOWN[name]}


def boundaries(kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Take the boundaries out of keywords: as [N + 1] or None, and as each token's sequence."""
    cu_seqlens, of_queries, seq_idx = (kwargs.pop(name, None) for name in BOUNDARIES)
    return of_queries if cu_seqlens is None else cu_seqlens, seq_idx


def served(family: ModuleType, name: str) -> Callable:
    """An operator of sequences as it is lent."""
    operator = getattr(family, name)
    order = list(inspect.signature(operator).parameters)

    def function(*args: Any, **kwargs: Any):
        check.absent("head_first", kwargs.get("head_first") or False, False)
        x = args[0] if args else kwargs.get(order[0])
        cu_seqlens, seq_idx = boundaries(kwargs)
        if isinstance(kwargs.get("initial_state"), rings.State):
            _alone(cu_seqlens, seq_idx)
            given = dict(zip(order, args, strict=False))
            return rings.delta(operator, given | known(name, kwargs))
        if cu_seqlens is None and seq_idx is not None:
            cu_seqlens = _starts(seq_idx, x.shape[1])
        bounds = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
        return getattr(family, name)(*args, **bounds, **known(name, kwargs))

    function.__name__ = function.__qualname__ = name
    return serves(operator)(function)


def _alone(*boundaries: Tensor | None) -> None:
    """Refuse packed sequences for a cache with rings, which has a row for each sequence."""
    if any(x is not None for x in boundaries):
        raise ValueError("a cache with rings takes no packed sequences, got their boundaries")


def _starts(seq_idx: Tensor, T: int) -> Tensor:
    """The boundaries [N + 1] of each token's sequence [1, T]."""
    if seq_idx.shape != (1, T):
        raise ValueError(
            f"seq_idx must be [1, {T}], sequences packed into a batch of one, "
            f"got {list(seq_idx.shape)}"
        )
    starts = (seq_idx[0, 1:] != seq_idx[0, :-1]).nonzero()[:, 0] + 1
    ends = torch.tensor([0, T], device=seq_idx.device)
    return torch.cat([ends[:1], starts, ends[1:]])


chunk_gated_delta_rule = served(gdn, "chunk_gated_delta_rule")
fused_recurrent_gated_delta_rule = served(gdn, "fused_recurrent_gated_delta_rule")
chunk_kda = served(kda, "chunk_kda")
fused_recurrent_kda = served(kda, "fused_recurrent_kda")
chunk_gdn2 = served(gdn2, "chunk_gdn2")
fused_recurrent_gdn2 = served(gdn2, "fused_recurrent_gdn2")
chunk_dplr_delta_rule = served(dplr, "chunk_dplr_delta_rule")
fused_recurrent_dplr_delta_rule = served(dplr, "fused_recurrent_dplr_delta_rule")
chunk_rwkv7 = served(dplr, "chunk_rwkv7")
fused_recurrent_rwkv7 = served(dplr, "fused_recurrent_rwkv7")
fused_mul_recurrent_rwkv7 = served(dplr, "fused_mul_recurrent_rwkv7")
chunk_delta_rule = served(names, "chunk_delta_rule")
fused_recurrent_delta_rule = served(names, "fused_recurrent_delta_rule")
fused_recurrent_simple_gla = served(gla, "fused_recurrent_simple_gla")
fused_recurrent_lightning_attn = served(gla, "fused_recurrent_lightning_attn")
chunk_gated_delta_product = served(gla, "chunk_gated_delta_product")


@serves(gdn.chunk_gated_delta_rule)
def doubled_gated_delta_rule(q: Tensor, *args: Any, **kwargs: Any):
    """chunk_gated_delta_rule for a layer that may have doubled beta itself: that is said."""
    if not kwargs.get("use_beta_sigmoid_in_kernel"):
        kwargs.setdefault("allow_neg_eigval", True)
    return chunk_gated_delta_rule(q, *args, **kwargs)


@serves(convolve)
def causal_conv1d_fn(x: Tensor, weight: Tensor, bias: Tensor | None = None, *args, **kwargs):
    cu_seqlens, seq_idx = boundaries(kwargs)
    if cu_seqlens is None:
        if seq_idx is not None:
            kwargs["seq_idx"] = seq_idx
        return convolve(x, weight, bias, *args, **known("causal_conv1d_fn", kwargs))
    y, _ = causal_conv1d(
        x.mT, weight, bias, activation=kwargs.get("activation"), cu_seqlens=cu_seqlens,
        impl=kwargs.get("impl", "auto"),
    )  # fmt: skip
    return y.mT


@serves(convolve_one)
def causal_conv1d_update(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return convolve_one(x, *args, **known("causal_conv1d_update", kwargs))


def build_cp_context(
    cu_seqlens: Tensor,
    group: Any = None,
    conv1d_kernel_size: int | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    **unknown: Any,
) -> CPContext:
    """:func:`linattn_edu.build_cp_context`; how fla multiplies its maps changes nothing here."""
    return context.build_cp_context(
        cu_seqlens, group, conv1d_kernel_size, cu_seqlens_cpu, layout=layout
    )


@serves(ssd.mamba_chunk_scan_combined)
def mamba_chunk_scan_combined(*args: Any, **kwargs: Any):
    if isinstance(state := kwargs.get("initial_states"), rings.State):
        kwargs = _mamba("mamba_chunk_scan_combined", kwargs)
        _alone(kwargs.pop("cu_seqlens", None), kwargs.pop("seq_idx", None))
        return rings.scan(state, *args, **kwargs)
    return ssd.mamba_chunk_scan_combined(*args, **_mamba("mamba_chunk_scan_combined", kwargs))


def _mamba(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords of Mamba-2's operators; boundaries [N + 1] win over each token's sequence."""
    cu_seqlens, seq_idx = boundaries(kwargs)
    kwargs = known(name, kwargs)
    if kwargs.get("dt_limit") is not None:  # a list, where it was read from a file
        kwargs["dt_limit"] = tuple(kwargs["dt_limit"])
    if cu_seqlens is not None and "cu_seqlens" in KNOWN[name]:
        kwargs["cu_seqlens"] = cu_seqlens
    elif seq_idx is not None:
        kwargs["seq_idx"] = seq_idx
    return kwargs


@serves(ssd.selective_state_update)
def selective_state_update(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if isinstance(state, rings.State):
        return rings.step(state, *args, **known("selective_state_update", kwargs))
    return ssd.selective_state_update(state, *args, **known("selective_state_update", kwargs))


@serves(ssd.mamba_split_conv1d_scan_combined)
def mamba_split_conv1d_scan_combined(*args: Any, **kwargs: Any):
    return ssd.mamba_split_conv1d_scan_combined(
        *args, **_mamba("mamba_split_conv1d_scan_combined", kwargs)
    )


def one_by_one(*args: Any, **kwargs: Any) -> None:
    """In place of the split function: the layer then calls its parts, which are ours too.

    The fused function sees no padding and always norms after the gate. A layer zeroes padding after
    the convolution too, and that of Falcon-H1 may norm before the gate.
    """


def unfused(way: Callable, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """A layer's way through the functions, in training too one by one: see one_by_one."""
    training, layer.training = layer.training, False
    try:
        return way(layer, *args, **kwargs)
    finally:
        layer.training = training


def gated_norm(
    norm: nn.Module, before_gate: bool, impl: str, x: Tensor, gate: Tensor | None = None
):
    """The forward pass of a gated norm of a layer; before_gate where norm itself does not say."""
    if impl == "auto" and x.device.type == "cpu":  # there its own operations take less time
        return type(norm).forward(norm, x, gate)
    groups = getattr(norm, "n_groups", 1)
    return rms_norm_gated(
        x, norm.weight, None, gate,
        eps=norm.variance_epsilon,
        group_size=getattr(norm, "group_size", x.shape[-1] // groups),
        norm_before_gate=getattr(norm, "norm_before_gate", before_gate),
        activation=getattr(norm, "activation", "silu"),
        impl=impl,
    )  # fmt: skip


# The names that functions have in a file of models, or in the layers of one, and ours.
RECURRENCES: dict[str, Callable] = {
    "chunk_gated_delta_rule": chunk_gated_delta_rule,
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "fused_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    "recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    "torch_recurrent_gated_delta_rule": fused_recurrent_gated_delta_rule,
    "chunk_kda": chunk_kda,
    "chunk_kimi_delta_attention": chunk_kda,
    "fused_recurrent_kda": fused_recurrent_kda,
    "recurrent_kimi_delta_attention": fused_recurrent_kda,
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
    "mamba2_selective_state_update": selective_state_update,
    "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "mamba2_split_conv1d_scan_combined": one_by_one,
}
# Those that layers of other kinds call too.
FUNCTIONS = RECURRENCES | {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "selective_state_update": selective_state_update,
}
