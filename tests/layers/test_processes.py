"""Layers in two processes: data parallel, sharded, and with their sequences cut."""

from pathlib import Path

import pytest
import torch
from processes import run_ranks

SCRIPT = Path(__file__).with_name("one_rank.py")


@pytest.mark.long
@pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
def test_two_processes_are_one(tmp_path):
    run_ranks(SCRIPT, "gloo", 2, tmp_path)
