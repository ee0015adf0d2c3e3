"""The general delta rule in chunks: the public functions, the declaration, the composition."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check, checkpoints
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.dplr.recurrent import OUTPUTS, TENSORS, checked, rank_one
from linattn_edu.ops.operator import Operator, widened
from linattn_edu.ops.preallocated import check_rooms, into
from linattn_edu.ops.prefill import overwriting
from linattn_edu.ops.ranks import Ranks
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.packing import Packing


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: CPContext | None = None,
    lower_bound: float | None = None,
    *,
    max_num_seqs: int | None = None,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""The general delta rule in chunks, for training and prefill.

    .. math::

        S_t = \mathrm{diag}(e^{gk_t})\, S_{t-1} + b_t^\top (a_t S_{t-1}) + k_t^\top v_t, \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    the function of :func:`fused_recurrent_dplr_delta_rule`, a chunk of tokens at a time. What
    tokens of a chunk read from each other is in four matrices; with the gates accumulated in the
    rows (subscripts g) and e what all a's of a chunk read,

    .. math::

        e = (I - ab)^{-1} (a_g S + ak\, v), \quad o = \mathrm{scale} (q_g S + qb\, e + qk\, v),
        \quad S \leftarrow \mathrm{diag}(e^{g_C}) S + b_g^\top e + k_g^\top v

    Products are in the dtype of q, sums and the state in float32; no exponent is positive, whatever
    the gates. A gate below -104 counts as that, 150 in the sums of log2 of its chunk, and costs the
    gates behind it as many digits: where one gate of six is shut, float32 keeps 3e-5.
    Differentiable by every tensor; both passes start from the arguments alone, and no state is held
    between them. Heads of K > 256 are gone through token by token. A token that is NaN or infinite
    may make all outputs of its chunk NaN, those before it too, and all that follow; earlier chunks
    keep their bits.

    Args:
        q, k, v, a, b, gk, scale, initial_state, output_final_state, cu_seqlens, impl: As in
            :func:`fused_recurrent_dplr_delta_rule`.
        cu_seqlens_cpu: The numbers of cu_seqlens on the CPU: with them the host does not wait for
            the device.
        chunk_size: Tokens of a chunk, 16, 32, 64, or None: 64. The kernels take fewer where tiles
            of K numbers do not fit the GPU.
        safe_gate, disable_recompute: True or False, lower_bound: a number or None. They change
            nothing here.
        cp_context: Sequences cut over several ranks, as in :func:`chunk_gated_delta_rule`; not in
            heads of K > 256 where kernels run.
        max_num_seqs, inplace_final_state, ssm_state_indices: As in :func:`chunk_gated_delta_rule`.
        checkpoint_every_n_tokens, out, final_state_out: Likewise; the first not in heads of K > 256
            where kernels run.

    Works in CUDA graphs, with cu_seqlens only together with cu_seqlens_cpu or max_num_seqs.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`; with
        checkpoint_every_n_tokens its states, as of :func:`chunk_gated_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: Peng et al. 2025 (arXiv:2503.14456); arguments as in fla-core 0.6.0; chapter 12e.
    """
    options = safe_gate, chunk_size, disable_recompute, cp_context, lower_bound, max_num_seqs
    serving = inplace_final_state, ssm_state_indices, checkpoint_every_n_tokens
    return _run(
        {"q": q, "k": k, "v": v, "a": a, "b": b, "gk": gk}, initial_state, cu_seqlens,
        cu_seqlens_cpu, scale, output_final_state, options, serving, (out, final_state_out), impl,
    )  # fmt: skip


def chunk_rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: CPContext | None = None,
    lower_bound: float | None = None,
    *,
    max_num_seqs: int | None = None,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    checkpoint_every_n_tokens: int | None = None,
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """RWKV-7 in chunks: :func:`chunk_dplr_delta_rule` by its own names.

    Args:
        r, w, k, v, a, b: As in :func:`fused_recurrent_rwkv7`.
        scale: Factor of the output, 1 if not given; ``K ** -0.5`` if None.
        initial_state, output_final_state, cu_seqlens, cu_seqlens_cpu, safe_gate, chunk_size: As in
            :func:`chunk_dplr_delta_rule`.
        disable_recompute, cp_context, lower_bound, max_num_seqs, inplace_final_state: Likewise.
        ssm_state_indices, checkpoint_every_n_tokens, out, final_state_out, impl: Likewise.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`; with
        checkpoint_every_n_tokens its states, as of :func:`chunk_gated_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: Peng et al. 2025 (arXiv:2503.14456); arguments as in fla-core 0.6.0; chapter 12e.
    """
    options = safe_gate, chunk_size, disable_recompute, cp_context, lower_bound, max_num_seqs
    serving = inplace_final_state, ssm_state_indices, checkpoint_every_n_tokens
    return _run(
        {"r": r, "k": k, "v": v, "a": a, "b": b, "w": w}, initial_state, cu_seqlens,
        cu_seqlens_cpu, scale, output_final_state, options, serving, (out, final_state_out), impl,
    )  # fmt: skip


def _run(
    tensors: dict[str, Tensor],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    scale: float | None,
    output_final_state: bool,
    options: tuple,
    serving: tuple,
    rooms: tuple[Tensor | None, Tensor | None],
    impl: str,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Check all arguments and run the chunks.  tensors: q, k, v, a, b and gk by their names.
    options: of chunk_dplr_delta_rule, in the order of fla's signature, and max_num_seqs.  serving:
    whether the final state overwrites the initial one, in which slots, the tokens between
    checkpoints.  rooms: for o and the final state.
    """
    safe_gate, chunk_size, disable_recompute, cp_context, lower_bound, most = options
    inplace, slots, every = serving
    output_final_state, _, _, inplace = arguments.flags(
        output_final_state=output_final_state, safe_gate=safe_gate,
        disable_recompute=disable_recompute, inplace_final_state=inplace,
    )  # fmt: skip
    chunk_size = 64 if chunk_size is None else chunk_size
    check.choice("chunk_size", chunk_size, arguments.CHUNK_SIZES)
    check.number("lower_bound", lower_bound)
    given, scale, impl = checked(
        tensors, initial_state, cu_seqlens, scale, impl, cp_context, slots is not None
    )
    place = arguments.place(
        given, cu_seqlens, cu_seqlens_cpu, None, chunk_size, cp_context, even=True, most=most
    )
    inputs = (*tensors.values(),)
    others = *inputs, cu_seqlens, cu_seqlens_cpu, slots
    place = overwriting(place, given, others, initial_state, inplace, slots, cp_context)
    check_rooms(
        given, (*others, initial_state), ("out", rooms[0], ("B", "T", "H", "V")),
        ("final_state_out", rooms[1], ("N", "H", "K", "V")), tensors["v"],
        asked="" if output_final_state else "output_final_state=True, got False",
        elsewhere="inplace_final_state=True" if inplace else "", ranks=cp_context is not None,
    )  # fmt: skip
    checkpoints.check_every(every, chunk_size, cp_context, most)
    kept, state, wanted = (), place.entering(initial_state), output_final_state or place.writes
    if impl == "triton" and _by_token(inputs[0], tensors["v"], chunk_size, cu_seqlens is not None):
        for name, x in (("cp_context", cp_context), ("checkpoint_every_n_tokens", every)):
            if x is not None:
                raise ValueError(
                    f"{name} must be None where kernels go token by token, in heads of K > 256, "
                    f"got K={inputs[0].shape[-1]}"
                )
        o, final_state = rank_one(*inputs, state, cu_seqlens, scale, False, impl)
        final_state = final_state if wanted else None
    else:
        o, final_state, *kept = chunk(
            *place.joined(*inputs), state, *place.bounds, scale, wanted, chunk_size, place.group,
            impl, "", save="crossing" if place.group else "", every=every,
        )  # fmt: skip
    o, final_state = into(rooms[0], place.parted(o)), into(rooms[1], place.left(final_state, False))
    return (o, final_state) if every is None else (o, final_state, *kept)


def _by_token(q: Tensor, v: Tensor, chunk_size: int, packed: bool) -> bool:
    """Whether the kernels take one token after the other."""
    from linattn_edu.kernels.routes import by_kind, kind_of

    kind = kind_of(q, *v.shape[2:], chunk_size, packed)
    return by_kind.dplr_stages(kind).takes == "token by token"


@dataclass(frozen=True)
class Stages:
    """One implementation of each stage."""

    gate_cumsum: Callable = stage("delta.gate_cumsum")
    dplr_intra: Callable = stage("dplr.intra")
    dplr_scan: Callable = stage("dplr.scan")
    dplr_states: Callable = stage("dplr.scan")
    dplr_scan_bwd: Callable = stage("dplr.scan_bwd")
    dplr_rows_bwd: Callable = stage("dplr.intra_bwd")
    dplr_intra_bwd: Callable = stage("dplr.intra_bwd")
    gate_bwd: Callable = stage("delta.gate_bwd")
    dplr_map: Callable = stage("dplr.scan")
    cp_merge: Callable = stage("delta.cp_merge")
    dplr_map_bwd: Callable = stage("dplr.scan_bwd")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


stages = implementations(Stages)


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept."""

    crossing: Tensor | None = None  # states that come from other ranks


def _operations(s: dict) -> tuple[int, int]:
    """Operations of the matrix products, forward and backward, two for each multiply-add."""
    C = s["C"]
    tokens = 2 * s["B"] * s["T"] * s["H"]
    forward = tokens * (4 * C * s["K"] + 4 * C * s["V"] + 4 * s["K"] * s["V"])
    backward = tokens * (12 * C * s["K"] + 10 * C * s["V"] + 11 * s["K"] * s["V"])
    return forward, backward


chunk = Operator(
    "chunk_dplr_delta_rule",
    TENSORS,
    OUTPUTS | {"crossing": widened("X H K V", "q")},
    options={"scale": "float", "output_final_state": "bool", "chunk_size": "int"},
    residuals=Residuals,
    stages=stages,
    packed="ranks",
    transition="H K K",
    limited="k",
    flops=_operations,
)


@chunk.forward
def forward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    packing: Packing | None = None,
    cp: Ranks | None = None,
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The chunked forward pass as a composition of stages; only the kernels take a packing.

    cp: what other ranks send and are sent.  Returns o, the final state or None, and what the
    backward pass may read.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    gc = stages.gate_cumsum(gk, **options)
    M, *scores, qg, kg, ag, bg = stages.dplr_intra(q, k, a, b, gc, **options)
    if cp is not None:
        cp.send(stages.dplr_map, (kg, ag, bg, v, gc, M, scores[0]), initial_state, **packed)
        initial_state = cp.receive(stages.cp_merge, initial_state)
    o, final_state = stages.dplr_scan(
        qg, kg, ag, bg, v, gc, M, *scores, initial_state,
        scale=scale, output_final_state=output_final_state, **packed,
    )  # fmt: skip
    return o, final_state, Residuals(cp and cp.crossing)


@chunk.backward
def backward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    residuals: Residuals,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    chunk_size: int = 64,
    packing: Packing | None = None,
    cp: Ranks | None = None,
) -> tuple[Tensor, ...]:
    """The chunked backward pass, from the arguments of the forward pass, and the states that came
    from other ranks; cp: as in the forward pass.

    Returns:
        dq, dk, dv, da, db, dgk and the gradient of the initial state.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    gc = stages.gate_cumsum(gk, **options)
    M, ak, *scores, qg, kg, ag, bg = stages.dplr_intra(q, k, a, b, gc, **options)
    read = qg, kg, ag, bg, gc, M, ak, *scores, do
    if cp is not None:
        cp.send(stages.dplr_map_bwd, read, dht, scale=scale, **packed)
        initial_state = cp.entering(residuals.crossing, initial_state)
        dht = cp.receive(stages.cp_merge_bwd, dht)
    h, e = stages.dplr_states(kg, ag, bg, v, gc, M, ak, initial_state, **packed)
    dh, dx, dv, dh0 = stages.dplr_scan_bwd(*read, dht, scale=scale, **packed)
    del read, qg, kg, ag, bg, M, ak, scores
    rows = stages.dplr_rows_bwd(v, e, do, dx, h, dh, scale=scale, **options)
    del h, e, dh, dx
    dq, dk, da, db, dgc = stages.dplr_intra_bwd(q, k, a, b, gc, *rows, **packed)
    dgk, _, _ = stages.gate_bwd(dgc, gk, **options)
    return dq, dk, dv, da, db, dgk, dh0
