"""Context parallel over real processes: torch.distributed with gloo, and with NCCL on GPUs."""

from pathlib import Path

import pytest
import torch
from cp.cp_checks import OPERATORS
from grids import few
from processes import run_ranks

SCRIPT = Path(__file__).with_name("one_rank.py")
RAISING = Path(__file__).with_name("raising_rank.py")
PARALLEL = Path(__file__).with_name("parallel_keys.py")
gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this PyTorch has no gloo",
)
gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")


@pytest.mark.long
@gloo
@pytest.mark.parametrize("world", few(2, more=(4,)))
def test_processes_are_one(world, tmp_path):
    run_ranks(SCRIPT, "gloo", world, tmp_path)


@pytest.mark.long
@gloo
@pytest.mark.parametrize("how", ["input", "stage", "stays"])
def test_no_rank_hangs_on_an_error_of_another(how, tmp_path):
    run_ranks(RAISING, "gloo", 2, tmp_path, how)


@gpus
@pytest.mark.parametrize("which", [*OPERATORS, "calls"])
@pytest.mark.parametrize("world", (2, 4))
def test_gpus_are_one(world, which, tmp_path):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    run_ranks(SCRIPT, "nccl", world, tmp_path, which)


@gpus
@pytest.mark.parametrize("how", ["input", "stage"])
def test_no_gpu_hangs_on_an_error_of_another(how, tmp_path):
    run_ranks(RAISING, "nccl", 2, tmp_path, how, ended=(0,))


@gpus
def test_keys_nearly_parallel(tmp_path):
    """Our error over two ranks is that of one; beside fla, where it is."""
    said, _ = run_ranks(PARALLEL, "nccl", 2, tmp_path)
    print(said)
