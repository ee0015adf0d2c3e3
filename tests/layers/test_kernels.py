"""The layers on the kernels against those on the reference stages."""

import copy

import pytest
import torch
from layers.layer_checks import MAIN, hidden, make

from linattn_edu.testing import assert_close


@pytest.mark.parametrize("kind", MAIN)
def test_kernels_are_the_reference(kind, device, poison):
    x, dy = (hidden(1, 18, torch.float32, device, seed) for seed in (1, 2))
    x.requires_grad_()
    layers = [make(kind, torch.float32, device, impl) for impl in ("reference", "triton")]
    with torch.no_grad():
        begun = layers[0].make_cache(1)
        layers[0](x[:, :17], cache=begun)
    found = []
    for layer in layers:
        y = layer(x)
        dx, *grads = torch.autograd.grad(y, [x, *layer.parameters()], dy)
        names = (n for n, _ in layer.named_parameters())
        results = {"y": y.detach(), "dx": dx, **dict(zip(names, grads, strict=True))}
        with torch.no_grad():
            cache = copy.deepcopy(begun)
            results["step"] = layer(x[:, 17:], cache=cache)
        results |= {f"state {i}": state for i, state in enumerate(cache.states)}
        found.append(results)
    reference, kernels = found
    for name, want in reference.items():
        assert_close(name, kernels[name], want, 1e-5)
    assert_close("step", kernels["step"], kernels["y"][:, 17:], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MAIN)
def test_a_mask_whose_numbers_are_not_looked_at(kind):
    """transformers #48256: a prompt padded on the right. Its tokens are right; what follows it, of
    a cache, is NaN and not another number. Rows padded on the left, or not at all, go on.
    """
    layer, x = make(kind, torch.float32, "cuda"), hidden(3, 13, torch.float32, "cuda")
    mask = torch.ones(3, 12, device="cuda")
    mask[0, :2], mask[1, 9:] = 0, 0
    with torch.no_grad():
        prompt, alone, cache = x[:, :12], layer(x), layer.make_cache(3)
        y = layer(prompt, mask)
        late = layer(x[:1, 2:])  # the first row without its padding
        assert_close("left", y[0, 2:], late[0, :-1], 1e-5)
        assert_close("right", y[1, :9], alone[1, :9], 1e-5)
        assert not y[0, :2].any() and not y[1, 9:].any()
        y = layer(prompt, mask, cache)
        assert y[1, 9:].isnan().all()
        step = layer(x[:, 12:], cache=cache)
        assert_close("left, next", step[0], late[0, -1:], 1e-5)
        assert step[1].isnan().all()
        assert_close("whole, next", step[2], alone[2, 12:], 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MAIN)
def test_a_step_in_a_cuda_graph(kind):
    layer = make(kind, torch.float32, "cuda")
    x = hidden(2, 8, torch.float32, "cuda")
    want = layer(x).detach()
    with torch.no_grad():
        cache, token = layer.make_cache(2), x[:, :1].clone()
        layer(token, cache=cache)  # compiles the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(token, cache=cache)
        cache.reset()
        for t in range(8):
            token.copy_(x[:, t : t + 1])
            graph.replay()
            assert_close("y", y, want[:, t : t + 1], 1e-5)
