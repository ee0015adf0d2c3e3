"""PyTorch's deterministic mode (mamba #493, #137, #827): nothing is refused, memory that is read
before it is written is NaN, and runs agree to the bit, on another stream and in dirty memory too.
"""

import os

import pytest
import torch
from gdn_checks import same_bits
from ops import calls
from ops.contract import forms

pytestmark = pytest.mark.gpu
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, at the first product


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def again(run):
    """The results of three more runs: on another stream, and after what was there is NaN."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [run()]
    torch.cuda.current_stream().wait_stream(stream)
    sizes = [2**24] * 8 + [2**n for n in range(7, 18)] * 16  # of both pools of the allocator
    dirty = [torch.full((n,), torch.nan, device="cuda") for n in sizes]
    del dirty
    return [*found, run(), run()]


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@forms("test_runs_agree", dtypes=(torch.float32, torch.bfloat16))
def test_runs_agree(form, dtype, packed, device):
    """In both passes, of more programs than run at once."""
    B, T, sizes = form.crowd or (2, 300, form.sizes)
    if packed:
        x, do, dht, options = form.packed((5, 0, 2 * T, T, 1), dtype, device, sizes=sizes)
        options["cu_seqlens"] = torch.tensor([0, 5, 5, 5 + 2 * T, 5 + 3 * T, 6 + 3 * T])
        options["cu_seqlens"] = options["cu_seqlens"].to(device)
    else:
        x, options = form.draw(B, T, dtype, device, sizes=sizes)
        do, dht = form.cotangents(x)

    def run():
        return form.run(x, do, dht, **options)

    first = run()
    assert not {n for n, t in first.items() if not t.isfinite().all()}
    for found in again(run):
        same_bits(found, first)


@pytest.mark.parametrize("name", calls.CALLS)
def test_small_calls_agree(name, device):
    """Of every function, those that decode in place among them."""
    f, x, options = calls.call(name, device)

    def run():
        given = {n: t.clone() for n, t in x.items()}
        with torch.no_grad():
            out = f(**given, **options)
        out = out if isinstance(out, tuple) else (out,)
        changed = {n: given[n] for n in ("state", "conv_state", "initial_state") if n in given}
        return changed | {str(i): y for i, y in enumerate(out) if y is not None}

    first = run()
    assert all(t.isfinite().all() for t in first.values())
    for found in again(run):
        same_bits(found, first)
