"""Context parallel over real processes: torch.distributed with gloo."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
SCRIPT = Path(__file__).parent / "gloo_rank.py"


@pytest.mark.parametrize("world", [2, 4])
def test_processes_are_one(world, tmp_path):
    file = tmp_path / "meeting"
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
