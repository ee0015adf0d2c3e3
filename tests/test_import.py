"""Importing the package: quick, without Triton, without a look at any device."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_takes_less_than_two_seconds_beyond_torch():
    code = "import time, torch; t = time.perf_counter(); import linattn_edu; "
    assert float(run(code + "print(time.perf_counter() - t)")) < 2.0


def test_import_loads_neither_triton_nor_a_device():
    modules = ("linattn_edu", "linattn_edu.ops.gdn", "linattn_edu.testing", "linattn_edu.teaching",
               "linattn_edu.doctor", "linattn_edu.reference.delta.solve")  # fmt: skip
    code = f"import sys, torch, {', '.join(modules)}\n"
    code += "new = {m.split('.')[0] for m in sys.modules} & {'triton', 'matplotlib', 'IPython'}\n"
    code += "print(sorted(new), torch.cuda.is_initialized())"
    assert run(code) == "[] False"


def test_the_library_works_with_triton_absent():
    code = """
import sys
sys.modules["triton"] = None
from linattn_edu import chunk_gated_delta_rule
from linattn_edu.testing import gdn_inputs
x = gdn_inputs(1, 5, 1, 1, 3, 2)
print(tuple(chunk_gated_delta_rule(**x.asdict())[0].shape))
"""
    assert run(code) == "(1, 5, 1, 2)"


def test_the_version_is_given_once():
    import linattn_edu

    assert linattn_edu.__version__ in (ROOT / "CHANGELOG.md").read_text()
