"""chunk_kda as PyTorch knows it: implementation, shapes for tracing, gradient.

Registered with torch.library as `autograd.py` does it for chunk_gated_delta_rule.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.ops import library


class Residuals(NamedTuple):
    """What the backward pass reads beside the arguments of the forward pass; None: not kept."""

    P: Tensor | None
    A: Tensor | None
    gc: Tensor | None
    w: Tensor | None
    kg: Tensor | None
    qg: Tensor | None
    h: Tensor | None
    v_new: Tensor | None


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    *rest,
    keep: bool,
    return_states: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """chunk_kda, its arguments checked and its flags resolved (see `_chunk_forward`)."""
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    gradient = library.needs_gradient(*tensors)
    f = library.form(_chunk, _chunk_eager, _chunk_forward, *tensors)
    kept = 2 if gradient and keep else int(gradient)
    o, final_state, *residuals = f(*tensors, *rest, kept, return_states)
    *_, output_final_state, _, _ = rest
    h = residuals[Residuals._fields.index("h")] if return_states else None
    return o, final_state if output_final_state else None, h


def _chunk_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    scale: float,
    lower_bound: float | None,
    safe_bound: float | None,
    output_final_state: bool,
    chunk_size: int,
    impl: str,
    keep: int,
    return_states: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, the final state and the Residuals, empty where they are not kept.

    keep: 0, nothing; 1, P and A, from which the backward pass starts; 2, all.
    """
    from linattn_edu.ops import kda

    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    q, k, v, g, beta, A_log, dt_bias, initial_state = map(library.contiguous, tensors)
    length = library.chunk_length(k, chunk_size, impl)
    stages, options = kda.stages(impl), {
        "scale": scale, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound,
        "safe_bound": safe_bound, "chunk_size": length, "output_final_state": output_final_state,
        "keep": _kept(keep, return_states),
    }  # fmt: skip
    if cu_seqlens is None or impl == "triton":
        packing = library.packing(cu_seqlens, cu_seqlens_cpu, chunk_indices, k, chunk_size, length)
        o, final_state, residuals = kda.forward(
            stages, q, k, v, g, beta, initial_state=initial_state, packing=packing, **options
        )
    else:

        def run(*sequence):
            *given, state = sequence
            return kda.forward(
                stages, *given, initial_state=state, **options | {"output_final_state": True}
            )

        o, final_state, residuals = library.forward_by_sequence(
            run, (q, k, v, g, beta, initial_state), cu_seqlens, cu_seqlens_cpu,
            _states(tensors, cu_seqlens),
        )  # fmt: skip
    final_state = final_state if output_final_state else None
    given = (o, final_state, *residuals)
    return tuple(q.new_empty(0) if x is None else x for x in given)


def _kept(keep: int, return_states: bool) -> tuple[str, ...]:
    """The residuals that are returned: none, P and A, or all; and h, if asked for."""
    kept = {0: (), 1: ("P", "A"), 2: Residuals._fields}[keep]
    return (*kept, "h") if return_states else kept


def _states(tensors, cu_seqlens: Tensor | None) -> Tensor:
    """An empty final state."""
    q, _, v, g, _, A_log, dt_bias, initial_state = tensors
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = library.wide(q, g, A_log, dt_bias, initial_state)
    return q.new_empty(N, v.shape[2], q.shape[-1], v.shape[-1], dtype=dtype)


_chunk = torch.library.custom_op("linattn_edu::chunk_kda", _chunk_forward, mutates_args=())


@_chunk.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, chunk_indices,
    scale, lower_bound, safe_bound, output_final_state, chunk_size, impl, keep, return_states,
):  # fmt: skip
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    length = library.chunk_length(k, chunk_size, impl)
    NT = -(-T // length)
    if cu_seqlens is not None and (keep == 2 or return_states):
        NT = torch.library.get_ctx().new_dynamic_size()
    tokens, channels = q.new_empty(B, T, HV, length), q.new_empty(B, T, HV, K)
    gc = channels.to(library.wide(g, A_log, dt_bias))
    h, v_new = q.new_empty(B, NT, HV, K, V), q.new_empty(B, T, HV, V)
    every = Residuals(tokens, tokens, gc, channels, channels, channels, h, v_new)._asdict()
    residuals = (x if n in _kept(keep, return_states) else None for n, x in every.items())
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    final_state = _states(tensors, cu_seqlens) if output_final_state else None
    given = (o, final_state, *residuals)
    return tuple(q.new_empty(0) if x is None else torch.empty_like(x) for x in given)


def _chunk_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
    chunk_indices: Tensor | None,
    P: Tensor,
    A: Tensor,
    gc: Tensor,
    w: Tensor,
    kg: Tensor,
    qg: Tensor,
    h: Tensor,
    v_new: Tensor,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    lower_bound: float | None,
    chunk_size: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and initial_state."""
    from linattn_edu.ops import kda

    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    q, k, v, g, beta, A_log, dt_bias, initial_state = map(library.contiguous, tensors)
    do, dht = library.contiguous(do), library.contiguous(dht)
    residuals = Residuals(P, A, gc, w, kg, qg, h, v_new)
    if not gc.numel():
        residuals = Residuals(P, A, *[None] * 6)
    stages, options = kda.stages(impl), {
        "scale": scale, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound
    }  # fmt: skip
    length = A.shape[-1]
    if cu_seqlens is None or impl == "triton":
        packing = library.packing(cu_seqlens, cu_seqlens_cpu, chunk_indices, k, chunk_size, length)
        got = kda.backward(
            stages, q, k, v, g, beta, residuals, do, dht,
            initial_state=initial_state, packing=packing, **options,
        )  # fmt: skip
        return library.gradients(tensors, got)

    def run(q, k, v, g, beta, residuals, do, dht, state):
        return kda.backward(
            stages, q, k, v, g, beta, Residuals(*residuals), do, dht,
            initial_state=state, **options,
        )  # fmt: skip

    return library.backward_by_sequence(
        run, (q, k, v, g, beta, A_log, dt_bias, initial_state), residuals, do, dht,
        cu_seqlens, cu_seqlens_cpu, length, by_chunk=(Residuals._fields.index("h"),),
    )  # fmt: skip


_chunk_backward = torch.library.custom_op(
    "linattn_edu::chunk_kda_backward", _chunk_gradients, mutates_args=()
)


@_chunk_backward.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, *rest):
    return library.gradients((q, k, v, g, beta, A_log, dt_bias, initial_state))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.lower_bound, _, _, ctx.chunk_size, ctx.impl, ctx.keep, _ = inputs
    _, _, *residuals = output
    if ctx.keep < 2:
        ctx.save_for_backward(*tensors, *residuals[:2])
    else:
        ctx.save_for_backward(*tensors, *residuals)
    ctx.mark_non_differentiable(*residuals)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dht, *_):
    saved = ctx.saved_tensors  # asked for once: activation checkpointing allows no more
    tensors, residuals = saved[:11], saved[11:]
    residuals = (*residuals, *[residuals[0].new_empty(0)] * (8 - len(residuals)))
    if do is None:
        do = torch.zeros_like(tensors[2])
    if dht is not None and not dht.numel():
        dht = None
    f = library.adjoint(_chunk_backward, _chunk_once, _chunk_gradients, tensors[0])
    gradients = f(
        *tensors, *residuals, do, dht, ctx.scale, ctx.lower_bound, ctx.chunk_size, ctx.impl
    )
    gradients = [
        dx if x is not None else None for x, dx in zip(tensors[:8], gradients, strict=True)
    ]
    return *gradients, *(None,) * 11


_chunk.register_autograd(_backward, setup_context=_setup)
_chunk_eager = library.eager("chunk_kda", _chunk_forward, _setup, _backward)
_chunk_once = library.once("chunk_kda", _chunk_gradients)
