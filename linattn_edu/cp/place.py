"""Where the sequences of a call are: in a batch, packed, or cut over ranks."""

from dataclasses import dataclass

from torch import Tensor

from linattn_edu.ops.tensors import laid_out


@dataclass(frozen=True)
class Place:
    """The bounds that an operator declared packed="ranks" takes, and the ways in and out of it.

    On ranks the entries of a batch are packed into one, or are a batch of local sequences, where
    all are equally long; and there is a state for every local sequence, where the caller has those
    of the sequences that begin, or end, on this rank.

    Args:
        bounds: cu_seqlens, the same on the CPU, chunk_indices, plan and rows.
        group: Name of the process group; empty where nothing is exchanged.
        B, tokens: Entries of the batch and the tokens of each; B is 0 where nothing is changed.
        sequences: All local ones.
        first, last: Those that begin, and that end, here; None: all.
        even: Whether they are a batch.
    """

    writes = False  # the final states over the initial ones

    bounds: tuple[Tensor | None, ...]
    group: str = ""
    B: int = 0
    tokens: int = 0
    sequences: int = 0
    first: Tensor | None = None
    last: Tensor | None = None
    even: bool = False

    def joined(self, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Tensors [B, T, ...] as [1, B T, ...], or as a batch of the local sequences."""
        if not self.B:
            return tensors
        rows = self.sequences if self.even else 1
        if rows == self.B:
            return tensors
        size = rows, self.B * self.tokens // rows
        return tuple(x if x is None else x.reshape(*size, *x.shape[2:]) for x in tensors)

    def parted(self, x: Tensor) -> Tensor:
        """What came of joined tensors as [B, T, ...]."""
        if self.B in (0, x.shape[0]):
            return x
        return x.reshape(self.B, self.tokens, *x.shape[2:])

    def entering(self, state: Tensor | None) -> Tensor | None:
        """States of the sequences that begin here, as those of all local ones."""
        if state is None or self.first is None:
            return state
        whole = state.new_zeros(self.sequences, *state.shape[1:])
        return whole.index_copy(0, self.first, state)

    def left(self, state: Tensor | None, v_first: bool = False) -> Tensor | None:
        """States of all local sequences, as those of the sequences that end here; with v_first
        [V, K] of [K, V].
        """
        ends = state if state is None or self.last is None else state[self.last]
        return laid_out(ends, v_first)
