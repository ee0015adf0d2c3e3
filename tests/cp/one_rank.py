"""The processes that are the ranks of a group: see processes.run_ranks.

Every operator, with and without the compiler, against one rank; calls that are written down
against composed ones. With MORE, one operator, or "calls": what is not of one operator. "right" is
written to FILE.RANK.
"""

import os
import sys
from functools import partial
from pathlib import Path

if sys.argv[1] == "gloo":
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch._dynamo  # once, before there are several processes
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cp.cp_checks import LARGE, OPERATORS, SMALL, TOLERANCES, compare, draw, on_one, on_rank
from grids import FULL
from interpreter import quicken
from processes import be_a_rank

from linattn_edu.kernels.host import plan
from linattn_edu.kernels.routes import forced
from linattn_edu.ops.gdn.chunk import chunk as gdn
from linattn_edu.ops.kda.chunk import chunk as kda
from linattn_edu.ops.ssd.chunk import scan as ssd

BOUNDS = [0, 30, 41, 90]
LAYOUTS = ("contiguous", "zigzag")
DTYPES = {"cpu": torch.float64, "cuda": torch.float32}  # of small heads; large ones in bfloat16
LONG = ([0, 3000, 7000, 7001, 10240], [0, 8192])  # documents, and one sequence, in whole chunks


def on_cpu(x):
    """A nest of tensors."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {n: on_cpu(y) for n, y in x.items()}
    return type(x)(on_cpu(y) for y in x) if isinstance(x, (tuple, list)) else x


def flat(found: tuple) -> torch.Tensor:
    """The results of a rank, one after the other."""
    o, final, gradients = found[3]
    return torch.cat([x.flatten().double() for x in (o, final, *gradients.values())])


def ranks_are_one(
    operator: str, bounds: list[int], dtype, device: torch.device, size, layouts
) -> None:
    """In these layouts; on a GPU to the bit what another call gives, and a convolution's output."""
    drawn, gpu = draw(operator, bounds, dtype=dtype, device=device, size=size), device.type != "cpu"
    if dtype.itemsize == 2:  # the gradient of |o|^2 / 2: sums over all tokens do not cancel
        drawn = (*drawn[:4], on_one(drawn, bounds)[0], drawn[5])
    whole = on_cpu(on_one(drawn, bounds))
    for layout in layouts:
        run = partial(on_rank, drawn, bounds, dist.group.WORLD, layout=layout)
        own, parts = on_cpu(run()), [None] * dist.get_world_size()
        assert not gpu or torch.equal(flat(own), flat(on_cpu(run()))), (operator, layout)
        dist.all_gather_object(parts, own)
        compare(whole, parts, drawn[2], TOLERANCES[dtype])
        if gpu and operator == "conv":
            assert torch.equal(own[3][0], whole[0][:, own[0]]), layout


def check(device: torch.device, rank: int, world: int) -> None:
    which, whole = sys.argv[5:] or [*OPERATORS, "calls"], FULL or device.type == "cuda"
    dtype = DTYPES[device.type]
    for i, operator in enumerate(OPERATORS):
        if operator not in which:
            continue
        layouts = LAYOUTS if whole else LAYOUTS[i % 2 :][:1]  # simulated ranks have both
        ranks_are_one(operator, BOUNDS, dtype, device, SMALL, layouts)
        for bounds in LONG if device.type == "cuda" else ():
            ranks_are_one(operator, bounds, torch.bfloat16, device, LARGE, LAYOUTS)
    if "calls" not in which or (world > 2 and device.type == "cpu"):
        return  # what follows is the same for every world, and takes its time
    packed, batch = (BOUNDS, 1, "zigzag"), ([0, 24 * world], 2, "contiguous")
    for bounds, B, layout in (packed, batch) if whole else (packed,):
        f, *drawn = draw("gdn", bounds, B, dtype=dtype, device=device)
        compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
        found = [
            on_rank((g, *drawn), bounds, dist.group.WORLD, B, layout)[3] for g in (f, compiled)
        ]
        plain, again = (torch.cat([x.flatten() for x in (o, s, *g.values())]) for o, s, g in found)
        assert torch.equal(plain, again), ("compiled", B)
    plan.DEVICES.add("cpu")
    two_each = [0, *range(24, 48 * world, 48), 48 * world]  # which go on in another rank
    cuts = [([0, 48 * world], "contiguous"), ([0, 48 * world], "zigzag"), (two_each, "contiguous")]
    for i, (operator, declared) in enumerate((("gdn", gdn), ("kda", kda), ("ssd", ssd))):
        for bounds, layout in cuts if whole else cuts[i : i + 1]:
            written_down(operator, declared, bounds, layout, device)
    if device.type == "cpu":  # as compiled kernels take so few tokens
        with forced(kda_backward_stages="staged"):
            written_down("kda", kda, *cuts[1], device)
    with forced(SSD_PIECE=128):  # two pieces, the second one shorter
        written_down("ssd", ssd, [0, 136 * world], "contiguous", device)
    if device.type == "cuda":  # one kernel, behind the maps of parts that the ring makes
        with forced(ENOUGH=0, CROWDED=0, LONG=0, chunk_fwd="one"):
            for layout in LAYOUTS:
                written_down("gdn", gdn, [0, 25_728 * world], layout, device, LARGE)


def written_down(
    operator: str, declared, bounds: list[int], layout: str, device, size=SMALL
) -> None:
    """Calls of a kind, each with other numbers: composed, watched, and run as a program."""

    def run(drawn) -> list[torch.Tensor]:
        found = on_rank(drawn, bounds, dist.group.WORLD, impl="triton", layout=layout)[3]
        return [*found[:2], *found[2].values()]

    before = [len(each) for each in declared._programs or ((), ())]
    for seed in range(3):
        f, *drawn = draw(operator, bounds, dtype=torch.bfloat16, device=device, size=size)
        torch.manual_seed(seed)
        drawn[2:] = [x + 0.1 * torch.randn_like(x) for x in drawn[2:]]  # states, gradients
        found = run((f, *drawn))
    with plan.off():
        composed = run((f, *drawn))
    assert all(map(torch.equal, found, composed)), (operator, layout)
    for n, each in zip(before, declared._programs, strict=True):
        made = [*each.values()][n:]
        assert made and all(map(callable, made)), (operator, layout, made)


if __name__ == "__main__":
    if sys.argv[1] == "gloo":
        quicken()
    be_a_rank(check)
