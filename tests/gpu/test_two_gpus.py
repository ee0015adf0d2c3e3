"""Tensors on another GPU than the current one: mamba #593 and #699, triton #2441 and #5205."""

import pytest
import torch
from gdn_checks import same_bits
from layers.layer_checks import MAIN, hidden, make
from ops.contract import forms

from linattn_edu.testing import assert_close

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]
DEVICES = ("cuda:1", "cuda:0", "cuda:1") * 3  # the third call of a kind runs as a written-down plan


@forms("test_gpus_by_turns", dtypes=(torch.float32, torch.bfloat16))
def test_gpus_by_turns(form, dtype):
    """The same call on either, again and again, has the same bits, on the GPU of its tensors."""
    assert torch.cuda.current_device() == 0
    x, do, dht, options = form.short(dtype, "cpu")
    want = None
    for device in DEVICES:
        there = {n: t.to(device) for n, t in x.items()}
        got = form.run(there, do.to(device), dht.to(device), **options)
        assert {t.device for t in got.values()} == {torch.device(device)}
        got = {n: t.cpu() for n, t in got.items()}
        want = want or got
        same_bits(got, want)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("kind", MAIN)
def test_a_layer_decodes_on_the_other(kind):
    layer, x = make(kind, torch.float32, "cuda:1"), hidden(2, 9, torch.float32, "cuda:1")
    with torch.no_grad():
        want = layer(x)
        for _ in range(3):
            cache = layer.make_cache(2)
            parts = [layer(part, cache=cache) for part in x.split([6, 1, 1, 1], 1)]
            assert_close("y", torch.cat(parts, 1), want, 1e-5)
            assert {s.device for s in cache.states} == {x.device}
