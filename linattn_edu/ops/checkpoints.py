"""Prompts in pieces: states at every n tokens, for caches of prefixes, and the whole's bits."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from linattn_edu.cp.context import CPContext
from linattn_edu.cp.place import Place
from linattn_edu.ops import check, sequences
from linattn_edu.ops.operator import Operator
from linattn_edu.ops.tensors import known, traced, transformed, wide


def check_every(every: int | None, chunk_size: int, cp_context: CPContext | None) -> None:
    """Refuse a number of tokens that is no number of chunks."""
    if every is None:
        return
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f"checkpoint_every_n_tokens must be an integer or None, got {every!r}")
    if every < 1 or every % chunk_size:
        raise ValueError(
            f"checkpoint_every_n_tokens must be a multiple of the chunk's {chunk_size} tokens, "
            f"got {every}"
        )
    if cp_context is not None:
        raise ValueError("checkpoint_every_n_tokens is not supported with cp_context")


def check_invariant(
    asked: bool, x: Tensor, heads: int, V: int, place: Place, every: int | None, impl: str
) -> None:
    """Refuse what has other bits in pieces, or in another batch: batch_invariant of the public
    functions.  x: [B, T, ...], with states of V columns; 0: of Mamba-2.
    """
    if not check.flag("batch_invariant", asked):
        return
    if impl == "reference":
        raise ValueError(
            "batch_invariant=True needs the kernels, got impl='reference', whose products on a CPU "
            "are rounded by the size of the batch"
        )
    if place.group:
        raise ValueError("batch_invariant=True is not supported with cp_context")
    from linattn_edu.kernels.routes import by_kind, kind_of

    bounds, longest = place.bounds[1], x.shape[1]
    if known(bounds):
        longest = max(bounds.diff().tolist())
    kind = kind_of(x, heads, V, 64, None)._replace(T=min(longest, every or longest))
    if V:
        cut = by_kind.pieces_by_maps(kind).takes or by_kind.pieces_by_warm_up(kind).takes
    else:
        cut = impl == "fused" and by_kind.ssd_piece(kind).takes < kind.T
    if cut:
        raise ValueError(
            f"batch_invariant=True needs sequences that no kernel cuts, got T={kind.T}: give "
            "checkpoint_every_n_tokens, or the prompt in pieces of whole chunks"
        )


def run(
    operator: Operator, args: tuple, every: int | None, save: str = ""
) -> tuple[tuple[Tensor | None, ...], Tensor | None]:
    """The outputs of an operator, and its state after every so many tokens of each sequence.

    args: of a call of the operator, whose first output is of tokens, the second the final state.
    Without `every` it is that call, and None. With it each piece is a call, which starts from the
    state that the one before it has left; packed sequences have their pieces side by side.
    The states are [B, T // every, ...], or [C, ...], those of a packed sequence after the other.
    """
    if every is None:
        return operator(*args, save=save), None
    given = dict(zip(operator.names, args, strict=False))
    asked = given["output_final_state"]
    given["output_final_state"] = True

    def call(given: dict) -> tuple[Tensor, Tensor]:
        o, state, *_ = operator(*given.values(), save=save)
        return o, state

    tokens = [n for n in operator.inputs if "T" in operator.axes[n] and given[n] is not None]
    in_pieces = _of_batch if given["cu_seqlens"] is None else _of_packed
    o, state, kept = in_pieces(operator, call, given, tokens, every)
    return (o, state if asked else None), kept


def _of_batch(
    operator: Operator, call: Callable, given: dict, tokens: list[str], every: int
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
    operator: Operator, call: Callable, given: dict, tokens: list[str], every: int
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
