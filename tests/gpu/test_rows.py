"""Every row of every configuration table, compiled, against float64; memory and race checks."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.gpu


def _run(*command):
    """The finished process; a row that hangs is stopped after five minutes."""
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


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


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    result = _run(
        sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, HERE / "sanitize.py"
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-500:]
    assert "0 errors" in result.stdout or "0 hazards" in result.stdout, result.stdout[-500:]
