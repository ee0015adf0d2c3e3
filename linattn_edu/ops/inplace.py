"""What operators share that write a state in place, one a sequence or in the slots of a pool."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from linattn_edu.ops.check import Tensors
from linattn_edu.ops.tensors import has_tangent, needs_gradient, traced, transformed, wide


class Names(NamedTuple):
    """What a public function calls the states that it overwrites, the flag that asks for it, their
    slots in a pool, and the number of sequences.
    """

    state: str
    asked: str
    slots: str
    axis: str


DELTA = Names("initial_state", "inplace_final_state", "ssm_state_indices", "N")
SSD = Names("initial_states", "inplace_final_states", "state_batch_indices", "N")


def check(
    name: str,
    state: Tensor,
    others: tuple[Tensor | None, ...],
    writer: str,
    instead: str = "",
    *,
    without_gradient: bool = False,
    beside: dict[str, Tensor] | None = None,
) -> None:
    """Refuse to write a state where a transform or a gradient would not notice, or where another
    argument lies.

    writer: who writes it, and `instead` what else there is, in the words of the refusals.
    beside: what else is written, by name.
    without_gradient: the writer runs by `stepped`: only a leaf that needs a gradient is refused, as
    everywhere in PyTorch.
    """
    beside = beside or {}
    if transformed():
        raise ValueError(
            f"{writer} writes one state, which a transform of torch.func (vmap, grad) cannot "
            f"follow: call it outside{instead}"
        )
    if without_gradient:
        refused = has_tangent(state, *others) or (needs_gradient(state) and state.is_leaf)
    else:
        refused = needs_gradient(state, *others, *beside.values())
    if refused:
        raise ValueError(
            f"{writer} overwrites what a gradient needs: call it under torch.no_grad(){instead}"
        )
    refuse_shared({name: state, **beside}, others, writer)


def refuse_shared(
    written: dict[str, Tensor], others: tuple[Tensor | None, ...], writer: str
) -> None:
    """Refuse what is written where another argument lies."""
    first = next(iter(written.values()))
    if first.device.type == "meta" or traced(first):
        return
    spans = {name: memory(written[name]) for name in written}
    places = []
    for x in others:
        if x is not None and x.numel():
            places.append(memory(x))
    for name in spans:
        apart = [*places, *(spans[other] for other in spans if other != name)]
        if any(_meet(spans[name], place) for place in apart):
            raise ValueError(
                f"{name} must not share memory with another argument: {writer} would "
                "overwrite it while it is read"
            )


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether two pieces of memory have an address in common."""
    return other[0] < one[1] and one[0] < other[1]


def dense(pool: Tensor) -> bool:
    """Whether each state of a pool is contiguous and no two overlap; they may lie apart, as in the
    pages of a cache.
    """
    apart = pool.stride(0) >= pool[:1].numel() or pool.shape[0] == 1
    return pool[:1].is_contiguous() and apart


def check_slots(name: str, pool: str, rows: list[list[int]], slots: int) -> None:
    """Refuse slots of sequences, a row each, that are not in the pool, or named by two of them.

    Called when the operator runs, so that a compiled graph checks them too.
    """
    owner: dict[int, int] = {}
    for n, row in enumerate(rows):
        if max(row) >= slots:
            raise ValueError(
                f"{name} must be below the {slots} slots of {pool}, got {max(row)} for sequence {n}"
            )
        for slot in row:
            if slot >= 0 and owner.setdefault(slot, n) != n:
                raise ValueError(
                    f"{name} must name a slot for one sequence only, "
                    f"got {slot} for {owner[slot]} and {n}"
                )


def check_rows(
    name: str, axis: str, N: int, indices: Tensor | None, accepted: Tensor | None
) -> None:
    """Refuse slots of N sequences, and numbers of accepted tokens, of a shape that does not fit."""
    shape = None if indices is None else tuple(indices.shape)
    if shape is not None and (len(shape) not in (1, 2) or shape[0] != N or 0 in shape):
        raise ValueError(f"{name} must have shape [{axis}={N}] or [{axis}={N}, S], got {shape}")
    if accepted is None:
        return
    if shape is None or len(shape) == 1:
        raise ValueError(
            f"num_accepted_tokens needs {name} of shape [{axis}, S], a slot for each token, "
            f"got {shape}"
        )
    if accepted.shape != (N,):
        raise ValueError(
            f"num_accepted_tokens must have shape [{axis}={N}], got {tuple(accepted.shape)}"
        )


def check_pool(
    given: Tensors, names: Names, asked: bool, indices: Tensor, accepted: Tensor | None = None
) -> None:
    """Refuse slots of a pool, and numbers of accepted tokens, of a shape that does not fit."""
    for name, x in ((names.slots, indices), ("num_accepted_tokens", accepted)):
        if x is not None:
            given.integers(name, x)
    if not asked:
        raise ValueError(
            f"{names.slots} names slots of a pool that is written in place: it needs "
            f"{names.asked}=True, got False"
        )
    check_rows(names.slots, names.axis, given.sizes[names.axis], indices, accepted)


def check_kept(
    name: str, state: Tensor, others: tuple[Tensor | None, ...], where: str = ""
) -> None:
    """Refuse a dtype that states are not kept in: float64 beside float64, else 32 or 16 bits."""
    kept = wide(*others)
    halves = kept == torch.float32 and state.dtype in (torch.float16, torch.bfloat16)
    if state.dtype != kept and not halves:
        more = ", torch.float16 or torch.bfloat16" if kept == torch.float32 else ""
        raise TypeError(f"{name} must be {kept}{more}{where}, got {state.dtype}")


def check_final(
    names: Names, state: Tensor | None, others: tuple[Tensor | None, ...], pool: bool
) -> None:
    """Refuse an initial state that cannot take the final one."""
    name, asked, slots, _ = names
    if state is None:
        raise ValueError(f"{name} must be given with {asked}=True, got None")
    check_kept(name, state, others, f" with {asked}=True")
    if pool and not dense(state):
        raise ValueError(
            f"{name} must be contiguous in every slot with {slots}, and slots "
            f"must not overlap, got strides {state.stride()} for {tuple(state.shape)}"
        )
    if not pool and not state.is_contiguous():
        raise ValueError(f"{name} must be contiguous with {asked}=True")
    check(name, state, others, f"{asked}=True", ", or without")


def check_accepted(name: str, rows: list[list[int]], counts: list[int]) -> None:
    """Refuse numbers of accepted tokens that are not those of a slot of their row."""
    for n, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not 1 <= count <= len(row):
            raise ValueError(f"{name} must be 1 to S={len(row)}, got {count} for sequence {n}")


def writable(state: Tensor) -> AbstractContextManager:
    """Where a state may be written: one made in inference mode, in inference mode alone."""
    made_there = not traced(state) and state.is_inference()
    return torch.inference_mode() if made_there else nullcontext()


def stepped(step: Callable, state: Tensor, impl: str) -> Tensor:
    """The output of a step of a kind that has no gradient, which writes the state that it is given.

    A backward pass that comes to the output or to the new state is an error. A graph that is traced
    records none of it.
    """
    if traced(state):
        with torch.no_grad():
            return step(state)
    with writable(state):
        out = step(state.detach() if state.requires_grad else state)
    if impl == "triton":
        written(state)
    if needs_gradient(state):  # made of what has one: what it was made of is overwritten
        _Overwritten.apply(state)
    return out


class _Overwritten(torch.autograd.Function):
    """The history of a state from when a step has written it."""

    @staticmethod
    def forward(ctx, state: Tensor) -> Tensor:
        ctx.mark_dirty(state)
        return state

    @staticmethod
    def backward(ctx, _):
        raise RuntimeError("a state that a decoding step has written has no gradient")


def written(state: Tensor) -> None:
    """Tell autograd that a kernel has written a state; one of inference mode has no version."""
    if not traced(state) and not state.is_inference():
        torch.autograd.graph.increment_version(state)


def memory(x: Tensor) -> tuple[int, int]:
    """The addresses between which the elements of x lie."""
    begin, size = x.data_ptr(), x.element_size()
    if x.is_contiguous():
        return begin, begin + x.numel() * size
    far = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return begin, begin + (far + 1) * size
