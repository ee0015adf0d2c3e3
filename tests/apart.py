"""Tensors whose rows lie apart, as slices of the rows of a projection do."""

import torch


def apart(x: torch.Tensor, axes: int = 1, gap: int = 32) -> torch.Tensor:
    """x, of whose rows, its last `axes` axes, each stands among `gap` numbers that are NaN."""
    flat = x.flatten(-axes)
    wide = flat.new_full((*flat.shape[:-1], flat.shape[-1] + gap), torch.nan)
    inner = wide[..., gap // 2 : flat.shape[-1] + gap // 2]
    inner.copy_(flat)
    return inner.unflatten(-1, x.shape[-axes:])
