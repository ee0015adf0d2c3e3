"""One of the processes that are the ranks of a group: python one_rank.py BACKEND RANK WORLD FILE.

Every operator, with and without the compiler, against one rank; "right" is written to FILE.RANK.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cp.cp_checks import OPERATORS, TOLERANCES, compare, draw, on_one, on_rank
from processes import be_a_rank

BOUNDS = [0, 30, 41, 90]
DTYPES = {"cpu": (torch.float64,), "cuda": (torch.float32, torch.bfloat16)}


def on_cpu(x):
    """A nest of tensors."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {n: on_cpu(y) for n, y in x.items()}
    return type(x)(on_cpu(y) for y in x) if isinstance(x, (tuple, list)) else x


def check(device: torch.device, rank: int, world: int) -> None:
    group, dtypes = dist.group.WORLD, DTYPES[device.type]
    for dtype in dtypes:
        for layout in ("contiguous", "zigzag"):
            for operator in OPERATORS:
                drawn = draw(operator, BOUNDS, dtype=dtype, device=device)
                parts = [None] * world
                own = on_cpu(on_rank(drawn, BOUNDS, group, layout=layout))
                dist.all_gather_object(parts, own)
                compare(on_cpu(on_one(drawn, BOUNDS)), parts, drawn[2], TOLERANCES[dtype])
    f, *drawn = draw("gdn", BOUNDS, dtype=dtypes[0], device=device)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = [on_rank((g, *drawn), BOUNDS, group)[3] for g in (f, compiled)]
    plain, again = (torch.cat([x.flatten() for x in (o, s, *g.values())]) for o, s, g in results)
    assert torch.equal(plain, again), "compiled"


if __name__ == "__main__":
    be_a_rank(check)
