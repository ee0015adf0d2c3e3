"""A call of an operator in pieces of n tokens, for the states between them: caches of prefixes."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from linattn_edu.ops import sequences
from linattn_edu.ops.operator.composing import Composition
from linattn_edu.ops.tensors import traced, transformed, wide


def run(
    operator: Composition, args: tuple, every: int, save: str
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The first two outputs of an operator, of tokens and the final state, and its state after
    every so many tokens of each sequence.

    Each piece is a call, which starts from the state that the one before it has left; packed
    sequences have their pieces side by side.
    args: of a call of the operator.
    The states are [B, T // every, ...], or [C, ...], those of a packed sequence after the other.
    """
    given = dict(zip(operator.names, args, strict=False))
    asked = given["output_final_state"]
    given["output_final_state"] = True

    def call(given: dict) -> tuple[Tensor, Tensor]:
        o, state, *_ = operator(*given.values(), save=save)
        return o, state

    tokens = [n for n in operator.inputs if "T" in operator.axes[n] and given[n] is not None]
    in_pieces = _of_batch if given["cu_seqlens"] is None else _of_packed
    o, state, kept = in_pieces(operator, call, given, tokens, every)
    return o, state if asked else None, kept


def _of_batch(
    operator: Composition, call: Callable, given: dict, tokens: list[str], every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """o, the final state and the states of sequences of one length."""
    T, outputs, states = given[tokens[0]].shape[1], [], []
    for first in range(0, max(T, 1), every):
        count = min(every, T - first)
        one = {n: given[n].narrow(1, first, count) for n in tokens}
        o, state = call(given | one)
        given["initial_state"] = state
        outputs.append(o)
        states += [state] if count == every else []
    kept = torch.stack(states, 1) if states else state.new_empty(len(state), 0, *state.shape[1:])
    return torch.cat(outputs, 1), state, kept


def _of_packed(
    operator: Composition, call: Callable, given: dict, tokens: list[str], every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same of packed sequences: all first pieces in a call, then all second ones, ..."""
    bounds, first = given["cu_seqlens"], given[tokens[0]]
    if traced(bounds) or transformed():
        raise ValueError(
            "checkpoint_every_n_tokens with cu_seqlens needs its numbers, which a compiled graph "
            "or a transform of torch.func does not know"
        )
    T, start = first.shape[1], given["initial_state"]
    ends = sequences.bounds(bounds, given["cu_seqlens_cpu"], T)
    lengths = [b - a for a, b in pairwise(ends)]
    if start is None:
        sizes = operator._sizes(given, None)
        shape = [sizes[a] for a in operator.axes["initial_state"]]
        of = (given[n] for n in operator.outputs["final_state"].of)
        start = first.new_zeros(shape, dtype=wide(*of))
    states, outputs, kept = [*start.split(1)], {}, [[] for _ in lengths]
    for done in range(0, max(lengths), every):
        alive = [n for n, length in enumerate(lengths) if length > done]
        pieces = [(ends[n] + done, min(ends[n] + done + every, ends[n + 1])) for n in alive]
        counts = [b - a for a, b in pieces]
        cpu = torch.tensor([0, *counts]).cumsum(0)
        one = {n: torch.cat([given[n][:, a:b] for a, b in pieces], 1) for n in tokens}
        one |= {"initial_state": torch.cat([states[n] for n in alive])}
        one |= {"cu_seqlens": cpu.to(bounds.device), "cu_seqlens_cpu": cpu, "chunk_indices": None}
        o, last = call(given | one)
        for n, count, (a, _), part, state in zip(
            alive, counts, pieces, o.split(counts, 1), last.split(1), strict=True
        ):
            states[n], outputs[a] = state, part
            kept[n] += [state] if count == every else []
    if not outputs:  # no sequence has tokens
        o, state = call(given)
        return o, state, state[:0]
    parts = [outputs[a] for a in sorted(outputs)]
    behind = parts[0].new_zeros(1, T - ends[-1], *parts[0].shape[2:])
    states = torch.cat(states)
    kept = [state for row in kept for state in row]
    return torch.cat([*parts, behind], 1), states, torch.cat(kept) if kept else states[:0]
