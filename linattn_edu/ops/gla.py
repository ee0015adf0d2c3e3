"""Linear attention with a decay for each head, and products of several delta rules a token: names
of fla-core over operators that are there.
"""

import torch
from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.dplr import fused_recurrent_dplr_delta_rule
from linattn_edu.ops.gdn import chunk_gated_delta_rule
from linattn_edu.ops.gdn2 import chunk_gdn2
from linattn_edu.ops.tensors import laid_out, transposed


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    *,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Linear attention with a decay for each head, in chunks: training and prefill.

    .. math::

        S_t = e^{g_t} S_{t-1} + k_t^\top v_t, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and head; q, k, v are rows, S is ``[K, V]``. It is :func:`chunk_gdn2` with
    nothing erased, b zero and w one, whose kernels it runs: they read a decay for each channel and
    invert a matrix that is the identity here, so it takes longer than it would need. Differentiable
    by q, k, v, g, g_gamma and initial_state.

    Args:
        q, k, v: As in :func:`chunk_gdn2`; keys of any length.
        g: Natural-log decay of each token ``[B, T, H]``, <= 0, or None.
        g_gamma: Natural-log decay of each head ``[H]``, the same at every token, <= 0, or None. Not
            both; with neither nothing is forgotten.
        scale, initial_state, output_final_state, state_v_first: As in :func:`chunk_gdn2`.
        cu_seqlens, cu_seqlens_cpu, chunk_size, impl: Likewise.

    Returns:
        ``(o, final_state)`` as of :func:`chunk_gdn2`.

    Raises:
        TypeError, ValueError: as :func:`chunk_gdn2`, before any kernel runs.

    Source: the rule of Yang et al. 2023 (arXiv:2312.06635) with one gate a head; arguments as in
    fla-core 0.6.0; chapter 07.
    """
    g = _decay(q, k, v, g, g_gamma)
    return chunk_gdn2(
        q, k, v, g, torch.zeros_like(g), torch.ones_like(v), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, state_v_first=state_v_first,
        chunk_size=chunk_size, impl=impl,
    )  # fmt: skip


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    transpose_state_layout: bool | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """:func:`chunk_simple_gla` one token after the other: decoding, and prefill of short prompts.

    It is :func:`fused_recurrent_dplr_delta_rule` without the matrix of rank one, whose kernel it
    runs. Differentiable by q, k, v, g, g_gamma and initial_state.

    Args:
        q, k, v, g, g_gamma, state_v_first: As in :func:`chunk_simple_gla`.
        scale, initial_state, output_final_state, reverse, cu_seqlens, impl: As in
            :func:`fused_recurrent_dplr_delta_rule`.
        transpose_state_layout: Deprecated name of state_v_first.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_dplr_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_dplr_delta_rule`, before any kernel runs.

    Source: as :func:`chunk_simple_gla`; chapter 01.
    """
    g = _decay(q, k, v, g, g_gamma)
    state_v_first = arguments.v_first(state_v_first, transpose_state_layout)
    if state_v_first and initial_state is not None:
        check.tensor("initial_state", initial_state, ("N", "H", "V", "K"), {})
    zero = torch.zeros_like(k)
    o, final_state = fused_recurrent_dplr_delta_rule(
        q, k, v, zero, zero, g, scale, transposed(initial_state, state_v_first),
        output_final_state, reverse, cu_seqlens, impl=impl,
    )  # fmt: skip
    return o, laid_out(final_state, state_v_first)


def chunk_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Lightning attention in chunks: :func:`chunk_simple_gla` with decays that a layer fixes.

    .. math::

        g_h = - \frac{8 h}{H} \Bigl(1 - \frac{\mathrm{layer\_idx}}{\mathrm{num\_layers}}\Bigr),
        \qquad h = 0, \ldots, H - 1

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens, chunk_size, impl: As in
            :func:`chunk_simple_gla`.
        layer_idx: Number of the layer, 0 to num_layers.
        num_layers: How many layers there are, >= 1.
        head_first: Must be False: tensors are ``[B, T, H, ...]``.

    Returns:
        ``(o, final_state)`` as of :func:`chunk_simple_gla`.

    Raises:
        TypeError, ValueError: as :func:`chunk_simple_gla`, before any kernel runs.

    Source: Qin et al. 2024 (arXiv:2405.17381); the decays as in fla-core 0.6.0; chapter 07.
    """
    check.absent("head_first", head_first, False)
    return chunk_simple_gla(
        q, k, v, g_gamma=_slopes(q, layer_idx, num_layers), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens,
        chunk_size=chunk_size, impl=impl,
    )  # fmt: skip


def fused_recurrent_lightning_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Lightning attention one token after the other: :func:`fused_recurrent_simple_gla` with the
    decays of :func:`chunk_lightning_attn`.

    Args:
        q, k, v, scale, initial_state, output_final_state, reverse, cu_seqlens, impl: As in
            :func:`fused_recurrent_simple_gla`.
        layer_idx, num_layers, head_first: As in :func:`chunk_lightning_attn`.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_simple_gla`.

    Raises:
        TypeError, ValueError: as :func:`fused_recurrent_simple_gla`, before any kernel runs.

    Source: as :func:`chunk_lightning_attn`; chapter 01.
    """
    check.absent("head_first", head_first, False)
    return fused_recurrent_simple_gla(
        q, k, v, g_gamma=_slopes(q, layer_idx, num_layers), scale=scale,
        initial_state=initial_state, output_final_state=output_final_state, reverse=reverse,
        cu_seqlens=cu_seqlens, impl=impl,
    )  # fmt: skip


def chunk_gated_delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: None = None,
    *,
    allow_neg_eigval: bool = False,
    chunk_size: int = 64,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Gated DeltaProduct in chunks: a decay and n steps of the delta rule at every token.

    .. math::

        S_t = \tilde S_n, \qquad
        \tilde S_i = \tilde S_{i-1} + k_{t,i}^\top \beta_{t,i} (v_{t,i} - k_{t,i} \tilde S_{i-1}),
        \qquad \tilde S_0 = e^{g_t} S_{t-1}, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and value head. It is :func:`chunk_gated_delta_rule` over n times the
    tokens, whose kernels it runs: the decay stands at the first of a token's n steps, and the query
    at the last. Differentiable by q, k, v, g, beta and initial_state.

    Args:
        q: Queries ``[B, T, H, K]``, as in :func:`chunk_gated_delta_rule`.
        k: Keys ``[B, T n, H, K]``, the n of a token one after the other.
        v: Values ``[B, T n, HV, V]``, likewise.
        g: Natural-log decay of each token ``[B, T, HV]``, <= 0, or None: no decay.
        beta: Write strength ``[B, T n, HV]`` in [0, 2].
        num_householder: n, >= 1.
        scale, initial_state, output_final_state, use_qk_l2norm_in_kernel: As in
            :func:`chunk_gated_delta_rule`.
        allow_neg_eigval, chunk_size, impl: Likewise.
        cu_seqlens, cu_seqlens_cpu: Boundaries in tokens of q ``[N + 1]``, likewise.
        cp_context: Must be None.

    Returns:
        ``(o, final_state)`` as of :func:`chunk_gated_delta_rule`, o ``[B, T, HV, V]``.

    Raises:
        TypeError, ValueError: as :func:`chunk_gated_delta_rule`, before any kernel runs.

    Source: Siems et al. 2025 (arXiv:2502.10297); arguments as in fla-core 0.6.0; chapter 06.
    """
    check.absent("cp_context", cp_context)
    check.positive(num_householder=num_householder)
    given, n = check.Tensors(), num_householder
    given.take("q", q, ("B", "T", "H", "K"))
    given.sizes["T n"] = n * given.sizes["T"]
    given.take("k", k, ("B", "T n", "H", "K"), alike=True)
    given.take("v", v, ("B", "T n", "HV", "V"), alike=True)
    if g is not None:
        given.take("g", g, ("B", "T", "HV"), decay=True)
    given.take("beta", beta, ("B", "T n", "HV"))
    if cu_seqlens is not None:
        arguments.count_sequences(given, cu_seqlens)
    bounds, on_host = (x if x is None else n * x for x in (cu_seqlens, cu_seqlens_cpu))
    decay = torch.zeros_like(beta, dtype=torch.float32)
    if g is not None:
        decay = _at(g, 0, n)
    o, final_state = chunk_gated_delta_rule(
        _at(q, n - 1, n), k, v, decay, beta, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, cu_seqlens=bounds, cu_seqlens_cpu=on_host,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval,
        chunk_size=chunk_size, impl=impl,
    )  # fmt: skip
    return o[:, n - 1 :: n].contiguous(), final_state


def _at(x: Tensor, i: int, n: int) -> Tensor:
    """x [B, T, ...] as step i of n of each token, zero at the others: [B, T n, ...]."""
    rows = [x if j == i else torch.zeros_like(x) for j in range(n)]
    return torch.stack(rows, 2).flatten(1, 2)


def _decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, g_gamma: Tensor | None) -> Tensor:
    """The log decay of each channel [B, T, H, K], of that of each token and head, or each head."""
    given = check.Tensors()
    given.take("q", q, ("B", "T", "H", "K"))
    given.take("k", k, ("B", "T", "H", "K"), alike=True)
    given.take("v", v, ("B", "T", "H", "V"), alike=True)
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma are one argument: give one of them")
    if g is not None:
        given.take("g", g, ("B", "T", "H"), decay=True)
        return g[..., None].expand(q.shape).contiguous()
    if g_gamma is None:
        return torch.zeros_like(q, dtype=torch.float32)
    given.take("g_gamma", g_gamma, ("H",), decay=True)
    return g_gamma[:, None].expand(q.shape).contiguous()


def _slopes(q: Tensor, layer_idx: int, num_layers: int) -> Tensor:
    """The log decay of each head of a layer [H]."""
    check.tensor("q", q, ("B", "T", "H", "K"), {})
    check.positive(num_layers=num_layers)
    if type(layer_idx) is not int or layer_idx not in range(num_layers + 1):
        raise ValueError(f"layer_idx must be an integer from 0 to {num_layers}, got {layer_idx!r}")
    H = q.shape[2]
    heads = torch.arange(H, device=q.device, dtype=torch.float32)
    return -8 / H * (1 - layer_idx / num_layers) * heads
