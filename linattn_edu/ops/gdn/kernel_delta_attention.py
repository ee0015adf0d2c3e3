"""kernel_delta_attention: the gated delta rule under ejkernel's name, arguments and defaults."""

import torch
from torch import Tensor

from linattn_edu.ops import check, tensors
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.gdn.chunk import chunk_gated_delta_rule
from linattn_edu.ops.gdn.gate import fused_gdn_gate
from linattn_edu.ops.gdn.recurrent import fused_recurrent_gated_delta_rule


def kernel_delta_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    decay: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    use_qk_l2norm: bool = True,
    use_chunked: bool = True,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    r"""Gated delta rule with one decay a head, under the name it has in ejkernel.

    .. math::

        S_t = \tilde S_t + k_t^\top \beta_t (v_t - k_t \tilde S_t), \qquad
        \tilde S_t = e^{\mathrm{decay}_t} S_{t-1}, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    This is Gated DeltaNet. In spite of the name it is not Kimi Delta Attention, whose decay is one
    number for each channel: that is :func:`fused_recurrent_kda`. ejkernel's documentation takes the
    error against the state before its decay, ``v - h_{t-1} k``; its code, like this function, takes
    it against the decayed state. Differentiable by every tensor.

    Args:
        query, key: ``[B, T, H, K]``, float32, float16 or bfloat16 (float64: reference only),
            K <= 256.
        value: ``[B, T, H, V]`` of query's dtype, V <= 512.
        beta: Write strength ``[B, T, H]``, any of these dtypes. Beyond 1, chunks of 16 bit are as
            :func:`chunk_gated_delta_rule` has them where allow_neg_eigval is not given.
        decay: Natural-log decay of each token ``[B, T, H]``, <= 0, or None: no decay.
        softmax_scale: Factor of the output, ``K ** -0.5`` if None.
        chunk_size: Tokens a chunk at most: 16, 32 or 64. ejkernel takes any; the result does not
            depend on it but for rounding.
        initial_state: State before the first token ``[B, H, K, V]``, zero if None.
        use_qk_l2norm: Whether to divide the rows of query and key by their length first.
        use_chunked: Whether to compute in chunks, by :func:`chunk_gated_delta_rule`; else, and for
            a single token with an initial_state, token by token, by
            :func:`fused_recurrent_gated_delta_rule`.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Accuracy: as of the function that computes; chunks in float16 hold states below 65504 alone.

    Returns:
        ``(o, final_state)``, always both: o ``[B, T, H, V]`` in query's dtype, final_state
        ``[B, H, K, V]`` in float32 (float64 where an argument is).

    Raises:
        TypeError, ValueError: as :func:`chunk_gated_delta_rule`, before any kernel runs.

    Source: Yang et al. 2024 (arXiv:2412.06464); ejkernel, ``kernel_delta_attention``; chapter 01.
    """
    given = check.Tensors()
    given.take("query", query, ("B", "T", "H", "K"))
    given.take("key", key, ("B", "T", "H", "K"), alike=True)
    given.take("value", value, ("B", "T", "H", "V"), alike=True)
    given.take("beta", beta, ("B", "T", "H"))
    if decay is not None:
        given.take("decay", decay, ("B", "T", "H"), decay=True)
    if initial_state is not None:
        given.take("initial_state", initial_state, ("B", "H", "K", "V"))
    check.head_counts(given.sizes | {"HV": given.sizes["H"]}, ("query", "key", "value"))
    softmax_scale = check.number("softmax_scale", softmax_scale)
    check.choice("chunk_size", chunk_size, arguments.CHUNK_SIZES)
    use_qk_l2norm, use_chunked = arguments.flags(
        use_qk_l2norm=use_qk_l2norm, use_chunked=use_chunked
    )
    options = {
        "scale": softmax_scale, "initial_state": initial_state, "output_final_state": True,
        "use_qk_l2norm_in_kernel": use_qk_l2norm, "impl": impl,
    }  # fmt: skip
    if not use_chunked or (given.sizes["T"] == 1 and initial_state is not None):
        return fused_recurrent_gated_delta_rule(query, key, value, decay, beta=beta, **options)
    decay = beta.new_zeros(beta.shape) if decay is None else decay
    if beta.dtype == torch.float64:  # as the recurrent form: the state is too
        decay = decay.double()
    return chunk_gated_delta_rule(query, key, value, decay, beta, **options, chunk_size=chunk_size)


def kda_decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The decay of :func:`kernel_delta_attention` from the raw gate of a layer.

        decay = -exp(A_log) softplus(gate + dt_bias)

    Differentiable: :func:`fused_gdn_gate`. ``use_gate_in_kernel`` of
    :func:`chunk_gated_delta_rule` computes the same in its kernels.

    Args:
        gate: ``[B, T, H]``, any float dtype.
        A_log, dt_bias: ``[H]``, any float dtype.

    Returns:
        decay ``[B, T, H]``, <= 0, in float32 (float64 where an argument is).

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: ejkernel, ``kda_decay``; chapter 12.
    """
    given = check.Tensors()
    given.take("gate", gate, ("B", "T", "H"))
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        given.take(name, x, ("H",))
    wide = tensors.wide(gate, A_log, dt_bias)
    return fused_gdn_gate(gate, A_log, dt_bias, output_dtype=wide)
