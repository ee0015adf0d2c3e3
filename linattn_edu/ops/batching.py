"""Operators under torch.vmap: the mapped axis becomes part of the batch."""

from collections.abc import Callable

import torch
from torch import Tensor

BATCH = ("B", "N")  # axes along which everything is independent


def rule(operator, call: Callable, names: tuple, outputs: tuple, *, sums: bool) -> Callable:
    """The rule of vmap of call(*args), whose arguments and outputs have these names.

    The mapped axis becomes part of B and N. One call after the other instead where sequences are
    packed, where a tensor that belongs to the whole batch is mapped, and where there is one at all
    if the call sums over the batch, as a backward pass does.
    """
    axes = operator.axes

    def whole_batch(n: str) -> bool:
        return n in axes and axes[n][0] not in (*BATCH, "...")

    def vmap(info, in_dims, *args):
        if operator.mutates:
            written = ", ".join(operator.mutates)
            raise ValueError(f"{written} cannot be written in place under torch.vmap")
        given = []
        for n, x, d in zip(names, args, in_dims, strict=True):
            mapped = isinstance(x, Tensor) and d is not None
            given.append((n, x.movedim(d, 0) if mapped else x, mapped))
        size = info.batch_size
        if any(
            x is not None and (n in operator.bounds or (whole_batch(n) and (mapped or sums)))
            for n, x, mapped in given
        ):
            each = [call(*(x[i] if mapped else x for _, x, mapped in given)) for i in range(size)]
            parts = zip(*each, strict=True)
            results = tuple(None if one[0] is None else torch.stack(one) for one in parts)
            return results, tuple(None if x is None else 0 for x in results)
        results = call(*(_folded(axes.get(n), x, mapped, size) for n, x, mapped in given))
        results = tuple(
            x if _absent(x) or axes[n][0] not in BATCH else x.unflatten(0, (size, -1))
            for n, x in zip(outputs, results, strict=True)
        )
        return results, tuple(None if _absent(x) else 0 for x in results)

    return vmap


def _absent(x: Tensor | None) -> bool:
    """Whether x stands for an output that was not asked for."""
    return x is None or x.shape == (0,)


def _folded(axes: tuple[str, ...] | None, x, mapped: bool, size: int):
    """x with the mapped axis, its first, as part of the batch."""
    if axes is None or x is None or axes[0] not in (*BATCH, "..."):
        return x
    x = x if mapped else x.expand(size, *x.shape)
    return x.flatten(0, 1) if axes[0] in BATCH else x
