"""Context parallel over real processes: torch.distributed with gloo, and with NCCL on GPUs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("one_rank.py")


def run(backend, world, tmp_path):
    file = tmp_path / "meeting"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), backend, str(rank), str(world), str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    assert all((tmp_path / f"meeting.{rank}").read_text() == "right" for rank in range(world))


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
@pytest.mark.parametrize("world", [2, 4])
def test_processes_are_one(world, tmp_path):
    run("gloo", world, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_gpus_are_one(tmp_path):
    run("nccl", min(4, torch.cuda.device_count()), tmp_path)
