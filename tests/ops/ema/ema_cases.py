"""ema_scan as a whole: inputs, the recurrence in float64, tolerances."""

import gdn_checks
import torch
from ssd.ema_checks import draw, loop

from linattn_edu import ema_scan

# relative RMS against float64 of y and the final state, and of the gradients
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}


def tensors(T, D, given="both", gate="trained", dtype=torch.float32, device="cpu", **sizes):
    """The arguments by name."""
    names = ("x", "g", "weight", "initial_state")
    drawn = zip(names, draw(T, D, given, gate, dtype, device, **sizes), strict=True)
    return {n: t for n, t in drawn if t is not None}


def cotangents(x, N=None):
    dht = torch.randn(N or len(x["x"]), *x["x"].shape[2:], device=x["x"].device)
    return torch.randn_like(x["x"]), dht.to(torch.promote_types(dht.dtype, x["x"].dtype))


def run(x, dy, dht, f=ema_scan, **options):
    return gdn_checks.run(x, dy, dht, f, **options)


def exact(x, dy, dht):
    """What `run` should give: autograd of the recurrence in float64."""
    wide = {n: t.double() for n, t in x.items()}
    dht = dht if dht is None else dht.double()
    return run(wide, dy if dy is None else dy.double(), dht, lambda **x: loop(**x))


def check(got, want, dtype, **at_least):
    gdn_checks.check(
        got, want, dtype, tolerance=lambda n, dtype: TOLERANCES[dtype][n not in ("o", "ht")],
        **at_least,
    )  # fmt: skip
