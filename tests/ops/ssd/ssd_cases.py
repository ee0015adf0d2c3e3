"""mamba_chunk_scan_combined as a whole: inputs, the recurrence in float64, tolerances."""

import gdn_checks
import pytest
import torch
import torch.nn.functional as F

from linattn_edu import mamba_chunk_scan_combined
from linattn_edu.testing import ssd_inputs

DTYPES = gdn_checks.DTYPES
IMPLS = ("reference", "triton")
impls = pytest.mark.parametrize("impl", IMPLS)
# (P, N, dtype) whose kernels are fused, and two in stages: for 16 bit and for float32
FORMS = {
    "fused": (24, 40, torch.bfloat16),
    "staged": (24, 130, torch.bfloat16),
    "float32": (24, 40, torch.float32),
}
forms = pytest.mark.parametrize("form", FORMS)
# relative RMS against float64 of out and the states, and of the gradients
TOLERANCES = {
    torch.float64: (1e-10, 1e-10),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (5e-3, 1e-2),
    torch.bfloat16: (5e-3, 1e-2),
}
# what there is beside x, dt, A, B and C; "limit" has no tensor of its own
GIVEN = {
    "all": ("D", "z", "dt_bias", "initial_states", "seq_idx"),
    "none": (),
    "channels": ("D", "dt_bias", "initial_states"),
    "documents": ("seq_idx", "initial_states"),
    "limit": ("dt_bias", "z"),
}


def tolerance(name, dtype):
    return TOLERANCES[dtype][name not in ("o", "ht")]


def inputs(B, T, H, G, P, N, dtype=torch.float32, device="cpu", given="all", *, states=None, **kw):
    """(tensors by name, options). states: how many initial states there are, B if None.

    dt is before the softplus but in "none", where it is the step. "channels": a D for each. The
    same numbers on every device: whether a sum of two heads nearly cancels is luck.
    """
    drawn = ssd_inputs(B, T, H, G, P, N, dtype=dtype, **kw)
    x = {n: t for n, t in drawn.asdict().items() if n in ("x", "dt", "A", "B", "C", *GIVEN[given])}
    options = {"dt_softplus": given != "none"}
    if given in ("none", "documents"):  # without a bias
        x["dt"] = x["dt"].sub(2)
    if given == "none":
        x["dt"] = F.softplus(x["dt"])
    if given == "limit":
        options["dt_limit"] = (0.05, 0.3)
    like = {"generator": torch.Generator().manual_seed(7), "dtype": drawn.D.dtype}
    if given == "channels":
        x["D"] = torch.randn(H, P, **like)
    if states is not None and "initial_states" in x:
        x["initial_states"] = torch.randn(states, H, P, N, **like)
    return {n: t.to(device) for n, t in x.items()}, options


def cotangents(x, N=None):
    """Random gradients of out and of the states."""
    v = x["x"]
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    options = {"generator": torch.Generator().manual_seed(1), "dtype": wide}
    shape = N or v.shape[0], *v.shape[2:], x["B"].shape[3]
    return torch.randn(v.shape, **options).to(v), torch.randn(shape, **options).to(v.device)


def steps(dt, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf"))):
    """The step sizes, by their formula."""
    step = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        step = torch.logaddexp(step, torch.zeros_like(step))
    return step.clamp(*dt_limit)


def recurrence(
    x, dt, A, B, C, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")),
):  # fmt: skip
    """(out, final states) token by token, in the dtype of the arguments; A [H] or like dt."""
    H = x.shape[2]
    B, C = (y.repeat_interleave(H // y.shape[2], 2) for y in (B, C))
    step = steps(dt, dt_bias, dt_softplus, dt_limit)
    S = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3])
    S = S if initial_states is None else S + initial_states
    y = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            S = S * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = (step[:, t] * A.expand_as(dt)[:, t]).exp()[..., None, None]
        S = decay * S + (step[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y.append((S * C[:, t, :, None]).sum(-1))
    out = torch.stack(y, 1) if y else torch.zeros_like(x)
    if D is not None:
        out = out + (D if D.ndim == 2 else D[:, None]) * x
    return out if z is None else out * z * torch.sigmoid(z), S


def scan(x, dt, A, B, C, *, chunk_size=64, return_final_states=True, **rest):
    """(out, states) of mamba_chunk_scan_combined; None for states not asked for."""
    rest["return_final_states"] = return_final_states
    y = mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, **rest)
    return y if isinstance(y, tuple) else (y, None)


def run(x, do, dht, f=scan, **options):
    """out ("o"), the states ("ht") and the gradient of every tensor of x."""
    return gdn_checks.run(x, do, dht, f, **options)


def wide(x):
    """The same numbers in float64, the integers as they are."""
    return {n: t.double() if t.is_floating_point() else t for n, t in x.items()}


def exact(x, do, dht, **options):
    """What `run` should give: autograd of the recurrence in float64.

    "terms" are the norms of what dA and ddt_bias are sums of, over tokens; "spacing" is how well
    float32 tells apart the decays of a chunk.
    """
    do, dht = (y if y is None else y.double() for y in (do, dht))
    x = wide(x)
    x["A"] = x["A"].expand(x["dt"].shape)
    want = run(x, do, dht, recurrence, **options)
    want["terms"] = {n: want[d].norm().item() for n, d in (("dA", "dA"), ("ddt_bias", "ddt"))}
    want["dA"] = want["dA"].sum((0, 1))
    step = steps(x["dt"], x.get("dt_bias"), **options)
    want["spacing"] = gdn_checks.spacing(step * x["A"], 128)
    return want


def check(got, want, dtype, **at_least):
    """A sum over tokens that nearly cancels is as exact as its terms and the decays in them."""
    for n, norm in want["terms"].items():
        if n in got and (size := want[n].norm().item()):
            spacing = 0 if dtype == torch.float64 else want["spacing"]
            at_least[n] = (tolerance(n, dtype) + spacing) * max(1.0, norm / size)
    gdn_checks.check(got, want, dtype, tolerance=tolerance, **at_least)


def of_form(form, T, device="cpu", given="all", B=1, H=2, G=1, **kinds):
    """(tensors, options) whose kernels are of this form."""
    P, N, dtype = FORMS[form]
    return inputs(B, T, H, G, P, N, dtype, device, given, **kinds)
