"""Kimi Delta Attention token by token, the state not written for each: decoding."""

from torch import Tensor

from linattn_edu.ops import check
from linattn_edu.ops.delta import arguments, replay
from linattn_edu.ops.delta.recurrence import How
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.ring import Ring


@repeated("state", "ring")
def replay_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    ring: Ring,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    *,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Kimi Delta Attention, one token or a few: decoding, with the state read and not written.

    .. math::

        S_t = \mathrm{diag}(e^{G_t}) S_0
            + \sum_{i \le t} \mathrm{diag}(e^{G_t - G_i})\, k_i^\top u_i, \qquad
        u_t = \beta_t (v_t - k_t\, \mathrm{diag}(e^{g_t}) S_{t-1}), \qquad
        o_t = \mathrm{scale} \cdot q_t S_t

    As :func:`replay_gated_delta_rule`, with a decay for each row of the state.

    Args:
        q, k, v, beta, scale: As in :func:`replay_gated_delta_rule`.
        state, ssm_state_indices, num_accepted_tokens, impl: Likewise.
        ring: Likewise, made with channels=True.
        g, A_log, dt_bias, lower_bound, use_gate_in_kernel: As in :func:`fused_recurrent_kda`.
        use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval: Likewise.

    Returns:
        o ``[N, T, HV, V]`` in the dtype of v.

    Raises:
        TypeError, ValueError: as :func:`replay_gated_delta_rule`, before any kernel runs.

    Source: Kimi Team 2025 (arXiv:2510.26692); ReplaySSM of Dao and others 2026; chapter 26b.
    """
    normalise, raw_gate = arguments.flags(
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel
    )
    sigmoid, _ = arguments.sigmoid_factor(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    bound = check.number("lower_bound", lower_bound)
    how = How(check.number("scale", scale), normalise, raw_gate, sigmoid, False, bound, impl)
    return replay.replay(
        (q, k, v, g, beta, A_log, dt_bias), state, ring, how, ssm_state_indices,
        num_accepted_tokens, channels=True,
    )  # fmt: skip
