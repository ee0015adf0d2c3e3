"""Gated DeltaNet token by token: decoding, and prefill of short prompts.

`compute` serves Kimi Delta Attention too, whose gate is the gk of this module.
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from linattn_edu.ops import arguments, check, library
from linattn_edu.ops.l2norm import l2norm


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    transpose_state_layout: bool | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule one token after the other: decoding, and prefill of short prompts.

    The same result as :func:`chunk_gated_delta_rule`, in one kernel that takes a step a token: the
    faster form for a few tokens, T = 1 in particular, and without the rounding of chunks. All
    arithmetic is in float32. Differentiable by every tensor; the backward pass computes the states
    again in blocks of sqrt(T) tokens (sqrt(T / N), of N packed sequences).

    Args:
        q, k, v, scale, output_final_state, state_v_first, transpose_state_layout, impl: As in
            :func:`chunk_gated_delta_rule`.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias: Likewise.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: Likewise.
        cu_seqlens: Likewise, but the kernels' numbers are never read by the host: they are checked
            on the CPU only.
        g: Natural-log decay of each token ``[B, T, HV]``, <= 0, or None: no decay.
        gk: Natural-log decay of each row of the state ``[B, T, HV, K]``, <= 0, or None.
        gv: Natural-log decay of each column ``[B, T, HV, V]``, <= 0, or None. The decays given
            multiply.
        beta: Write strength ``[B, T, HV]`` in [0, 2], or None: 1.
        initial_state: State before the first token, as in :func:`chunk_gated_delta_rule`.
        inplace_final_state: Whether to write the final state to initial_state, which must be a
            contiguous float32 tensor (float64 where the reference runs in it), and return it. Not
            while a gradient is recorded.
        ssm_state_indices: Slot of each sequence ``[N]``, int32 or int64, in a pool of states:
            initial_state is then ``[slots, HV, K, V]``, of which each slot is contiguous, and
            inplace_final_state must be True. Slots that are not named keep their bits. A negative
            slot is none: nothing is read or written there, and a sequence that would start from one
            is padding, whose outputs are zero. Or ``[N, S]``, for tokens that may be rejected
            later: the state after token t of sequence n goes to slot ``[n, t]``. With more tokens
            than columns the last slot is left with the last state. No slot may be named by two
            sequences; slots are checked on the CPU only.
        num_accepted_tokens: How many tokens of the previous call were kept ``[N]``, 1 to S, with
            ssm_state_indices ``[N, S]``: sequence n starts from the state in slot
            ``[n, num_accepted_tokens[n] - 1]``. None: from slot ``[n, 0]``.

    Returns:
        ``(o, final_state)`` as of :func:`chunk_gated_delta_rule`, but final_state is float64 where
        any argument is; it is initial_state with inplace_final_state, whatever output_final_state
        says.

    Raises:
        TypeError, ValueError: as :func:`chunk_gated_delta_rule`, before any kernel runs.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapter 01.
    """
    state_v_first = arguments.v_first(state_v_first, transpose_state_layout)
    sizes = arguments.check_tensors(
        q, k, v, g, beta, initial_state, cu_seqlens, state_v_first, gk, gv,
        pool=ssm_state_indices is not None,
    )  # fmt: skip
    arguments.check_gate(sizes, q, g, use_gate_in_kernel, A_log, dt_bias)
    for name, x in (("gk", gk), ("gv", gv)):
        if x is not None:
            check.log_decay(name, x)
    if use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError("beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    return compute(
        (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state), cu_seqlens, sizes,
        scale=scale, output_final_state=output_final_state, normalise=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel, sigmoid=use_beta_sigmoid_in_kernel, double=allow_neg_eigval,
        v_first=state_v_first, inplace=inplace_final_state, indices=ssm_state_indices,
        accepted=num_accepted_tokens, impl=impl,
    )  # fmt: skip


def compute(
    tensors: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    sizes: dict[str, int],
    *,
    scale: float | None,
    output_final_state: bool,
    normalise: bool,
    gate: bool,
    sigmoid: bool,
    double: bool,
    v_first: bool,
    inplace: bool,
    indices: Tensor | None,
    accepted: Tensor | None,
    impl: str,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Check what the operators share, then run the recurrence.

    tensors: q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, in shapes that fit. gate: g,
    or gk if g is None, is the raw gate of a layer. double: twice the sigmoid of beta.
    """
    q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state = tensors
    arguments.check_beta(sigmoid, double)
    check.number("scale", scale)
    check.flag("output_final_state", output_final_state)
    check.flag("use_qk_l2norm_in_kernel", normalise)
    check.flag("inplace_final_state", inplace)
    if check.known(cu_seqlens):
        check.lengths("cu_seqlens", cu_seqlens.tolist(), sizes["T"])
    gradient = library.needs_gradient(*tensors)
    _check_pool(q, initial_state, indices, accepted, sizes, inplace)
    if inplace:
        _check_inplace(initial_state, library.wide(*tensors), gradient, indices is not None)
    impl = check.resolve_impl(impl, q.device, tuple(x.dtype for x in tensors if x is not None))
    scale = sizes["K"] ** -0.5 if scale is None else float(scale)
    lower_bound = None if lower_bound is None else float(lower_bound)
    if gradient or impl == "reference":
        if gate and g is None:
            gk = arguments.channel_gate(gk, A_log, dt_bias, lower_bound)
        elif gate:
            g = arguments.gate(g, A_log, dt_bias, lower_bound)
        dtype = q.dtype
        if normalise:  # not rounded to 16 bit, as in the kernel
            wide = library.wide(q)
            q, k = (l2norm(x, output_dtype=wide, impl=impl) for x in (q, k))
            v = v.to(wide)
        if sigmoid:
            beta = arguments.sigmoid(beta, double)
        if beta is None:
            beta = torch.ones_like(v[..., 0])
        tensors = (q, k, v, g, gk, gv, beta)
        if indices is not None:
            rest = (cu_seqlens, indices, accepted, scale, v_first)
            return _pool(*tensors, initial_state, *rest).to(dtype), initial_state
        state = initial_state
        if v_first and state is not None:
            state = state.transpose(-1, -2)
        f = library.form(_recurrent, _eager, _forward, *tensors, state)
        o, final_state = f(*tensors, state, cu_seqlens, scale, impl)
        if v_first:
            final_state = final_state.transpose(-1, -2).contiguous()
        if inplace:
            # a state made in inference mode may be written in inference mode alone
            made_there = not library.traced(q) and initial_state.is_inference()
            with torch.inference_mode() if made_there else nullcontext():
                initial_state.copy_(final_state)
            return o.to(dtype), initial_state
        return o.to(dtype), final_state if output_final_state else None
    rest = (cu_seqlens, scale, normalise, int(sigmoid) * (2 if double else 1), v_first)
    if inplace:
        rest = (*rest, lower_bound, indices, accepted)
        if library.traced(q):
            return _step_inplace_op(*tensors, *rest), initial_state
        o = _step_inplace(*tensors, *rest)
        if not initial_state.is_inference():  # which are never saved for a gradient
            torch.autograd.graph.increment_version(initial_state)
        return o, initial_state
    step = _step_op if library.traced(q) else _step
    o, final_state = step(*tensors, *rest, output_final_state, lower_bound)
    return o, final_state if output_final_state else None


def _check_pool(
    q: Tensor,
    state: Tensor | None,
    indices: Tensor | None,
    accepted: Tensor | None,
    sizes: dict[str, int],
    inplace: bool,
) -> None:
    """Refuse slots of a pool, and numbers of accepted tokens, that do not fit."""
    if indices is None:
        if accepted is not None:
            raise ValueError("num_accepted_tokens belongs to ssm_state_indices, which is None")
        return
    for name, x in (("ssm_state_indices", indices), ("num_accepted_tokens", accepted)):
        if x is not None and (not isinstance(x, Tensor) or x.dtype not in arguments.INTEGERS):
            got = getattr(x, "dtype", type(x).__name__)
            raise TypeError(f"{name} must be a tensor of int32 or int64, got {got}")
    if not inplace:
        raise ValueError(
            "ssm_state_indices names slots of a pool that is written in place: it needs "
            "inplace_final_state=True, got False"
        )
    N = sizes["N"]
    if indices.ndim not in (1, 2) or indices.shape[0] != N or not indices.numel():
        raise ValueError(
            f"ssm_state_indices must have shape [N={N}] or [N={N}, S], got {tuple(indices.shape)}"
        )
    if accepted is not None and indices.ndim == 1:
        raise ValueError(
            "num_accepted_tokens needs ssm_state_indices of shape [N, S], a slot for each token, "
            f"got {tuple(indices.shape)}"
        )
    if accepted is not None and accepted.shape != (N,):
        raise ValueError(
            f"num_accepted_tokens must have shape [N={N}], got {tuple(accepted.shape)}"
        )
    check.same_device(("q", q), ("ssm_state_indices", indices), ("num_accepted_tokens", accepted))
    if check.known(indices) and state is not None:
        rows = indices.reshape(N, -1).tolist()
        _check_slots(rows, None if accepted is None else accepted.tolist(), state.shape[0])


def _check_slots(rows: list[list[int]], accepted: list[int] | None, slots: int) -> None:
    owner: dict[int, int] = {}
    for n, row in enumerate(rows):
        if max(row) >= slots:
            raise ValueError(
                f"ssm_state_indices must be below the {slots} slots of initial_state, "
                f"got {max(row)} for sequence {n}"
            )
        for slot in row:
            if slot >= 0 and owner.setdefault(slot, n) != n:
                raise ValueError(
                    "ssm_state_indices must name a slot for one sequence only, "
                    f"got {slot} for {owner[slot]} and {n}"
                )
        if accepted is not None and not 1 <= accepted[n] <= len(row):
            raise ValueError(
                f"num_accepted_tokens must be 1 to S={len(row)}, got {accepted[n]} for sequence {n}"
            )


def _check_inplace(state: Tensor | None, dtype: torch.dtype, gradient: bool, pool: bool) -> None:
    """Refuse an initial_state that cannot take the final state."""
    if state is None:
        raise ValueError("initial_state must be given with inplace_final_state=True, got None")
    if state.dtype != dtype:
        raise TypeError(
            f"initial_state must be {dtype} with inplace_final_state=True, got {state.dtype}"
        )
    if pool:  # slots may lie apart, as in the pages of a cache
        apart = state.stride(0) >= state[:1].numel() or state.shape[0] == 1
        fits = state[:1].is_contiguous() and apart
        if not fits:
            raise ValueError(
                "initial_state must be contiguous in every slot with ssm_state_indices, and slots "
                f"must not overlap, got strides {state.stride()} for {tuple(state.shape)}"
            )
    elif not state.is_contiguous():
        raise ValueError("initial_state must be contiguous with inplace_final_state=True")
    if gradient:
        raise ValueError(
            "inplace_final_state=True overwrites what a gradient needs: "
            "call it under torch.no_grad(), or without"
        )


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalise: bool,
    sigmoid: int,
    v_first: bool,
    output_final_state: bool,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel with everything in it; the final state is empty if not asked for."""
    initial_state = library.contiguous(initial_state)
    tensors = (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state)
    o, final_state = _launch(
        tensors, cu_seqlens, scale=scale, normalise=normalise, sigmoid=sigmoid, v_first=v_first,
        output_final_state=output_final_state, lower_bound=lower_bound,
    )  # fmt: skip
    return o, q.new_empty(0, dtype=torch.float32) if final_state is None else final_state


def _launch(tensors: tuple, cu_seqlens: Tensor | None, **options) -> tuple[Tensor, Tensor | None]:
    from linattn_edu.kernels.delta.recurrent import recurrent

    *tensors, state = tensors
    q, k, v, g, gk, gv, beta, A_log, dt_bias = map(library.contiguous, tensors)
    return recurrent(
        q, k, v, g, beta, gk=gk, gv=gv, initial_state=state, A_log=A_log, dt_bias=dt_bias,
        cu_seqlens=_int64(cu_seqlens), **options,
    )  # fmt: skip


def _step_inplace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    normalise: bool,
    sigmoid: int,
    v_first: bool,
    lower_bound: float | None = None,
    indices: Tensor | None = None,
    accepted: Tensor | None = None,
) -> Tensor:
    """The same; the final state goes where the initial one is, or to a slot of the pool."""
    aligned = state if indices is not None else library.contiguous(state)
    indices, accepted = (x if x is None else x.contiguous() for x in (indices, accepted))
    tensors = (q, k, v, g, gk, gv, beta, A_log, dt_bias, aligned)
    o, _ = _launch(
        tensors, cu_seqlens, scale=scale, normalise=normalise, sigmoid=sigmoid, v_first=v_first,
        lower_bound=lower_bound, inplace=True, indices=indices, accepted=accepted,
    )  # fmt: skip
    if aligned is not state:
        state.copy_(aligned)
    return o


def _int64(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else cu_seqlens.long().contiguous()


_step_op = torch.library.custom_op("linattn_edu::recurrent_step", _step, mutates_args=())
_step_inplace_op = torch.library.custom_op(
    "linattn_edu::recurrent_step_", _step_inplace, mutates_args={"state"}
)


@_step_op.register_fake
def _(q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, cu_seqlens, scale, normalise,
      sigmoid, v_first, output_final_state, lower_bound=None):  # fmt: skip
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    K, V = q.shape[-1], v.shape[-1]
    shape = (N, v.shape[2], V, K) if v_first else (N, v.shape[2], K, V)
    state = q.new_empty(shape if output_final_state else 0, dtype=torch.float32)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state


@_step_inplace_op.register_fake
def _(q, k, v, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@torch.library.custom_op("linattn_edu::recurrent_pool", mutates_args={"pool"})
@library.at_first
def _pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor,
    pool: Tensor,
    cu_seqlens: Tensor | None,
    indices: Tensor,
    accepted: Tensor | None,
    scale: float,
    v_first: bool,
) -> Tensor:
    """o of the reference, which reads and writes the pool."""
    from linattn_edu.reference.delta.recurrent import recurrent_pool

    B, T = q.shape[:2]
    shape = v.shape
    bounds = list(range(0, B * T + 1, T))
    if cu_seqlens is not None:
        bounds = check.lengths("cu_seqlens", cu_seqlens.tolist(), T)
    tensors = (x if x is None else x.flatten(0, 1)[None] for x in (q, k, v, g, beta, gk, gv))
    q, k, v, g, beta, gk, gv = tensors
    return recurrent_pool(
        q, k, v, g, beta, pool.mT if v_first else pool, indices, accepted, gk=gk, gv=gv,
        scale=scale, bounds=bounds,
    ).view(shape)  # fmt: skip


@_pool.register_fake
def _(q, k, v, *rest):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@library.at_first
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """o and the final state: what has a gradient."""
    tensors = (q, k, v, g, gk, gv, beta, initial_state)
    q, k, v, g, gk, gv, beta, initial_state = map(library.contiguous, tensors)
    if impl == "triton":
        from linattn_edu.kernels.delta.recurrent import recurrent

        return recurrent(
            q, k, v, g, beta, gk=gk, gv=gv, scale=scale, initial_state=initial_state,
            cu_seqlens=_int64(cu_seqlens),
        )  # fmt: skip
    from linattn_edu.reference.delta.recurrent import recurrent

    if cu_seqlens is None:
        return recurrent(q, k, v, g, beta, gk=gk, gv=gv, scale=scale, initial_state=initial_state)
    o, final_state = _results(tensors, cu_seqlens)
    final_state.copy_(torch.tensor(0.0) if initial_state is None else initial_state)
    for n, t in library.sequences(cu_seqlens, None, q.shape[1]):
        g_, gk_, gv_ = (x if x is None else x[:, t] for x in (g, gk, gv))
        state = None if initial_state is None else initial_state[n : n + 1]
        o[:, t], S = recurrent(
            q[:, t], k[:, t], v[:, t], g_, beta[:, t], gk=gk_, gv=gv_, scale=scale,
            initial_state=state,
        )  # fmt: skip
        final_state[n] = S[0]
    return o, final_state


def _results(tensors, cu_seqlens) -> tuple[Tensor, Tensor]:
    q, _, v, *_ = tensors
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = q.new_empty(N, v.shape[2], q.shape[-1], v.shape[-1], dtype=library.wide(*tensors))
    return torch.empty_like(v, memory_format=torch.contiguous_format), state


_recurrent = torch.library.custom_op("linattn_edu::recurrent", _forward, mutates_args=())


@_recurrent.register_fake
def _(q, k, v, g, gk, gv, beta, initial_state, cu_seqlens, scale, impl):
    return _results((q, k, v, g, gk, gv, beta, initial_state), cu_seqlens)


@library.at_first
def _recurrent_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    gv: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, gk, gv, beta and initial_state."""
    tensors = (q, k, v, g, gk, gv, beta, initial_state)
    q, k, v, g, gk, gv, beta, initial_state = map(library.contiguous, tensors)
    do, dht = library.contiguous(do), library.contiguous(dht)
    if impl == "triton":
        from linattn_edu.kernels.delta.recurrent import recurrent_bwd

        options = {"scale": scale, "initial_state": initial_state, "gk": gk, "gv": gv}
        got = recurrent_bwd(q, k, v, g, beta, do, dht, cu_seqlens=_int64(cu_seqlens), **options)
        return _gradients(tensors, got)
    from linattn_edu.reference.delta.recurrent import recurrent_bwd

    if cu_seqlens is None:
        options = {"scale": scale, "initial_state": initial_state, "gk": gk, "gv": gv}
        return _gradients(tensors, recurrent_bwd(q, k, v, g, beta, do, dht, **options))
    gradients = _gradients(tensors)
    if initial_state is not None:  # through a sequence without tokens
        gradients[7].copy_(torch.tensor(0.0) if dht is None else dht)
    for n, t in library.sequences(cu_seqlens, None, q.shape[1]):
        g_, gk_, gv_ = (x if x is None else x[:, t] for x in (g, gk, gv))
        state, dstate = (x if x is None else x[n : n + 1] for x in (initial_state, dht))
        one = recurrent_bwd(
            q[:, t], k[:, t], v[:, t], g_, beta[:, t], do[:, t], dstate, gk=gk_, gv=gv_,
            scale=scale, initial_state=state,
        )  # fmt: skip
        dq, dk, dv, dg, dbeta, dgk, dgv, dh0 = one
        for whole, part in zip(gradients, (dq, dk, dv, dg, dgk, dgv, dbeta), strict=False):
            if part is not None:
                whole[:, t] = part
        if initial_state is not None:
            gradients[7][n] = dh0[0]
    return gradients


def _gradients(tensors, given=None) -> tuple[Tensor, ...]:
    """What `_recurrent_gradients` returns: the given ones in the tensors' dtypes, or new ones."""
    if given is not None:
        dq, dk, dv, dg, dbeta, dgk, dgv, dh0 = given
        given = (dq, dk, dv, dg, dgk, dgv, dbeta, dh0)
    return library.gradients(tensors, given)


_recurrent_backward = torch.library.custom_op(
    "linattn_edu::recurrent_backward", _recurrent_gradients, mutates_args=()
)


@_recurrent_backward.register_fake
def _(q, k, v, g, gk, gv, beta, initial_state, *rest):
    return _gradients((q, k, v, g, gk, gv, beta, initial_state))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.impl = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dht):
    tensors = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(tensors[2])
    f = library.adjoint(_recurrent_backward, _once, _recurrent_gradients, tensors[0])
    got = f(*tensors, do, dht, ctx.scale, ctx.impl)
    gradients = [x if x is None else dx for x, dx in zip(tensors[:8], got, strict=True)]
    return *gradients, None, None, None


_recurrent.register_autograd(_backward, setup_context=_setup)
_eager = library.eager("recurrent", _forward, _setup, _backward)
_once = library.once("recurrent", _recurrent_gradients)
