"""interpreter.py: Triton's interpreter as conftest.py makes it gives the bits that it gave."""

import pytest
import torch

from linattn_edu import chunk_kda
from linattn_edu.testing import kda_inputs

interpreter = pytest.importorskip("triton.runtime.interpreter")
REPLACED = pytest.importorskip("interpreter").REPLACED


@pytest.mark.skipif(
    not hasattr(interpreter._patch_lang, "__wrapped__"), reason="Triton's own interpreter, or none"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_same_bits(dtype, monkeypatch):
    x = kda_inputs(1, 17, 1, 1, 20, 16, dtype=dtype, initial_state=True).asdict()
    leaves = {n: t.requires_grad_() for n, t in x.items()}

    def run():
        o, ht = chunk_kda(**leaves, impl="triton", output_final_state=True, chunk_size=16)
        return o, ht, *torch.autograd.grad((o, ht), leaves.values(), (o.detach(), ht.detach()))

    quick = run()
    for where, name in REPLACED:
        monkeypatch.setattr(where, name, getattr(where, name).__wrapped__)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions())
    for a, b in zip(quick, run(), strict=True):
        assert torch.equal(a, b)
