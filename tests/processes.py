"""Processes that are the ranks of a group: what starts them, and what each of them is."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forks
import torch
import torch.distributed as dist

SCRIPT = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FORKING = """
import pickle, sys
import torch.multiprocessing as mp

def spawn(f, args, nprocs):
    mp.start_processes(*pickle.loads(pickle.dumps((f, args))), nprocs, start_method="fork")

mp.spawn = spawn
"""


def run_ranks(
    script: Path, backend: str, world: int, folder: Path, *more: str, ended: tuple[int, ...] = ()
) -> list[str]:
    """Run `python script BACKEND RANKS WORLD FILE MORE`, and return what the programs say.

    All ranks must end well, but for those that the watchdog of NCCL must have ended.

    With gloo it is one program, a fork of what has loaded torch, whose children are the ranks: what
    it imports, it imports once. A process of CUDA has no children, so with NCCL there is a program
    for each rank.
    """
    file, ranks = folder / "meeting", [str(rank) for rank in range(world)]
    if backend == "gloo":
        given = (str(script), backend, ",".join(ranks), str(world), str(file), *more)
        done = forks.python("-c", SCRIPT, *given, env=dict(os.environ))
        said = [done.stdout + done.stderr]
        assert done.returncode == 0, said[0]
        assert all_right(file, ranks), said[0]
        return said
    programs = [
        subprocess.Popen(
            [sys.executable, str(script), backend, rank, str(world), str(file), *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )
        for rank in ranks
    ]  # fmt: skip
    try:
        said = [program.communicate(timeout=240)[0] for program in programs]
    finally:
        for program in programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
    wanted = [-signal.SIGABRT * (rank in ended) for rank in range(len(programs))]
    assert [program.returncode for program in programs] == wanted, "\n".join(said)
    assert all_right(file, ranks), "\n".join(said)
    return said


def all_right(file: Path, ranks: list[str]) -> bool:
    return all(Path(f"{file}.{rank}").read_text() == "right" for rank in ranks)


def with_forks(program: str, *args: str, env: dict[str, str] | None = None) -> None:
    """A program of Python in which torch.multiprocessing.spawn forks: what the processes need is
    loaded once. They are given what goes through pickle, as when each begins anew.
    """
    done = forks.python(
        "-c", FORKING + program, *args, env=dict(os.environ if env is None else env)
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
