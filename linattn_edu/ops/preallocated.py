"""Results in memory that the caller has: checked before any kernel runs, filled when all have."""

from torch import Tensor

from linattn_edu.ops import check, inplace
from linattn_edu.ops.tensors import needs_gradient, transformed, wide

Room = tuple[str, Tensor | None, tuple[str, ...]]  # its argument, the tensor given, its axes


def check_rooms(
    given: check.Tensors,
    inputs: tuple[Tensor | None, ...],
    out: Room,
    state: Room,
    like: Tensor,
    *,
    asked: str = "",
    elsewhere: str = "",
    ranks: bool = False,
) -> None:
    """Refuse tensors that cannot take the results of a call.

    inputs: all its other tensors.  like: has the dtype of out.  asked: what the state needs, where
    nothing asks for it.  elsewhere: what sends it to another place.  ranks: whether sequences are
    cut over them.
    """
    if out[1] is None and state[1] is None:
        return
    names = " and ".join(name for name, x, _ in (out, state) if x is not None)
    if ranks:
        raise ValueError(f"{names} must be None with cp_context")
    if state[1] is not None and elsewhere:
        raise ValueError(f"{state[0]} must be None with {elsewhere}")
    if state[1] is not None and asked:
        raise ValueError(f"{state[0]} needs {asked}")
    written = {}
    for (name, x, axes), dtype in ((out, like.dtype), (state, wide(*inputs))):
        if x is None:
            continue
        given.take(name, x, axes)
        if x.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, as what is written to it, got {x.dtype}")
        if not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")
        if x.requires_grad:
            raise ValueError(f"{name} must not require a gradient, since it is overwritten")
        written[name] = x
    if transformed():
        raise ValueError(f"{names} cannot be written inside a transform of torch.func (vmap, grad)")
    if needs_gradient(*inputs):
        raise ValueError(
            f"{names} cannot be written where a gradient is recorded: call it under torch.no_grad()"
        )
    inplace.refuse_shared(written, inputs, "the call")


def check_results(
    given: check.Tensors,
    inputs: tuple[Tensor | None, ...],
    v: Tensor,
    rooms: tuple[Tensor | None, Tensor | None, bool],
    v_first: bool,
    inplace: bool,
    cp_context: object = None,
) -> None:
    """`check_rooms` of a delta rule.  rooms: out, final_state_out, whether the final state is asked
    for.  inplace: whether it overwrites the initial one.
    """
    shape = ("N", "HV", "V", "K") if v_first else ("N", "HV", "K", "V")
    check_rooms(
        given, inputs, ("out", rooms[0], ("B", "T", "HV", "V")),
        ("final_state_out", rooms[1], shape), v,
        asked="" if rooms[2] else "output_final_state=True, got False",
        elsewhere="inplace_final_state=True" if inplace else "",
        ranks=cp_context is not None,
    )  # fmt: skip


def into(room: Tensor | None, x: Tensor | None) -> Tensor | None:
    """x, in the room for it where there is one."""
    if room is None:
        return x
    with inplace.writable(room):
        return room.copy_(x)
