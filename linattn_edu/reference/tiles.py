"""Views of a sequence as chunks, and the precision of the reference stages."""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any input is float64, else float32: the dtype a reference stage computes in."""
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def to_chunks(x: Tensor, chunk_size: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, NT, C, ...]; the last chunk is padded with zeros."""
    B, T, H, *rest = x.shape
    pad = -T % chunk_size
    x = torch.cat([x, x.new_zeros(B, pad, H, *rest)], 1)
    return x.view(B, -1, chunk_size, H, *rest).movedim(3, 1)


def from_chunks(x: Tensor, T: int) -> Tensor:
    """[B, H, NT, C, ...] -> [B, T, H, ...], contiguous: the inverse of `to_chunks`."""
    B, H, NT, C, *rest = x.shape
    return x.movedim(1, 3).reshape(B, NT * C, H, *rest)[:, :T].contiguous()


def repeat_heads(x: Tensor, HV: int) -> Tensor:
    """[B, T, H, D] -> [B, T, HV, D]: value head j reads q/k head j // (HV // H)."""
    return x.repeat_interleave(HV // x.shape[2], dim=2)


def sum_heads(x: Tensor, H: int) -> Tensor:
    """[B, T, HV, D] -> [B, T, H, D]: the adjoint of `repeat_heads`."""
    return x.unflatten(2, (H, -1)).sum(3)
