"""One of several processes that are the ranks of a gloo group: python gloo_rank.py RANK WORLD FILE.

Every operator, with and without the compiler, against one rank; "right" is written to FILE.RANK.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cp.cp_checks import OPERATORS, compare, draw, on_one, on_rank

BOUNDS = [0, 30, 41, 90]


def main(rank: int, world: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    for layout in ("contiguous", "zigzag"):
        for operator in OPERATORS:
            drawn = draw(operator, BOUNDS)
            own = on_rank(drawn, BOUNDS, dist.group.WORLD, layout=layout)
            parts = [None] * world
            dist.all_gather_object(parts, own)
            compare(on_one(drawn, BOUNDS), parts, drawn[2], 1e-12)
    f, *drawn = draw("gdn", BOUNDS)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    results = [on_rank((g, *drawn), BOUNDS, dist.group.WORLD)[3] for g in (f, compiled)]
    plain, again = (torch.cat([x.flatten() for x in (o, s, *g.values())]) for o, s, g in results)
    assert torch.equal(plain, again), "compiled"
    Path(f"{file}.{rank}").write_text("right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
