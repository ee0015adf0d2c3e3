"""GDN-2 in chunks: the public function over the composition of Kimi Delta Attention."""

from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.ops.delta import arguments
from linattn_edu.ops.kda.chunk import backward, declare, forward, prepared
from linattn_edu.ops.repeated import repeated


@repeated("initial_state", "out", "final_state_out")
def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: CPContext | None = None,
    *,
    chunk_indices: Tensor | None = None,
    max_num_seqs: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
    allow_neg_eigval: bool = False,
    inplace_final_state: bool = False,
    ssm_state_indices: Tensor | None = None,
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    gate_domain: str = "log",
    checkpoint_every_n_tokens: int | None = None,
    batch_invariant: bool = False,
    transpose_state_layout: bool | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    r"""GDN-2 in chunks: Kimi Delta Attention with a gate for each channel in the place of beta.

    .. math::

        S_t = \tilde S_t + k_t^\top \bigl(w_t v_t - (b_t k_t)\, \tilde S_t\bigr), \qquad
        \tilde S_t = \mathrm{diag}(e^{g_t})\, S_{t-1}, \qquad o_t = \mathrm{scale} \cdot q_t S_t

    for each batch entry and value head; q, k, v, b and w are rows, b and w multiply number by
    number, S is ``[K, V]``. b says of each channel of the key how much of what the state holds is
    erased, w of each channel of the value how much is written. With b and w the same number in all
    channels it is :func:`chunk_kda`, beta that number. Differentiable by q, k, v, g, b, w,
    initial_state, A_log and dt_bias, from o and from the final state.

    Args:
        q, k, v, g, scale, initial_state, output_final_state: As in :func:`chunk_kda`. Rows of k
            must satisfy ``sum(b * k * k) <= 2``, which alone bounds no state (chapter 12d).
        b: Erase gate ``[B, T, HV, K]`` in [0, 2], any of the dtypes of g. Where it may be beyond 1,
            allow_neg_eigval should say so.
        w: Write gate ``[B, T, HV, V]``, any of these dtypes.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias: As in :func:`chunk_kda`.
        safe_gate, lower_bound, disable_recompute, return_intermediate_states: Likewise.
        state_v_first, cu_seqlens, cu_seqlens_cpu, chunk_indices, max_num_seqs: Likewise.
        cp_context, chunk_size: Likewise.
        inplace_final_state, ssm_state_indices, out, final_state_out: Likewise.
        gate_domain, checkpoint_every_n_tokens, batch_invariant: Likewise.
        transpose_state_layout, impl: Likewise.
        allow_neg_eigval: Whether b may be beyond 1: in 16 bit everything is kept in float32 then,
            or as two numbers of bfloat16 of heads whose numbers cancel, as in :func:`chunk_kda`.

    Causality, accuracy, memory, where it works and where it runs in fused stages are as of
    :func:`chunk_kda`; the kernels in Gluon, and with them the fused backward pass, want b and w of
    q's dtype. b and w are kept between the passes beside its tensors.

    Returns:
        ``(o, final_state)``, with return_intermediate_states ``(o, final_state, h)``, as of
        :func:`chunk_kda`.

    Raises:
        TypeError, ValueError: as :func:`chunk_kda`, before any kernel runs.

    Source: Hatamizadeh, Choi and Kautz 2026 (arXiv:2605.22791); chapter 12d.
    """
    _, beyond = arguments.sigmoid_factor(False, allow_neg_eigval)
    (q, *given), save, results = prepared(
        (q, k, v, g, b, w, A_log, dt_bias, initial_state),
        (cu_seqlens, cu_seqlens_cpu, chunk_indices), cp_context, scale, chunk_size, impl,
        v_first=arguments.v_first(state_v_first, transpose_state_layout),
        lower_bound=lower_bound,
        beyond=beyond,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        disable_recompute=disable_recompute,
        return_intermediate_states=return_intermediate_states,
        final=(inplace_final_state, ssm_state_indices),
        rooms=(out, final_state_out),
        most=max_num_seqs,
        domain=gate_domain,
        every=checkpoint_every_n_tokens,
        invariant=batch_invariant,
    )  # fmt: skip
    return results(chunk(q, *given, save=save, every=checkpoint_every_n_tokens))


chunk = declare("chunk_gdn2", {"beta": "B T HV K", "write": "B T HV V"})
chunk.forward(forward)
chunk.backward(backward)
