"""Gated DeltaNet token by token, the state not written for each: decoding."""

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments, replay
from linattn_edu.ops.delta.recurrence import How
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.ring import Ring


@repeated("state", "ring")
def replay_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    ring: Ring,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    *,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Gated delta rule, one token or a few: decoding, with the state read and not written.

    .. math::

        S_t = e^{G_t} S_0 + \sum_{i \le t} e^{G_t - G_i} k_i^\top u_i, \qquad
        u_t = \beta_t (v_t - e^{g_t} k_t S_{t-1}), \qquad o_t = \mathrm{scale} \cdot q_t S_t

    S_0 is a checkpoint, G_t the log decay since. The ring keeps k_i, u_i and g_i of the tokens
    since: a token reads S_0 and these few rows, and writes its own. Where a call's tokens do not
    fit into a ring beside the others, it is folded into its checkpoint first, once in ring.length
    tokens: each sequence by its own count. The result is that of
    :func:`fused_recurrent_gated_delta_rule` to rounding, and the same bits whatever shares the
    batch. All arithmetic is in float32. There is no gradient.

    Args:
        q, k, v, g, beta, scale: As in :func:`chunk_gated_delta_rule`, with K <= 512 and
            T <= ring.tokens.
        state: Checkpoints ``[slots, HV, K, V]``, ``[slots, HV, V, K]`` with ring.state_v_first:
            float32, float16 or bfloat16 (float64 for the reference), each slot contiguous. Written
            in place where a ring is folded, which is where 16 bits are rounded: once in ring.length
            tokens, so that after as many tokens they are off by a third of what they are where
            each token writes the state.
        ring: What was written since, by :func:`make_ring`. Written in place. :func:`commit_ring`
            makes of both the plain state.
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias: As in
            :func:`chunk_gated_delta_rule`.
        use_beta_sigmoid_in_kernel, allow_neg_eigval: Likewise.
        ssm_state_indices: Slot of each sequence ``[N]``, int32 or int64; None: sequence n has slot
            n. Slots that are not named keep their bits. A negative slot is none: the sequence is
            padding, whose outputs are zero. No slot may be named by two sequences. On the CPU slots
            are checked, when a compiled graph runs too. On a GPU they are not read; there a slot
            past the pool's end counts as negative, and one named twice is left with anything.
        num_accepted_tokens: How many tokens of the slot's last call were right ``[N]``, 0 to
            ring.tokens: the others leave the ring before anything else is done, and nothing is left
            of them. None: all. More than there were are all.
        impl: "triton", "reference" or "auto", as in :func:`chunk_gated_delta_rule`.

    Returns:
        o ``[N, T, HV, V]`` in the dtype of v.

    Raises:
        TypeError, ValueError: An argument does not fit, shares memory with what is written, or
            needs a gradient; before any kernel runs.

    Source: Yang et al. 2024 (arXiv:2412.06464); ReplaySSM of Dao and others 2026; chapter 26b.
    """
    normalise, raw_gate = arguments.flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel
    )
    sigmoid, _ = arguments.sigmoid_factor(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    how = How(check.number("scale", scale), normalise, raw_gate, sigmoid, False, impl=impl)
    return replay.replay(
        (q, k, v, g, beta, A_log, dt_bias), state, ring, how, ssm_state_indices,
        num_accepted_tokens, channels=False,
    )  # fmt: skip
