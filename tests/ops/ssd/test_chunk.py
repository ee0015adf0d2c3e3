"""mamba_chunk_scan_combined: the properties that a user relies on, and its callers."""

import dataclasses

import pytest
import torch
from grids import parametrize
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.ssd.ssd_cases import (
    DTYPES,
    GIVEN,
    TOLERANCES,
    cotangents,
    exact,
    forms,
    impls,
    inputs,
    of_form,
    recurrence,
    scan,
    wide,
)
from ops.ssd.ssd_cases import check as check_all

from linattn_edu import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
    mamba_chunk_scan_combined,
)
from linattn_edu.ops import ssd
from linattn_edu.testing import assert_close, poison

pytestmark = pytest.mark.usefixtures("poison")

GPU = torch.cuda.is_available()
# heads (a few of those there are), P, N, groups, chunk_size: the defaults of transformers'
# configurations, and of Zamba2 the released sizes
CALLERS = {
    "mamba2": (8, 64, 128, 8, 256),
    "bamba": (2, 64, 256, 1, 256),
    "falcon_h1": (4, 8, 256, 1, 256),
    "granitemoehybrid": (2, 64, 256, 1, 256),
    "nemotron_h": (8, 64, 128, 8, 128),
    "zamba2": (2, 64, 64, 1, 256),
}


def layer(H, P, N, G, dtype, device, B=1, T=70):
    """The arguments of a layer: slices of what the convolution and the projection return."""
    generator = torch.Generator(device=device).manual_seed(0)
    randn = lambda *shape: torch.randn(*shape, generator=generator, device=device)
    conv = randn(B, T, H * P + 2 * G * N).to(dtype)
    projection = randn(B, T, H * P + H).to(dtype)
    x, b, c = conv.split([H * P, G * N, G * N], -1)
    b, c = (y.view(B, T, G, N) for y in (b, c))
    A = -torch.exp(2 * torch.rand(H, generator=generator, device=device))
    x = {"x": x.view(B, T, H, P), "dt": projection[..., -H:], "A": A, "B": b, "C": c}
    x |= {"D": randn(H), "dt_bias": randn(H) / 10 - 2}
    return x, randn(B, H, P, N)


@parametrize(1, model=CALLERS, dtype=DTYPES[::2])
def test_calls_of_transformers(model, dtype, device):
    """Keyword for keyword; the prompt from a cache's states too, and rows of several documents."""
    *sizes, chunk_size = CALLERS[model]
    x, states = layer(*sizes, dtype, device)
    seq_idx = torch.zeros(1, 70, dtype=torch.int32, device=device)
    seq_idx[:, 30:] = 1
    tokens = [x.pop(n) for n in ("x", "dt", "A", "B", "C")]
    options = {"dt_softplus": True, "dt_limit": (0.0, float("inf"))}
    for seq, initial in ((None, None), (seq_idx, states)):
        out, last = mamba_chunk_scan_combined(
            *tokens, chunk_size=chunk_size, z=None, seq_idx=seq, return_final_states=True,
            initial_states=initial, **x, **options,
        )  # fmt: skip
        given = wide(x) | ({} if initial is None else {"initial_states": initial.double()})
        want = recurrence(*(y.double() for y in tokens), **given, seq_idx=seq, **options)
        assert out.dtype == dtype and out.shape == tokens[0].shape
        assert last.dtype == torch.float32 and last.shape == states.shape
        assert_close("out", out, want[0], TOLERANCES[dtype][0])
        assert_close("states", last, want[1], TOLERANCES[dtype][0])


@forms
def test_steps_below_zero(form, device):
    """Where the limits let a step be negative the memory grows, which no kernel may hide."""
    x, options = of_form(form, 100, device, "limit")
    x["dt"] = 0.1 * torch.randn_like(x["dt"])
    x.pop("dt_bias")
    options |= {"dt_softplus": False, "dt_limit": (-1.0, 1.0)}
    want = recurrence(**wide(x), **options)
    got = scan(**x, **options, chunk_size=64, impl="triton")
    for n, a, b in zip(("out", "states"), got, want, strict=True):
        assert_close(n, a, b, TOLERANCES[x["x"].dtype][0])


@impls
@pytest.mark.parametrize("rule", [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule])
def test_is_the_delta_rule_without_its_correction(rule, impl, device):
    """With orthogonal keys there is nothing to correct: q = C, k = B, v = step x, g = step A."""
    dtype = torch.float64 if impl == "reference" else torch.float32
    x, options = inputs(2, 16, 3, 3, 20, 16, dtype, device, "none")
    keys = torch.linalg.qr(torch.randn(2, 3, 16, 16, dtype=dtype, device=device)).Q
    x["B"] = keys.transpose(1, 2).contiguous()
    states = torch.randn(2, 3, 20, 16, dtype=dtype, device=device)
    # a state that holds nothing along the keys would be none: they span the space
    for initial in (None, torch.zeros_like(states)):
        out, last = scan(**x, initial_states=initial, **options, chunk_size=16, impl=impl)
        step = x["dt"].clamp(min=0)
        o, S = rule(
            x["C"], x["B"], step[..., None] * x["x"], step * x["A"],
            beta=torch.ones_like(step), scale=1.0, output_final_state=True, impl=impl,
        )  # fmt: skip
        tol = 1e-12 if impl == "reference" else 5e-6
        assert_close("out", out, o, tol)
        assert_close("states", last.mT, S, tol)


@pytest.mark.parametrize("fused", [False, True])
def test_any_one_stage_can_be_swapped(fused, device):
    """A stage of the one implementation among those of the other, in both passes.

    ssd_bwd_dc and ssd_bwd_dx go together: what they give to dgc cancels as far as both round alike.
    """
    sets = ssd.fused_stages if fused else ssd.stages
    dtype = torch.bfloat16 if fused else torch.float32
    x, _ = inputs(1, 70, 2, 1, 24, 40, dtype, device)
    do, dht = cotangents(x)
    want = exact(x, do, dht, dt_softplus=True)
    h0 = x.pop("initial_states").mT.contiguous()
    options = {"initial_state": h0, "softplus": True, "chunk_size": 64}
    x["D"] = x["D"][:, None]
    names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")
    singly = [(f.name,) for f in dataclasses.fields(sets("reference"))]
    pair = ("ssd_bwd_dc", "ssd_bwd_dx")
    for together in [s for s in singly if s[0] not in pair] + [pair] * fused:
        swapped = {stage: getattr(sets("triton"), stage) for stage in together}
        mixed = dataclasses.replace(sets("reference"), **swapped)
        out, last, _ = ssd.forward(mixed, **x, **options, output_final_state=True)
        gradients = ssd.backward(mixed, **x, dout=do, dht=dht.mT.contiguous(), **options)
        got = {f"d{n}": y for n, y in zip(names, gradients, strict=True)}
        got |= {"o": out, "ht": last.mT, "dinitial_states": got["dinitial_states"].mT}
        got["dD"] = got["dD"].reshape(-1)
        check_all(got, want, dtype)


@settings(max_examples=40 if GPU else 12, derandomize=not GPU, deadline=None)
@given(
    T=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    P=st.integers(1, 40),
    N=st.integers(1, 40),
    C=st.sampled_from([16, 32, 64, 128]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(tuple(GIVEN)),
    decay=st.sampled_from(("trained", "none", "closed")),
    seed=st.integers(0, 2**31),
)
def test_any_valid_arguments(T, heads, P, N, C, dtype, kind, decay, seed):
    x, options = inputs(
        1, T, *heads, P, N, dtype, "cuda" if GPU else "cpu", kind, decay=decay, seed=seed
    )
    want = recurrence(**wide(x), **options)
    with poison():
        got = scan(**x, **options, chunk_size=C)
    # what x, B and C of rms 1 and the steps give: a sum of few numbers may cancel
    sizes = ((N**0.5 * want[1].square().mean().sqrt()).item() or 1.0, 0.0)
    for n, size, a, b in zip(("out", "states"), sizes, got, want, strict=True):
        rms = b.square().mean().sqrt().item()
        tol = TOLERANCES[dtype][0] * max(1.0, size / rms if rms else 1.0)
        assert_close(n, a, b, tol)
