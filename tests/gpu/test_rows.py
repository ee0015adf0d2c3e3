"""Every row of every configuration table, compiled, against float64; memory and race checks."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu.sanitize import DTYPES, SHAPES

HERE = Path(__file__).parent
pytestmark = pytest.mark.gpu


def _run(*command, **environment):
    """The finished process; one that hangs is stopped after five minutes."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | environment,
    )  # fmt: skip


def test_every_row():
    listing = _run(sys.executable, HERE / "run_rows.py").stdout.splitlines()
    assert len(listing) > 50

    def run(n):
        result = _run(sys.executable, HERE / "run_rows.py", str(n))
        return listing[n], result.stdout.strip() or result.stderr[-300:]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(run, range(len(listing))))
    failures = [f"{row}: {said}" for row, said in results if not said.startswith("OK")]
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool, dtype, shape):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    program = sys.executable, HERE / "sanitize.py", dtype, str(shape)
    compiled = _run(*program)  # faster outside the sanitizer
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    # every tensor an allocation of its own, so that memcheck sees the end of each
    result = _run(
        sanitizer, "--tool", tool, "--target-processes", "application-only",
        "--error-exitcode", "9", *program, PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-500:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-500:]
