"""Two processes that are the ranks of a group: see processes.run_ranks.

A stack of every layer with DistributedDataParallel and with fully_shard, a row of the batch a rank,
and with sequences cut over the ranks, against one process; "right" is written to FILE.RANK.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from layers.layer_checks import MAIN, hidden, make
from processes import be_a_rank

from linattn_edu.cp import build_cp_context
from linattn_edu.testing import assert_close


def stack():
    return torch.nn.Sequential(*(make(kind) for kind in MAIN))


def gradients(model):
    """Of all parameters, whole."""
    grads = {n.removeprefix("module."): p.grad for n, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def check(device: torch.device, rank: int, world: int) -> None:
    x, dy = hidden(world, 20), hidden(world, 20, seed=2)
    one = stack()
    y = one(x)
    y.backward(dy / world)  # both average over the ranks
    want = gradients(one)
    sharded = stack()
    mesh = init_device_mesh("cpu", (world,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    for model in (torch.nn.parallel.DistributedDataParallel(stack()), sharded):
        own = model(x[rank : rank + 1])
        own.backward(dy[rank : rank + 1])
        assert_close("y", own, y[rank : rank + 1], 1e-12)
        for name, g in gradients(model).items():
            assert_close(name, g, want[name], 1e-10)
    one, model = stack(), stack()
    y = one(x[:1])
    context = build_cp_context(torch.tensor([0, 20]), dist.group.WORLD)
    begin, end = context.parts[0].tokens
    own = x[:1, begin:end]
    for layer in model:
        own = layer(own, cp_context=context)
    assert_close("context", own, y[:, begin:end], 1e-12)
    own.backward(dy[:1, begin:end])
    y.backward(dy[:1])
    for (name, p), q in zip(model.named_parameters(), one.parameters(), strict=True):
        dist.all_reduce(p.grad)
        assert_close(name, p.grad, q.grad, 1e-10)


if __name__ == "__main__":
    be_a_rank(check)
