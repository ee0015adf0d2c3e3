"""Processes that are the ranks of a group: what starts them, and what each of them is."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(
    script: Path, backend: str, world: int, folder: Path, *more: str, ended: tuple[int, ...] = ()
) -> list[str]:
    """Run `python script BACKEND RANKS WORLD FILE MORE`, and return what the programs say.

    All ranks must end well, but for those that the watchdog of NCCL must have ended.

    With gloo it is one program, whose children are the ranks: what it imports, it imports once.
    A process of CUDA has no children, so with NCCL there is a program for each rank.
    """
    file, ranks = folder / "meeting", [str(rank) for rank in range(world)]
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), backend, given, str(world), str(file), *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for given in ([",".join(ranks)] if backend == "gloo" else ranks)
    ]  # fmt: skip
    try:
        said = [program.communicate(timeout=240)[0] for program in programs]
    finally:
        for program in programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    wanted = [-signal.SIGABRT * (rank in ended) for rank in range(len(programs))]
    assert [program.returncode for program in programs] == wanted, "\n".join(said)
    assert all((folder / f"meeting.{rank}").read_text() == "right" for rank in ranks)
    return said


def be_ranks(rank_of: Callable[[str, int, int, str], None]) -> None:
    """Of a program so started: rank_of(backend, rank, world, file) in a process for each rank."""
    backend, ranks, world, file = sys.argv[1:5]
    ranks, children = [int(rank) for rank in ranks.split(",")], []
    for rank in ranks:
        if len(ranks) > 1 and (child := os.fork()):
            children.append(child)
        else:
            return rank_of(backend, rank, int(world), file)
    sys.exit("a rank failed" if [c for c in children if os.waitpid(c, 0)[1]] else 0)


def be_a_rank(check: Callable[[torch.device, int, int], None]) -> None:
    """Of a program so started: check(device, rank, world) in the group, likewise."""
    be_ranks(lambda *arguments: _in_the_group(check, *arguments))


def _in_the_group(check, backend: str, rank: int, world: int, file: str) -> None:
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
