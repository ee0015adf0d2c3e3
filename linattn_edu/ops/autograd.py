"""chunk_gated_delta_rule as PyTorch knows it: implementation, shapes for tracing, gradient.

Registered with torch.library, so that torch.compile takes it whole. Such an operator may not return
None: an empty tensor stands for what was not asked for.
"""

import torch
from torch import Tensor

from linattn_edu.ops import library


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
) -> tuple[Tensor, Tensor | None]:
    """chunk_gated_delta_rule, its arguments checked and its flags resolved (see `_chunk`)."""
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    gradient = library.needs_gradient(*tensors)
    f = library.form(_chunk, _chunk_eager, _chunk_forward, *tensors)
    o, final_state, _, _ = f(*tensors, *rest, gradient)
    *_, output_final_state, _, _ = rest
    return o, final_state if output_final_state else None


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
    output_final_state: bool,
    chunk_size: int,
    impl: str,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the final state, and with `save` gc and A, which the backward pass starts from."""
    from linattn_edu.ops import gdn

    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    q, k, v, g, beta, A_log, dt_bias, initial_state = map(library.contiguous, tensors)
    length = library.chunk_length(k, chunk_size, impl)
    options = {
        "scale": scale, "A_log": A_log, "dt_bias": dt_bias, "chunk_size": length,
        "output_final_state": output_final_state, "return_residuals": save,
    }  # fmt: skip
    if cu_seqlens is None or impl == "triton":
        packing = library.packing(cu_seqlens, cu_seqlens_cpu, chunk_indices, k, chunk_size, length)
        stages = gdn.fused_stages(impl) if impl == "triton" else gdn.stages(impl)
        results = gdn.forward(
            stages, q, k, v, g, beta, initial_state=initial_state, packing=packing, **options
        )
        return _results(tensors, cu_seqlens, length, output_final_state, save, results)

    def run(*sequence):
        *given, state = sequence
        o, S, *residuals = gdn.forward(
            gdn.stages(impl), *given, initial_state=state,
            **options | {"output_final_state": True, "return_residuals": True},
        )  # fmt: skip
        return o, S, residuals

    state = _results(tensors, cu_seqlens, length, True, False)[1]
    o, state, residuals = library.forward_by_sequence(
        run, (q, k, v, g, beta, initial_state), cu_seqlens, cu_seqlens_cpu, state
    )
    results = (o, state if output_final_state else None, *(residuals if save else ()))
    return _results(tensors, cu_seqlens, length, output_final_state, save, results)


def _results(tensors, cu_seqlens, length, output_final_state, save, given=(None,) * 4):
    """What `_chunk` returns: the given tensors, and new ones of the right shape for the others."""
    q, _, v, g, _, A_log, dt_bias, initial_state = tensors
    (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    gate, every = library.wide(g, A_log, dt_bias), library.wide(q, g, A_log, dt_bias, initial_state)
    shapes = (
        ((B, T, HV, V), q.dtype),
        ((N, HV, K, V) if output_final_state else (0,), every),
        ((B, T, HV) if save else (0,), gate),
        ((B, T, HV, length) if save else (0,), q.dtype),
    )
    given = (*given, None, None)[:4]
    return tuple(
        q.new_empty(shape, dtype=dtype) if x is None else x
        for (shape, dtype), x in zip(shapes, given, strict=True)
    )


_chunk = torch.library.custom_op(
    "linattn_edu::chunk_gated_delta_rule", _chunk_forward, mutates_args=()
)


@_chunk.register_fake
def _(
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, chunk_indices,
    scale, output_final_state, chunk_size, impl, save,
):  # fmt: skip
    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    length = library.chunk_length(k, chunk_size, impl)
    return _results(tensors, cu_seqlens, length, output_final_state, save)


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
    gc: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None,
    scale: float,
    chunk_size: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta, A_log, dt_bias and initial_state."""
    from linattn_edu.ops import gdn

    tensors = (q, k, v, g, beta, A_log, dt_bias, initial_state)
    q, k, v, g, beta, A_log, dt_bias, initial_state = map(library.contiguous, tensors)
    do, dht = library.contiguous(do), library.contiguous(dht)
    stages, options = gdn.stages(impl), {"scale": scale, "A_log": A_log, "dt_bias": dt_bias}
    if cu_seqlens is None or impl == "triton":
        packing = library.packing(
            cu_seqlens, cu_seqlens_cpu, chunk_indices, k, chunk_size, A.shape[-1]
        )
        got = gdn.backward(
            stages, q, k, v, g, beta, gc, A, do, dht,
            initial_state=initial_state, packing=packing, **options,
        )  # fmt: skip
        return library.gradients(tensors, got)

    def run(q, k, v, g, beta, residuals, do, dht, state):
        return gdn.backward(
            stages, q, k, v, g, beta, *residuals, do, dht, initial_state=state, **options
        )

    return library.backward_by_sequence(
        run, (q, k, v, g, beta, A_log, dt_bias, initial_state), (gc, A), do, dht,
        cu_seqlens, cu_seqlens_cpu, A.shape[-1],
    )  # fmt: skip


_chunk_backward = torch.library.custom_op(
    "linattn_edu::chunk_gated_delta_rule_backward", _chunk_gradients, mutates_args=()
)


@_chunk_backward.register_fake
def _(q, k, v, g, beta, A_log, dt_bias, initial_state, *rest):
    return library.gradients((q, k, v, g, beta, A_log, dt_bias, initial_state))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, _, ctx.chunk_size, ctx.impl, _ = inputs
    _, _, gc, A = output
    ctx.save_for_backward(*tensors, gc, A)
    ctx.mark_non_differentiable(gc, A)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dht, _dgc, _dA):
    *tensors, gc, A = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(tensors[2])
    if dht is not None and not dht.numel():
        dht = None
    f = library.adjoint(_chunk_backward, _chunk_once, _chunk_gradients, tensors[0])
    gradients = f(*tensors, gc, A, do, dht, ctx.scale, ctx.chunk_size, ctx.impl)
    gradients = [
        dx if x is not None else None for x, dx in zip(tensors[:8], gradients, strict=True)
    ]
    return *gradients, *(None,) * 8


_chunk.register_autograd(_backward, setup_context=_setup)
_chunk_eager = library.eager("chunk_gated_delta_rule", _chunk_forward, _setup, _backward)
_chunk_once = library.once("chunk_gated_delta_rule", _chunk_gradients)
