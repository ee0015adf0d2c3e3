"""Importing the package: quick, without Triton, without a look at any device."""

import os
from pathlib import Path

import pytest
from forks import python

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, **variables: str) -> str:
    env = os.environ | variables
    done = python("-c", code, env=env)
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


# every public function on the CPU: with impl="auto", both passes, and what it says to impl="triton"
EVERY_FUNCTION = """
import torch
from linattn_edu import *
from linattn_edu.testing import gdn_inputs, kda_inputs

A, gate = torch.zeros(1, 5, 1, 16), torch.zeros(1, 5, 2)
sentences = set()
for f, given in (
    (chunk_gated_delta_rule, gdn_inputs(1, 5, 1, 2, 8, 8).asdict()),
    (fused_recurrent_gated_delta_rule, gdn_inputs(1, 5, 1, 2, 8, 8).asdict()),
    (chunk_kda, kda_inputs(1, 5, 1, 2, 8, 8).asdict()),
    (fused_recurrent_kda, kda_inputs(1, 5, 1, 2, 8, 8).asdict()),
    (kernel_delta_attention, dict(query=A, key=A, value=A, beta=A[..., 0])),
    (causal_conv1d, {"x": A[:, :, 0], "weight": A[0, :4, 0].mT}),
    (causal_conv1d_fn, {"x": A[:, :, 0].mT, "weight": A[0, :4, 0].mT}),
    (rms_norm_gated, {"x": A, "z": A}),
    (ema_scan, {"x": A, "g": -A[..., 0]}),
    (l2norm, {"x": A}),
    (solve_tril, {"A": A}),
    (chunk_local_cumsum, {"g": gate, "chunk_size": 16}),
    (chunk_global_cumsum, {"s": gate}),
    (fused_gdn_gate, {"g": gate, "A_log": gate[0, 0]}),
    (fused_kda_gate, {"g": A, "A_log": gate[0, 0, :1]}),
):
    leaves = {n: x.requires_grad_() if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    y = f(**leaves)
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    assert y.isfinite().all()
    try:
        f(**given, impl="triton")
    except ValueError as error:
        sentences.add(str(error))
print(*sentences, sep="\\n")
"""
CANNOT = "impl='triton' cannot run here: {}; impl='reference' can"


@pytest.mark.parametrize("error", ["OSError('no libtriton.so')", "AttributeError('x')"])
def test_the_library_works_with_a_triton_that_is_broken(error, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(f"raise {error}")
    path = {"PYTHONPATH": str(tmp_path)}
    kind, why = error.removesuffix("')").split("('")
    broken = f"the package triton is installed but cannot be imported ({kind}: {why})"
    assert run(EVERY_FUNCTION, **path, TRITON_INTERPRET="1") == CANNOT.format(broken)


def test_an_interpreter_that_was_asked_for_too_late():
    """Who imported triton before the variable was set has it decorated for the compiler."""
    pytest.importorskip("triton")
    late = "import os, triton; os.environ['TRITON_INTERPRET'] = '1'\n"
    too_late = "the tensors are on the CPU and TRITON_INTERPRET=1 was not set in time"
    assert run(late + EVERY_FUNCTION, TRITON_INTERPRET="0") == CANNOT.format(too_late)


def test_the_version_is_given_once():
    import linattn_edu

    assert linattn_edu.__version__ in (ROOT / "CHANGELOG.md").read_text()
