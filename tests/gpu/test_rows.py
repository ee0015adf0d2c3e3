"""Every row of every configuration table, compiled, against float64; memory and race checks."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gpu.sanitize import DTYPES, SHAPES

HERE = Path(__file__).parent


def _run(*command, **environment):
    """The finished process; one that hangs is stopped after five minutes."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("shape", range(len(SHAPES)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(tool, dtype, shape):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("needs a GPU machine with the CUDA toolkit's compute-sanitizer")
    program = sys.executable, HERE / "sanitize.py", dtype, str(shape)
    compiled = _run(*program)  # faster outside the sanitizer
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    # every tensor an allocation of its own, so that memcheck sees the end of each
    result = _run(
        sanitizer, "--tool", tool, "--target-processes", "application-only", *program,
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )  # fmt: skip
    said = result.stdout[-3000:] + result.stderr[-500:]
    assert result.returncode == 0, said
    if tool == "memcheck":
        assert errors(result.stdout) == 0, said
    else:
        assert "RACECHECK SUMMARY" in result.stdout, said
        assert not list(hazards(result.stdout)), said


def errors(text):
    """How many errors memcheck counts, without Triton 3.9's question for more shared memory than a
    driver may give a block: it is refused when a kernel is loaded, and asks for less.
    """
    asked = re.findall(
        r"Program hit CUDA_ERROR_INVALID_VALUE .* on CUDA API call to cuFuncSetAttribute\.\n"
        r"=+ +Saved host backtrace .*\n=+ +Host Frame: loadBinary .* in cuda_utils\.",
        text,
    )
    return int(re.search(r"ERROR SUMMARY: (\d+) error", text)[1]) - len(asked)


def test_an_error_is_counted():
    asked = (
        '========= Program hit CUDA_ERROR_INVALID_VALUE (error 1) due to "invalid argument" on '
        "CUDA API call to {}.\n"
        "=========     Saved host backtrace up to driver entry point at error\n"
        "=========         Host Frame: loadBinary [0x4c33] in cuda_utils.cpython-312.so\n"
    )
    text = asked.format("cuFuncSetAttribute") * 2
    assert errors(text + "========= ERROR SUMMARY: 2 errors\n") == 0
    assert (
        errors(text + "========= Invalid __global__ read\n========= ERROR SUMMARY: 3 errors") == 1
    )
    assert errors(asked.format("cuLaunchKernelEx") + "========= ERROR SUMMARY: 1 error\n") == 1
    assert errors("========= ERROR SUMMARY: 0 errors\n") == 0


def hazards(text):
    """The pairs of accesses that racecheck reports, but for those of one store with itself.

    Where several threads hold the same element, Triton's change of layout lets each of them write
    it to shared memory: the same value to the same address by the same instruction. A race across
    the barriers around it would have a read on one side.
    """
    first = None
    for line in text.splitlines():
        match = re.search(r"(Race reported between|and) (Read|Write) access at (.*?)( \[|$)", line)
        if match and match[1] != "and":
            first = match[2], match[3]
        elif (match and first != ("Write", match[3])) or (match and match[2] == "Read"):
            yield first, match[2], match[3]


def test_a_race_is_noticed():
    line = "========= Error: Race reported between {} access at k+0x10 in k.py:1\n"
    line += "=========     and {} access at k+{} in k.py:1 [2 hazards]\n"
    assert not list(hazards(line.format("Write", "Write", "0x10")))
    for case in (("Write", "Write", "0x20"), ("Write", "Read", "0x10"), ("Read", "Write", "0x10")):
        assert list(hazards(line.format(*case)))
