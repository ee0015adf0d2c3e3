"""Gated DeltaNet: the public function, its checks and the composition of its stages."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.ops import check

CHUNK_SIZES = (16, 32, 64)


def _on_the_device_of_q(f: Callable) -> Callable:
    """Run f(stages, q, ...) on q's GPU, where Triton launches, and without autocast.

    The stages choose the precision of every product themselves.
    """

    @functools.wraps(f)
    def wrapped(stages, q, *args, **kwargs):
        kind = q.device.type if torch.amp.is_autocast_available(q.device.type) else "cpu"
        with torch.cuda.device_of(q), torch.autocast(kind, enabled=False):
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


@dataclass(frozen=True)
class FusedStages:
    """The same forward pass in fused stages: intra for solve, scan for wy, state and output."""

    gate_cumsum: Callable
    intra: Callable
    scan: Callable


@functools.cache
def stages(impl: str) -> Stages:
    """The five stages of an implementation, "reference" or "triton"."""
    if impl == "reference":
        from linattn_edu.reference.delta import gate_cumsum, output, solve, state, wy
    elif impl == "triton":
        from linattn_edu.kernels.delta import gate_cumsum, output, solve, state, wy
    else:
        raise ValueError(f"impl must be 'reference' or 'triton', got {impl!r}")
    return Stages(gate_cumsum.gate_cumsum, solve.solve, wy.wy, state.state, output.output)


@functools.cache
def fused_stages(impl: str) -> FusedStages:
    """The fused stages of an implementation, "reference" or "triton"."""
    if impl == "reference":
        from linattn_edu.reference.delta import fused, gate_cumsum
    elif impl == "triton":
        from linattn_edu.kernels.delta import fused, gate_cumsum
    else:
        raise ValueError(f"impl must be 'reference' or 'triton', got {impl!r}")
    return FusedStages(gate_cumsum.gate_cumsum, fused.intra, fused.scan)


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
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """The chunked forward pass as a composition of stages (shapes as in chunk_gated_delta_rule).

    Source: chapter 06.
    """
    gc = stages.gate_cumsum(g, chunk_size=chunk_size)
    if isinstance(stages, FusedStages):
        P, R, _ = stages.intra(q, k, beta, gc, chunk_size=chunk_size)
        return stages.scan(
            q, k, v, gc, P, R, initial_state, scale=scale, output_final_state=output_final_state
        )
    A = stages.solve(k, beta, chunk_size=chunk_size)
    w, u = stages.wy(k, v, beta, gc, A)
    h, v_new, final_state = stages.state(
        k, w, u, gc, initial_state, chunk_size=chunk_size, output_final_state=output_final_state
    )
    return stages.output(q, k, v_new, h, gc, scale=scale, chunk_size=chunk_size), final_state


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    *,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule in chunks: training and prefill of Gated DeltaNet.

    .. math::

        S_t = e^{g_t} S_{t-1} + k_t^\top \beta_t (v_t - k_t e^{g_t} S_{t-1}), \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and value head; q, k, v are rows, S is ``[K, V]``. With fewer q/k heads
    than value heads (GVA), value head j reads q/k head ``j // (HV // H)``.

    Args:
        q: Queries ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only),
            K <= 256.
        k: Keys ``[B, T, H, K]`` of q's dtype. Rows must satisfy ``beta * |k|^2 <= 2``: normalise
            them to unit length. Longer keys make the recurrence itself unstable.
        v: Values ``[B, T, HV, V]`` of q's dtype, HV a multiple of H, V <= 256.
        g: Natural-log decay of each token ``[B, T, HV]``, <= 0, any of these dtypes. A positive g
            is refused on the CPU; on a GPU it is not looked for: that would wait for the device.
        beta: Write strength ``[B, T, HV]`` in [0, 2], any of these dtypes.
        scale: Factor of the output, ``K ** -0.5`` if None.
        initial_state: State before the first token ``[B, HV, K, V]``, zero if None.
        output_final_state: Whether to return the state after the last token.
        chunk_size: Tokens a chunk at most: 16, 32 or 64. It changes the speed and the rounding
            only; the kernels take shorter ones where longer do not fit the GPU (fp32, Turing).
        impl: "triton", "reference", or "auto": the kernels for CUDA tensors and under
            ``TRITON_INTERPRET=1``, else (and for float64) the reference stages.

    Non-contiguous tensors, and on a GPU those that do not start at 16 bytes, are copied first.

    Accuracy: products are accumulated in float32; 16-bit inputs are rounded where a product needs
    them. In float16 every value written, about ``2 |v|``, must stay below 65504: beyond it the
    whole chunk turns to NaN. A token whose decay is shut (``g`` below -104, a zero in float32)
    costs the later decays of its chunk digits: up to 1e-3 in relative terms with many of them.

    Arguments of fla-core's function that are not listed (``cu_seqlens``,
    ``use_qk_l2norm_in_kernel`` and others) do not exist yet and raise a TypeError.

    Returns:
        ``(o, final_state)``: o ``[B, T, HV, V]`` in q's dtype; final_state ``[B, HV, K, V]`` in
        float32 (float64 where q, g or initial_state is float64), or None.

    Raises:
        TypeError: an argument is no tensor, or not of a dtype listed above.
        ValueError: a shape, device, head count, chunk_size, scale or impl does not fit; the message
            names the argument, what was expected and what came. No kernel has run then.
        NotImplementedError: in ``backward()`` of the kernels, which have no backward pass yet;
            ``impl="reference"`` is differentiable.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapters 01 to 06.
    """
    sizes = _check_tensors(q, k, v, g, beta, initial_state)
    check.choice("chunk_size", chunk_size, CHUNK_SIZES)
    check.number("scale", scale)
    check.flag("output_final_state", output_final_state)
    tensors = (q, k, v, g, beta, initial_state)
    impl = check.resolve_impl(impl, q.device, tuple(x.dtype for x in tensors if x is not None))
    options = {
        "scale": sizes["K"] ** -0.5 if scale is None else float(scale),
        "output_final_state": output_final_state,
        "chunk_size": chunk_size,
    }
    tensors = tuple(x if x is None else _aligned(x.contiguous()) for x in tensors)
    if impl == "triton":
        return _KernelForward.apply(options, *tensors)
    q, k, v, g, beta, initial_state = tensors
    return forward(stages(impl), q, k, v, g, beta, initial_state=initial_state, **options)


def _check_tensors(q, k, v, g, beta, initial_state) -> dict[str, int]:
    """Refuse tensors that do not fit; return the sizes B, T, H, HV, K, V."""
    sizes: dict[str, int] = {}
    check.tensor("q", q, ("B", "T", "H", "K"), sizes)
    check.tensor("k", k, ("B", "T", "H", "K"), sizes)
    check.tensor("v", v, ("B", "T", "HV", "V"), sizes)
    check.tensor("g", g, ("B", "T", "HV"), sizes)
    check.tensor("beta", beta, ("B", "T", "HV"), sizes)
    if initial_state is not None:
        check.tensor("initial_state", initial_state, ("B", "HV", "K", "V"), sizes)
    check.head_counts(sizes)
    check.same_dtype(("q", q), ("k", k), ("v", v))
    others = {"k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    check.same_device(("q", q), *others.items())
    check.log_decay("g", g)
    return sizes


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy if it does not start at 16 bytes: narrower loads would make another kernel."""
    return x.clone() if x.is_cuda and x.data_ptr() % 16 else x


class _KernelForward(torch.autograd.Function):
    """The kernels' forward pass; its backward says what to use instead."""

    @staticmethod
    def forward(ctx, options, q, k, v, g, beta, initial_state):
        from linattn_edu.kernels.tiles import chunk_limit

        kernels = fused_stages("triton")
        options = options | {"chunk_size": min(options["chunk_size"], chunk_limit(k))}
        return forward(kernels, q, k, v, g, beta, initial_state=initial_state, **options)

    @staticmethod
    def backward(ctx, do, dht):
        raise NotImplementedError(
            "chunk_gated_delta_rule has no backward kernels yet: "
            "call it with impl='reference' to differentiate, or under torch.no_grad()"
        )
