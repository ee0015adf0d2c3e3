"""interpreter.py: Triton's interpreter as conftest.py makes it gives the bits that it gave."""

import pytest
import torch

from linattn_edu import chunk_kda, mamba_chunk_scan_combined
from linattn_edu.testing import kda_inputs, ssd_inputs

interpreter = pytest.importorskip("triton.runtime.interpreter")
core = pytest.importorskip("triton.language.core")
REPLACED = pytest.importorskip("interpreter").REPLACED

pytestmark = pytest.mark.skipif(not REPLACED, reason="Triton's own interpreter, or none")


@pytest.fixture
def undo(monkeypatch):
    """Back to Triton's own."""

    def act():
        for where, name in REPLACED:
            monkeypatch.setattr(where, name, getattr(where, name).__wrapped__)
        builder = interpreter.interpreter_builder
        monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions())

    return act


def kda(x):
    return chunk_kda(**x, impl="triton", output_final_state=True, chunk_size=16)


def ssd(x):
    more = {"dt_softplus": True, "return_final_states": True, "chunk_size": 16}
    return mamba_chunk_scan_combined(**x, **more, impl="triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "run, inputs",
    [
        (kda, lambda dtype: kda_inputs(1, 17, 1, 1, 20, 16, dtype=dtype, initial_state=True)),
        (ssd, lambda dtype: ssd_inputs(1, 17, 2, 1, 20, 16, dtype=dtype)),
    ],
    ids=["kda", "ssd"],
)
def test_same_bits(run, inputs, dtype, undo):
    x = inputs(dtype).asdict()
    leaves = [t.requires_grad_() for t in x.values() if t.is_floating_point()]

    def both_passes():
        out = run(x)
        return *out, *torch.autograd.grad(out, leaves, [o.detach() for o in out])

    quick = both_passes()
    undo()
    for a, b in zip(quick, both_passes(), strict=True):
        assert torch.equal(a, b)


def test_what_a_block_may_not_be_is_refused_each_time(undo):
    """After a block that is remembered, and after a refusal."""

    def refusals():
        for good, bad in (([16], [16.0]), ([4, 4], [4, 3]), ([1], [])):
            core.block_type(core.float32, good)
            for _ in range(2):
                with pytest.raises((TypeError, ValueError)) as refused:
                    core.block_type(core.float32, bad)
                yield str(refused.value)

    quick = list(refusals())
    undo()
    assert quick == list(refusals())


def test_shapes_and_types(undo):
    """Of blocks and numbers, from lists and from Triton's own tuples."""

    def made():
        sizes = [core.constexpr(4), 8]
        for shape in (sizes, core.tuple(sizes), [8, 4]):
            for element in (core.float32, core.int32, core.pointer_type(core.float32)):
                block = core.block_type(element, shape)
                for kind in (block, element):
                    x = core.tensor(None, kind)
                    yield str(x), x.type, x.dtype, x.numel.value, list(x.shape), kind.name
                yield block.numel, block.name, list(block.shape)

    quick = list(made())
    undo()
    assert quick == list(made())
