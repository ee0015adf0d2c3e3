"""Views of a sequence as chunks, and the precision of the reference stages."""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any input is float64, else float32: the dtype a reference stage computes in."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x rounded to a dtype of 16 bit, and what that cuts off: their sum has twice the bits."""
    high = x.to(dtype)
    return high, (x - high.to(x.dtype)).to(dtype)


def chosen(ways: Tensor, x: Tensor | None, other: Tensor | None, heads: int = 2) -> Tensor | None:
    """x [B, ..., HV, ...] for heads that are not -1 in ways [B, HV], else the other; heads: their
    axis. Of q/k heads, each with all of its value heads.
    """
    if x is None:
        return None
    ways = ways[:, :: ways.shape[1] // x.shape[heads]]
    shape = [n if i in (0, heads) else 1 for i, n in enumerate(x.shape)]
    return torch.where(ways.view(shape) == 0, x, other)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), the same bits wherever a number stands in x.

    torch.sigmoid rounds the last few of a tensor, which fill no vector register, otherwise.
    """
    return (1 + torch.exp(-x)).reciprocal_()


def to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, NT, C, ...], contiguous; the last chunk is padded with zeros."""
    B, T, H, *rest = x.shape
    if pad := -T % chunk_size:
        x = torch.cat([x, x.new_zeros(B, pad, H, *rest)], 1)
    return x.reshape(B, -1, chunk_size, H, *rest).movedim(3, 1).contiguous()


def pad_gate(gc: Tensor, chunk_size: int) -> Tensor:
    """Repeat the last token's gate up to the chunk's end: a missing token does not decay."""
    pad = -gc.shape[1] % chunk_size
    return torch.cat([gc, gc[:, -1:].expand(-1, pad, *gc.shape[2:])], 1) if pad else gc


def documents(seq_idx: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Documents of each chunk: of its tokens, of the state that enters it, of the one that leaves.

    The state before the first token belongs to that token's document.

    Args:
        seq_idx: [B, T]; equal numbers are neighbours.
    Returns:
        [B, 1, NT, C], [B, 1, NT, 1], [B, 1, NT, 1].
    """
    ids = to_chunks(pad_gate(seq_idx[..., None], chunk_size), chunk_size)
    end = ids[..., -1:]
    return ids, torch.cat([ids[:, :, :1, :1], end[:, :, :-1]], 2), end


def from_chunks(x: Tensor, T: int) -> Tensor:
    """[B, H, NT, C, ...] -> [B, T, H, ...], contiguous: the inverse of `to_chunks`."""
    B, H, NT, C, *rest = x.shape
    return x.movedim(1, 3).reshape(B, NT * C, H, *rest)[:, :T].contiguous()


def repeat_heads(x: Tensor, HV: int) -> Tensor:
    """[B, T, H, D] -> [B, T, HV, D]: value head j reads q/k head j // (HV // H)."""
    return x if x.shape[2] == HV else x.repeat_interleave(HV // x.shape[2], dim=2)


def by_channel(gate: Tensor) -> Tensor:
    """A gate of each token and head with an axis of channels: its own, or one of length 1."""
    return gate[..., None] if gate.ndim == 3 else gate


def sum_heads(x: Tensor, H: int) -> Tensor:
    """[B, T, HV, D] -> [B, T, H, D]: the adjoint of `repeat_heads`."""
    return x if x.shape[2] == H else x.unflatten(2, (H, -1)).sum(3)
