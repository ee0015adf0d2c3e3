"""The layers on the kernels against those on the reference stages."""

import pytest
import torch
from layers.layer_checks import MAIN, hidden, make

from linattn_edu.testing import assert_close


@pytest.mark.parametrize("kind", MAIN)
def test_kernels_are_the_reference(kind, device, poison):
    x, dy = (hidden(1, 18, torch.float32, device, seed) for seed in (1, 2))
    x.requires_grad_()
    found = []
    for impl in ("triton", "reference"):
        layer = make(kind, torch.float32, device, impl)
        y = layer(x)
        y.backward(dy)
        results = {"y": y.detach(), "dx": x.grad}
        results |= {n: p.grad for n, p in layer.named_parameters()}
        x.grad = None
        with torch.no_grad():
            cache = layer.make_cache(1)
            layer(x[:, :17], cache=cache)
            results["step"] = layer(x[:, 17:], cache=cache)
        results |= {f"state {i}": state for i, state in enumerate(cache.states)}
        found.append(results)
    for name, want in found[1].items():
        assert_close(name, found[0][name], want, 1e-5)
    assert_close("step", found[0]["step"], found[0]["y"][:, 17:], 1e-5)
