"""causal_conv1d as a whole: inputs, PyTorch's convolution in float64, tolerances."""

import gdn_checks
import torch
import torch.nn.functional as F

from linattn_edu import causal_conv1d

# relative RMS against float64 of y and the final state, and of the gradients
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 8e-3, torch.float64: 1e-12}


def tensors(T, D=20, W=4, dtype=torch.float32, device="cpu", B=2, N=None, seed=0, without=()):
    """The arguments by name; the layer's have float32 beside 16 bits."""
    generator = torch.Generator(device).manual_seed(T + W + 1000 * seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator, device=device, dtype=wide).to(dtype)

    x = {"x": randn(B, T, D), "weight": randn(D, W, dtype=wide), "bias": randn(D, dtype=wide)}
    x |= {"residual": randn(B, T, D), "initial_state": randn(N or B, D, W)}
    return {n: t for n, t in x.items() if n not in without}


def cotangents(x, N=None):
    y, weight = x["x"], x["weight"]
    generator = torch.Generator(y.device).manual_seed(1)
    shapes = y.shape, (N or len(y), *weight.shape)
    drawn = (torch.randn(s, generator=generator, device=y.device) for s in shapes)
    return tuple(t.to(y.dtype) for t in drawn)


def plain(x, weight, bias=None, residual=None, initial_state=None, activation=None):
    """y and the final state, by PyTorch's convolution."""
    state = x.new_zeros(len(x), *weight.shape) if initial_state is None else initial_state
    u = torch.cat([state.mT, x], 1)
    y = F.conv1d(u[:, 1:].mT, weight[:, None], bias, groups=len(weight)).mT
    y = F.silu(y) if activation else y
    return y if residual is None else y + residual, u[:, x.shape[1] :].mT


def run(x, dy, dht, f=causal_conv1d, **options):
    return gdn_checks.run(x, dy, dht, f, **options)


def exact(x, dy, dht, activation=None):
    """What `run` should give: autograd of the convolution in float64."""
    wide = {n: t.double() for n, t in x.items()}
    dy, dht = (dt if dt is None else dt.double() for dt in (dy, dht))
    return run(wide, dy, dht, plain, activation=activation)


def check(got, want, dtype):
    got = {n: t.double() for n, t in got.items()}
    gdn_checks.check(got, want, dtype, tolerance=lambda n, dtype: TOLERANCES[dtype])
