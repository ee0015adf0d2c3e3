"""Layers in two processes: data parallel, sharded, and with their sequences cut."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("one_rank.py")


@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
def test_two_processes_are_one(tmp_path):
    file, world = tmp_path / "meeting", 2
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(world), str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)
    assert all((tmp_path / f"meeting.{rank}").read_text() == "right" for rank in range(world))
