"""Ranks of a group of which the last raises, as HOW says: see processes.run_ranks.

How: "input", it refuses its arguments before its first exchange, and ends; "stage", a stage raises
between its exchanges, and it ends; "stays", as "input", but it lives on, and the others end by the
group's timeout. Each that waits for it must get an error; then "right" is written to FILE.RANK.
With NCCL it must be ended, as its host may or may not wait; "right" is written before.
"""

import dataclasses
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import be_ranks

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.cp import build_cp_context
from linattn_edu.ops.gdn.chunk import chunk
from linattn_edu.testing import gdn_inputs

TIMEOUT = {"gloo": 5, "nccl": 12}  # seconds


def refuse(*args, **options):
    raise ArithmeticError("a stage of this rank")


def call(group, device: torch.device, raises: bool, how: str) -> None:
    """Both passes on this rank's tokens."""
    world = group.size()
    context = build_cp_context(torch.tensor([0, 16 * world]).to(device), group)
    x = gdn_inputs(1, 16, 1, 1, 8, 8, device=device)
    tokens = {n: getattr(x, n).requires_grad_() for n in ("q", "k", "v", "g", "beta")}
    if raises and how != "stage":
        tokens["g"] = tokens["g"][:, :3]
    if raises and how == "stage":
        stages = chunk.stages
        chunk.stages = lambda impl: dataclasses.replace(stages(impl), piece_map_bwd=refuse)
    o, _ = chunk_gated_delta_rule(**tokens, cp_context=context, impl="reference")
    o.sum().backward()


def be_one(backend: str, rank: int, world: int, file: str) -> None:
    how, timeout = sys.argv[5], TIMEOUT[backend]
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=world,
        timeout=timedelta(seconds=timeout if backend == "nccl" else 60),
    )  # fmt: skip
    if backend == "nccl":
        torch.cuda.set_device(device)
        group = dist.group.WORLD  # of a group in it the watchdog waits for the whole one's
    else:
        group = dist.new_group(timeout=timedelta(seconds=timeout))
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # all have begun, are connected
    if backend == "nccl":
        torch.cuda.synchronize()
    raises, begun = rank == world - 1, time.monotonic()
    if backend == "nccl" and not raises:
        Path(f"{file}.{rank}").write_text("right")
    try:
        call(group, device, raises, how)
        assert backend == "nccl", f"rank {rank} waited for nobody"
        time.sleep(6 * timeout)  # the watchdog ends this process
        Path(f"{file}.{rank}").write_text("waits for ever")
    except Exception as error:
        kind = {True: ArithmeticError if how == "stage" else ValueError, False: RuntimeError}
        assert isinstance(error, kind[raises]), error
        took = time.monotonic() - begun
        assert took < 4 * timeout, took
        if how == "stays" and raises:
            others = [Path(f"{file}.{i}") for i in range(world - 1)]
            while not all(other.exists() for other in others) and took < 12 * timeout:
                time.sleep(0.1)
                took = time.monotonic() - begun
        elif how == "stays":
            assert "imed out" in str(error) or took > 0.8 * timeout, error
        Path(f"{file}.{rank}").write_text("right")
    sys.stdout.flush()
    os._exit(0)  # as a program that an error ends: it does not leave the group


if __name__ == "__main__":
    be_ranks(be_one)
