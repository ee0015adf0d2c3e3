"""Decoding that does not write its state: what the forms of the delta rule share."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops import ring as rings
from linattn_edu.ops.delta import arguments, recurrence
from linattn_edu.ops.delta.recurrence import FLAGS, GIVEN, How
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.ring import Ring
from linattn_edu.ops.stages import implementations, stage
from linattn_edu.ops.tensors import in_heads, wide


def replay(
    tensors: tuple[Tensor | None, ...],
    state: Tensor,
    ring: Ring,
    how: How,
    indices: Tensor | None,
    accepted: Tensor | None,
    *,
    channels: bool,
) -> Tensor:
    """o of tokens, which the ring has then.

    tensors: q, k, v, g, beta, A_log, dt_bias.  channels: g is a decay for each row of the state.
    """
    q, k, v, g, beta, A_log, dt_bias = tensors
    given = check.Tensors()
    A_log, dt_bias = arguments.check_tensors(
        given, q, k, v, g, beta, None, A_log, dt_bias, None, v_first=False,
        raw_gate=how.raw_gate, lower_bound=how.lower_bound, channels=channels, alike=True,
        largest=recurrence.LARGEST,
    )  # fmt: skip
    rings.check_ring(given, state, ring)
    _check_fit(given, state, ring, tensors, channels)
    rings.check_slots(given, given.sizes["B"], indices, accepted)
    v = in_heads(v, given.sizes["HV"])
    g, gk = (None, g) if channels else (g, None)
    tensors, _ = recurrence.prepare(
        (q, k, v, g, gk, None, beta, A_log, dt_bias, None), None, given, how
    )
    rings.check_writes(state, ring, (*tensors, indices, accepted), "a decoding step")
    if how.impl == "reference":  # which keeps k as it is given, and divides by its length itself
        q, k, v, g, gk, _, beta = recurrence.plain(tensors, replace(how, normalise=False))
        A_log = dt_bias = None
        how = replace(how, sigmoid=0, lower_bound=None)
    else:
        q, k, v, g, gk, _, beta, A_log, dt_bias, _ = recurrence.given(tensors)
    with inplace.writable(state), inplace.writable(ring.keys):
        (o,) = replay_(
            q, k, v, g, gk, beta, A_log, dt_bias, *ring[:4], state, indices, accepted, how.scale,
            how.normalise, how.sigmoid, how.lower_bound, ring.state_v_first, ring.length, how.impl,
        )  # fmt: skip
    rings.written(state, ring, how.impl)
    return o


def _check_fit(
    given: check.Tensors, state: Tensor, ring: Ring, tensors: tuple, channels: bool
) -> None:
    """Refuse a state and a ring that are not for such tokens."""
    q, sizes = tensors[0], given.sizes
    inplace.check_kept("state", state, tensors)
    check.same_dtype(("q", q), ("ring.keys", ring.keys))
    if ring.decays.dtype != wide(state):
        raise TypeError(f"ring.decays must be {wide(state)}, got {ring.decays.dtype}")
    gates = sizes["K"] if channels else 1
    if sizes["gates"] != gates:
        raise ValueError(
            f"ring must be made with channels={channels}: ring.decays must have {gates} gates, "
            f"got {sizes['gates']}"
        )
    rings.check_tokens(sizes, ring, "q")


@dataclass(frozen=True)
class Stages:
    """Tokens are taken into a ring, and read."""

    replay: Callable = stage("delta.replay")


replay_ = Operator(
    "replay_delta_rule",
    {n: axes for n, axes in GIVEN[False].items() if n != "gv"}
    | rings.AXES
    | {"indices": "B?", "accepted": "B?"},
    {"o": like("B T HV V", "v")},
    options=FLAGS | {"v_first": "bool", "length": "int"},
    stages=implementations(Stages),
    mutates=rings.WRITTEN,
)


@replay_.forward
def forward(
    stages, q, k, v, g, gk, beta, A_log, dt_bias, keys, writes, decays, counts, state, indices,
    accepted, scale, normalise, sigmoid, lower_bound, v_first, length, impl,
):  # fmt: skip
    """o; the ring, and where it is full the state, are written in place."""
    rings.check_numbers(indices, accepted, state.shape[0], keys.shape[2] - length)
    state, more = rings.laid(state, v_first, impl)
    if impl != "reference":
        more |= {
            "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound, "sigmoid": sigmoid,
        }  # fmt: skip
    return stages.replay(
        q, k, v, g, beta, state, keys, writes, decays, counts, indices, accepted,
        length=length, gk=gk, scale=scale, normalise=normalise, **more,
    )  # fmt: skip
