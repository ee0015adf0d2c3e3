"""Decoding: states written in place, one a sequence or in the slots of a pool."""

from torch import Tensor

from linattn_edu.ops import check, inplace, sequences
from linattn_edu.ops.delta import recurrence
from linattn_edu.ops.delta.recurrence import FLAGS, GIVEN, LACKS, How
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.preallocated import check_results, into
from linattn_edu.ops.tensors import contiguous, known, transposed
from linattn_edu.reference.delta.recurrent import recurrent_pool


def run(
    tensors: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    checked: check.Tensors,
    how: How,
    output_final_state: bool,
    asked: bool,
    indices: Tensor | None,
    accepted: Tensor | None,
    rooms: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """o and the final state or None, in new tensors or in the rooms for them; or in place.

    tensors, checked: as of recurrence.run.  asked: whether final states overwrite the initial ones,
    and indices: in which slots of a pool.
    """
    inputs = *tensors, cu_seqlens, indices, accepted
    wanted = *rooms, output_final_state
    check_results(checked, inputs, tensors[2], wanted, how.v_first, asked)
    if asked or indices is not None:
        o, state = in_place(tensors, cu_seqlens, checked, how, asked, indices, accepted)
        return into(rooms[0], o), state
    no_pool(accepted)
    o, state = recurrence.run(tensors, cu_seqlens, checked, how, output_final_state)
    return into(rooms[0], o), into(rooms[1], state)


def in_place(
    tensors: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | None,
    checked: check.Tensors,
    how: How,
    asked: bool,
    indices: Tensor | None,
    accepted: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and the initial state, in which the final one stands; arguments as in recurrence.run.

    checked: what took them.
    """
    state = tensors[-1]
    if indices is None:
        no_pool(accepted)
    else:
        inplace.check_pool(checked, inplace.DELTA, asked, indices, accepted)
    inplace.check_final(inplace.DELTA, state, tensors[:-1], indices is not None)
    if indices is not None:
        indices = indices.reshape(checked.sizes["N"], -1)
    tensors, dtype = recurrence.prepare(tensors, cu_seqlens, checked, how)
    if how.impl == "triton":
        (o,) = steps_[how.gated](
            *recurrence.given(tensors), indices, accepted, cu_seqlens, how.scale, how.normalise,
            how.sigmoid, how.lower_bound, how.v_first, how.impl,
        )  # fmt: skip
        inplace.written(state)
    elif indices is not None:
        with inplace.writable(state):
            (o,) = pools_[how.gated](
                *recurrence.plain(tensors, how), state, indices, accepted, cu_seqlens, how.scale,
                how.v_first, how.impl,
            )  # fmt: skip
    else:
        o, final_state = recurrence.differentiable(tensors, cu_seqlens, how)
        with inplace.writable(state):
            state.copy_(final_state)
    return o.to(dtype), state


def no_pool(accepted: Tensor | None) -> None:
    """Refuse accepted tokens without slots."""
    if accepted is not None:
        raise ValueError("num_accepted_tokens belongs to ssm_state_indices, which is None")


def _check_slots(indices: Tensor | None, accepted: Tensor | None, slots: int) -> None:
    """Refuse slots and numbers of accepted tokens that cannot be, where they can be read."""
    if not known(indices):
        return
    rows = indices.tolist()
    inplace.check_slots("ssm_state_indices", "initial_state", rows, slots)
    if accepted is not None:
        inplace.check_accepted("num_accepted_tokens", rows, accepted.tolist())


_POOL = {"initial_state": "slots HV X Y", "indices": "N S?", "accepted": "N?"}


def _step(gated: bool) -> Operator:
    """The recurrence in one kernel; the final state goes where the initial one is, or to a slot."""
    step = Operator(
        "recurrent_step_" + "gated_" * gated,
        GIVEN[gated] | _POOL,
        {"o": like("B T HV V", "v")},
        options=FLAGS | {"v_first": "bool"},
        stages=recurrence.stages,
        packed="tokens",
        mutates="initial_state",
        lacks=() if gated else LACKS,
    )

    @step.forward
    def forward(
        stages, q, k, v, g, gk, gv, beta, A_log, dt_bias, initial_state, indices, accepted, scale,
        normalise, sigmoid, lower_bound, v_first, cu_seqlens=None, write=None,
    ):  # fmt: skip
        _check_slots(indices, accepted, initial_state.shape[0])
        aligned = initial_state if indices is not None else contiguous(initial_state)
        o, _ = stages.recurrent(
            q, k, v, g, beta, gk=gk, gv=gv, write=write, A_log=A_log, dt_bias=dt_bias, scale=scale,
            normalise=normalise, sigmoid=sigmoid, lower_bound=lower_bound, v_first=v_first,
            initial_state=aligned, inplace=True, indices=indices, accepted=accepted,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        if aligned is not initial_state:
            initial_state.copy_(aligned)
        return o

    return step


def _pool(gated: bool) -> Operator:
    """The reference over a pool, which it reads and writes."""
    pool = Operator(
        "recurrent_pool" + "_gated" * gated,
        {
            **{n: axes for n, axes in GIVEN[gated].items() if n not in ("A_log", "dt_bias")},
            **_POOL,
            "cu_seqlens": "bounds?",
        },
        {"o": like("B T HV V", "v")},
        options={"scale": "float", "v_first": "bool"},
        stages=lambda impl: recurrent_pool,
        mutates="initial_state",
        lacks=() if gated else LACKS,
    )

    @pool.forward
    def forward(
        recurrent_pool, q, k, v, g, gk, gv, beta, initial_state, indices, accepted, cu_seqlens,
        scale, v_first, write=None,
    ):  # fmt: skip
        _check_slots(indices, accepted, initial_state.shape[0])
        B, T = q.shape[:2]
        bounds = list(range(0, B * T + 1, T))
        if cu_seqlens is not None:
            bounds = sequences.bounds(cu_seqlens, None, T)
        one = (q, k, v, g, beta, gk, gv, write)
        one = (x if x is None else x.flatten(0, 1)[None] for x in one)
        q, k, v_, g, beta, gk, gv, write = one
        o = recurrent_pool(
            q, k, v_, g, beta, transposed(initial_state, v_first), indices, accepted,
            gk=gk, gv=gv, write=write, scale=scale, bounds=bounds,
        )  # fmt: skip
        return o.view(v.shape)

    return pool


# by whether there are gates of channels for what is erased and for what is written
steps_ = {False: _step(False), True: _step(True)}
pools_ = {False: _pool(False), True: _pool(True)}
