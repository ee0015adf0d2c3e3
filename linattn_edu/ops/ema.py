"""ema_scan: the public function, its declaration, the composition of its stages."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check, checkpoints
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.preallocated import check_rooms, into
from linattn_edu.ops.prefill import overwriting
from linattn_edu.ops.ranks import Ranks
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.packing import Packing


def ema_scan(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_size: int = 64,
    cp_context: CPContext | None = None,
    max_num_seqs: int | None = None,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""Exponential moving average with a decay of its own for each token.

    .. math::

        h_t = e^{g_t} h_{t-1} + w_t x_t, \qquad y_t = h_t, \qquad
        w_t = 1 - e^{g_t} \ \text{without a weight}

    for each channel of x; the channels of a head share the decay and the weight. It is Mamba-2's
    recurrence without B and C. Differentiable by x, g, weight and initial_state, from y and from
    the final state.

    Args:
        x: ``[B, T, H, D]``, or ``[B, T, D]`` for one head: float32, float16 or bfloat16 (float64:
            reference only), any D >= 1; T may be 0. Many channels of few heads are what the
            kernels are made for: a head takes as long as one of 64 channels.
        g: Natural-log decay of each token ``[B, T, H]``, or ``[B, T]`` with x ``[B, T, D]``, <= 0,
            any of these dtypes. ``-inf`` is a reset: nothing is left of the tokens before, but of
            a NaN or infinity, which goes on. A positive g is refused on the CPU; on a GPU, where
            that would wait for the device, and under torch.compile it is not looked for.
        weight: Factor of each token, of g's shape, any of these dtypes and any numbers; if None
            ``1 - exp(g)``, computed without loss where g is small.
        initial_state: State before the first token ``[N, H, D]``, or ``[N, D]``, zero if None. N is
            B, or the number of sequences of cu_seqlens.
        output_final_state: Whether to return the state after the last token.
        cu_seqlens, cu_seqlens_cpu, chunk_indices: As in :func:`chunk_gated_delta_rule`. Each
            sequence gives the same bits as alone.
        cp_context: Sequences cut over several ranks, as in :func:`chunk_gated_delta_rule`. Each
            pass gathers ``H (D + 1)`` numbers of float32 from every rank, once.
        chunk_size: Tokens a chunk: 16, 32 or 64. It changes the speed and the rounding only.
        max_num_seqs, inplace_final_state, ssm_state_indices: As in :func:`chunk_gated_delta_rule`;
            a pool is ``[slots, H, D]``, or ``[slots, D]``.
        checkpoint_every_n_tokens, out, final_state_out: Likewise; out takes y.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Non-contiguous tensors, and on a GPU those that do not start at 16 bytes, are copied first.

    A NaN or infinity reaches earlier tokens of its chunk, as in :func:`chunk_gated_delta_rule`.

    Accuracy: states and sums are float32; with 16-bit inputs the products inside a chunk have
    rounded operands, and y is rounded. A decay between two tokens is the difference of two sums of
    g over the chunk, as in :func:`chunk_gated_delta_rule`. One below ``e^-104`` is 0, and its g has
    the gradient 0. The gradient of g, without a weight, is that of ``e^g (y_(t-1) - x_t)``: where
    the two are large and nearly equal, 16 bits have few digits for the difference. Then subtract
    the level from x and the state and add it to y, which gives the same numbers, or use float32.

    A probability p that sets ``g = log(1 - p)`` may be 1, but PyTorch then multiplies g's gradient
    0 by the slope of the logarithm, which is infinite: give
    ``g = log1p(-p.clamp(max=1 - 2**-20))`` and ``weight=p``.

    Memory: between the passes it keeps its inputs, one number of each token and head, and the state
    at the head of every chunk, in float32: with 16 bits a thirtieth of x in chunks of 64.

    Works under ``torch.compile(fullgraph=True)``, in CUDA graphs (with cu_seqlens only together
    with cu_seqlens_cpu or max_num_seqs), with activation checkpointing and under autocast, which
    does not change its precision. Gradients of gradients and forward-mode differentiation are
    errors.

    Returns:
        ``(y, final_state)``: y of x's shape and dtype; final_state ``[N, H, D]``, or ``[N, D]``, in
        float32 (float64 where an input is), or None. With checkpoint_every_n_tokens its states, as
        of :func:`chunk_gated_delta_rule`.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, chunk_size, impl or combination of arguments does not fit; the
            message names the argument, what was expected and what came. No kernel has run then.

    Source: Dao and Gu 2024 (arXiv:2405.21060) section 6; chapter 20.
    """
    slots, every = ssm_state_indices, checkpoint_every_n_tokens
    given = _check_tensors(
        x, g, weight, initial_state, cu_seqlens, cp_context, pool=slots is not None
    )
    output_final_state, inplace = arguments.flags(
        output_final_state=output_final_state, inplace_final_state=inplace_final_state
    )
    check.choice("chunk_size", chunk_size, arguments.CHUNK_SIZES)
    impl = check.resolve_impl(impl, given.device, tuple(given.dtypes))
    place = arguments.place(
        given, cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size, cp_context, most=max_num_seqs
    )
    tensors, head = (x, g, weight), ("H",) * (x.ndim == 4)
    others = *tensors, cu_seqlens, cu_seqlens_cpu, chunk_indices, slots
    state = initial_state
    if state is not None:  # as matrices [H, D, 1], which is what slots of a pool hold
        state = (state if head else state.unsqueeze(1)).unsqueeze(-1)
    place = overwriting(place, given, others, state, inplace, slots, cp_context)
    state_out = "final_state_out", final_state_out, ("N", *head, "D")
    check_rooms(
        given, (*others, initial_state), ("out", out, ("B", "T", *head, "D")), state_out, x,
        asked="" if output_final_state else "output_final_state=True, got False",
        elsewhere="inplace_final_state=True" if inplace else "", ranks=cp_context is not None,
    )  # fmt: skip
    checkpoints.check_every(every, chunk_size, cp_context, max_num_seqs)
    state = place.entering(state)
    if not head:
        tensors = (t if t is None else t.unsqueeze(2) for t in tensors)
    y, *states = scan(
        *place.joined(*tensors), state if state is None else state.squeeze(-1), *place.bounds,
        output_final_state or place.writes, chunk_size, place.group, impl, "", save="gc h",
        every=every,
    )  # fmt: skip
    y, (final_state, *kept) = place.parted(y), states[: 1 if every is None else 2]
    if final_state is not None:
        final_state = place.left(final_state.unsqueeze(-1), False).squeeze(-1)
    if not head:
        y = y.squeeze(2)
        final_state, *kept = (s if s is None else s.squeeze(-2) for s in (final_state, *kept))
    final_state = initial_state if place.writes else final_state
    return into(out, y), into(final_state_out, final_state), *kept


def _check_tensors(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: CPContext | None,
    *,
    pool: bool,
) -> check.Tensors:
    """Refuse tensors that do not fit; the sizes are B, T, D, N, and H where heads are given; with
    pool the initial states are any number, slots.
    """
    given = check.Tensors()
    head = () if isinstance(x, Tensor) and x.ndim == 3 else ("H",)
    given.take("x", x, ("B", "T", *head, "D"))
    for axis, size in given.sizes.items():
        if size < 1 and axis != "T":
            raise ValueError(f"x must have {axis} >= 1, got {axis}={size}")
    given.take("g", g, ("B", "T", *head), decay=True)
    if weight is not None:
        given.take("weight", weight, ("B", "T", *head))
    arguments.count_sequences(given, cu_seqlens, cp_context, ("initial_state", initial_state))
    if initial_state is not None:
        given.take("initial_state", initial_state, ("slots" if pool else "N", *head, "D"))
    return given


@dataclass(frozen=True)
class Stages:
    """One implementation of each stage."""

    gate_cumsum: Callable = stage("delta.gate_cumsum")
    ema: Callable = stage("ssd.ema")
    ema_bwd: Callable = stage("ssd.ema_bwd")
    cp_merge: Callable = stage("delta.cp_merge")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


stages = implementations(Stages)


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept."""

    gc: Tensor | None
    h: Tensor | None


def _operations(s: dict) -> tuple[int, int]:
    """Operations of the matrix products, forward and backward: two for each multiply-add."""
    channels, C = 2 * s["B"] * s["T"] * s["H"] * s["D"], s["C"]
    return channels * (C + 1), channels * (2 * C + 1)


scan = Operator(
    "ema_scan",
    {"x": "B T H D", "g": "B T H", "weight": "B T H?", "initial_state": "N H D?"},
    {
        "y": like("B T H D", "x", gradient="dy"),
        "final_state": widened("N H D", "x g weight initial_state", gradient="dht"),
        "gc": widened("B T H", "g"),
        "h": widened("B NT H D", "x g weight initial_state"),
    },
    options={"output_final_state": "bool", "chunk_size": "int"},
    residuals=Residuals,
    stages=stages,
    packed="ranks",
    transition="H",
    flops=_operations,
)


@scan.forward
def forward(
    stages: Stages,
    x: Tensor,
    g: Tensor,
    *,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    keep: Collection[str] = Residuals._fields,
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The forward pass as a composition of stages (shapes as in ema_scan, with heads).

    cp: what other ranks send and are sent. keep: the residuals that are returned.
    Returns y, the final state or None, and what the backward pass starts from.

    Source: chapter 20.
    """
    options = {"chunk_size": chunk_size} | ({} if packing is None else {"packing": packing})
    gc = stages.gate_cumsum(g, **options)
    if cp is not None:
        cp.send_all(partial(_map, stages), (x, g, gc, weight), initial_state, **options)
        initial_state = cp.receive(stages.cp_merge, initial_state)
    y, h, final_state = stages.ema(
        x, g, gc, weight, initial_state, output_final_state=output_final_state,
        return_states="h" in keep, **options,
    )  # fmt: skip
    return y, final_state, Residuals(gc if "gc" in keep else None, h)


def _map(
    stages: Stages, x: Tensor, g: Tensor, gc: Tensor, weight: Tensor | None, state: Tensor | None,
    *, transition: bool, **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What every sequence makes of the state that enters it: S_ext, and what is left of 1."""
    final = {"output_final_state": True, "return_states": False, **options}
    _, _, S_ext = stages.ema(x, g, gc, weight, state, **final)
    if not transition:
        return S_ext, None
    one = S_ext.new_ones(*S_ext.shape[:2], 1)
    _, _, M = stages.ema(x.new_zeros(*x.shape[:3], 1), g, gc, weight, one, **final)
    return S_ext, M[..., 0]


def _map_bwd(
    stages: Stages, x: Tensor, g: Tensor, gc: Tensor, weight: Tensor | None, h: Tensor, dy: Tensor,
    dht: Tensor | None, *, transition: bool, **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What every sequence makes of the gradient of the state that leaves it."""
    *_, dS_ext = stages.ema_bwd(x, g, gc, weight, h, dy, dht, **options)
    none, no_state = x.new_zeros(*x.shape[:3], 1), None
    if not transition:
        return dS_ext, None
    return dS_ext, _map(stages, none, g, gc, weight, no_state, transition=True, **options)[1]


@scan.backward
def backward(
    stages: Stages,
    x: Tensor,
    g: Tensor,
    residuals: Residuals,
    dy: Tensor,
    dht: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    packing: Packing | None = None,
    cp: Ranks | None = None,
) -> tuple[Tensor | None, ...]:
    """The backward pass as a composition of stages, of which there is one.

    Starts from the arguments of the forward pass and its residuals.

    Args:
        dy: Gradient of y.  dht: Gradient of the final state, or None.  cp: as in the forward pass.
    Returns:
        dx, dg, and the gradients of the weight and of the initial state (or None).
    Source: chapter 20.
    """
    options = {"chunk_size": chunk_size} | ({} if packing is None else {"packing": packing})
    gc, h = residuals
    if cp is not None:
        cp.send_all(partial(_map_bwd, stages), (x, g, gc, weight, h, dy), dht, **options)
        dht = cp.receive(stages.cp_merge_bwd, dht)
    *gradients, dh0 = stages.ema_bwd(x, g, gc, weight, h, dy, dht, **options)
    return *gradients, None if initial_state is None else dh0
