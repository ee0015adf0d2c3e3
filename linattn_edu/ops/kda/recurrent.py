"""Kimi Delta Attention token by token: decoding, and prefill of short prompts."""

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments, decode, recurrence
from linattn_edu.ops.delta.gate import as_logarithm
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.tensors import in_heads


@repeated("initial_state", "out", "final_state_out")
def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    gate_domain: str = "log",
    transpose_state_layout: bool | None = None,
    cp_context: None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Kimi Delta Attention one token after the other: decoding, and prefill of short prompts.

    .. math::

        S_t = \tilde S_t + k_t^\top \beta_t (v_t - k_t \tilde S_t), \qquad
        \tilde S_t = \mathrm{diag}(e^{g_t})\, S_{t-1}, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    The gated delta rule with a decay for each row of the state, each channel of the key. The same
    kernel as :func:`fused_recurrent_gated_delta_rule`, whose ``gk`` this g is. Differentiable by
    every tensor; the backward pass computes the states again in blocks of sqrt(T)
    tokens (sqrt(T / N), of N packed sequences).

    Args:
        q, k, v: As in :func:`fused_recurrent_gated_delta_rule`.
        beta, scale, output_final_state, cp_context: As in :func:`chunk_gated_delta_rule`.
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval: Likewise.
        state_v_first, transpose_state_layout, impl: Likewise.
        cu_seqlens, initial_state, inplace_final_state, ssm_state_indices, num_accepted_tokens: As
            in :func:`fused_recurrent_gated_delta_rule`; out, final_state_out and
            gate_domain too.
        g: Natural-log decay of each row of the state ``[B, T, HV, K]``, <= 0, any float dtype.
        use_gate_in_kernel: Whether g is the raw gate of a layer, from which the log decay is
            ``-exp(A_log) * softplus(g + dt_bias)``, or with lower_bound
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        A_log: HV numbers in any shape, with use_gate_in_kernel only. May be left out with
            lower_bound: the factor is 1 then.
        dt_bias: HV * K numbers in any shape, with use_gate_in_kernel only; may be left out.
        lower_bound: The least log decay, < 0, with use_gate_in_kernel only.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_gated_delta_rule`.

    Raises:
        TypeError, ValueError: as :func:`chunk_gated_delta_rule`, before any kernel runs.

    Source: Kimi Team 2025 (arXiv:2510.26692); chapter 01.
    """
    check.absent("cp_context", cp_context)
    sigmoid, _ = arguments.sigmoid_factor(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    return call(
        (q, k, v, g, beta, A_log, dt_bias, initial_state), cu_seqlens, scale, impl,
        v_first=arguments.v_first(state_v_first, transpose_state_layout),
        lower_bound=lower_bound,
        indices=ssm_state_indices,
        accepted=num_accepted_tokens,
        rooms=(out, final_state_out),
        domain=gate_domain,
        sigmoid=sigmoid,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        inplace_final_state=inplace_final_state,
    )  # fmt: skip


def call(
    tensors: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    scale: float | None,
    impl: str,
    *,
    v_first: bool,
    lower_bound: float | None,
    indices: Tensor | None,
    accepted: Tensor | None,
    rooms: tuple[Tensor | None, Tensor | None],
    domain: str,
    sigmoid: int = 0,
    **flags: bool,
) -> tuple[Tensor, Tensor | None]:
    """Check all arguments and run the recurrence with a decay for each channel.

    tensors: q, k, v, g, beta or b and w, A_log, dt_bias, initial_state.  flags: the last four of
    fused_recurrent_kda's call, in its order.
    """
    output_final_state, normalise, raw_gate, inplace = arguments.flags(**flags)
    lower_bound = check.number("lower_bound", lower_bound)
    q, k, v, g, beta, *write, A_log, dt_bias, initial_state = tensors
    given = check.Tensors()
    A_log, dt_bias = arguments.check_tensors(
        given, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens,
        v_first=v_first, raw_gate=raw_gate, write=tuple(write), lower_bound=lower_bound,
        channels=True, pool=indices is not None, domain=domain, largest=recurrence.LARGEST,
    )  # fmt: skip
    g, v = as_logarithm(g, domain), in_heads(v, given.sizes["HV"])
    tensors = (q, k, v, None, g, None, beta, *write, A_log, dt_bias, initial_state)
    how = recurrence.How(
        check.number("scale", scale), normalise, raw_gate, sigmoid, v_first, lower_bound, impl,
        gated=len(write) > 0,
    )  # fmt: skip
    return decode.run(
        tensors, cu_seqlens, given, how, output_final_state, inplace, indices, accepted, rooms
    )
