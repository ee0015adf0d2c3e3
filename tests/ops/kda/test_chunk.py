"""chunk_kda: against the recurrence, what other operators it contains, what a user relies on."""

from functools import partial
from itertools import pairwise

import kda_checks
import pytest
import torch
import torch.nn.functional as F
from gdn_checks import DTYPES, boundaries, cotangents, exact, run, same_bits
from grids import few
from kda_checks import check, inputs, spacing, tolerance, triton
from ops.contract import kda
from ops.test_compile import compiled

from linattn_edu import (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
from linattn_edu.ops.kda import stages
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, relative_rms

pytestmark = [
    pytest.mark.usefixtures("poison"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of NumPy's, interpreted
]

GPU = torch.cuda.is_available()
IMPLS = ("reference", "triton")
C16 = {"chunk_size": 16}


def small(dtype, device, **kinds):
    """Two chunks of 16."""
    return inputs(1, 20, 1, 2, 12, 8, dtype, device, **kinds)


def recurrence(x, **options):
    x = {n: t.double() for n, t in x.items()}
    return recurrent(g=None, gk=x.pop("g"), **x, **options)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("C", "dtype"), list(zip((16, 32, 64), DTYPES, strict=True)), ids=str)
def test_intermediate_states_are_those_of_the_recurrence(C, dtype, impl, device, force):
    T = 300 if GPU else 2 * C + 3
    HV = 2 if GPU else 1
    x = inputs(2 if GPU else 1, T, 1, HV, 20, 16, dtype, device)
    options = {"return_intermediate_states": True, "chunk_size": C, "impl": impl}
    o, S, h = chunk_kda(**x, **options)
    assert S is None
    assert h.dtype == dtype and h.shape == (len(x["q"]), -(-T // C), HV, 20, 16)
    assert_close("h 0", h[:, 0], x["initial_state"], tolerance("h", dtype))
    for c in range(1, h.shape[1]):
        before = {n: t if n == "initial_state" else t[:, : c * C] for n, t in x.items()}
        assert_close(f"h {c}", h[:, c], recurrence(before)[1], tolerance("h", dtype))
    # without the states another stage makes the output: from the same products in 16 bit
    plain, _ = chunk_kda(**x, chunk_size=C, impl=impl)
    assert_close("o without states", plain, o, tolerance("o", dtype))
    if impl == "triton" and dtype != torch.float32:
        force(kda_forward_stages="staged", kda_backward_stages="staged")
        staged, _ = chunk_kda(**x, chunk_size=C, impl=impl)
        assert torch.equal(o, staged)
    x["initial_state"] = x["initial_state"].mT.contiguous()
    _, _, turned = chunk_kda(**x, **options, state_v_first=True)
    assert torch.equal(turned, h.mT)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_intermediate_states_beside_a_gradient(impl, keep, device):
    """The same states where the backward pass asks for residuals, all or two of them."""
    x = small(torch.float32, device)
    options = {"return_intermediate_states": True, "impl": impl, **C16}
    o, _, h = chunk_kda(**x, **options)
    x["v"].requires_grad_()
    got = chunk_kda(**x, **options, disable_recompute=keep)
    assert torch.equal(got[0], o) and torch.equal(got[2], h)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("v_first", [False, True])
def test_states_of_the_chunks_of_all_sequences(v_first, impl, device):
    """Those of the sequences one after the other; without a token there is no chunk."""
    lengths = (15, 0, 20)
    x = inputs(1, 35, 1, 1, 12, 8, torch.float32, device, N=3)
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()
    options = {"return_intermediate_states": True, "impl": impl, "state_v_first": v_first, **C16}
    o, _, h = chunk_kda(**x, cu_seqlens=boundaries(lengths, device), **options)
    assert h.shape == (1, 3, 1, *((8, 12) if v_first else (12, 8)))
    bounds = [slice(*b) for b in pairwise((0, 15, 15, 35))]
    parts = [kda.part(x, n, own) for n, own in enumerate(bounds) if own.stop > own.start]
    alone = [chunk_kda(**one, **options) for one in parts]
    assert torch.equal(h, torch.cat([one[2] for one in alone], 1))
    assert torch.equal(o, torch.cat([one[0] for one in alone], 1))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[::2], ids=str)
def test_what_is_kept_changes_no_bit(dtype, impl, device, force):
    x = small(dtype, device, raw_gate=True)
    do, dht = cotangents(x)
    options = {"use_gate_in_kernel": True, "output_final_state": True, "impl": impl, **C16}

    def both():
        return [kda_checks.run(x, do, dht, disable_recompute=y, **options) for y in (True, False)]

    got, want = both()
    if impl == "triton" and dtype != torch.float32:
        if not GPU:  # fused stages, of which another makes the rows again
            same_bits(got, want)
        x_, do_, dht_ = {n: t.double() for n, t in x.items()}, do.double(), dht.double()
        exact = kda_checks.run(x_, do_, dht_, **options | {"impl": "reference"})
        for name, y in exact.items():
            assert_close(name, got[name], y, tolerance(name, dtype))
        force(kda_forward_stages="staged", kda_backward_stages="staged")
        got, want = both()
        # either backward pass follows the fused forward pass, which leaves the same P and A
        force(kda_forward_stages="fused", kda_backward_stages="staged")
        same_bits(kda_checks.run(x, do, dht, **options), want, "o", "ht")
    # o is made by another stage, of the same products only in the kernels and in 16 bit
    o = ("o",) if impl == "reference" or dtype == torch.float32 else ()
    same_bits(got, want, *o)
    assert_close("o", got["o"], want["o"].double(), tolerance("o", dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_promise_changes_no_bit_in_fp16(dtype, device):
    """In bf16 and fp32 other products for the rows that decay beyond 2^-80 in their block; the
    gradients are within the tolerance (fla's grid).
    """
    x = small(dtype, device, safe=True)
    do, dht = cotangents(x)
    x["g"][..., ::2] = -5
    got, want = (triton(x, do, dht, safe_gate=safe, **C16) for safe in (True, False))
    if dtype == torch.float16:
        same_bits(got, want)
    else:
        assert not torch.equal(got["o"], want["o"])


@pytest.mark.parametrize("impl", IMPLS)
def test_no_gradient_through_the_intermediate_states(impl, device):
    x = small(torch.float32, device)
    for keep in (False, True):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        options = {"return_intermediate_states": True, "disable_recompute": keep}
        o, _, h = chunk_kda(**leaves, **options, impl=impl, **C16)
        assert o.requires_grad and not h.requires_grad


def test_stages_of_an_unknown_implementation():
    with pytest.raises(ValueError, match="impl must be one of 'triton', 'reference', got 'cuda'"):
        stages("cuda")


in_16 = partial(chunk_kda, **C16)
# with a gate a channel, and the same with one a head
BOTH = ((in_16, chunk_gated_delta_rule), (fused_recurrent_kda, fused_recurrent_gated_delta_rule))
forms = pytest.mark.parametrize(("f", "one_gate"), BOTH, ids=["in chunks", "by token"])


@pytest.mark.parametrize("impl", IMPLS)
@forms
def test_equal_channels_are_gated_deltanet(f, one_gate, impl, device):
    """Outputs and gradients; the sum of g's over the channels is that of the one gate."""
    x = small(torch.float32, device)
    x["g"] = x["g"][..., 0].contiguous()
    do, dht = cotangents(x)
    options = {"output_final_state": True, "impl": impl}
    want = run(x, do, dht, one_gate, **options)
    channels = x | {"g": x["g"][..., None].expand(-1, -1, -1, 12).contiguous()}
    got = run(channels, do, dht, f, **options)
    got["dg"] = got["dg"].sum(-1)
    check(got, {n: t.double() for n, t in want.items()}, torch.float32)


@pytest.mark.parametrize("cut", (1, 5, 16, 23, 33, 64, 96) if GPU else (16, 23))
@pytest.mark.parametrize(
    ("safe", "dtype"), list(zip((False, True, True), DTYPES, strict=True)), ids=str
)
def test_states_know_nothing_after_the_cut(safe, dtype, cut, device):
    """Of the tokens before it alone: the same states of chunks, to the bit."""
    x = inputs(1, 130 if GPU else 36, 1, 1, 16, 16, dtype, device, safe=safe)
    options = {"safe_gate": safe, "chunk_size": 32, "impl": "triton"}
    options["return_intermediate_states"] = True
    short = {n: t if n == "initial_state" else t[:, :cut] for n, t in x.items()}
    (o, _, h), (o_short, _, h_short) = chunk_kda(**x, **options), chunk_kda(**short, **options)
    assert torch.equal(o[:, :cut], o_short)
    assert torch.equal(h[:, : h_short.shape[1]], h_short)


@pytest.mark.parametrize("dtype", DTYPES[1:] if GPU else DTYPES[2:], ids=str)
@pytest.mark.parametrize("safe", [False, True] if GPU else [True])
def test_the_error_does_not_grow_with_the_context(safe, dtype, device):
    """Against float64, of every output and gradient, at lengths that grow by factors of four."""
    lengths, size = ((256, 1024, 4096, 16384, 65536), 64) if GPU else ((64, 256), 8)
    options = {"safe_gate": safe, "chunk_size": 64 if GPU else 16}
    errors = {}
    for T in lengths:
        x = inputs(1, T, 2 if GPU else 1, 2 if GPU else 1, size, size, dtype, device, safe=safe)
        do, dht = cotangents(x)
        # what comes in at the ends is far larger than what a token brings, in a share of the
        # tokens that falls with the length: its error would be compared with theirs
        x["initial_state"].zero_(), dht.zero_()
        got = triton(x, do, dht, **options)
        wide = {n: t.double() for n, t in x.items()}
        # the reference's float64 is the recurrence's to 1e-12, and has a step for each chunk
        want = triton_free(wide, do.double(), dht.double(), **options)
        for name, y in got.items():
            errors.setdefault(name, []).append(relative_rms(y, want[name]))
    # a final state and the gradient of the first have the numbers of one state, whatever T is
    for name, (first, *others) in errors.items():
        slack = 2.0 if name in ("ht", "dinitial_state") else 1.3
        assert max(others) < slack * first, (name, errors[name])


def triton_free(x, do, dht, **options):
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    o, ht = chunk_kda(**leaves, output_final_state=True, impl="reference", **options)
    gradients = torch.autograd.grad([o, ht], list(leaves.values()), [do, dht])
    return {"o": o, "ht": ht} | {f"d{n}": dx for n, dx in zip(leaves, gradients, strict=True)}


@pytest.mark.long
def test_keys_far_from_unit_length(device):
    """Raw keys of any size, normalised by the call: fla's inputs of context parallelism."""
    B, HV = (16, 8) if GPU else (8, 4)  # the error of a handful of numbers is no yardstick
    x = inputs(B, 20, 1, HV, 12, 8, torch.bfloat16, device, raw_qk=True, raw_gate=True)
    x["k"] = (10 * x["k"] - 50).to(torch.bfloat16)
    x["q"] = x["q"] + 1
    x["A_log"] = torch.linspace(1, 8, HV, device=device).log()
    flags = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    flags |= {"lower_bound": -5.0, "safe_gate": True}
    do, dht = cotangents(x)
    got, want = triton(x, do, dht, **flags, **C16), exact(x, do, dht, **flags)
    # all keys nearly point the same way, so dk is what is left of far larger terms
    normal = F.normalize(x["k"].double(), dim=-1)
    assert torch.einsum("bihd,bjhd->bij", normal, normal).min() > 0.8
    del got["dk"]
    check(got, want, torch.bfloat16)


def test_spacing_is_of_floored_gates():
    g = torch.full((1, 64, 1, 1), -1000.0)
    assert spacing(g) == pytest.approx(2**-24 * 64 * 104, rel=1e-3)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("packed", [True, False] if GPU else [True])
@pytest.mark.parametrize("keep", few(True, more=(False,)))
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_fullgraph_with_states_of_chunks(backend, keep, packed, device):
    """How many chunks packed sequences have is not known while the graph is traced."""

    def states(**leaves):
        bounds = [0, 3, 3, leaves["q"].shape[1]]
        known = {"cu_seqlens": torch.tensor(bounds, device=device)} if packed else {}
        known |= {"cu_seqlens_cpu": torch.tensor(bounds)} if packed else {}
        o, ht, h = in_16(
            **leaves, **known, output_final_state=True, return_intermediate_states=True,
            disable_recompute=keep,
        )  # fmt: skip
        return o, ht, 2 * h.float()

    g = compiled(states, backend)
    for T in (17, 20):
        x = inputs(1, T, 1, 2, 8, 16, torch.float32, device, N=3 if packed else 1)
        do, _ = cotangents(x)
        with torch.no_grad():
            got, want = g(**x), states(**x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    results = []
    for function in (g, states):
        leaves = {n: t.clone().requires_grad_() for n, t in x.items()}
        o, _, h = function(**leaves)
        results.append([o, h, *torch.autograd.grad(o, list(leaves.values()), do)])
    for a, b in zip(*results, strict=True):
        assert_close("value", a, b, 1e-6)


@pytest.mark.parametrize("keep", [False, True])
def test_memory_between_the_passes(keep, device):
    """What autograd holds: the inputs, P and A; with disable_recompute the rest too."""
    x = inputs(1, 20, 1, 2, 8, 16, torch.float32, device)
    held = []

    def pack(t):
        held.append(t)
        return t

    leaves = {n: t.requires_grad_() for n, t in x.items()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        in_16(**leaves, disable_recompute=keep)
    numbers = sum(t.numel() for t in held if t is not None)
    given = sum(t.numel() for t in x.values())
    pairs = 2 * 20 * 2 * 16
    # gc, w, kg, qg: K a token; h: K V a chunk; v_new: V a token
    rest = 20 * 2 * (4 * 8 + 16) + 2 * 2 * 8 * 16
    assert numbers == given + pairs + keep * rest
