"""Programs that compile kernels: a process that interprets them cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path


def lines_of(program: str, *options: str) -> list[dict]:
    """What a program of this folder prints, a JSON object a line."""
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name(program), *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]
