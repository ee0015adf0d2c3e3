"""Sequences of different lengths, one after the other in a batch of one."""

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where each sequence and each chunk of a packed batch begins; on the device of the data.

    Sequence n holds the tokens cu_seqlens[n] to cu_seqlens[n + 1] - 1. Chunks are counted through
    all sequences; no chunk reaches over the end of its sequence.
    """

    cu_seqlens: Tensor  # [N + 1] int64
    chunk_indices: Tensor  # [NT, 2] int64: sequence of each chunk, and its number in the sequence
    chunk_offsets: Tensor  # [N + 1] int64: number of the first chunk of each sequence
    longest: int | None = None  # tokens of the longest sequence, where the host knows
    _pieces: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def sequences(self) -> int:
        """N, the number of sequences."""
        return len(self.cu_seqlens) - 1

    @property
    def chunks(self) -> int:
        """NT, the number of chunks of all sequences."""
        return len(self.chunk_indices)

    def pieces(self, size: int, tokens: int, most: int | None = None, whole: int = 0) -> Tensor:
        """[NP, 3]: as chunk_indices, for pieces of all `tokens`, and the tokens of a piece: `size`,
        or such a multiple of it that a sequence has `most` pieces or fewer; it is one of `whole`
        tokens or fewer.

        A sequence without tokens has a piece. NP is what may be needed, so that nothing waits for
        the device: the rows left over are of pieces after the last sequence's end.
        """
        key = size, tokens, most, whole
        if key not in self._pieces:
            self._pieces[key] = self._cut(*key)
        return self._pieces[key]

    def _cut(self, size: int, tokens: int, most: int | None, whole: int) -> Tensor:
        lengths, more = self.cu_seqlens.diff(), tokens // size
        sizes = torch.full_like(lengths, size)
        if most is not None:
            times = (lengths + most * size - 1).div(most * size, rounding_mode="floor")
            sizes = torch.where(lengths > whole, times * size, max(whole, size))
            more = min(more, tokens // (whole + 1) * (most - 1))
        counts = (lengths + sizes - 1).div(sizes, rounding_mode="floor").clamp_(min=1)
        ends = counts.cumsum(0)
        i = torch.arange(len(counts) + more, device=counts.device)
        sequence = torch.searchsorted(ends, i, right=True).clamp_(max=len(counts) - 1)
        return torch.stack([sequence, i - (ends - counts)[sequence], sizes[sequence]], 1)

    def piece_offsets(self, size: int) -> Tensor:
        """[N + 1]: as chunk_offsets, for `pieces` of this size."""
        counts = (self.cu_seqlens.diff() + size - 1).div(size, rounding_mode="floor").clamp_(min=1)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def room(cu_seqlens: Tensor, tokens: int, chunk_size: int) -> Tensor:
    """Rows of chunk_indices for any boundaries of as many sequences, the last one `tokens` or less:
    made on the device, as many whatever the numbers are.

    Those left over name a sequence that does not exist, N + 1: `pack` places it behind all tokens.
    """
    cu_seqlens, N = cu_seqlens.long(), len(cu_seqlens) - 1
    counts = (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor")
    ends = counts.cumsum(0)
    most = (tokens + N * (chunk_size - 1)) // chunk_size
    i = torch.arange(most, device=ends.device)
    sequence = torch.searchsorted(ends, i, right=True)
    number = i - (ends - counts)[sequence.clamp(max=N - 1)]
    over = i >= ends[-1]
    return torch.stack([sequence.masked_fill(over, N + 1), number.masked_fill(over, 0)], 1)


def pack(
    cu_seqlens: Tensor,
    chunk_size: int,
    *,
    lengths: list[int] | None = None,
    chunk_indices: Tensor | None = None,
    tokens: int | None = None,
) -> Packing:
    """The Packing of cu_seqlens, made on its device.

    Args:
        cu_seqlens: [N + 1], int32 or int64.
        chunk_size: Tokens of a chunk.
        lengths: The same numbers as cu_seqlens, known to the host: then nothing waits for the
            device.
        chunk_indices: [NT, 2], made before for the same cu_seqlens and chunk_size.
        tokens: Of all sequences and behind them, where chunk_indices may be those of `room`.
    """
    cu_seqlens = cu_seqlens.long().contiguous()
    if tokens is not None:  # N + 1 has no token: behind the view kernels find where it is
        ends = torch.cat([cu_seqlens, cu_seqlens.new_full((2,), tokens)])
        cu_seqlens = ends[: len(cu_seqlens)]
    counts = (cu_seqlens.diff() + chunk_size - 1).div(chunk_size, rounding_mode="floor")
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    if chunk_indices is None and lengths is None:
        lengths = cu_seqlens.tolist()
    own = None if lengths is None else [b - a for a, b in pairwise(lengths)]
    if chunk_indices is None:
        total = sum(-(-n // chunk_size) for n in own)
        sequence = torch.arange(len(counts), device=counts.device)
        sequence = sequence.repeat_interleave(counts, output_size=total)
        number = torch.arange(total, device=counts.device) - offsets[sequence]
        chunk_indices = torch.stack([sequence, number], 1)
    longest = None if own is None else max(own, default=0)
    return Packing(cu_seqlens, chunk_indices.long().contiguous(), offsets, longest)
