"""Prefill that writes final states where it reads initial ones: in rows, or slots of a pool."""

from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.cp.place import Place
from linattn_edu.ops import check, inplace
from linattn_edu.ops.operator import Operator, like
from linattn_edu.ops.tensors import known, transposed


@dataclass(frozen=True)
class Overwriting(Place):
    """Where the sequences of a call are whose final states overwrite the initial ones.

    No number of slots is read from a device: a slot beyond the pool's end counts as negative.

    Args:
        state: What is overwritten, as it was given.  v_first: Whether its states are [V, K].
        slots: Of each sequence in a pool [N], int64, or None.  rows: The states that they hold.
    """

    writes = True
    state: Tensor | None = None
    v_first: bool = False
    slots: Tensor | None = None
    rows: Tensor | None = None

    def entering(self, state: Tensor) -> Tensor:
        """The states of the sequences."""
        return state if self.rows is None else transposed(self.rows, self.v_first)

    def parted(self, o: Tensor) -> Tensor:
        """o, with zeros for the sequences without a slot."""
        if self.slots is None:
            return o
        padding, bounds = ~_there(self.state, self.slots), self.bounds[0]
        if bounds is None:
            return o.masked_fill(padding.view(-1, *[1] * (o.ndim - 1)), 0)
        tokens = torch.arange(o.shape[1], device=o.device)
        owner = torch.searchsorted(bounds.long(), tokens, right=True) - 1
        padding = padding[owner.clamp(max=len(self.slots) - 1)]
        return o.masked_fill(padding.view(1, -1, *[1] * (o.ndim - 2)), 0)

    def left(self, state: Tensor, v_first: bool) -> Tensor:
        """The tensor that was given, with the final states in it."""
        state = transposed(state, self.v_first).to(self.state.dtype)
        with inplace.writable(self.state):
            if self.slots is None:
                self.state.copy_(state)
                return self.state
            # a sequence without a slot writes what another one writes, or a state as it is
            there = _there(self.state, self.slots)
            rows = torch.arange(len(there), device=there.device)
            rows = rows.where(there, there.int().argmax())
            slots = self.slots[rows].where(there.any(), 0)
            state = state[rows].where(there.any(), self.state[slots])
            self.state.index_copy_(0, slots, state)
        return self.state


def _there(pool: Tensor, slots: Tensor) -> Tensor:
    """Whether each sequence has a slot."""
    return (slots >= 0) & (slots < pool.shape[0])


# an operator, so that a compiled graph checks the slots too
read = Operator(
    "pool_rows",
    {"pool": "slots HV P S", "slots": "N"},
    {"rows": like("N HV P S", "pool")},
    options={"name": "str", "of": "str"},
    stages=lambda impl: None,
    apart={"pool": 3},
)


@read.forward
def forward(stages: None, pool: Tensor, slots: Tensor, name: str, of: str) -> Tensor:
    """The states in the slots, zero where there is none."""
    if known(slots):
        inplace.check_slots(name, of, slots[:, None].tolist(), pool.shape[0])
    there = _there(pool, slots)
    return pool[slots.where(there, 0)].masked_fill_(~there.view(-1, 1, 1, 1), 0)


def overwriting(
    place: Place,
    given: check.Tensors,
    tensors: tuple[Tensor | None, ...],
    state: Tensor | None,
    asked: bool,
    slots: Tensor | None,
    cp_context: CPContext | None,
    names: inplace.Names = inplace.DELTA,
    *,
    v_first: bool = False,
) -> Place:
    """place, or, where it is asked for, one that overwrites state; refuse what does not fit.

    tensors: the others of the call.  asked: the flag names.asked.  slots: of a pool, or None.
    """
    if slots is not None:
        inplace.check_pool(given, names, asked, slots)
        if slots.ndim != 1:
            raise ValueError(
                f"{names.slots} must have shape [{names.axis}={given.sizes[names.axis]}], a slot "
                f"for each sequence, got {tuple(slots.shape)}"
            )
    if not asked:
        return place
    if cp_context is not None:
        raise ValueError(f"{names.asked}=True is not supported with cp_context")
    inplace.check_final(names, state, tensors, slots is not None)
    if slots is None:
        return Overwriting(place.bounds, state=state, v_first=v_first)
    if not state.shape[0]:
        raise ValueError(f"{names.state} must have a slot at least, got {tuple(state.shape)}")
    slots = slots.long()
    (rows,) = read(state.detach(), slots, names.slots, names.state, "reference")
    return Overwriting(place.bounds, state=state, v_first=v_first, slots=slots, rows=rows)
