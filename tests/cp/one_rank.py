"""One of the processes that are the ranks of a group: python one_rank.py BACKEND RANK WORLD FILE.

Every operator, with and without the compiler, against one rank; "right" is written to FILE.RANK.
"""

import gc
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cp.cp_checks import OPERATORS, TOLERANCES, compare, draw, on_one, on_rank

BOUNDS = [0, 30, 41, 90]
DTYPES = {"gloo": (torch.float64,), "nccl": (torch.float32, torch.bfloat16)}


def on_cpu(x):
    """A nest of tensors."""
    if isinstance(x, torch.Tensor):
        return x.cpu()
    if isinstance(x, dict):
        return {n: on_cpu(y) for n, y in x.items()}
    return type(x)(on_cpu(y) for y in x) if isinstance(x, (tuple, list)) else x


def main(backend: str, rank: int, world: int, file: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    check(backend, device, world, dist.group.WORLD)
    Path(f"{file}.{rank}").write_text("right")
    gc.collect()  # a group's threads end with the last reference to it
    dist.destroy_process_group()


def check(backend: str, device: torch.device, world: int, group: dist.ProcessGroup) -> None:
    for dtype in DTYPES[backend]:
        for layout in ("contiguous", "zigzag"):
            for operator in OPERATORS:
                drawn = draw(operator, BOUNDS, dtype=dtype, device=device)
                parts = [None] * world
                own = on_cpu(on_rank(drawn, BOUNDS, group, layout=layout))
                dist.all_gather_object(parts, own)
                compare(on_cpu(on_one(drawn, BOUNDS)), parts, drawn[2], TOLERANCES[dtype])
    f, *drawn = draw("gdn", BOUNDS, dtype=DTYPES[backend][0], device=device)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = [on_rank((g, *drawn), BOUNDS, group)[3] for g in (f, compiled)]
    plain, again = (torch.cat([x.flatten() for x in (o, s, *g.values())]) for o, s, g in results)
    assert torch.equal(plain, again), "compiled"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
