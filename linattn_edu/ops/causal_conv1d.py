"""causal_conv1d and causal_conv1d_fn: the public functions, their declaration, its two stages."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.cp import halo
from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check, inplace
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.ranks import Ranks
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import needs_gradient
from linattn_edu.packing import Packing

WIDEST = 8  # tokens of a sum: the kernels have a load for each
CHUNK = 64  # tokens of a tile of the kernels


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: CPContext | None = None,
    *,
    max_num_seqs: int | None = None,
    seq_idx: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Short causal convolution: each channel's sum over the last W tokens.

    .. math::

        y_t = \mathrm{act}\Big(b + \sum_{j=0}^{W-1} w_j\, u_{t-W+1+j}\Big) + r_t, \qquad
        u_t = x_t \ \text{for}\ t \ge 0

    for each channel; tokens before the first are those of the initial state, or zero. The layers of
    Gated DeltaNet, Kimi Delta Attention and Mamba-2 have it before the recurrence. Differentiable
    by x, weight, bias, residual and initial_state, from y and from the final state.

    Args:
        x: ``[B, T, D]``, float32, float16 or bfloat16 (float64: reference only); T may be 0.
        weight: ``[D, W]``, W from 1 to 8, any of these dtypes: the last column is the factor of the
            token itself.
        bias: b ``[D]``, any of these dtypes, zero if None.
        residual: r ``[B, T, D]``, any of these dtypes, which is added to y after the activation.
        initial_state: The W tokens before the first ``[N, D, W]``, newest last, any of these
            dtypes, zero if None. The oldest of them is in no sum. N is B, or the number of
            sequences of cu_seqlens.
        output_final_state: Whether to return the last W tokens.
        activation: None, or "silu" (also called "swish"), ``p * sigmoid(p)``.
        backend: fla-core's name of its kernels: None or "triton", which changes nothing. What runs
            is chosen by impl.
        cu_seqlens, cu_seqlens_cpu, chunk_indices: As in :func:`chunk_gated_delta_rule`, of chunks
            of 64 tokens. Each sequence gives the same bits of y, of the final state and of the
            gradients of x and of initial_state as alone.
        max_num_seqs: As in :func:`chunk_gated_delta_rule`.
        cp_context: Sequences cut over several ranks, as in :func:`chunk_gated_delta_rule`; the
            kernels give y the same bits as on one. Each pass gathers ``D (W + 1)`` numbers of
            float32 for each part of the stream, once.
        seq_idx: Sequence of each token ``[B, T]``, as in :func:`causal_conv1d_fn`, in place of
            cu_seqlens and cp_context: the states are those of the first token's and of the last
            token's sequence.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    x may have its tokens at any one distance, as a slice of a projection has; other non-contiguous
    tensors, and on a GPU those that do not start at 16 bytes, are copied first.

    Accuracy: the arithmetic is in float32 (float64 where an input is); y is rounded once, before
    residual is added. The kernels give a token the same bits of y wherever its sequence is split
    into calls, if the states between them are those returned. A state has x's dtype: what is left
    in it of an initial_state in a wider dtype is rounded.

    Memory: between the passes it keeps its inputs. The backward pass adds up the gradients of
    weight and bias from W + 1 numbers for each channel and 64 tokens, in float32.

    Works under ``torch.compile(fullgraph=True)``, in CUDA graphs (with cu_seqlens only together
    with cu_seqlens_cpu or max_num_seqs), with activation checkpointing and under autocast, which
    does not change its precision. Gradients of gradients and forward-mode differentiation are
    errors.

    Returns:
        ``(y, final_state)``: y ``[B, T, D]``; final_state ``[N, D, W]``, the last W tokens of
        initial_state and x, newest last, or None. Both in x's dtype.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, activation, backend, impl or combination of arguments does not
            fit; the message names the argument, what was expected and what came. No kernel has run
            then.

    Source: chapter 23.
    """
    given = _check_tensors(x, weight, bias, residual, initial_state, cu_seqlens, cp_context)
    if seq_idx is not None:
        given.sequence_numbers("seq_idx", seq_idx)
        if cu_seqlens is not None or cp_context is not None:
            raise ValueError("seq_idx must be None with cu_seqlens or cp_context, which cut too")
    output_final_state = check.flag("output_final_state", output_final_state)
    activation = activation_of(activation)
    check_backend(backend)
    tensors = (x, weight, bias, initial_state)
    impl = check.resolve_impl(impl, x.device, tuple(t.dtype for t in tensors if t is not None))
    bounds = cu_seqlens, cu_seqlens_cpu, chunk_indices
    place = arguments.place(given, *bounds, CHUNK, cp_context, most=max_num_seqs)
    y, final_state, _ = convolve(
        *place.joined(x), weight, bias, place.entering(initial_state), seq_idx, *place.bounds,
        output_final_state, activation, CHUNK, place.group, impl, "",
        save="crossing" if place.group else "",
    )  # fmt: skip
    y, final_state = place.parted(y), place.left(final_state)
    return y if residual is None else (y + residual).to(x.dtype), final_state


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Short causal convolution of channels that come before the tokens.

    .. math::

        y_t = \mathrm{act}\Big(b + \sum_{j=0}^{W-1} w_j\, u_{t-W+1+j}\Big), \qquad
        u_t = x_t \ \text{for}\ t \ge 0

    for each channel, as :func:`causal_conv1d`; u_t is zero where token t is not of the sequence of
    the token whose sum it is. Differentiable by x, weight, bias and initial_states.

    Args:
        x: ``[B, D, T]``, float32, float16 or bfloat16 (float64: reference only); T may be 0. The
            transpose of a contiguous ``[B, T, D]``, or of a slice of its channels, is not copied,
            and y is the transpose of a contiguous one.
        weight: ``[D, W]``, W from 1 to 8, any of these dtypes: the last column is the factor of the
            token itself.
        bias: b ``[D]``, any of these dtypes, zero if None.
        seq_idx: Sequence of each token ``[B, T]``, int32 or int64: one begins where the number
            changes. A negative number is padding: its y is zero, and it is in no sum. Each sequence
            gives the same bits of y and of the gradient of x as alone.
        initial_states: The W - 1 tokens before the first ``[B, D, W - 1]``, newest last, any of
            these dtypes, zero if None. With seq_idx they are of the first token's sequence.
        return_final_states: Whether to return the last W - 1 tokens, with seq_idx those of the last
            token's sequence, and zeros for the others.
        final_states_out: Where to write them ``[B, D, W - 1]``, or None: a new tensor. Not
            expanded, no leaf that needs a gradient, and not in the memory of x, weight or bias.
        activation: None, or "silu" (also called "swish"), ``p * sigmoid(p)``.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Accuracy, memory, and what it works with: as :func:`causal_conv1d`.

    Returns:
        y ``[B, D, T]`` in x's dtype, or with return_final_states ``(y, final_states)``, the states
        ``[B, D, W - 1]``, which are final_states_out if it is given, and else in x's dtype.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, activation, impl or combination of arguments does not fit; the
            message names the argument, what was expected and what came. No kernel has run then.

    Source: the arguments are those of causal_conv1d 1.6 (Dao-AILab), which takes no state together
    with seq_idx; chapters 23 and 27.
    """
    final = check.flag("return_final_states", return_final_states)
    states = {"initial_states": initial_states, "final_states_out": final_states_out}
    _check_channels(x, weight, bias, seq_idx, states)
    if final_states_out is not None:
        if not final:
            raise ValueError("final_states_out needs return_final_states=True, got False")
        _check_out(final_states_out, (x, weight, bias))
    activation = activation_of(activation)
    tensors = (x, weight, bias, initial_states)
    impl = check.resolve_impl(impl, x.device, tuple(t.dtype for t in tensors if t is not None))
    if initial_states is not None:  # W tokens, of which the oldest is in no sum
        initial_states = torch.nn.functional.pad(initial_states, (1, 0))
    y, last, _ = convolve(
        x.mT, weight, bias, initial_states, seq_idx, None, None, None, None, None, final,
        activation, CHUNK, "", impl, "",
    )  # fmt: skip
    if not final:
        return y.mT
    last = last[..., 1:]
    return y.mT, last if final_states_out is None else final_states_out.copy_(last)


def _check_channels(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    states: dict[str, Tensor | None],
) -> None:
    """Refuse tensors of causal_conv1d_fn that do not fit."""
    given = check_sizes(x, ("B", "D", "T"), weight)
    given.sizes["W - 1"] = given.sizes["W"] - 1
    if bias is not None:
        given.take("bias", bias, ("D",))
    for name, state in states.items():
        if state is not None:
            given.take(name, state, ("B", "D", "W - 1"))
    if seq_idx is not None:
        given.sequence_numbers("seq_idx", seq_idx)


def _check_out(out: Tensor, others: tuple[Tensor | None, ...]) -> None:
    """Refuse final states that cannot be written, or would be over another argument."""
    if any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(
            f"final_states_out must not be expanded, got strides {out.stride()} for "
            f"{tuple(out.shape)}"
        )
    if out.is_leaf and needs_gradient(out):
        raise ValueError("final_states_out must not need a gradient: it is overwritten")
    inplace.refuse_shared({"final_states_out": out}, others, "causal_conv1d_fn")


def _check_tensors(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: CPContext | None,
) -> check.Tensors:
    """Refuse tensors that do not fit; the sizes are B, T, D, W and N."""
    given = check_sizes(x, ("B", "T", "D"), weight)
    state = "initial_state", initial_state
    arguments.count_sequences(given, cu_seqlens, cp_context, state)
    for name, y, shape in (
        ("bias", bias, ("D",)),
        ("residual", residual, ("B", "T", "D")),
        ("initial_state", initial_state, ("N", "D", "W")),
    ):
        if y is not None:
            given.take(name, y, shape)
    return given


def check_sizes(x: Tensor, axes: tuple[str, ...], weight: Tensor) -> check.Tensors:
    """Refuse x and weight that do not fit; the sizes are B, T, D and W."""
    given = check.Tensors()
    given.take("x", x, axes)
    for axis, size in given.sizes.items():
        if size < 1 and axis != "T":
            raise ValueError(f"x must have {axis} >= 1, got {axis}={size}")
    given.take("weight", weight, ("D", "W"))
    if not 1 <= given.sizes["W"] <= WIDEST:
        raise ValueError(f"weight must have W from 1 to {WIDEST}, got W={given.sizes['W']}")
    return given


def activation_of(name: str | None) -> str | None:
    """None or "silu"; refuse what is no activation."""
    if name is not None and (not isinstance(name, str) or name not in ("silu", "swish")):
        raise ValueError(f"activation must be None, 'silu' or 'swish', got {name!r}")
    return None if name is None else "silu"


def check_backend(backend: str | None) -> None:
    """Refuse a name that is none of fla-core's kernels here."""
    if backend not in (None, "triton"):
        raise ValueError(f"backend must be None or 'triton', got {backend!r}: impl says what runs")


@dataclass(frozen=True)
class Stages:
    """The convolution, and its adjoint."""

    causal_conv1d: Callable = stage("delta.causal_conv1d")
    causal_conv1d_bwd: Callable = stage("delta.causal_conv1d")
    cp_merge: Callable = halo.merge
    cp_merge_bwd: Callable = halo.merge_bwd


stages = implementations(Stages)


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept."""

    crossing: Tensor | None = None  # states that come from other ranks


NOTHING = Residuals()

# The channels are called H: like heads they know nothing of each other, and DTensors may be sharded
# by them.
convolve = Operator(
    "causal_conv1d",
    {"x": "B T H", "weight": "H W", "bias": "H?", "initial_state": "N H W?", "seq_idx": "B T?"},
    {
        "y": like("B T H", "x", gradient="dy"),
        "final_state": like("N H W", "x", gradient="dht"),
        "crossing": widened("X H W", "x"),
    },
    options={"output_final_state": "bool", "activation": "str?", "chunk_size": "int"},
    residuals=Residuals,
    stages=stages,
    packed="ranks",
    transition="H",
    constants=("seq_idx",),
    apart={"x": 1},
)


@convolve.forward
def forward(
    stages: Stages,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    output_final_state: bool = False,
    activation: str | None = None,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    keep: Collection[str] = Residuals._fields,
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The forward pass: a stage (shapes as in causal_conv1d).

    cp: what other ranks send and are sent. keep: the residuals that are returned.

    Source: chapter 23.
    """
    packed = {} if packing is None else {"packing": packing}
    if cp is not None:
        cp.send(partial(_map, weight.shape[1]), (x,), initial_state, **packed)
        initial_state = cp.receive(stages.cp_merge, initial_state)
    y, final_state = stages.causal_conv1d(
        x, weight, bias, initial_state, seq_idx, activation=activation,
        output_final_state=output_final_state, **packed,
    )  # fmt: skip
    return y, final_state, Residuals(cp and cp.crossing)


def _bounds(x: Tensor, rows: Tensor | None, packing: Packing | None) -> tuple[Tensor, Tensor]:
    """First tokens and ends of pieces: all of x, or these sequences."""
    if packing is None:
        cu_seqlens = torch.tensor([0, x.shape[1]], device=x.device)
    else:
        cu_seqlens = packing.cu_seqlens
    begin, end = cu_seqlens[:-1], cu_seqlens[1:]
    return (begin, end) if rows is None else (begin[rows], end[rows])


def _map(W: int, x: Tensor, state: Tensor | None, *, transition, rows=None, packing=None):
    """What a piece makes of the last W tokens before it, as piece_map."""
    return halo.last_tokens(x, state, *_bounds(x, rows, packing), W)


def _map_bwd(
    stages: Stages, x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None,
    dy: Tensor, dht: Tensor | None, *, transition, activation, rows=None, packing=None,
):  # fmt: skip
    """What a piece makes of the gradient of the last W tokens, as piece_map_bwd.

    The tokens before a piece are read by its first W - 1 alone.
    """
    (begin, end), W = _bounds(x, rows, packing), weight.shape[1]
    own, of_own = (halo.first_tokens(t, begin, end, max(W - 1, 1)) for t in (x, dy))
    state = own.new_zeros(len(own), x.shape[2], W) if initial_state is None else initial_state
    state = state if rows is None else state[rows]
    *_, dS_ext = stages.causal_conv1d_bwd(own, weight, bias, state, of_own, activation=activation)
    if dht is not None:
        dS_ext = dS_ext + halo.shifted(dht, begin - end)
    return dS_ext, (end - begin).clamp(max=W)[:, None].expand(dS_ext.shape[:2])


@convolve.backward
def backward(
    stages: Stages,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    dy: Tensor,
    dht: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    activation: str | None = None,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    residuals: Residuals = NOTHING,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The backward pass: a stage.

    Args:
        dy: Gradient of y.  dht: Gradient of the final state, or None.  cp: as in the forward pass.
    Returns:
        dx, dweight, and the gradients of the bias and of the initial state (or None).
    Source: chapter 23.
    """
    packed = {} if packing is None else {"packing": packing}
    if cp is not None:
        initial_state = cp.entering(residuals.crossing, initial_state)
        given, options = (x, weight, bias, initial_state, dy), {"activation": activation, **packed}
        cp.send(partial(_map_bwd, stages), given, dht, **options)
        dht = cp.receive(stages.cp_merge_bwd, dht)
    return stages.causal_conv1d_bwd(
        x, weight, bias, initial_state, dy, dht, seq_idx, activation=activation, **packed
    )
