"""Gated DeltaNet token by token: decoding, and prefill of short prompts."""

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments, decode, recurrence
from linattn_edu.ops.delta.gate import as_logarithm
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.tensors import in_heads


@repeated("initial_state", "out", "final_state_out")
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
    out: Tensor | None = None,
    final_state_out: Tensor | None = None,
    gate_domain: str = "log",
    transpose_state_layout: bool | None = None,
    cp_context: None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    r"""Gated delta rule one token after the other: decoding, and prefill of short prompts.

    The same result as :func:`chunk_gated_delta_rule`, in one kernel that takes a step a token: the
    faster form for a few tokens, T = 1 in particular, and without the rounding of chunks. All
    arithmetic is in float32. Differentiable by every tensor; the backward pass computes the states
    again in blocks of sqrt(T) tokens (sqrt(T / N), of N packed sequences).

    Args:
        q, k, v, scale, output_final_state, state_v_first, transpose_state_layout, cp_context, impl:
            As in :func:`chunk_gated_delta_rule`, with K <= 512. q, k, v may differ in dtype: o has
            that of v, and the arithmetic is at least as wide as each.
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
            contiguous tensor of float32, float16 or bfloat16 (float64 where another argument is),
            and return it. 16 bits are half of the traffic, and round the state once a call: over
            4096 calls outputs are off by up to 4e-2 in bfloat16 and 5e-3 in float16, which holds up
            to 65504, as chapter 26 derives. It must share no memory with another argument. Not
            while a gradient is recorded, and not inside a transform of torch.func.
        ssm_state_indices: Slot of each sequence ``[N]``, int32 or int64, in a pool of states:
            initial_state is then ``[slots, HV, K, V]``, of which each slot is contiguous, and
            inplace_final_state must be True. Slots that are not named keep their bits. A negative
            slot is none: nothing is read or written there, and a sequence that would start from one
            is padding, whose outputs are zero. Or ``[N, S]``, for tokens that may be rejected
            later: the state after token t of sequence n goes to slot ``[n, t]``. With more tokens
            than columns the last slot is left with the last state. No slot may be named by two
            sequences. On the CPU slots and counts are checked, when a compiled graph runs too. On a
            GPU they are not read; there a slot past the pool's end counts as negative, so does a
            count that is not 1 to S, and a slot named twice is left with either state.
        num_accepted_tokens: How many tokens of the previous call were kept ``[N]``, 1 to S, with
            ssm_state_indices ``[N, S]``: sequence n starts from the state in slot
            ``[n, num_accepted_tokens[n] - 1]``. None: from slot ``[n, 0]``.
        out, final_state_out: As in :func:`chunk_gated_delta_rule`; out has v's dtype.
        gate_domain: Likewise, of g, gk and gv.

    Returns:
        ``(o, final_state)`` as of :func:`chunk_gated_delta_rule`, but final_state is float64 where
        any argument is; it is initial_state with inplace_final_state, whatever output_final_state
        says.

    Raises:
        TypeError, ValueError: as :func:`chunk_gated_delta_rule`, before any kernel runs.

    Source: Yang et al. 2024 (arXiv:2412.06464); chapter 01.
    """
    check.absent("cp_context", cp_context)
    state_v_first = arguments.v_first(state_v_first, transpose_state_layout)
    output_final_state, normalise, raw_gate, inplace = arguments.flags(
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        inplace_final_state=inplace_final_state,
    )
    given = check.Tensors()
    A_log, dt_bias = arguments.check_tensors(
        given, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, None, gk, gv,
        v_first=state_v_first, raw_gate=raw_gate, optional=True,
        pool=ssm_state_indices is not None, domain=gate_domain, largest=recurrence.LARGEST,
    )  # fmt: skip
    sigmoid, _ = arguments.sigmoid_factor(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    if sigmoid and beta is None:
        raise ValueError("beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    g, gk, gv = (as_logarithm(x, gate_domain) for x in (g, gk, gv))
    v = in_heads(v, given.sizes["HV"])
    tensors = (q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state)
    how = recurrence.How(
        check.number("scale", scale), normalise, raw_gate, sigmoid, state_v_first, impl=impl
    )
    return decode.run(
        tensors, cu_seqlens, given, how, output_final_state, inplace, ssm_state_indices,
        num_accepted_tokens, (out, final_state_out),
    )  # fmt: skip
