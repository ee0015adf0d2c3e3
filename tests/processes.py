"""Processes that are the ranks of a group: what starts them, and what each of them is."""

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(script: Path, backend: str, world: int, folder: Path, *more: str) -> None:
    """Run `python script BACKEND RANK WORLD FILE MORE` for each rank; all must end well."""
    file = folder / "meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), backend, str(rank), str(world), str(file), *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    assert all((folder / f"meeting.{rank}").read_text() == "right" for rank in range(world))


def be_a_rank(check: Callable[[torch.device, int, int], None]) -> None:
    """Of a program so started: check(device, rank, world) in the group."""
    backend, rank, world, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{file}", rank=rank, world_size=world)
    check(device, rank, world)
    Path(f"{file}.{rank}").write_text("right")
    leave()


def leave() -> None:
    """Leave the group: its threads end with the last reference to it, or Python cannot."""
    gc.collect()
    dist.destroy_process_group()
