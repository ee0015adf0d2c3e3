"""Kimi Delta Attention in chunks: the public function, its declaration, the composition."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import check, checkpoints
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.delta.operations import operations
from linattn_edu.ops.l2norm import unit
from linattn_edu.ops.operator import Operator, counted, like, widened
from linattn_edu.ops.preallocated import into
from linattn_edu.ops.ranks import Ranks
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import in_float32, known, laid_out
from linattn_edu.packing import Packing


@repeated("initial_state", "out", "final_state_out")
def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_indices: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    gate_domain: str = "log",
    checkpoint_every_n_tokens: int | None = None,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    cp_context: CPContext | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""Kimi Delta Attention in chunks: the delta rule with a gate for each key channel.

    .. math::

        S_t = \mathrm{diag}(e^{g_t}) S_{t-1}
              + k_t^\top \beta_t (v_t - k_t\, \mathrm{diag}(e^{g_t}) S_{t-1}), \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and value head; q, k, v are rows, S is ``[K, V]``, g_t a row of K numbers.
    With fewer q/k heads than value heads (GVA), value head j reads q/k head ``j // (HV // H)``.
    Differentiable by q, k, v, g, beta, initial_state, A_log and dt_bias, from o and from the final
    state. Right for any gate, from 0 to a closed one, mixed in any way within a chunk.

    Args:
        q: Queries ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only),
            K <= 256.
        k: Keys ``[B, T, H, K]`` of q's dtype. Rows must satisfy ``beta * |k|^2 <= 2``: normalise
            them to unit length.
        v: Values ``[B, T, HV, V]`` of q's dtype, HV a multiple of H, V <= 512; or of fewer heads
            than H, as in :func:`chunk_gated_delta_rule`.
        g: Natural-log decay of each token and channel ``[B, T, HV, K]``, <= 0, any of these
            dtypes. A positive g is refused on the CPU; on a GPU, where that would wait for the
            device, and under torch.compile it is not looked for.
        beta: Write strength ``[B, T, HV]`` in [0, 2], any of these dtypes. Where it may be beyond
            1, allow_neg_eigval should say so.
        scale: Factor of the output, ``K ** -0.5`` if None; a number of Python or NumPy, or a tensor
            of one. Under torch.compile each value is a graph of its own: where it changes from
            call to call, give 1 and multiply o.
        initial_state: State before the first token ``[N, HV, K, V]``, zero if None. N is B, or the
            number of sequences of cu_seqlens.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether to divide the rows of q and k by their length first
            (:func:`l2norm`, eps 1e-6).
        use_gate_in_kernel: Whether g is the raw gate of a layer, from which the log decay is
            ``-exp(A_log) * softplus(g + dt_bias)``, or, with lower_bound,
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        use_beta_sigmoid_in_kernel: Whether beta is given before its sigmoid.
        allow_neg_eigval: Whether beta may be beyond 1, as in :func:`chunk_gated_delta_rule`; in 16
            bit everything is kept in float32 then; in bfloat16 on Hopper, for an even K and V up to
            128 and without return_intermediate_states, as two numbers of bfloat16, on one rank of
            those heads alone whose numbers cancel. With keys alike and a beta beyond 1 of which
            nothing is said, o and gradients are off by as much as they are.
        safe_gate: A promise that every log decay is at least lower_bound (-5 if None), in [-5, 0):
            in bfloat16 and float32 the forward pass need not look for channels that fade by more
            than 2^80 in 16 tokens, and is faster for it. With use_gate_in_kernel it needs
            lower_bound, which keeps it; without, g is checked on the CPU and taken on trust
            on a GPU and under torch.compile, where a g below the bound makes the output wrong or
            not finite.
        lower_bound: Least log decay, < 0: of the gate with use_gate_in_kernel, of g with
            safe_gate.
        disable_recompute: Whether to keep what the backward pass would compute again. Where both
            passes run in fused stages (see below), the gates and the rows with the gate in them:
            five times the memory of k at HV heads, in 16 bit, for a fifth of the time of the
            backward pass; last bits of gradients may differ. Elsewhere the stages one by one keep
            the states too: about four times the memory of q, k and v, for a quarter of the time of
            their backward pass; but nothing where allow_neg_eigval has two numbers kept for one.
        return_intermediate_states: Whether to return the state entering each chunk too; no gradient
            flows through it.
        state_v_first: Whether states are ``[N, HV, V, K]``. Costs a copy of them.
        cu_seqlens, cu_seqlens_cpu, chunk_indices: Packed sequences, as in
            :func:`chunk_gated_delta_rule`; but for allow_neg_eigval their backward pass never runs
            in fused stages.
        A_log, dt_bias: HV and HV * K numbers in any shape, with use_gate_in_kernel only; dt_bias
            may be left out, and with lower_bound A_log too.
        chunk_size: Tokens a chunk at most: 16, 32 or 64. It changes the speed and the rounding
            only; the kernels take shorter ones where longer do not fit the GPU (fp32, Turing).
        inplace_final_state, ssm_state_indices: Prefill over a pool of states, as in
            :func:`chunk_gated_delta_rule`.
        out, final_state_out, gate_domain: As in :func:`chunk_gated_delta_rule`.
        checkpoint_every_n_tokens: States for a cache of prefixes, as in
            :func:`chunk_gated_delta_rule`; not with return_intermediate_states.
        batch_invariant: As in :func:`chunk_gated_delta_rule`.
        transpose_state_layout: Deprecated name of state_v_first.
        cp_context: Sequences cut over several ranks, as in :func:`chunk_gated_delta_rule`; not with
            return_intermediate_states.
        use_graph: Name of fla-core: True is max_num_seqs of as many sequences as cu_seqlens has.
        max_num_seqs: As in :func:`chunk_gated_delta_rule`; not with return_intermediate_states.
        impl: "triton", "reference", or "auto": the kernels for CUDA tensors and under
            ``TRITON_INTERPRET=1``, else (and for float64) the reference stages.

    Non-contiguous tensors, and on a GPU those that do not start at 16 bytes, are copied first.

    Causal to the bit, while all values stay finite: changing a token, its gate included, changes
    no output before it. A token that is NaN or infinite may make all outputs of its chunk NaN,
    those before it too, and all that follow; earlier chunks keep their bits.

    Accuracy: as of :func:`chunk_gated_delta_rule`, states and written values below 65504 in float16
    included: :func:`fused_recurrent_kda`, bfloat16 and float32 hold larger ones. With
    allow_neg_eigval, of heads whose numbers do not cancel the gradient of k is within three and a
    half roundings, and that of an initial state of which next to nothing is left within five. Of
    heads whose numbers do, rows that use_qk_l2norm_in_kernel divides keep all digits.

    Memory: between the passes it keeps its inputs and, of each token and head, 2 chunk_size numbers
    of q's dtype, of float32 with allow_neg_eigval, where halves may be kept of some heads both;
    more with the flags named in :func:`chunk_gated_delta_rule`.

    Speed depends on the gates in bfloat16 on Hopper: the backward pass is faster where no channel
    of a group of 64 fades by more than 2^60 up to the middle of a chunk or from there (chapter 11),
    the forward pass in chunks of which none fades by more than 2^80 in a block of 16 tokens.

    The forward pass runs in fused stages (chapter 24) in 16 bit on Hopper and later, for K and V up
    to 128; the backward pass too in Gluon on Hopper, in bfloat16, for K and V of 128, as
    many q/k heads as value heads, chunks of 64 and sequences of whole chunks, of at least 2^14
    tokens times heads, unless cu_seqlens is given or cp_context cuts sequences of several lengths
    for a rank. Neither does with return_intermediate_states, nor the forward pass with
    disable_recompute where the backward pass does not. Their last bits are not those of the stages
    one by one.

    Works under ``torch.compile(fullgraph=True)``, in CUDA graphs (with cu_seqlens only together
    with cu_seqlens_cpu or max_num_seqs), with activation checkpointing and under autocast, which
    does not change its precision. Gradients of gradients and forward-mode differentiation are
    errors.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in q's dtype; final_state ``[N, HV, K, V]`` in
        float32 (float64 where q, g, A_log, dt_bias or initial_state is), or None; initial_state
        with inplace_final_state. With return_intermediate_states also h ``[B, NT, HV, K, V]`` in
        q's dtype; with checkpoint_every_n_tokens its states.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, head count, chunk_size, scale, impl or combination of arguments
            does not fit; the message names the argument, what was expected and what came. No
            kernel has run then.

    Source: Kimi Team 2025 (arXiv:2510.26692); chapters 07, 11 and 12.
    """
    if check.flag("use_graph", use_graph) and max_num_seqs is None:
        if cu_seqlens is None:
            raise ValueError("use_graph belongs to cu_seqlens, which is None")
        max_num_seqs = check.boundaries("cu_seqlens", cu_seqlens)
    sigmoid, beyond = arguments.sigmoid_factor(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    (q, *given), save, results = prepared(
        (q, k, v, g, beta, A_log, dt_bias, initial_state),
        (cu_seqlens, cu_seqlens_cpu, chunk_indices), cp_context, scale, chunk_size, impl,
        v_first=arguments.v_first(state_v_first, transpose_state_layout),
        lower_bound=lower_bound,
        sigmoid=sigmoid,
        beyond=beyond,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        final=(inplace_final_state, ssm_state_indices),
        rooms=(out, final_state_out),
        most=max_num_seqs,
        domain=gate_domain,
        every=checkpoint_every_n_tokens,
        invariant=batch_invariant,
    )  # fmt: skip
    return results(chunk(q, *given, save=save, every=checkpoint_every_n_tokens))


def prepared(
    tensors: tuple[Tensor | None, ...],
    bounds: tuple[Tensor | None, ...],
    cp_context: CPContext | None,
    scale: float | None,
    chunk_size: int,
    impl: str,
    *,
    v_first: bool,
    lower_bound: float | None,
    sigmoid: int = 0,
    beyond: bool,
    final: tuple[bool, Tensor | None],
    rooms: tuple[Tensor | None, Tensor | None],
    most: int | None,
    domain: str,
    every: int | None,
    invariant: bool,
    **flags: bool,
) -> tuple[tuple, str, Callable]:
    """All arguments checked: those of an operator that `declare` makes, what it saves, and what
    makes of its outputs those of the public function.

    tensors, final, most, domain: as of `arguments.chunked`.  rooms: for o and the final state.
    every: checkpoint_every_n_tokens.  invariant: batch_invariant.  flags: the last six of
    chunk_kda's call, in its order.
    """
    output_final_state, normalise, raw_gate, safe_gate, keep_all, return_states = arguments.flags(
        **flags
    )
    gate_bound, safe_bound = arguments.gate_bounds(
        raw_gate, safe_gate, check.number("lower_bound", lower_bound)
    )
    (q, k, v, g, *strength, A_log, dt_bias, initial_state), place, scale, impl = arguments.chunked(
        tensors, bounds, cp_context, scale, chunk_size, impl, sigmoid=sigmoid, v_first=v_first,
        raw_gate=raw_gate, lower_bound=gate_bound, channels=True,
        final=(*arguments.flags(inplace_final_state=final[0]), final[1]),
        rooms=(*rooms, output_final_state), most=most, domain=domain,
    )  # fmt: skip
    if return_states and cp_context is not None:
        raise ValueError("return_intermediate_states=True is not supported with cp_context")
    if return_states and most is not None:
        raise ValueError("return_intermediate_states=True is not supported with max_num_seqs")
    checkpoints.check_every(every, chunk_size, cp_context, most)
    checkpoints.check_invariant(invariant, q, *v.shape[2:], place, every, impl)
    if every is not None and return_states:
        raise ValueError(
            "return_intermediate_states must be False with checkpoint_every_n_tokens, got both"
        )
    if safe_gate and not raw_gate:
        _check_promise(g, safe_bound)
    dtype, halves = q.dtype, 0
    if beyond and not return_states and _in_halves(impl, q, v, chunk_size):
        # of all heads, where a part of a sequence decides as the whole
        halves = 2 if invariant or place.group else 1
    if (beyond and not halves) or impl == "reference":  # where it costs no time
        q, k, v = in_float32(q, k, v)
    if normalise and halves == 2:  # rounded, a key of unit length would have another
        q, k = in_float32(q, k)
    raw = (q.detach(), k.detach()) if normalise and halves == 1 else (None, None)
    if normalise:
        q, k = unit(q, impl), unit(k, impl)
    save = ("P A", "P A P_fine A_fine cancels", "P_fine A_fine")[halves]
    save += " crossing" if place.group else ""
    q, k, v, g, *strength = place.joined(q, k, v, g, *strength)
    packed = place.bounds[0] is not None
    fused = 2 if halves else 0
    if not (halves or return_states):
        fused = _fused_passes(impl, q, v, chunk_size, packed, strength)
    if keep_all and not halves:
        if fused == 2:
            save += " gc kg qg kd"
        else:
            save, fused = "P A gc w kg qg h v_new", 0
    given = (
        q, k, v, g, *strength, A_log, dt_bias, place.entering(initial_state), *raw,
        *place.bounds, scale, gate_bound, safe_bound, output_final_state or place.writes,
        chunk_size, fused, halves, place.group, impl, "h" if return_states else "",
    )  # fmt: skip

    def results(outputs: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        o, final_state, *kept = outputs
        o, final_state = place.parted(o).to(dtype), place.left(final_state, v_first)
        o, final_state = into(rooms[0], o), into(rooms[1], final_state)
        if every is not None:
            return o, final_state, laid_out(*kept, v_first)
        h = laid_out(Residuals(*kept).h, v_first)
        return (o, final_state, h.to(dtype)) if return_states else (o, final_state)

    return given, save, results


def _check_promise(g: Tensor, bound: float) -> None:
    """Check the promise of safe_gate where the numbers of g are known."""
    if known(g) and bool((g < bound).any()):
        raise ValueError(
            f"g must be >= {bound} with safe_gate=True, got a minimum of {g.min().item():.4g}"
        )


def _fused_passes(
    impl: str, q: Tensor, v: Tensor, chunk_size: int, packed: bool, strength: list[Tensor]
) -> int:
    """How many of the two passes run in fused kernels, the forward pass first, where nothing is
    asked for that only the stages make. Both forms of the backward pass start from P and A.

    strength: beta, or an erase and a write gate.
    """
    if impl != "triton":
        return 0
    from linattn_edu.kernels.routes import by_kind, kind_of

    gates = (x.dtype for x in (strength if len(strength) > 1 else ()))
    kind = kind_of(q, *v.shape[2:], chunk_size, packed)
    if by_kind.kda_forward_stages(kind).takes == "staged":
        return 0
    return 1 + (by_kind.kda_backward_stages(kind, *gates).takes == "fused")


def _in_halves(impl: str, q: Tensor, v: Tensor, chunk_size: int) -> bool:
    """Whether the kernels multiply in two halves of 16 bit, where beta may be beyond 1."""
    if impl != "triton":
        return False
    from linattn_edu.kernels.routes import by_kind, kind_of

    return by_kind.kda_halves(kind_of(q, *v.shape[2:], chunk_size, None)).takes == "halves"


@dataclass(frozen=True)
class Stages:
    """One implementation of each stage; `dataclasses.replace` swaps a single one.

    kda_scan is state and output, kda_scans is state and state_bwd, where no state is kept.
    """

    gate_cumsum: Callable = stage("delta.gate_cumsum")
    kda_intra: Callable = stage("delta.kda_intra")
    wy: Callable = stage("delta.wy")
    state: Callable = stage("delta.state")
    output: Callable = stage("delta.output")
    kda_scan: Callable = stage("delta.kda_scan")
    kda_scans: Callable = stage("delta.kda_scans")
    state_bwd: Callable = stage("delta.state_bwd")
    kda_output_bwd: Callable = stage("delta.kda_bwd")
    kda_wy_bwd: Callable = stage("delta.kda_bwd")
    kda_intra_bwd: Callable = stage("delta.kda_intra_bwd")
    gate_bwd: Callable = stage("delta.gate_bwd")
    piece_map: Callable = stage("delta.cp_merge")
    cp_merge: Callable = stage("delta.cp_merge")
    piece_map_bwd: Callable = stage("delta.cp_merge_bwd")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


@dataclass(frozen=True)
class FusedStages:
    """The same passes in fused stages, on rows that have the gate in them: kda_prepare for
    kda_intra and a part of wy, kda_fused_scan for the rest of wy and kda_scan; kda_gates and
    kda_fused_scans for wy and kda_scans, kda_fused_intra_bwd for kda_output_bwd, kda_wy_bwd and
    kda_intra_bwd. kda_gate_prepare is gate_cumsum and kda_prepare, kda_intra_gate_bwd is
    kda_fused_intra_bwd and gate_bwd. kda_halves is all of the forward pass where beta may be beyond
    1, kda_halves_bwd of the backward pass.
    """

    gate_cumsum: Callable = stage("delta.gate_cumsum")
    kda_intra: Callable = stage("delta.kda_intra")
    kda_prepare: Callable = stage("fused.kda_fwd")
    kda_gate_prepare: Callable = stage("fused.kda_fwd")
    kda_fused_scan: Callable = stage("fused.kda_fwd")
    kda_gates: Callable = stage("fused.kda_scans")
    kda_fused_scans: Callable = stage("fused.kda_scans")
    kda_fused_intra_bwd: Callable = stage("fused.kda_bwd")
    kda_intra_gate_bwd: Callable = stage("fused.kda_bwd")
    gate_bwd: Callable = stage("delta.gate_bwd")
    kda_fused_scan_map: Callable = stage("fused.kda_fwd")
    cp_merge: Callable = stage("delta.cp_merge")
    kda_fused_scan_map_bwd: Callable = stage("fused.kda_scans")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")
    kda_halves: Callable = stage("fused.kda_halves")
    kda_halves_bwd: Callable = stage("fused.kda_halves")


stages, fused_stages = implementations(Stages), implementations(FusedStages)


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept."""

    P: Tensor | None = None
    A: Tensor | None = None
    gc: Tensor | None = None
    w: Tensor | None = None
    kg: Tensor | None = None
    qg: Tensor | None = None
    kd: Tensor | None = None
    h: Tensor | None = None
    v_new: Tensor | None = None
    P_fine: Tensor | None = None  # not rounded
    A_fine: Tensor | None = None
    cancels: Tensor | None = None  # the heads that read these; None: all
    crossing: Tensor | None = None  # states that come from other ranks


def declare(name: str, strength: dict[str, str], **more: object) -> Operator:
    """An operator with a decay for each channel; strength: the axes of what it writes with."""
    return Operator(
        name,
        {
            "q": "B T H K",
            "k": "B T H K",
            "v": "B T HV V",
            "g": "B T HV K",
            **strength,
            "A_log": "HV?",
            "dt_bias": "HV K?",
            "initial_state": "N HV K V?",
            "raw_q": "B T H K?",
            "raw_k": "B T H K?",
        },
        {
            "o": like("B T HV V", "v", gradient="do"),
            "final_state": widened("N HV K V", "q g A_log dt_bias initial_state", gradient="dht"),
            "P": like("B T HV C", "q"),
            "A": like("B T HV C", "q"),
            "gc": widened("B T HV K", "g A_log dt_bias"),
            "w": like("B T HV K", "q"),
            "kg": like("B T HV K", "q"),
            "qg": like("B T HV K", "q"),
            "kd": like("B T HV K", "q"),
            "h": like("B NT HV K V", "q"),
            "v_new": like("B T HV V", "q"),
            "P_fine": widened("B T HV C", "q"),
            "A_fine": widened("B T HV C", "q"),
            "cancels": counted("N HV"),
            "crossing": widened("X HV K V", "q"),
        },
        options={
            "scale": "float",
            "lower_bound": "float?",
            "safe_bound": "float?",
            "output_final_state": "bool",
            "chunk_size": "int",
            "fused": "int",
            "halves": "int",
        },
        residuals=Residuals,
        stages=stages,
        fused="fused",
        forward_stages=fused_stages,
        packed="ranks",
        transition="HV K K",
        limited="k",
        constants=("raw_q", "raw_k"),
        flops=partial(operations, keys=4),
        **more,
    )


chunk = declare("chunk_kda", {"beta": "B T HV"}, lacks=("write",))


@chunk.forward
def forward(
    stages: Stages | FusedStages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    write: Tensor | None = None,
    raw_q: Tensor | None = None,
    raw_k: Tensor | None = None,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    safe_bound: float | None = None,
    chunk_size: int = 64,
    halves: int = 0,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    keep: Collection[str] = Residuals._fields,
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The chunked forward pass as a composition of stages (shapes as in chunk_kda).

    write: The write gate of chunk_gdn2, whose erase gate beta is then. raw_q, raw_k: q and k before
    they were divided by their lengths, with halves of some heads, or None.
    safe_bound: a promise that no log decay of a token is below it. halves: FusedStages hold kd, kg,
    v_new and Z as two numbers of bfloat16, and P and A in float32, of all heads (2), or, without
    cp, where numbers cancel (1). cp: what other ranks send and are sent. keep: the residuals that
    are returned; the others are freed as soon as no stage reads them. Without h and v_new among
    them kda_scan takes the place of state and output. FusedStages have neither w, h nor v_new, and
    they alone kd.
    Returns o, the final state or None, and what the backward pass may read. Only the kernels take a
    packing.

    Source: chapters 07 and 24.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    if isinstance(stages, FusedStages):
        if halves == 1:
            raw = None if raw_q is None else (raw_q, raw_k)
            o, last, *made = stages.kda_halves(
                q, k, v, beta, g, A_log, dt_bias, write, initial_state, raw, scale=scale,
                output_final_state=output_final_state, lower_bound=lower_bound,
                safe_bound=safe_bound, **options,
            )  # fmt: skip
            kept = dict(zip(("P", "A", "P_fine", "A_fine", "cancels"), made, strict=True))
            return o, last, Residuals(**{n: x for n, x in kept.items() if n in keep})
        gate = g, A_log, dt_bias, lower_bound, safe_bound
        scan = {"scale": scale, "output_final_state": output_final_state, **packed}
        return _fused(
            stages, q, k, v, gate, beta, write, initial_state, cp, options, scan, halves == 2, keep
        )
    gc = stages.gate_cumsum(g, A_log, dt_bias, lower_bound=lower_bound, **options)
    P, A = stages.kda_intra(q, k, beta, gc, lower_bound=safe_bound, **options)
    w, u, kg, qg = stages.wy(k, v, beta, gc, A, q, write, **packed)
    A = A if "A" in keep else None
    if cp is not None:
        cp.send(stages.piece_map, (kg, w, u, gc), initial_state, **options)
        initial_state = cp.receive(stages.cp_merge, initial_state)
    scaled, h, v_new = {"scale": scale, **packed}, None, None
    if "h" in keep or "v_new" in keep:
        h, v_new, final_state = stages.state(
            kg, w, u, gc, initial_state, output_final_state=output_final_state, **options
        )
    else:
        o, final_state = stages.kda_scan(
            qg, kg, w, u, gc, P, initial_state, output_final_state=output_final_state, **scaled
        )
    del u
    kept = Residuals(P, A, gc, w, kg, qg, None, h, v_new, crossing=cp and cp.crossing)
    kept = Residuals(*(x if n in keep else None for n, x in kept._asdict().items()))
    if h is not None:
        del A, gc, w, kg
        o = stages.output(qg, None, v_new, h, None, P, chunk_size=chunk_size, **scaled)
    return o.to(v.dtype), final_state, kept


def _fused(
    stages: FusedStages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: tuple,
    beta: Tensor,
    write: Tensor | None,
    initial_state: Tensor | None,
    cp: Ranks | None,
    options: dict,
    scan: dict,
    halves: bool,
    keep: Collection[str],
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The forward pass of FusedStages; gate: g, A_log, dt_bias, its bound and the promised one."""
    *gate, lower_bound, safe_bound = gate
    fine = {"fine": True} if halves else {}
    if halves:
        own = *gate, None if write is None else beta
        gc, kd, kg, qg = stages.kda_gates(q, k, *own, lower_bound=lower_bound, **options, **fine)
        options |= {"lower_bound": safe_bound, "precision": "halves"}
        P, A = stages.kda_intra(q, k, beta, gc, **options)
    else:
        options |= {"lower_bound": lower_bound, "safe_bound": safe_bound}
        gc, P, A, kd, kg, qg = stages.kda_gate_prepare(q, k, beta, *gate, **options)
    beta = beta if write is None else write  # of the values; that of the keys is in P, A and kd
    if cp is not None:
        fine |= {n: x for n, x in options.items() if n == "packing"}
        cp.send(stages.kda_fused_scan_map, (kg, kd, v, beta, gc, A), initial_state, **fine)
        initial_state = cp.receive(stages.cp_merge, initial_state)
    o, final_state = stages.kda_fused_scan(
        qg, kg, kd, v, beta, gc, P, A, initial_state, **scan | fine
    )
    kept = {"P": P, "A": A, "gc": gc, "kg": kg, "qg": qg, "kd": kd, "crossing": cp and cp.crossing}
    kept |= {"P_fine": P, "A_fine": A} if halves else {}
    return o, final_state, Residuals(**{n: x for n, x in kept.items() if n in keep})


@chunk.backward
def backward(
    stages: Stages | FusedStages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    residuals: Residuals,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    write: Tensor | None = None,
    raw_q: Tensor | None = None,
    raw_k: Tensor | None = None,
    scale: float,
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    halves: int = 0,
    packing: Packing | None = None,
    cp: Ranks | None = None,
) -> tuple[Tensor | None, ...]:
    """The chunked backward pass as a composition of stages.

    Starts from the arguments of the forward pass and its P and A; where the other residuals are
    None they are computed again, so that no state is held between the two passes. FusedStages
    compute the states always.

    Args:
        do: Gradient of o.  dht: Gradient of the final state, or None.  write, raw_q, raw_k, halves,
            cp: as in the forward pass.
    Returns:
        dq, dk, dv, dg, dbeta, with write its gradient, dA_log and ddt_bias (or None), and the
        gradient of the initial state.
    Source: chapters 11, 12 and 24.
    """
    packed = {} if packing is None else {"packing": packing}
    P, A, gc, w, kg, qg, kd, h, v_new, *fine, found, crossing = residuals
    if halves == 2:
        P, A = fine
    options = {"chunk_size": A.shape[-1], **packed}
    gate, again = {"lower_bound": lower_bound, **options}, gc is None
    if halves == 1:
        raw = None if raw_q is None else (raw_q, raw_k)
        *made, dh0 = stages.kda_halves_bwd(
            q, k, v, beta, g, (P, A), tuple(fine), found, do, A_log, dt_bias, write, initial_state,
            dht, raw, scale=scale, **gate,
        )  # fmt: skip
        dq, dk, dbeta, dg, dA_log, ddt_bias, dv, *dwrite = made
        return dq, dk, dv, dg, dbeta, *dwrite, dA_log, ddt_bias, dh0
    if h is None and cp is not None:
        initial_state = cp.entering(crossing, initial_state)
    if isinstance(stages, FusedStages):
        fine = packed | ({"fine": True} if halves else {})
        erase, strength = (None, beta) if write is None else (beta, write)
        if again:
            gc, kd, kg, qg = stages.kda_gates(q, k, g, A_log, dt_bias, erase, **gate | fine)
        if cp is not None:
            inputs = qg, kg, kd, strength, gc, P, A, do
            cp.send(stages.kda_fused_scan_map_bwd, inputs, dht, scale=scale, **fine)
            dht = cp.receive(stages.cp_merge_bwd, dht)
        h, v_new, dh, Z, dv, dh0 = stages.kda_fused_scans(
            qg, kg, kd, v, strength, gc, P, A, do, initial_state, dht, scale=scale, **fine
        )
        del kd, kg, qg
        dq, dk, dbeta, dg, dA_log, ddt_bias, *of_values = stages.kda_intra_gate_bwd(
            q, k, v, beta, gc, h, v_new, do, dh, Z, g, A_log, dt_bias, write, scale=scale,
            **gate | fine,
        )  # fmt: skip
        dv, *dwrite = of_values or (dv,)
        return dq, dk, dv, dg, dbeta, *dwrite, dA_log, ddt_bias, dh0
    if again:
        gc = stages.gate_cumsum(g, A_log, dt_bias, **gate)
        w, u, kg, qg = stages.wy(k, v, beta, gc, A, q, write, **packed)
    back = {"P": P, "scale": scale, **options}
    if cp is not None:
        cp.send(stages.piece_map_bwd, (qg, kg, w, gc, do, None), dht, **back)
        dht = cp.receive(stages.cp_merge_bwd, dht)
    if again:
        h, v_new, dh, dv_new, dh0 = stages.kda_scans(
            qg, kg, w, u, gc, P, do, initial_state, dht, scale=scale, **packed
        )
        del u
    else:
        dh, dv_new, dh0 = stages.state_bwd(qg, kg, w, gc, do, None, dht, **back)
    del w, kg, qg
    dqg, dP = stages.kda_output_bwd(v_new, h, do, scale=scale, **options)
    dkb, dkg, dv, dL, dstrength, dgl = stages.kda_wy_bwd(
        v, beta if write is None else write, A, h, v_new, dh, dv_new, **packed
    )
    del h, v_new, dh, dv_new
    dq, dk, dbeta, dgc = stages.kda_intra_bwd(
        q, k, beta, gc, dP, dL, dqg, dkb, dkg, dgl, dstrength if write is None else None, **packed
    )
    del gc, dP, dL, dqg, dkb, dkg
    dg, dA_log, ddt_bias = stages.gate_bwd(dgc, g, A_log, dt_bias, **gate)
    dstrength = (dbeta,) if write is None else (dbeta, dstrength)
    return dq, dk, dv, dg, *dstrength, dA_log, ddt_bias, dh0
