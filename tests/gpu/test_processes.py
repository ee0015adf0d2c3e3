"""What wants a process of its own: no caching of memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu
def test_ends_of_allocations():
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("ends.py")], capture_output=True, text=True,
        check=False, timeout=600, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.startswith("right"), done.stdout + done.stderr
