"""Gated DeltaNet in chunks: the public function, its declaration, the composition of its stages."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops import checkpoints
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.delta.operations import operations
from linattn_edu.ops.l2norm import unit
from linattn_edu.ops.operator import Operator, counted, like, widened
from linattn_edu.ops.preallocated import into
from linattn_edu.ops.ranks import Ranks
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import in_float32, laid_out
from linattn_edu.packing import Packing


@repeated("initial_state", "out", "final_state_out")
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    *,
    max_num_seqs: int | None = None,
    use_gate_in_kernel: bool = False,
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
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""Gated delta rule in chunks: training and prefill of Gated DeltaNet.

    .. math::

        S_t = e^{g_t} S_{t-1} + k_t^\top \beta_t (v_t - k_t e^{g_t} S_{t-1}), \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and value head; q, k, v are rows, S is ``[K, V]``. With fewer q/k heads
    than value heads (GVA), value head j reads q/k head ``j // (HV // H)``. Differentiable by q, k,
    v, g, beta, initial_state, A_log and dt_bias, from o and from the final state.

    Args:
        q: Queries ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only),
            K <= 256; T may be 0.
        k: Keys ``[B, T, H, K]`` of q's dtype. Rows must satisfy ``beta * |k|^2 <= 2``: normalise
            them to unit length. Longer keys make the recurrence itself unstable.
        v: Values ``[B, T, HV, V]`` of q's dtype, HV a multiple of H, V <= 512. Or of fewer heads,
            H a multiple of them: q/k head i then writes v's head ``i // (H // heads)``; HV is H in
            all that follows, in o and in the states, and v is copied, each head ``H // heads``
            times.
        g: Natural-log decay of each token ``[B, T, HV]``, <= 0, any of these dtypes. A positive g
            is refused on the CPU; on a GPU, where that would wait for the device, and under
            torch.compile it is not looked for.
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
        use_beta_sigmoid_in_kernel: Whether beta is given before its sigmoid.
        allow_neg_eigval: Whether beta may be beyond 1, and ``1 - beta`` negative. With
            use_beta_sigmoid_in_kernel it is twice the sigmoid; a beta given as it is stays, and
            should come with this where it may be beyond 1: see Accuracy.
        state_v_first: Whether states are ``[N, HV, V, K]``. Costs a copy of them.
        cu_seqlens: Boundaries ``[N + 1]``, int32 or int64, of N sequences packed one after the
            other into a batch of one: 0 first, none smaller than the one before, the last at most
            T. Tokens behind the last are padding: outputs and gradients are zero there. Each
            sequence gives the same bits as alone; but gradients of a long one alone may come from
            a kernel for Hopper that packed ones do not have, and differ in their last bits.
        cu_seqlens_cpu: The same numbers on the CPU. Without them a cu_seqlens on a GPU is read
            once, and the call waits for the device; with them it does not.
        chunk_indices: ``[NT, 2]``, int32 or int64: sequence of every chunk of 64 tokens (or
            chunk_size) and its number in the sequence, where the caller has it already. On a GPU
            its numbers are taken on trust, and without cu_seqlens_cpu its length too.
        max_num_seqs: With cu_seqlens alone, of at most so many sequences, some without tokens: on a
            GPU nothing reads its numbers on the host, and the grids are those of any boundaries of
            as many sequences in T tokens. So a call in a CUDA graph is replayed with others that
            are written to cu_seqlens. That launches up to a chunk a sequence more than there are,
            which do nothing, and the bits may be those of a call whose longest sequence has T
            tokens. The reference reads the numbers. Not with checkpoint_every_n_tokens or
            cp_context.
        use_gate_in_kernel: Whether g is the raw gate of a layer, from which the log decay is
            ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log, dt_bias: HV numbers in any shape, with use_gate_in_kernel only; dt_bias may be left
            out.
        chunk_size: Tokens a chunk at most: 16, 32 or 64. It changes the speed and the rounding
            only; the kernels take shorter ones where longer do not fit the GPU (fp32, Turing).
        inplace_final_state: Whether to write the final state to initial_state, and to return it:
            as in :func:`fused_recurrent_gated_delta_rule`. Not with cp_context.
        ssm_state_indices: Slot of each sequence ``[N]``, int32 or int64, in a pool of states, with
            inplace_final_state: initial_state is then ``[slots, HV, K, V]``; each sequence starts
            from the state in its slot and leaves its last one there. The pool, its negative slots
            and its checks are those of :func:`fused_recurrent_gated_delta_rule`. The states of the
            N sequences are copied on the way.
        out, final_state_out: Where to write o and the final state, which are then returned in them;
            None: new tensors. Contiguous, of the shape and dtype of what is returned (the state in
            float32, float64 where any argument is), sharing no memory with another argument, and
            without a gradient; not while a gradient is recorded. A call that is refused has written
            nothing. The kernels write to memory of their own, from which it is copied, so that they
            save a place and no time. final_state_out needs output_final_state and is not for
            inplace_final_state; neither is for cp_context.
        gate_domain: "log", or "linear": g is the decay itself, a factor from 0 to 1, as FlashInfer
            has it. Its logarithm is taken in float32 before the kernels, in operations of PyTorch
            that read and write g; where it is 0 its gradient is 0. Not with use_gate_in_kernel.
        checkpoint_every_n_tokens: Whether, and after how many tokens of each sequence, a multiple
            of chunk_size, to return the state too, for a cache of prefixes. The call then runs in
            pieces of so many tokens, one after the other, packed sequences side by side: a prompt
            that goes on from one of these states has the bits of the whole one with the same
            number. It costs launches, and with cu_seqlens a copy of every tensor; then not under
            torch.compile and not in CUDA graphs. Not with cp_context.
        batch_invariant: Whether to refuse a call of which a sequence's bits, in the forward pass,
            depend on more than its tokens in whole chunks: see "The same bits" on the page
            Interface. It changes no result, but that with allow_neg_eigval all heads are kept in
            halves: see Accuracy.
        transpose_state_layout: Deprecated name of state_v_first.
        cp_context: Of :func:`build_cp_context`, where the sequences are cut over several ranks, all
            of which call this: the tensors are then those of this rank, ``[B, tokens, ...]``, every
            entry of a batch is cut alike, and no cu_seqlens is given. initial_state has a row for
            each sequence that begins on this rank, ``[B * len(context.first), HV, K, V]``, and the
            final state one for each that ends on it, ``[B * len(context.last), HV, K, V]``. Each
            pass gathers ``B HV K (V + K)`` numbers of float32 from every part of a rank, once;
            ``B HV K V`` where no part lies within a sequence, as with two contiguous ranks.
        impl: "triton", "reference", or "auto": the kernels for CUDA tensors and under
            ``TRITON_INTERPRET=1``, else (and for float64) the reference stages.

    Non-contiguous tensors, and on a GPU those that do not start at 16 bytes, are copied first.

    A token that is NaN or infinite may make all outputs of its chunk NaN, those before it too, and
    all that follow; earlier chunks keep their bits.

    Accuracy: products are accumulated in float32; 16-bit inputs are rounded where a product needs
    them. Of o that costs two to four times what rounding the result does, with keys of any two
    cosines up to .5 and beta up to 1; up to 30 times with keys alike and beta near 1. With keys
    alike and a beta beyond 1 of which nothing is said, o and gradients are off by as much as they
    are, or more: the numbers that are rounded alternate and cancel. allow_neg_eigval says that beta
    may be beyond 1, and keeps these in two halves of 16 bit each (Hopper, an even K and V up to
    128, on one rank) or, elsewhere, in float32, which costs memory, and time: then o, the final
    state and all gradients but that of g are within three roundings with unit keys, however alike;
    in bfloat16 nine, over 512 tokens fourteen, with one key, beta 2 and no decay, which forget
    nothing. The reference stages are so without being told. Halves are kept of the q/k heads of
    each sequence where the numbers of some chunk cancel, which a kernel finds on the GPU: heads
    whose keys are unlike and whose gates fade have none. The others are as without
    allow_neg_eigval, there within three roundings, too, but for the gradient of beta, of which up
    to seven were seen where that of the final state makes its last tokens large. Rows that
    use_qk_l2norm_in_kernel divides are rounded after it, as keys of 16 bit are from the beginning:
    with keys alike and a beta beyond 1 that alone costs o six roundings at a cosine of .97, with
    one key and no decay up to fifty; :func:`chunk_kda` keeps their digits. In float16 every
    value written, about ``2 |v|``, and every number of a state must stay below 65504, as the
    kernels read copies of 16 bit of both: beyond it o, the state and gradients are NaN or infinite
    from that chunk on, even where the right ones fit. :func:`fused_recurrent_gated_delta_rule`,
    bfloat16 and float32 hold such states. And v of 1e-6 and less, with two or three bits left, is a
    quarter wrong: multiply such values, and the initial state, by a power of two, and o and the
    state by its inverse. A decay between two tokens is the difference of two sums of g over the
    chunk, in float32, and has about 1e-7 times the larger of them as its relative error: 2e-5 after
    32 tokens with ``g = -5``, up to 1e-3 after many that are shut. A token whose decay is shut
    (``g`` below -104, a zero in float32) counts as -104, and its g has the gradient 0.

    Memory: between the passes it keeps its inputs and, of each token and head, chunk_size numbers
    of q's dtype, twice as many where both passes run in fused kernels (16 bit, Hopper and later, K
    and V up to 128), four times where these may keep halves. With use_qk_l2norm_in_kernel it keeps
    q and k twice, as given and divided, and with use_beta_sigmoid_in_kernel beta.

    Works under ``torch.compile(fullgraph=True)``, in CUDA graphs (with cu_seqlens only together
    with cu_seqlens_cpu or max_num_seqs), with activation checkpointing and under autocast, which
    does not change its precision. Gradients of gradients and forward-mode differentiation are
    errors.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in q's dtype; final_state ``[N, HV, K, V]`` in
        float32 (float64 where q, g, A_log, dt_bias or initial_state is), or None; initial_state
        with inplace_final_state, whatever output_final_state says. With checkpoint_every_n_tokens
        also the states after every so many tokens, in that dtype and with gradients:
        ``[B, T // n, HV, K, V]``, or with cu_seqlens ``[C, HV, K, V]``, those of one sequence of
        ``length // n`` after the other.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, head count, chunk_size, scale, impl or combination of arguments
            does not fit; the message names the argument, what was expected and what came. No
            kernel has run then.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapters 01 to 12.
    """
    state_v_first = arguments.v_first(state_v_first, transpose_state_layout)
    output_final_state, normalise, raw_gate, inplace = arguments.flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        inplace_final_state=inplace_final_state,
    )
    sigmoid, beyond = arguments.sigmoid_factor(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    (q, k, v, g, beta, A_log, dt_bias, initial_state), place, scale, impl = arguments.chunked(
        (q, k, v, g, beta, A_log, dt_bias, initial_state),
        (cu_seqlens, cu_seqlens_cpu, chunk_indices), cp_context, scale, chunk_size, impl,
        sigmoid=sigmoid, v_first=state_v_first, raw_gate=raw_gate,
        final=(inplace, ssm_state_indices), rooms=(out, final_state_out, output_final_state),
        most=max_num_seqs, domain=gate_domain,
    )  # fmt: skip
    beyond |= impl == "reference"  # where it costs no time
    every = checkpoint_every_n_tokens
    checkpoints.check_every(every, chunk_size, cp_context, max_num_seqs)
    checkpoints.check_invariant(batch_invariant, q, *v.shape[2:], place, every, impl)
    halves = beyond and _in_halves(impl, q, v, chunk_size, place.group)
    dtype = q.dtype
    if beyond and not halves:
        q, k, v = in_float32(q, k, v)
    if normalise:
        q, k = unit(q, impl), unit(k, impl)
    save = _saved(impl, q, v, chunk_size, place.group)
    if halves:  # of all heads, where that costs no more, and where a part decides as the whole
        halves = 2 if impl == "reference" or batch_invariant else 1
        save = "gc P AG P_low AG_low" + " cancels" * (halves == 1)
    o, final_state, *kept = chunk(
        *place.joined(q, k, v, g, beta), A_log, dt_bias, place.entering(initial_state),
        *place.bounds, scale, output_final_state or place.writes, chunk_size, halves, place.group,
        impl, "",
        save=save, every=every,
    )  # fmt: skip
    o, final_state = place.parted(o).to(dtype), place.left(final_state, state_v_first)
    o, final_state = into(out, o), into(final_state_out, final_state)
    if every is None:
        return o, final_state
    return o, final_state, laid_out(*kept, state_v_first)


@dataclass(frozen=True)
class Stages:
    """One implementation of each stage; `dataclasses.replace` swaps a single one."""

    gate_cumsum: Callable = stage("delta.gate_cumsum")
    solve: Callable = stage("delta.solve")
    wy: Callable = stage("delta.wy")
    state: Callable = stage("delta.state")
    output: Callable = stage("delta.output")
    output_bwd: Callable = stage("delta.output_bwd")
    state_bwd: Callable = stage("delta.state_bwd")
    wy_bwd: Callable = stage("delta.wy_bwd")
    gate_bwd: Callable = stage("delta.gate_bwd")
    piece_map: Callable = stage("delta.cp_merge")
    cp_merge: Callable = stage("delta.cp_merge")
    piece_map_bwd: Callable = stage("delta.cp_merge_bwd")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


@dataclass(frozen=True)
class FusedStages:
    """The same passes in fused stages: intra_chunk, or intra_halves, for solve, scan for wy, state
    and output; scans, which is scan_states for wy and state beside scan_bwd for state_bwd, and
    intra_chunk_bwd for output_bwd and wy_bwd. chunk_fwd is intra_chunk, scan and, where it is
    asked, cancels; chunk_bwd is scans and intra_chunk_bwd.
    """

    gate_cumsum: Callable = stage("delta.gate_cumsum")
    intra_chunk: Callable = stage("fused.gdn_intra")
    intra_halves: Callable = stage("fused.gdn_intra")
    those: Callable = stage("fused.cancel")
    scan: Callable = stage("fused.gdn_fwd")
    chunk_fwd: Callable = stage("fused.gdn_fwd")
    scan_states: Callable = stage("fused.gdn_scans")
    scan_bwd: Callable = stage("fused.gdn_scans")
    scans: Callable = stage("fused.gdn_scans")
    intra_chunk_bwd: Callable = stage("fused.gdn_bwd")
    chunk_bwd: Callable = stage("fused.gdn_bwd")
    gate_bwd: Callable = stage("delta.gate_bwd")
    scan_map: Callable = stage("fused.gdn_fwd")
    cp_merge: Callable = stage("delta.cp_merge")
    scan_map_bwd: Callable = stage("fused.gdn_scans")
    cp_merge_bwd: Callable = stage("delta.cp_merge_bwd")


stages, fused_stages = implementations(Stages), implementations(FusedStages)


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept.

    With A it runs in Stages, with P and AG in FusedStages, where these may have low halves.
    """

    gc: Tensor | None
    A: Tensor | None = None
    P: Tensor | None = None
    AG: Tensor | None = None  # A * G
    P_low: Tensor | None = None  # what rounding has cut off from P and AG
    AG_low: Tensor | None = None
    cancels: Tensor | None = None  # the heads that have them; None: all
    crossing: Tensor | None = None  # states that come from other ranks


def _saved(impl: str, q: Tensor, v: Tensor, chunk_size: int, group: str) -> str:
    """The residuals that the backward pass starts from.  group: of the ranks, or ""."""
    if impl == "triton":
        from linattn_edu.kernels.routes import by_kind, kind_of

        kind = kind_of(q, *v.shape[2:], chunk_size, None)
        if by_kind.gdn_backward_stages(kind).takes == "fused":
            return "gc P AG crossing" if group else "gc P AG"
    return "gc A crossing" if group else "gc A"


def _in_halves(impl: str, q: Tensor, v: Tensor, chunk_size: int, group: str) -> bool:
    """Whether numbers of 16 bit are given a low half where a product would cancel: P, A * G and
    what is made with them.  group: of the ranks, or "".
    """
    if group or q.dtype.itemsize != 2:
        return False
    if impl != "triton":
        return True
    from linattn_edu.kernels.routes import by_kind, kind_of

    return by_kind.gdn_halves(kind_of(q, *v.shape[2:], chunk_size, None)).takes == "halves"


chunk = Operator(
    "chunk_gated_delta_rule",
    {
        "q": "B T H K",
        "k": "B T H K",
        "v": "B T HV V",
        "g": "B T HV",
        "beta": "B T HV",
        "A_log": "HV?",
        "dt_bias": "HV?",
        "initial_state": "N HV K V?",
    },
    {
        "o": like("B T HV V", "q", gradient="do"),
        "final_state": widened("N HV K V", "q g A_log dt_bias initial_state", gradient="dht"),
        "gc": widened("B T HV", "g A_log dt_bias"),
        "A": like("B T HV C", "q"),
        "P": like("B T HV C", "q"),
        "AG": like("B T HV C", "q"),
        "P_low": like("B T HV C", "q"),
        "AG_low": like("B T HV C", "q"),
        "cancels": counted("N HV"),
        "crossing": widened("X HV K V", "q"),
    },
    options={
        "scale": "float",
        "output_final_state": "bool",
        "chunk_size": "int",
        "halves": "int",
    },
    residuals=Residuals,
    stages=stages,
    forward_stages=fused_stages,
    fused="AG",
    packed="ranks",
    transition="HV K K",
    limited="k",
    flops=partial(operations, keys=5),
)


@chunk.forward
def forward(
    stages: Stages | FusedStages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    halves: int = 0,
    packing: Packing | None = None,
    cp: Ranks | None = None,
    keep: Collection[str] = ("gc", "A", "crossing"),
) -> tuple[Tensor, Tensor | None, Residuals]:
    """The chunked forward pass as a composition of stages (shapes as in chunk_gated_delta_rule).

    halves: FusedStages with P and A * G in halves, of all heads (2), or where numbers cancel (1).
    cp: what other ranks send and are sent, without halves. keep: the residuals that are returned.
    Returns o, the final state or None, and what the backward pass starts from. Only the kernels
    take a packing.

    Source: chapter 06.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    gc = stages.gate_cumsum(g, A_log, dt_bias, **options)
    A, P, AG, P_low, AG_low, found = (None,) * 6

    def enter(make: Callable, given: tuple) -> Tensor | Callable | None:
        """Send the maps of the pieces, which `make` makes; the state that enters this one."""
        cp.send(make, given, initial_state, **packed)
        return cp.promised(stages.cp_merge, initial_state)

    if isinstance(stages, FusedStages) and (halves or "A" not in keep):
        scan = {"scale": scale, "output_final_state": output_final_state, **packed}
        only, inner, made = None, None, None
        if halves < 2:
            o, final_state, P, AG, found = stages.chunk_fwd(
                q, k, v, beta, gc, initial_state, None if cp is None else enter,
                keep="AG" in keep, cancelling=halves == 1, chunk_size=chunk_size, **scan,
            )  # fmt: skip
        if halves == 1:
            only, made = stages.those(found, k, **options), (o, final_state)
            inner = (P, AG) if "AG" in keep else None
        if halves:
            P, AG, P_low, AG_low = stages.intra_halves(q, k, beta, gc, only, inner, **options)
            low, ways = (P_low, AG_low), only and only[0]
            o, final_state = stages.scan(
                q, k, v, gc, P, AG, initial_state, beta, low, ways, made, **scan
            )
    elif isinstance(stages, FusedStages):
        P, R, A = stages.intra_chunk(q, k, beta, gc, return_inverse=True, **options)
        state = initial_state if cp is None else enter(stages.scan_map, (k, v, gc, R))
        o, final_state = stages.scan(
            q, k, v, gc, P, R, state, scale=scale, output_final_state=output_final_state, **packed
        )
    else:
        A = stages.solve(k, beta, **options)
        w, u = stages.wy(k, v, beta, gc, A, **packed)
        if cp is not None:
            cp.send(stages.piece_map, (k, w, u, gc), initial_state, **options)
            initial_state = cp.receive(stages.cp_merge, initial_state)
        h, v_new, final_state = stages.state(
            k, w, u, gc, initial_state, output_final_state=output_final_state, **options
        )
        o = stages.output(q, k, v_new, h, gc, scale=scale, **options)
    kept = Residuals(gc, A, P, AG, P_low, AG_low, found, cp and cp.crossing)._asdict()
    return o, final_state, Residuals(*(x if n in keep else None for n, x in kept.items()))


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
    scale: float,
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    packing: Packing | None = None,
    cp: Ranks | None = None,
) -> tuple[Tensor | None, ...]:
    """The chunked backward pass as a composition of stages.

    Starts from the arguments of the forward pass and its residuals, A or P and AG, whichever the
    stages want; h and v_new are computed again, so that no state is held between the two passes.

    Args:
        do: Gradient of o.  dht: Gradient of the final state, or None.  cp: as in the forward pass.
    Returns:
        dq, dk, dv, dg, dbeta, dA_log and ddt_bias (or None), and the gradient of the initial state.
    Source: chapter 12.
    """
    gc, A, P, AG, *low, found, crossing = residuals
    packed = {} if packing is None else {"packing": packing}
    if cp is not None:
        initial_state = cp.entering(crossing, initial_state)
    if isinstance(stages, FusedStages):
        options = {"chunk_size": AG.shape[-1], **packed}
        if cp is not None:
            inputs = q, k, beta, gc, P, AG, do
            cp.send(stages.scan_map_bwd, inputs, dht, scale=scale, **packed)
            dht = cp.promised(stages.cp_merge_bwd, dht)
        dq, dk, dv, dbeta, dgc, dh0 = stages.chunk_bwd(
            q, k, v, beta, gc, P, AG, do, initial_state, dht,
            None if low[0] is None else tuple(low), found, scale=scale, **packed,
        )  # fmt: skip
    else:
        options = {"chunk_size": A.shape[-1], **packed}
        w, u = stages.wy(k, v, beta, gc, A, **packed)
        h, v_new, _ = stages.state(k, w, u, gc, initial_state, **options)
        del u
        dq, dk, dv_new, dgc = stages.output_bwd(q, k, v_new, h, gc, do, scale=scale, **options)
        if cp is not None:
            inputs = q, k, w, gc, do, dv_new
            cp.send(stages.piece_map_bwd, inputs, dht, scale=scale, **options)
            dht = cp.receive(stages.cp_merge_bwd, dht)
        dh, dv_new, dh0 = stages.state_bwd(q, k, w, gc, do, dv_new, dht, scale=scale, **options)
        del w
        dk, dv, dbeta, dgc = stages.wy_bwd(
            k, v, beta, gc, A, h, v_new, dh, dv_new, dk, dgc, **packed
        )
    dg, dA_log, ddt_bias = stages.gate_bwd(dgc, g, A_log, dt_bias, **options)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0
