"""Mamba-2 in chunks: the public function, its declaration, the composition of its stages."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check, checkpoints
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.inplace import SSD as NAMES
from linattn_edu.ops.operator import Operator, like, widened
from linattn_edu.ops.preallocated import check_rooms, into
from linattn_edu.ops.prefill import overwriting
from linattn_edu.ops.ranks import Ranks
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import laid_out, transposed, wide
from linattn_edu.packing import Packing
from linattn_edu.reference.tiles import sigmoid as by_number

LARGEST = 256  # P and N
ONE_OF = "one of return_final_states=True and return_varlen_states=True"


@repeated("initial_states", "out", "final_states_out")
def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    cu_seqlens_cpu: Tensor | None = None,
    max_num_seqs: int | None = None,
    inplace_final_states: bool = False,
    state_batch_indices: Tensor | None = None,
    out: Tensor | None = None,
    final_states_out: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    batch_invariant: bool = False,
    cp_context: CPContext | None = None,
    impl: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    r"""Mamba-2 (SSD) in chunks: training and prefill.

    .. math::

        \Delta_t &= \mathrm{clamp}(\mathrm{softplus}(dt_t + dt\_bias)), \\
        S_t &= e^{\Delta_t A} S_{t-1} + \Delta_t\, x_t^\top B_t, \qquad
        out_t = (S_t C_t^\top + D x_t)\, \mathrm{silu}(z_t)

    for each batch entry and head; x, B and C are rows, S is ``[P, N]``, and head h reads B and C of
    group ``h // (H // G)``. Differentiable by x, dt, A, B, C, D, z, dt_bias and initial_states,
    from out and from the final states.

    Args:
        x: Values ``[B, T, H, P]``, float32, float16 or bfloat16 (float64: reference only),
            P <= 256; T may be 0.
        dt: Raw step sizes ``[B, T, H]``, any of these dtypes, as all that follow. With x in float16
            the gradient of a step below 1e-6 loses digits in the fused kernels, which multiply by
            steps in x's dtype.
        A: Rate of the log decay of each head ``[H]``, <= 0. A positive number is refused on the
            CPU; on a GPU, where that would wait for the device, it is not looked for.
        B, C: What is written with, and read with, ``[B, T, G, N]``, H a multiple of G, N <= 256; in
            products they are rounded to x's dtype.
        chunk_size: Tokens of a chunk at most, any number >= 1, which is rounded up to a power of
            two from 16 on. It changes the speed and the rounding only; the kernels take shorter
            ones, of 128 tokens or less.
        D: Weight of x in out, ``[H]`` or ``[H, P]``, or None: 0.
        z: Gate ``[B, T, H, P]``, or None: out is not gated.
        dt_bias: Added to dt ``[H]``, or None: 0.
        initial_states: States before the first token ``[B, H, P, N]`` (with cu_seqlens one for each
            sequence), zero if None.
        seq_idx: Document of each token ``[B, T]``, int32 or int64: where it changes, the state
            starts anew from zero. initial_states belong to the first token's document, and the
            final states to the last token's. Documents are kept apart by factors of zero, which
            NaN and inf pass: one in x, dt or B reaches out of every token of its row from the first
            of its chunk on, and the final states; one in any tensor, or in the gradient of out, may
            reach all gradients of its row. With cu_seqlens it stays in its sequence.
        cu_seqlens: Boundaries ``[N + 1]``, int32 or int64, of sequences packed into a batch of one:
            0 first, T last, or less: as in :func:`chunk_gated_delta_rule`. Each sequence gives the
            same bits as alone; seq_idx is not needed.
        dt_softplus: Whether the step is the softplus of dt + dt_bias, or that itself.
        dt_limit: Least and largest step; a step beyond them gives dt no gradient.
        return_final_states: Whether to return the states after the last token.
        return_varlen_states: Whether to return those of every sequence of cu_seqlens.
        cu_seqlens_cpu: The numbers of cu_seqlens on the CPU. Without them a cu_seqlens on a GPU is
            read once, and the call waits for the device; with them it does not.
        max_num_seqs: As in :func:`chunk_gated_delta_rule`.
        inplace_final_states, state_batch_indices: Prefill over a pool of states
            ``[slots, H, P, N]``, as inplace_final_state and ssm_state_indices in
            :func:`chunk_gated_delta_rule`; return_final_states then returns the pool,
            return_varlen_states is refused.
        out, final_states_out: Where to write out and the states, as out and final_state_out in
            :func:`chunk_gated_delta_rule`; with return_final_states or return_varlen_states, not
            both.
        checkpoint_every_n_tokens: States for a cache of prefixes, as in
            :func:`chunk_gated_delta_rule`, a multiple of the rounded chunk_size; the last result.
            Not with seq_idx.
        batch_invariant: As in :func:`chunk_gated_delta_rule`.
        cp_context: Sequences cut over several ranks, as in :func:`chunk_gated_delta_rule`; not with
            seq_idx. initial_states have a row for each sequence that begins on this rank; the final
            states one for each that ends on it, whichever flag asks for them. Each pass gathers
            ``H N (P + 4)`` numbers of float32 from every rank, once.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    A NaN or infinity reaches earlier tokens of its chunk, as in :func:`chunk_gated_delta_rule`. A
    sequence of more than 4096 tokens is cut into pieces: those after it are without it where their
    head has forgotten its token.

    Accuracy: products are accumulated in float32; 16-bit inputs are rounded where a product needs
    them, and the states between chunks are kept in x's dtype. So in float16 every number of a state
    must stay below 65504: beyond it out is infinite or NaN from the next chunk on, and gradients
    are, even where the right ones fit. bfloat16, float32 and :func:`selective_state_update` with a
    state in float32 hold such states.

    Memory: between the passes it keeps its inputs alone. An x whose tokens lie at any one distance,
    as a slice of a projection's do, is not copied where the kernels in Gluon run.

    Works under ``torch.compile(fullgraph=True)``, in CUDA graphs (with cu_seqlens only together
    with cu_seqlens_cpu or max_num_seqs), with activation checkpointing and under autocast, which
    does not change its precision. Gradients of gradients and forward-mode differentiation are
    errors.

    Returns:
        out ``[B, T, H, P]`` in x's dtype. With return_final_states ``(out, states)``, the states
        ``[B, H, P, N]`` after the last token; with return_varlen_states ``(out, states)``, those
        of each sequence ``[N, H, P, N]``; with both ``(out, final, varlen)``. In float32 (float64
        where x, dt, A or initial_states is).

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, chunk_size, limit, impl or combination of arguments does not
            fit; the message names the argument, what was expected and what came. No kernel has run
            then.

    Source: Dao and Gu 2024 (arXiv:2405.21060), section 6; the arguments are those of mamba_ssm
    2.3.2, which sees the boundaries of cu_seqlens only through seq_idx; chapters 13 to 19.
    """
    given = {"dt": dt, "A": A, "D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states}
    pool = state_batch_indices is not None
    checked = _check_tensors(x, B, C, given, seq_idx, cu_seqlens, cp_context, pool)
    softplus, final, varlen, inplace = arguments.flags(
        dt_softplus=dt_softplus,
        return_final_states=return_final_states,
        return_varlen_states=return_varlen_states,
        inplace_final_states=inplace_final_states,
    )
    if varlen and inplace:
        raise ValueError(
            "return_varlen_states must be False with inplace_final_states=True, whose "
            "initial_states hold the states of all sequences"
        )
    if varlen and cu_seqlens is None and cp_context is None:
        raise ValueError("return_varlen_states=True needs cu_seqlens or cp_context, got None")
    if seq_idx is not None and cp_context is not None:
        raise ValueError("seq_idx must be None with cp_context, which has the boundaries")
    chunk_size, low, high = check_options(chunk_size, dt_limit)
    impl = check.resolve_impl(impl, x.device, tuple(checked.dtypes))
    bounds = cu_seqlens, cu_seqlens_cpu, None
    form, length = _form(impl, x, B, chunk_size, low)
    place = arguments.place(checked, *bounds, length, cp_context, even=True, most=max_num_seqs)
    others = x, dt, A, B, C, D, z, dt_bias, seq_idx, *bounds, state_batch_indices
    place = overwriting(
        place, checked, others, initial_states, inplace, state_batch_indices, cp_context,
        NAMES, v_first=True,
    )  # fmt: skip
    check_rooms(
        checked, (*others, initial_states), ("out", out, ("B", "T", "H", "P")),
        ("final_states_out", final_states_out, ("N" if varlen else "B", "H", "P", "S")), x,
        asked=ONE_OF if final == varlen else "",
        elsewhere="inplace_final_states=True" if inplace else "", ranks=cp_context is not None,
    )  # fmt: skip
    every = checkpoint_every_n_tokens
    checkpoints.check_every(every, chunk_size, cp_context, max_num_seqs)
    if every is not None and seq_idx is not None:
        raise ValueError("seq_idx must be None with checkpoint_every_n_tokens: give cu_seqlens")
    B, C = B.to(x.dtype), C.to(x.dtype)
    checkpoints.check_invariant(batch_invariant, x, x.shape[2], 0, place, every, form)
    x, dt, B, C, z = place.joined(x, dt, B, C, z)
    y, states, *kept = scan(
        x, dt, A, B, C, None if D is None else D.reshape(x.shape[2], -1), z, dt_bias,
        place.entering(transposed(initial_states, True)), _runs(seq_idx), *place.bounds,
        softplus, low, high, final or varlen or place.writes, length, place.group, form, "",
        save="crossing" if place.group else "", every=every,
    )  # fmt: skip
    y, states = into(out, place.parted(y)), place.left(states, True)
    kept = () if every is None else (laid_out(*kept, True),)
    if not (final or varlen):
        return (y, *kept) if kept else y
    last = states if cu_seqlens is None or place.writes else states[-1:]
    every_state = [into(final_states_out, x) for x in [last] * final + [states] * varlen]
    return (y, *every_state, *kept)


def _check_tensors(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    given: dict[str, Tensor | None],
    seq_idx: Tensor | None,
    cu_seqlens: Tensor | None,
    cp_context: CPContext | None,
    pool: bool,
) -> check.Tensors:
    """Refuse tensors that do not fit; the sizes are B, T, H, P, G, S (the states' N) and N;
    with pool the initial states are any number, slots.
    """
    checked = check.Tensors()
    sizes = checked.sizes
    checked.take("x", x, ("B", "T", "H", "P"))
    checked.take("dt", given["dt"], ("B", "T", "H"))
    checked.take("A", given["A"], ("H",), decay=True)
    for name, y in (("B", B), ("C", C)):
        checked.take(name, y, ("B", "T", "G", "S"))
    for axis, owner in (("B", "x"), ("H", "x"), ("P", "x"), ("G", "B"), ("S", "B")):
        if sizes[axis] < 1:
            raise ValueError(f"{owner} must have no empty axis but T, got {axis}=0")
    for axis, owner in (("P", "x"), ("S", "B")):
        if sizes[axis] > LARGEST:
            raise ValueError(f"{owner}'s last axis must be <= {LARGEST}, got {sizes[axis]}")
    check.group_count(sizes)
    D = given["D"]
    shapes = {
        "D": ("H", "P") if isinstance(D, Tensor) and D.ndim == 2 else ("H",),
        "z": ("B", "T", "H", "P"),
        "dt_bias": ("H",),
        "initial_states": ("slots" if pool else "N", "H", "P", "S"),
    }
    state = "initial_states", given["initial_states"]
    arguments.count_sequences(checked, cu_seqlens, cp_context, state)
    for name, shape in shapes.items():
        if given[name] is not None:
            checked.take(name, given[name], shape)
    if seq_idx is not None:
        checked.sequence_numbers("seq_idx", seq_idx)
    return checked


def check_options(chunk_size: int, dt_limit: tuple[float, float]) -> tuple[int, float, float]:
    """Refuse what does not fit; return the tokens of a chunk, a power of two from 16 on, and the
    least and the largest step, as floats.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size must be an integer, got {chunk_size!r}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    try:
        low, high = (float(y) for y in dt_limit)
    except (TypeError, ValueError):
        raise TypeError(f"dt_limit must be two numbers, got {dt_limit!r}") from None
    if not low <= high:
        raise ValueError(f"dt_limit must be (least, largest), got {dt_limit}")
    return max(16, 1 << (chunk_size - 1).bit_length()), low, high


def _runs(seq_idx: Tensor | None) -> Tensor | None:
    """The number of the document of each token, counted along each row."""
    if seq_idx is None:
        return None
    first = torch.zeros_like(seq_idx[:, :1], dtype=torch.bool)
    changes = seq_idx[:, 1:] != seq_idx[:, :-1]
    return torch.cat([first, changes], 1).cumsum(1, dtype=torch.int32)


def _form(impl: str, x: Tensor, B: Tensor, chunk_size: int, low: float) -> tuple[str, int]:
    """(which stages, tokens of a chunk): kernels fused where they hold the heads, and no step, of
    which `low` is the least, makes a memory grow; the reference in short chunks, its fastest.
    """
    if impl == "reference":
        return impl, min(chunk_size, 64)
    from linattn_edu.kernels.routes import by_kind, kind_of, limits

    kind = kind_of(B, *x.shape[2:], chunk_size, None)._replace(dtype=x.dtype)
    if by_kind.ssd_stages(kind, low).takes == "fused":
        return "fused", min(chunk_size, limits.SSD_CHUNK)
    return impl, min(chunk_size, by_kind.chunk_limit(kind).takes)


@dataclass(frozen=True)
class Stages:
    """One implementation of each stage; `dataclasses.replace` swaps a single one."""

    chunk_cumsum: Callable = stage("ssd.chunk_cumsum")
    chunk_state: Callable = stage("ssd.chunk_state")
    state_passing: Callable = stage("ssd.state_passing")
    chunk_scan: Callable = stage("ssd.chunk_scan")
    chunk_scan_bwd_dstates: Callable = stage("ssd.chunk_scan_bwd_dstates")
    state_passing_bwd: Callable = stage("ssd.state_passing_bwd")
    chunk_state_bwd_db: Callable = stage("ssd.chunk_state_bwd_db")
    chunk_scan_bwd_dc: Callable = stage("ssd.chunk_scan_bwd_dc")
    chunk_scan_chunk_state_bwd_dx: Callable = stage("ssd.chunk_scan_chunk_state_bwd_dx")
    chunk_scan_bwd_da_cs: Callable = stage("ssd.chunk_scan_bwd_da_cs")
    chunk_cumsum_bwd: Callable = stage("ssd.chunk_cumsum_bwd")
    cp_merge: Callable = stage("delta.cp_merge")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


@dataclass(frozen=True)
class FusedStages:
    """Both passes in fused stages."""

    chunk_cumsum_log: Callable = stage("ssd.chunk_cumsum")
    chunk_scores: Callable = stage("fused.ssd_fwd")
    ssd_fwd: Callable = stage("fused.ssd_fwd")
    ssd_states: Callable = stage("fused.ssd_states")
    ssd_states_bwd: Callable = stage("fused.ssd_states")
    ssd_bwd_dc: Callable = stage("fused.ssd_bwd_dc")
    ssd_bwd_dx: Callable = stage("fused.ssd_bwd")
    chunk_cumsum_bwd: Callable = stage("ssd.chunk_cumsum_bwd")
    ssd_ends: Callable = stage("fused.ssd_fwd")
    cp_join: Callable = stage("delta.cp_merge")
    cp_merge: Callable = stage("delta.cp_merge")
    ssd_ends_bwd: Callable = stage("fused.ssd_bwd")
    cp_join_bwd: Callable = stage("delta.cp_merge_bwd")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


stages, fused_stages = implementations(Stages), implementations(FusedStages)


def _chosen(form: str) -> Stages | FusedStages:
    """The stages that `_form` chose."""
    return fused_stages("triton") if form == "fused" else stages(form)


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept."""

    crossing: Tensor | None = None  # states that come from other ranks


NOTHING = Residuals()


def _operations(s: dict) -> tuple[int, int]:
    """Operations of the matrix products of the fused kernels, for calls without a gate."""
    token, C, H, P, N = 2 * s["B"] * s["T"], s["C"], s["H"], s["P"], s["S"]
    scores, chunk, state = token * s["G"] * C * N, token * H * C * P, token * H * P * N
    return scores + chunk + 2 * state, 3 * (scores + chunk) + 6 * state


scan = Operator(
    "mamba_chunk_scan_combined",
    {
        "x": "B T H P",
        "dt": "B T H",
        "A": "H",
        "B": "B T G S",
        "C": "B T G S",
        "D": "H PER?",
        "z": "B T H P?",
        "dt_bias": "H?",
        "initial_state": "N H S P?",
        "seq_idx": "B T?",
    },
    {
        "out": like("B T H P", "x", gradient="dout"),
        "final_state": widened("N H S P", "x dt A initial_state", gradient="dht"),
        "crossing": widened("X H S P", "x"),
    },
    options={
        "softplus": "bool",
        "low": "float",
        "high": "float",
        "output_final_state": "bool",
        "chunk_size": "int",
    },
    residuals=Residuals,
    stages=_chosen,
    packed="ranks",
    transition="H",
    constants=("seq_idx",),
    apart={"x": 2},  # by what FusedStages has in Gluon; others copy it
    flops=_operations,
)


@scan.forward
def forward(
    stages: Stages | FusedStages,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    softplus: bool = False,
    low: float = 0.0,
    high: float = float("inf"),
    output_final_state: bool = False,
    chunk_size: int = 64,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    keep: Collection[str] = Residuals._fields,
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The forward pass as a composition of stages (shapes as in mamba_chunk_scan_combined).

    D is [H, 1] or [H, P], initial_state [N, H, N, P]. cp: what other ranks send and are sent. keep:
    the residuals that are returned. Only the kernels take a packing.
    Returns out, the final state or None, and what the backward pass reads beside the arguments.

    Source: chapter 13.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    steps = {"softplus": softplus, "limit": (low, high), **options}
    final = {"output_final_state": output_final_state}
    if isinstance(stages, FusedStages):
        gs, gc = stages.chunk_cumsum_log(dt, A, dt_bias, **steps)
        pieces = {}
        if cp is not None:
            *maps, offsets = stages.ssd_ends(B, x, gs, gc, rows=cp.sources, **options)
            cp.send_pieces(stages.cp_join, maps, initial_state, offsets=offsets)
            pieces = {"maps": maps}
        S = stages.chunk_scores(C, B, seq_idx, **options)  # while the maps are on their way
        if cp is not None:
            initial_state = cp.receive(stages.cp_merge, initial_state)
        out, final_state = stages.ssd_fwd(
            C, B, S, x, gs, gc, initial_state, D, z, seq_idx, **final, **packed, **pieces
        )
    else:
        x = x.contiguous()
        step, gc = stages.chunk_cumsum(dt, A, dt_bias, **steps)
        s = stages.chunk_state(B, x, step, gc, seq_idx, **options)
        if cp is not None:
            cp.send_all(partial(_passing_map, stages), (s, gc), initial_state, **options)
            initial_state = cp.receive(stages.cp_merge, initial_state)
        h, final_state = stages.state_passing(s, gc, initial_state, seq_idx, **final, **options)
        out = stages.chunk_scan(C, B, x, step, gc, h, D, z, seq_idx, **options)
    return out, final_state, Residuals(cp and cp.crossing)


def _passing_map(
    stages: Stages, s: Tensor, gc: Tensor, state: Tensor | None, *, transition: bool, **options
) -> tuple[Tensor, Tensor | None]:
    """What every sequence makes of the state that enters it, as piece_map."""
    _, S_ext = stages.state_passing(s, gc, state, output_final_state=True, **options)
    return S_ext, _transition(stages, s, gc, **options) if transition else None


def _passing_map_bwd(
    stages: Stages, dh_out: Tensor, gc: Tensor, h: Tensor, dht: Tensor | None, *,
    transition: bool, **options,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What every sequence makes of the gradient of the state that leaves it, as piece_map_bwd."""
    _, _, dS_ext = stages.state_passing_bwd(dh_out, gc, h, dht, **options)
    return dS_ext, _transition(stages, h, gc, **options) if transition else None


def _transition(stages: Stages, s: Tensor, gc: Tensor, **options) -> Tensor:
    """What is left of a state of one number, to which nothing is written."""
    packing = options.get("packing")
    N = s.shape[0] if packing is None else packing.sequences
    one = s.new_ones(N, s.shape[2], 1, 1)
    _, last = stages.state_passing(
        torch.zeros_like(s[..., :1, :1]).contiguous(), gc, one, output_final_state=True, **options
    )
    return last[..., 0, 0]


@scan.backward
def backward(
    stages: Stages | FusedStages,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    dout: Tensor,
    dht: Tensor | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    *,
    softplus: bool = False,
    low: float = 0.0,
    high: float = float("inf"),
    chunk_size: int = 64,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    residuals: Residuals = NOTHING,
) -> tuple[Tensor | None, ...]:
    """The backward pass as a composition of stages.

    Starts from the arguments of the forward pass: the states are computed again, so that none
    is held between the two passes.

    Args:
        dout: Gradient of out.  dht: Gradient of the final state, or None.  cp: as in the forward
            pass.
    Returns:
        Gradients of x, dt, A, B, C, D, z, dt_bias and initial_state, or None.
    Source: chapters 14 to 19.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    steps = {"softplus": softplus, "limit": (low, high), **options}
    dy, dz, m = dout, None, None
    if cp is not None:
        initial_state = cp.entering(residuals.crossing, initial_state)
    if isinstance(stages, FusedStages):
        gs, gc = stages.chunk_cumsum_log(dt, A, dt_bias, **steps)
        if z is not None:
            S = stages.chunk_scores(C, B, seq_idx, **options)
            y, _ = stages.ssd_fwd(C, B, S, x, gs, gc, initial_state, D, None, seq_idx, **packed)
            dy, dz = _through_gate(dout, y, z)
        pieces = {}
        if cp is not None:
            *maps, offsets = stages.ssd_ends_bwd(C, gc, dy, rows=cp.sources, **options)
            cp.send_pieces(stages.cp_join_bwd, maps, dht, offsets=offsets)
            pieces = {"maps": maps}
        # while the maps are on their way
        h = stages.ssd_states(B, x, gs, gc, initial_state, seq_idx, **options)
        if cp is not None:
            dht = cp.receive(stages.cp_merge_bwd, dht)
        dh, dh0 = stages.ssd_states_bwd(C, gc, dy, dht, seq_idx, **options, **pieces)
        dC, dgc, dlast = stages.ssd_bwd_dc(C, gc, h, dh, dy, seq_idx, **options)
        del h  # before dx is made
        dx, dB, dC, dstep, dgc, m, dD = stages.ssd_bwd_dx(
            C, B, x, gs, gc, dh, dy, dC, dgc, D, seq_idx, **options
        )
    else:
        x = x.contiguous()
        step, gc = stages.chunk_cumsum(dt, A, dt_bias, **steps)
        s = stages.chunk_state(B, x, step, gc, seq_idx, **options)
        h, _ = stages.state_passing(s, gc, initial_state, seq_idx, **options)
        del s
        if z is not None:
            y = stages.chunk_scan(C, B, x, step, gc, h, D, None, seq_idx, **options)
            dy, dz = _through_gate(dout, y, z)
        dh_out = stages.chunk_scan_bwd_dstates(C, gc, dy, seq_idx, **options)
        if cp is not None:
            cp.send_all(partial(_passing_map_bwd, stages), (dh_out, gc, h), dht, **options)
            dht = cp.receive(stages.cp_merge_bwd, dht)
        ds, dlast, dh0 = stages.state_passing_bwd(dh_out, gc, h, dht, seq_idx, **options)
        del dh_out
        dB, dgc_state, dlast_state = stages.chunk_state_bwd_db(
            B, x, step, gc, ds, seq_idx, **options
        )
        dC, dB, dgc_inter = stages.chunk_scan_bwd_dc(
            C, B, x, step, gc, h, dy, dB, seq_idx, **options
        )
        dx, dstep, dD = stages.chunk_scan_chunk_state_bwd_dx(
            C, B, x, step, gc, ds, dy, D, seq_idx, **options
        )
        dgc = stages.chunk_scan_bwd_da_cs(C, B, x, step, gc, dy, seq_idx, **options)
        dgc, dlast = dgc + dgc_inter + dgc_state, dlast + dlast_state
    ddt, dA, ddt_bias = stages.chunk_cumsum_bwd(dgc, dlast, dstep, dt, A, dt_bias, m, **steps)
    return dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dh0


def _through_gate(dout: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """dy and dz of out = y silu(z)."""
    dtype = wide(dout, y, z)
    do, z = dout.to(dtype), z.to(dtype)
    # torch's rounds by where a number stands on the CPU, so by what else is in the batch
    sigmoid = (by_number if z.device.type == "cpu" else torch.sigmoid)(z)
    dz = do * y.to(dtype) * sigmoid * (1 + z * (1 - sigmoid))
    return (do * z * sigmoid).to(dout.dtype), dz
