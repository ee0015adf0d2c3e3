"""GDN-2 token by token: decoding, and prefill of short prompts."""

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.kda.recurrent import call
from linattn_edu.ops.repeated import repeated


@repeated("initial_state", "out", "final_state_out")
def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
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
    r"""GDN-2 one token after the other: decoding, and prefill of short prompts.

    .. math::

        S_t = \tilde S_t + k_t^\top \bigl(w_t v_t - (b_t k_t)\, \tilde S_t\bigr), \qquad
        \tilde S_t = \mathrm{diag}(e^{g_t})\, S_{t-1}, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    The same result as :func:`chunk_gdn2`; the kernel of :func:`fused_recurrent_kda`, with a gate
    for each channel of the key (b) and of the value (w) in the place of beta. Differentiable by
    every tensor.

    Args:
        q, k, v, g, A_log, dt_bias, scale: As in :func:`fused_recurrent_kda`.
        b: Erase gate ``[B, T, HV, K]`` in [0, 2], any float dtype.
        w: Write gate ``[B, T, HV, V]``, any float dtype.
        output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, lower_bound: As there.
        state_v_first, cu_seqlens, initial_state, inplace_final_state: Likewise.
        ssm_state_indices, num_accepted_tokens, out, final_state_out: Likewise.
        gate_domain, transpose_state_layout, cp_context, impl: Likewise.

    Returns:
        ``(o, final_state)`` as of :func:`fused_recurrent_kda`.

    Raises:
        TypeError, ValueError: as :func:`chunk_gdn2`, before any kernel runs.

    Source: Hatamizadeh, Choi and Kautz 2026 (arXiv:2605.22791); chapter 12d.
    """
    check.absent("cp_context", cp_context)
    return call(
        (q, k, v, g, b, w, A_log, dt_bias, initial_state), cu_seqlens, scale, impl,
        v_first=arguments.v_first(state_v_first, transpose_state_layout),
        lower_bound=lower_bound,
        indices=ssm_state_indices,
        accepted=num_accepted_tokens,
        rooms=(out, final_state_out),
        domain=gate_domain,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        inplace_final_state=inplace_final_state,
    )  # fmt: skip
