"""Gated DeltaNet in chunks: the public function and the composition of its stages."""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from linattn_edu.ops import arguments, autograd, check, library
from linattn_edu.ops.l2norm import l2norm
from linattn_edu.packing import Packing


def _on_the_device_of_q(f: Callable) -> Callable:
    """Run f(stages, q, ...) on q's GPU and without autocast."""

    @functools.wraps(f)
    def wrapped(stages, q, *args, **kwargs):
        with library.at(q):
            return f(stages, q, *args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class Stages:
    """One implementation of each stage; `dataclasses.replace` swaps a single one."""

    gate_cumsum: Callable
    solve: Callable
    wy: Callable
    state: Callable
    output: Callable
    output_bwd: Callable
    state_bwd: Callable
    wy_bwd: Callable
    gate_bwd: Callable


@dataclass(frozen=True)
class FusedStages:
    """The same forward pass in fused stages: intra for solve, scan for wy, state and output."""

    gate_cumsum: Callable
    intra: Callable
    scan: Callable


@functools.cache
def stages(impl: str) -> Stages:
    """The stages of an implementation, "reference" or "triton"."""
    return Stages(*(_stage(impl, name, name) for name in Stages.__dataclass_fields__))


@functools.cache
def fused_stages(impl: str) -> FusedStages:
    """The fused stages of an implementation, "reference" or "triton"."""
    modules = {"gate_cumsum": "gate_cumsum", "intra": "fused", "scan": "fused"}
    return FusedStages(*(_stage(impl, module, name) for name, module in modules.items()))


def _stage(impl: str, module: str, name: str) -> Callable:
    packages = {"reference": "linattn_edu.reference.delta", "triton": "linattn_edu.kernels.delta"}
    if impl not in packages:
        raise ValueError(f"impl must be 'reference' or 'triton', got {impl!r}")
    return getattr(importlib.import_module(f"{packages[impl]}.{module}"), name)


@_on_the_device_of_q
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
    packing: Packing | None = None,
    return_residuals: bool = False,
) -> tuple[Tensor | None, ...]:
    """The chunked forward pass as a composition of stages (shapes as in chunk_gated_delta_rule).

    Returns o and the final state or None; with return_residuals also gc and A, which the backward
    pass starts from. Only the kernels take a packing.

    Source: chapter 06.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": chunk_size, **packed}
    gc = stages.gate_cumsum(g, A_log, dt_bias, **options)
    if isinstance(stages, FusedStages):
        P, R, A = stages.intra(q, k, beta, gc, return_inverse=return_residuals, **options)
        o, final_state = stages.scan(
            q, k, v, gc, P, R, initial_state, scale=scale, output_final_state=output_final_state,
            **packed,
        )  # fmt: skip
    else:
        A = stages.solve(k, beta, **options)
        w, u = stages.wy(k, v, beta, gc, A, **packed)
        h, v_new, final_state = stages.state(
            k, w, u, gc, initial_state, output_final_state=output_final_state, **options
        )
        o = stages.output(q, k, v_new, h, gc, scale=scale, **options)
    return (o, final_state, gc, A) if return_residuals else (o, final_state)


@_on_the_device_of_q
def backward(
    stages: Stages,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    gc: Tensor,
    A: Tensor,
    do: Tensor,
    dht: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    packing: Packing | None = None,
) -> tuple[Tensor | None, ...]:
    """The chunked backward pass as a composition of stages.

    Starts from the arguments of the forward pass and its gc and A; w, u, h and v_new are computed
    again, so that no state is held between the two passes.

    Args:
        do: Gradient of o.  dht: Gradient of the final state, or None.
    Returns:
        dq, dk, dv, dg, dbeta, dA_log and ddt_bias (or None), and the gradient of the initial state.
    Source: chapter 12.
    """
    packed = {} if packing is None else {"packing": packing}
    options = {"chunk_size": A.shape[-1], **packed}
    w, u = stages.wy(k, v, beta, gc, A, **packed)
    h, v_new, _ = stages.state(k, w, u, gc, initial_state, **options)
    del u
    dq, dk, dv_new, dgc = stages.output_bwd(q, k, v_new, h, gc, do, scale=scale, **options)
    dh, dv_new, dh0 = stages.state_bwd(q, k, w, gc, do, dv_new, dht, scale=scale, **options)
    del w
    dk, dv, dbeta, dgc = stages.wy_bwd(k, v, beta, gc, A, h, v_new, dh, dv_new, dk, dgc, **packed)
    dg, dA_log, ddt_bias = stages.gate_bwd(dgc, g, A_log, dt_bias, **options)
    return dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0


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
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    transpose_state_layout: bool | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule in chunks: training and prefill of Gated DeltaNet.

    .. math::

        S_t = e^{g_t} S_{t-1} + k_t^\top \beta_t (v_t - k_t e^{g_t} S_{t-1}), \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and value head; q, k, v are rows, S is ``[K, V]``. With fewer q/k heads
    than value heads (GVA), value head j reads q/k head ``j // (HV // H)``. Differentiable by q, k,
    v, g, beta, initial_state, A_log and dt_bias, from o and from the final state.

    Args:
        q: Queries ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only),
            K <= 256.
        k: Keys ``[B, T, H, K]`` of q's dtype. Rows must satisfy ``beta * |k|^2 <= 2``: normalise
            them to unit length. Longer keys make the recurrence itself unstable.
        v: Values ``[B, T, HV, V]`` of q's dtype, HV a multiple of H, V <= 256.
        g: Natural-log decay of each token ``[B, T, HV]``, <= 0, any of these dtypes. A positive g
            is refused on the CPU; on a GPU, where that would wait for the device, and under
            torch.compile it is not looked for.
        beta: Write strength ``[B, T, HV]`` in [0, 2], any of these dtypes.
        scale: Factor of the output, ``K ** -0.5`` if None.
        initial_state: State before the first token ``[N, HV, K, V]``, zero if None. N is B, or the
            number of sequences of cu_seqlens.
        output_final_state: Whether to return the state after the last token.
        use_qk_l2norm_in_kernel: Whether to divide the rows of q and k by their length first
            (:func:`l2norm`, eps 1e-6).
        use_beta_sigmoid_in_kernel: Whether beta is given before its sigmoid.
        allow_neg_eigval: With use_beta_sigmoid_in_kernel: take twice the sigmoid, so that
            ``1 - beta`` may be negative.
        state_v_first: Whether states are ``[N, HV, V, K]``. Costs a copy of them.
        cu_seqlens: Boundaries ``[N + 1]``, int32 or int64, of N sequences packed one after the
            other into a batch of one: 0 first, T last, none smaller than the one before. Each
            sequence gives the same bits as alone.
        cu_seqlens_cpu: The same numbers on the CPU. Without them a cu_seqlens on a GPU is read
            once, and the call waits for the device; with them it does not.
        chunk_indices: ``[NT, 2]``, int32 or int64: sequence of every chunk of 64 tokens (or
            chunk_size) and its number in the sequence, where the caller has it already. On a GPU
            its numbers are taken on trust, and without cu_seqlens_cpu its length too.
        use_gate_in_kernel: Whether g is the raw gate of a layer, from which the log decay is
            ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log, dt_bias: ``[HV]``, with use_gate_in_kernel only; dt_bias may be left out.
        chunk_size: Tokens a chunk at most: 16, 32 or 64. It changes the speed and the rounding
            only; the kernels take shorter ones where longer do not fit the GPU (fp32, Turing).
        transpose_state_layout: Deprecated name of state_v_first.
        impl: "triton", "reference", or "auto": the kernels for CUDA tensors and under
            ``TRITON_INTERPRET=1``, else (and for float64) the reference stages.

    Non-contiguous tensors, and on a GPU those that do not start at 16 bytes, are copied first.

    Accuracy: products are accumulated in float32; 16-bit inputs are rounded where a product needs
    them. In float16 every value written, about ``2 |v|``, must stay below 65504: beyond it the
    whole chunk turns to NaN. A decay between two tokens is the difference of two sums of g over the
    chunk, in float32, and has about 1e-7 times the larger of them as its relative error: 2e-5 after
    32 tokens with ``g = -5``, up to 1e-3 after many that are shut. A token whose decay is shut
    (``g`` below -104, a zero in float32) counts as -104, and its g has the gradient 0.

    Memory: between the passes it keeps its inputs and, of each token and head, chunk_size numbers
    of q's dtype. With use_qk_l2norm_in_kernel it keeps q and k twice, as given and divided, and
    with use_beta_sigmoid_in_kernel beta.

    Works under ``torch.compile(fullgraph=True)``, in CUDA graphs (with cu_seqlens only together
    with cu_seqlens_cpu), with activation checkpointing and under autocast, which does not change
    its precision. Gradients of gradients and forward-mode differentiation are errors.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in q's dtype; final_state ``[N, HV, K, V]`` in
        float32 (float64 where q, g, A_log, dt_bias or initial_state is), or None.

    Raises:
        TypeError: an argument is not of a type or dtype listed above.
        ValueError: a shape, device, head count, chunk_size, scale, impl or combination of arguments
            does not fit; the message names the argument, what was expected and what came. No
            kernel has run then.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapters 01 to 12.
    """
    state_v_first = arguments.v_first(state_v_first, transpose_state_layout)
    sizes = arguments.check_tensors(q, k, v, g, beta, initial_state, cu_seqlens, state_v_first)
    for name, x in (("g", g), ("beta", beta)):  # which the recurrent form may do without
        check.tensor(name, x, ("B", "T", "HV"), sizes)
    arguments.check_gate(sizes, q, g, use_gate_in_kernel, A_log, dt_bias)
    arguments.check_beta(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    check.choice("chunk_size", chunk_size, arguments.CHUNK_SIZES)
    check.number("scale", scale)
    check.flag("output_final_state", output_final_state)
    check.flag("use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel)
    tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias)
    impl = check.resolve_impl(impl, q.device, tuple(x.dtype for x in tensors if x is not None))
    cu_seqlens_cpu = arguments.check_packing(
        "q", q, sizes, cu_seqlens, cu_seqlens_cpu, chunk_indices, chunk_size
    )
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q, impl=impl), l2norm(k, impl=impl)
    if use_beta_sigmoid_in_kernel:
        beta = arguments.sigmoid(beta, allow_neg_eigval)
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, final_state = autograd.chunk(
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu, chunk_indices,
        sizes["K"] ** -0.5 if scale is None else float(scale), output_final_state, chunk_size, impl,
    )  # fmt: skip
    if final_state is not None and state_v_first:
        final_state = final_state.transpose(-1, -2).contiguous()
    return o, final_state
