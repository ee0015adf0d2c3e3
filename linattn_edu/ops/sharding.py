"""Operators on DTensors: the batch and the heads may lie apart, each device computes its own."""

import math
import sys

import torch
from torch import Tensor

from linattn_edu.ops.batching import BATCH

HEADS = ("H", "HV")


def sharded(*tensors: Tensor | None) -> bool:
    """Whether one of the tensors is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def on_shards(operator, args: tuple) -> tuple:
    """operator(*args) on the parts of DTensors; outputs are DTensors, sharded alike.

    Along a dimension of the mesh the tensors are taken as sharded by the batch, or by the heads, as
    the first of them is that is; otherwise, and where the parts would be uneven, as whole copies.
    A tensor that belongs to the whole batch is a copy, whose gradient is the sum of the parts'.
    """
    module = torch.distributed.tensor  # imported by who made the DTensors
    given = dict(zip(operator.names, args, strict=True))
    tensors = {n: given[n] for n in (*operator.inputs, *operator.bounds) if given[n] is not None}
    mesh = next(x.device_mesh for x in tensors.values() if isinstance(x, module.DTensor))
    kinds: list = []
    for i in range(mesh.ndim):
        kinds.append(_kind(operator, tensors, mesh, i, kinds))

    def placements(n: str, x: Tensor) -> list:
        dims = [_dim(operator.axes.get(n, ()), kind, x.ndim) for kind in kinds]
        return [module.Replicate() if d is None else module.Shard(d) for d in dims]

    for n, x in tensors.items():
        want = placements(n, x)
        if not isinstance(x, module.DTensor):
            x = module.DTensor.from_local(x, mesh, [module.Replicate()] * mesh.ndim)
        shared = [k is not None and p.is_replicate() for k, p in zip(kinds, want, strict=True)]
        if n in operator.mutates and (any(shared) or list(x.placements) != want):
            raise ValueError(
                f"{n} is written in place and must be sharded as the other tensors are, got "
                f"{x.placements}"
            )
        of_gradient = [module.Partial() if s else p for s, p in zip(shared, want, strict=True)]
        given[n] = x.redistribute(mesh, want).to_local(grad_placements=of_gradient)
    results = operator._call(*given.values())
    return tuple(
        x if x is None else module.DTensor.from_local(x, mesh, placements(n, x), run_check=False)
        for n, x in zip(operator.outputs, results, strict=True)
    )


def _kind(operator, tensors: dict, mesh, i: int, before: list) -> tuple[str, ...] | int | None:
    """The axes that are sharded along dimension i of the mesh: by name, by place, or none.

    before: those along the dimensions before it.
    """

    def even(kind, sizes) -> bool:
        earlier = (mesh.size(j) for j, other in enumerate(before) if other == kind)
        parts = math.prod(earlier, start=mesh.size(i))
        return all(size % parts == 0 for size in sizes)

    packed = any(n in operator.bounds for n in tensors)
    for n, x in tensors.items():
        placement = getattr(x, "placements", (None,) * mesh.ndim)[i]
        if n not in operator.axes or placement is None or not placement.is_shard():
            continue
        axes = operator.axes[n]
        free = x.ndim - len(axes) + 1 if axes[0] == "..." else 0
        if placement.dim < free:
            return placement.dim if even(placement.dim, [x.shape[placement.dim]]) else None
        axis = axes[placement.dim - free + 1 if free else placement.dim]
        for kind in (BATCH, HEADS):
            if axis in kind and not (packed and kind == BATCH):
                sizes = (
                    x.shape[d]
                    for m, x in tensors.items()
                    if (d := _dim(operator.axes.get(m, ()), kind, x.ndim)) is not None
                )
                return kind if even(kind, sizes) else None
    return None


def _dim(axes: tuple[str, ...], kind: tuple[str, ...] | int | None, ndim: int) -> int | None:
    """The dimension of a tensor that is sharded."""
    if kind is None or not axes:
        return None
    if isinstance(kind, int):
        return kind if axes[0] == "..." else None
    return next((d + ndim - len(axes) for d, a in enumerate(axes) if a in kind), None)
