"""Mamba-2 token by token, the state not written for each: decoding."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops import ring as rings
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.repeated import repeated
from linattn_edu.ops.ring import Ring
from linattn_edu.ops.ssd.step import LARGEST
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import wide


@repeated("state", "ring")
def replay_selective_state_update(
    state: Tensor,
    ring: Ring,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    num_accepted_tokens: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    r"""Mamba-2, one token or a few: decoding, with the state read and not written.

    For each sequence and head, with a checkpoint S_0 of P rows and N columns:

    .. math::

        \Delta_t &= \mathrm{softplus}(dt_t + dt\_bias) \\
        S_t &= e^{G_t} S_0 + \sum_{i \le t} e^{G_t - G_i} (\Delta_i\, x_i)^\top B_i, \qquad
        G_t = A \sum_{i \le t} \Delta_i \\
        out_t &= (C_t S_t^\top + D\, x_t)\, \mathrm{silu}(z_t)

    The ring keeps B_i, the step times x_i and the log decay of the tokens since the checkpoint: a
    token reads S_0 and these few rows, and writes its own. Where a call's tokens do not fit into a
    ring beside the others, it is folded into its checkpoint first, once in ring.length tokens: each
    sequence by its own count. The result is that of :func:`selective_state_update` to rounding, and
    the same bits whatever shares the batch. All arithmetic is in float32. There is no gradient.

    Args:
        state: Checkpoints ``[slots, H, P, N]``, float32, float16 or bfloat16 (float64: reference
            only), N at most 256, each slot contiguous. Written in place; a state of 16 bit is
            rounded where a ring is folded, not for each token.
        ring: What was written since, by :func:`make_ring` of the states, the G groups of B, and
            state_v_first=True. Written in place. :func:`commit_ring` makes of both the plain state.
        x: ``[B, T, H, P]``, T <= ring.tokens, of these dtypes too, as all that follow.
        dt: Raw step size ``[B, T, H]``.
        A: Rate of the log decay ``[H]``, <= 0.
        B, C: What is written with, and read with, ``[B, T, G, N]``, H a multiple of G; B in the
            dtype of ring.keys.
        D: Weight of x in out, ``[H]`` or ``[H, P]``, or None: 0.
        z: Gate of out ``[B, T, H, P]``, or None: out is not gated.
        dt_bias: Added to dt ``[H]``, or None: 0.
        dt_softplus: Whether the step size is the softplus of dt + dt_bias, or that itself.
        state_batch_indices: Slot of each sequence ``[B]``, as ssm_state_indices in
            :func:`replay_gated_delta_rule`.
        num_accepted_tokens, impl: As in :func:`replay_gated_delta_rule`.

    Returns:
        out ``[B, T, H, P]`` in the dtype of x.

    Raises:
        TypeError, ValueError: An argument does not fit, shares memory with what is written, or
            needs a gradient; before any kernel runs.

    Source: Dao and Gu 2024 (arXiv:2405.21060); ReplaySSM of Dao and others 2026; chapter 26b.
    """
    given = check.Tensors()
    sizes = given.sizes
    given.take("x", x, ("B", "T", "H", "P"))
    given.take("dt", dt, ("B", "T", "H"))
    given.take("A", A, ("H",))
    given.take("B", B, ("B", "T", "G", "N"))
    given.take("C", C, ("B", "T", "G", "N"))
    if D is not None:
        given.take("D", D, ("H", "P") if getattr(D, "ndim", 1) == 2 else ("H",))
    if z is not None:
        given.take("z", z, ("B", "T", "H", "P"))
    if dt_bias is not None:
        given.take("dt_bias", dt_bias, ("H",))
    rings.check_ring(given, state, ring, ("G", "H", "N", "P"))
    for axis, size in sizes.items():
        if size < 1:
            raise ValueError(f"x, B and state must have {axis} >= 1, got {axis}={size}")
    check.group_count(sizes)
    if sizes["N"] > LARGEST:
        raise ValueError(f"state must have N <= {LARGEST}, got N={sizes['N']}")
    if not ring.state_v_first or sizes["gates"] != 1:
        raise ValueError("ring must be made with state_v_first=True and channels=False")
    tensors = (x, dt, A, B, C, D, z, dt_bias)
    check.same_dtype(("B", B), ("ring.keys", ring.keys))
    if ring.decays.dtype != (dtype := wide(state, *tensors)):
        raise TypeError(f"ring.decays must be {dtype}, got {ring.decays.dtype}")
    rings.check_tokens(sizes, ring, "x")
    rings.check_slots(
        given, sizes["B"], state_batch_indices, num_accepted_tokens, "state_batch_indices"
    )
    softplus = check.flag("dt_softplus", dt_softplus)
    impl = check.resolve_impl(impl, given.device, tuple(given.dtypes))
    where = state_batch_indices, num_accepted_tokens
    rings.check_writes(state, ring, (*tensors, *where), "a decoding step")
    D = D[:, None] if D is not None and D.ndim == 1 else D
    with inplace.writable(state), inplace.writable(ring.keys):
        (out,) = replay_(
            x, dt, A, B, C, D, z, dt_bias, *ring[:4], state, *where, softplus, ring.length, impl
        )
    rings.written(state, ring, impl)
    return out


@dataclass(frozen=True)
class Stages:
    """Tokens are taken into a ring, and read."""

    replay: Callable = stage("ssd.replay")


replay_ = Operator(
    "replay_selective_state_update",
    {
        "x": "B T HV V",
        "dt": "B T HV",
        "A": "HV",
        "B": "B T H K",
        "C": "B T H K",
        "D": "HV P_D?",
        "z": "B T HV V?",
        "dt_bias": "HV?",
        **rings.AXES,
        "indices": "B?",
        "accepted": "B?",
    },
    {"out": like("B T HV V", "x")},
    options={"softplus": "bool", "length": "int"},
    stages=implementations(Stages),
    mutates=rings.WRITTEN,
    apart={"x": 3, "dt": 2, "B": 3, "C": 3, "z": 3},
)


@replay_.forward
def forward(
    stages, x, dt, A, B, C, D, z, dt_bias, keys, writes, decays, counts, state, indices, accepted,
    softplus, length,
):  # fmt: skip
    """out; the ring, and where it is full the state, are written in place."""
    tokens = keys.shape[2] - length
    rings.check_numbers(indices, accepted, state.shape[0], tokens, "state_batch_indices")
    return stages.replay(
        x, dt, A, B, C, D, z, dt_bias, state, keys, writes, decays, counts, indices, accepted,
        length=length, softplus=softplus,
    )  # fmt: skip
