"""Long sequences of few heads in pieces that are scanned side by side, in one of two ways.

`by_maps`: the state that enters a piece is found first, from maps of the pieces before it.
`by_warm_up`, where there are more heads: a scan begins some chunks before its piece, where all that
the state held is forgotten when the piece begins.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linattn_edu.kernels.routes import by_kind, kind_of, limits
from linattn_edu.kernels.rows import sequence_args
from linattn_edu.kernels.tiles import cdiv
from linattn_edu.packing import Packing


def here(state: Tensor | Callable | None) -> Tensor | None:
    """A state, or what a function gives that waits for it."""
    return state() if callable(state) else state


@dataclass(frozen=True)
class Pieces:
    """The sequences of a scan, or pieces of them: arguments that say to a kernel where they are.

    Which sequences are cut depends on their own length and on their heads alone, so that nothing
    changes with the batch.
    """

    N: int  # of pieces
    cu_seqlens: Tensor | None  # [N + 1], or None: of T tokens each
    chunk_offsets: Tensor | None  # [N]: the number of the first chunk of each
    T: int
    batch: int  # of sequences
    chains: Tensor | None = None  # [batch + 1]: the number of the first piece of each sequence
    sequence: Tensor | None = None  # [N]: the sequence of each piece, where lengths differ

    @property
    def several(self) -> bool:
        """Whether a sequence may be cut."""
        return self.batch < self.N

    @property
    def places(self) -> tuple[Tensor | None, Tensor | None, int]:
        """What kernels take as cu_ptr, offsets_ptr and T."""
        return self.cu_seqlens, self.chunk_offsets, self.T

    @property
    def chained(self) -> int:
        """What they take as N: as many pieces, one of which another's program may go through."""
        return self.N if self.several else 0

    def entering(
        self, merge: Callable, make: Callable, given: tuple, state: Tensor | Callable | None,
        **options,
    ) -> Tensor | None:  # fmt: skip
        """[N, ...]: the state that enters each piece, by the maps that `make` makes of `given`; or
        with cp_merge_bwd the gradient that leaves it. Of whole sequences it is `state` itself.
        """
        maps = make(*given, pieces=self, **options) if self.several else ()
        return self.through(merge, maps, here(state))

    def through(self, merge: Callable, maps: tuple, state: Tensor | None) -> Tensor | None:
        """The same by maps [N, ...] that are there already."""
        if not self.several:
            return state
        first = 1 if self.chains is not None else self.batch
        S_ext, M = (x.view(first, -1, *x.shape[1:]) for x in maps)
        offsets = {} if self.chains is None else {"offsets": self.chains}
        return merge(S_ext, M, state, **offsets)[0].view(-1, *S_ext.shape[2:])

    def placed(self, states: Tensor | None, last: bool = False) -> Tensor | None:
        """[N, ...]: states [batch, ...] at the first piece of every sequence, or at the last."""
        if states is None or not self.several:
            return states
        placed = states.new_zeros(self.N, *states.shape[1:])
        if self.chains is None:
            placed.unflatten(0, (self.batch, -1))[:, -1 if last else 0].copy_(states)
            return placed
        edge = self.chains[1:] - 1 if last else self.chains[:-1]
        return placed.index_copy_(0, edge, states)

    def spread(self, x: Tensor | None) -> Tensor | None:
        """[N, ...]: of every piece what x [batch, ...] says of its sequence."""
        if x is None or not self.several:
            return x
        if self.chains is None:
            return x.repeat_interleave(self.N // self.batch, 0)
        return x[self.sequence.clamp(max=self.batch - 1)]  # batch: there is no such piece

    def last(self, states: Tensor | None) -> Tensor | None:
        """Of states [N, ...] those of the last piece of every sequence."""
        if states is None or not self.several:
            return states
        if self.chains is None:
            return states.unflatten(0, (self.batch, -1))[:, -1].contiguous()
        return states[self.chains[1:] - 1]

    def first(self, states: Tensor) -> Tensor:
        """Of states [N, ...] those of the first piece of every sequence."""
        if not self.several:
            return states
        if self.chains is None:
            return states.unflatten(0, (self.batch, -1))[:, 0].contiguous()
        return states[self.chains[:-1]]


def whole_of(x: Tensor, packing: Packing | None) -> Pieces:
    """The sequences of x [B, T, ...], none of which is cut."""
    batch, cu_seqlens, chunk_offsets = sequence_args(x, packing)
    return Pieces(batch, cu_seqlens, chunk_offsets, x.shape[1], batch)


def by_maps(x: Tensor, heads: int, V: int, chunk_size: int, packing: Packing | None) -> Pieces:
    """The pieces of a scan of x [B, T, ...] with states [heads, K, V] that are entered by maps."""
    size = by_kind.pieces_by_maps(kind_of(x, heads, V, chunk_size, packing)).takes
    return _in_pieces(x, chunk_size, packing, size, limits.LEAST) if size else whole_of(x, packing)


def over_ranks(x: Tensor, heads: int, V: int, chunk_size: int, packing: Packing | None) -> Pieces:
    """The pieces of Mamba-2's scans back in time where sequences are cut over ranks: those of
    ssd_ends_bwd. Of packed ones the longest decides: here last bits change with what is beside a
    sequence.
    """
    size = by_kind.ssd_piece_bwd(kind_of(x, heads, V, chunk_size, packing)).takes
    cut = size < x.shape[1]
    return _in_pieces(x, chunk_size, packing, size, 1) if cut else whole_of(x, packing)


def by_warm_up(x: Tensor, heads: int, V: int, chunk_size: int, packing: Packing | None) -> Pieces:
    """The pieces of such a scan that are entered by a warm-up."""
    size = by_kind.pieces_by_warm_up(kind_of(x, heads, V, chunk_size, packing)).takes
    return _in_pieces(x, chunk_size, packing, size, 2) if size else whole_of(x, packing)


def _in_pieces(
    x: Tensor, chunk_size: int, packing: Packing | None, size: int, least: int
) -> Pieces:
    """Sequences of `least` pieces and more in pieces of `size` tokens, the last of what is left."""
    whole, T = whole_of(x, packing), x.shape[1]
    batch, cu_seqlens, chunk_offsets = whole.batch, whole.cu_seqlens, whole.chunk_offsets
    if cu_seqlens is None and T % size == 0:
        return Pieces(batch * T // size, None, None, size, batch)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, device=x.device) * T
        chunk_offsets = torch.arange(batch + 1, device=x.device) * cdiv(T, chunk_size)
    lengths = cu_seqlens.diff()
    counts = (lengths + size - 1).div(size, rounding_mode="floor")
    counts = counts.where(lengths >= least * size, 1)
    chains = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if packing is None:
        N = batch * (cdiv(T, size) if least * size <= T else 1)
    else:
        N = batch + T // size  # what may be needed: the last ones are empty
    i = torch.arange(N, device=x.device)
    sequence = torch.searchsorted(chains, i, right=True).sub_(1)  # batch: there is no such piece
    begun = (i - chains[sequence]) * size
    end = cu_seqlens[(sequence + 1).clamp_(max=batch)]
    begin = torch.minimum(cu_seqlens[sequence] + begun, end)
    bounds = torch.cat([begin, cu_seqlens[-1:]])
    offsets = chunk_offsets[sequence] + begun // chunk_size
    return Pieces(N, bounds, offsets, T, batch, chains, sequence)
