"""The public function: against the recurrence, and the properties a user relies on."""

import dataclasses

import gdn_checks
import pytest
import torch
from gdn_checks import GENERATIONS, tolerance
from grids import parametrize
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.ops.gdn import backward, forward, stages
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs, poison, relative_rms

GATES = ("trained", "none", "reset", "closed")
# relative RMS of o against float64, for outputs of ordinary size
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@parametrize(T=(1, 15, 63, 64, 65, 100, 257), C=(16, 32, 64), gate=GATES)
def test_chunked_equals_recurrent_in_float64(T, C, gate):
    x = gdn_inputs(2, T, 2, 4, 33, 20, dtype=torch.float64, initial_state=True, seed=T, gate=gate)
    want = recurrent(**x.asdict())
    got = chunk_gated_delta_rule(**x.asdict(), output_final_state=True, chunk_size=C)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)


def test_reference_gradient_is_the_recurrence_s():
    x = gdn_inputs(1, 65, 1, 2, 16, 12, dtype=torch.float64, initial_state=True)
    leaves = {n: t.clone().requires_grad_() for n, t in x.asdict().items()}
    do, dht = torch.randn(1, 65, 2, 12).double(), torch.randn(1, 2, 16, 12).double()

    def gradients(f, **options):
        o, ht = f(**leaves, **options)
        return torch.autograd.grad((o * do).sum() + (ht * dht).sum(), leaves.values())

    got = gradients(chunk_gated_delta_rule, impl="reference", output_final_state=True)
    for name, a, b in zip(leaves, got, gradients(recurrent), strict=True):
        assert_close(f"d{name}", a, b, 1e-10)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 130, 2, 4, 24, 40), (1, 70, 1, 1, 256, 256), (3, 5, 3, 3, 2, 3)]
)
def test_kernels_match_the_recurrence(shape, dtype, state, device):
    x = gdn_inputs(*shape, dtype=dtype, device=device, initial_state=state)
    want = recurrent(**x.double().asdict())
    with poison():
        got = chunk_gated_delta_rule(**x.asdict(), output_final_state=state, impl="triton")
    assert got[0].dtype == dtype
    assert_close("o", got[0], want[0], TOLERANCE[dtype])
    if state:
        assert got[1].dtype == torch.float32
        assert_close("final_state", got[1], want[1], TOLERANCE[dtype])


@pytest.mark.parametrize("wide", ["g", "beta", "initial_state"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_mixed_dtypes(wide, dtype, device):
    x = gdn_inputs(1, 70, 1, 2, 24, 40, dtype=dtype, device=device, initial_state=True)
    for name in ("g", "beta", "initial_state"):
        setattr(x, name, getattr(x, name).to(torch.float32 if name == wide else dtype))
    want = recurrent(**x.double().asdict())
    got = chunk_gated_delta_rule(**x.asdict(), output_final_state=True, impl="triton")
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, TOLERANCE[dtype])


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_autocast_does_not_reach_the_products(impl, device):
    x = gdn_inputs(1, 70, 1, 2, 24, 40, device=device)
    want, _ = recurrent(**x.double().asdict())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got, _ = chunk_gated_delta_rule(**x.asdict(), impl=impl)
    assert_close("o", got, want, 5e-6)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_gate_that_is_nan_shows(impl, device):
    x = gdn_inputs(1, 70, 1, 1, 16, 16, device=device)
    x.g[0, 5, 0] = torch.nan
    o, S = chunk_gated_delta_rule(**x.asdict(), output_final_state=True, impl=impl)
    assert o[:, 5:].isnan().any() and S.isnan().any()


def test_unaligned_storage(device):
    """Tensors that do not start at 16 bytes give the same bits as those that do."""
    x = gdn_inputs(1, 200, 1, 2, 32, 32, dtype=torch.bfloat16, device=device)
    shifted = {}
    for name, t in x.asdict().items():
        if t is not None:
            storage = torch.empty(t.numel() + 1, dtype=t.dtype, device=device)
            shifted[name] = storage[1:].view(t.shape).copy_(t)
    assert shifted["q"].is_contiguous() and shifted["q"].data_ptr() % 16
    got, _ = chunk_gated_delta_rule(**shifted, impl="triton")
    want, _ = chunk_gated_delta_rule(**x.asdict(), impl="triton")
    assert torch.equal(got, want)


@pytest.mark.parametrize("gen", GENERATIONS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_of_a_generation(gen, dtype, device, monkeypatch):
    """Its tiles compute the same; that they compile is tests/kernels."""
    gdn_checks.pretend(monkeypatch, gen)
    # values wider than a tile of the backward kernels: they take more than one of them
    x = gdn_checks.inputs(1, 40, 1, 2, 72, 100, dtype, device)
    do, dht = gdn_checks.cotangents(x)
    got = gdn_checks.run(x, do, dht, impl="triton", output_final_state=True)
    gdn_checks.check(got, gdn_checks.exact(x, do, dht), dtype)
    for K, V in ((100, 40), (200, 16)):
        x = gdn_inputs(1, 70, 1, 2, K, V, dtype=dtype, device=device, initial_state=True)
        want, _ = recurrent(**x.double().asdict())
        got, _ = chunk_gated_delta_rule(**x.asdict(), impl="triton")
        assert_close("o", got, want, TOLERANCE[dtype])


@pytest.mark.gpu
def test_more_heads_than_a_grid_axis_holds():
    x = gdn_inputs(40000, 1, 1, 2, 16, 16, device="cuda")
    o, _ = chunk_gated_delta_rule(**x.asdict())
    want, _ = recurrent(**x.double().asdict())
    assert_close("o", o, want, 5e-6)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_tensors_on_another_gpu_than_the_current_one():
    x = gdn_inputs(1, 70, 1, 2, 24, 40, device="cuda:1")
    o, _ = chunk_gated_delta_rule(**x.asdict())
    assert_close("o", o, recurrent(**x.double().asdict())[0], 5e-6)


def both_passes(stages, x, do, dht):
    """Outputs and gradients of the composition, by name."""
    arguments, options = x.asdict(), {"scale": 0.2, "initial_state": x.initial_state}
    del arguments["initial_state"]
    o, S, residuals = forward(stages, **arguments, **options, output_final_state=True)
    gradients = backward(stages, **arguments, residuals=residuals, do=do, dht=dht, **options)
    names = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
    return {"o": o, "S": S} | dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize("stage", [f.name for f in dataclasses.fields(stages("reference"))])
def test_any_one_stage_can_be_swapped(stage, device):
    x = gdn_inputs(1, 100, 1, 2, 24, 40, device=device, initial_state=True)
    do, dht = torch.randn_like(x.v), torch.randn_like(x.initial_state)
    mixed = dataclasses.replace(stages("reference"), **{stage: getattr(stages("triton"), stage)})
    want = both_passes(stages("reference"), x.double(), do.double(), dht.double())
    for name, got in both_passes(mixed, x, do, dht).items():
        if got is not None:
            tol = 5e-6 if name in ("o", "S") else tolerance(name, torch.float32)
            assert_close(name, got, want[name], tol)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("cut", [1, 64, 77])
def test_splitting_a_sequence_equals_one_call(impl, cut, device):
    x = gdn_inputs(1, 130, 1, 2, 24, 40, device=device, initial_state=True)
    o, final = chunk_gated_delta_rule(**x.asdict(), output_final_state=True, impl=impl)
    first = x.prefix(cut)
    o1, middle = chunk_gated_delta_rule(**first.asdict(), output_final_state=True, impl=impl)
    rest = {n: t[:, cut:] for n, t in x.asdict().items() if n != "initial_state"}
    o2, end = chunk_gated_delta_rule(
        **rest, initial_state=middle, output_final_state=True, impl=impl
    )
    assert_close("o", torch.cat([o1, o2], 1), o, 2e-6)
    assert_close("final_state", end, final, 2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("cut", [1, 40, 64, 100])
def test_causal_to_the_bit(cut, dtype, device):
    """Other tokens after the cut, gates included, or none at all: the outputs before it stay."""
    x = gdn_inputs(1, 130, 1, 2, 24, 40, dtype=dtype, device=device, initial_state=True)
    y = gdn_inputs(1, 130, 1, 2, 24, 40, dtype=dtype, device=device, seed=1, gate="reset")
    joined = {
        n: torch.cat([getattr(x, n)[:, :cut], getattr(y, n)[:, cut:]], 1)
        for n in ("q", "k", "v", "g", "beta")
    }
    o, _ = chunk_gated_delta_rule(**x.asdict(), impl="triton")
    other, _ = chunk_gated_delta_rule(**joined, initial_state=x.initial_state, impl="triton")
    short, _ = chunk_gated_delta_rule(**x.prefix(cut).asdict(), impl="triton")
    assert torch.equal(o[:, :cut], other[:, :cut])
    assert torch.equal(o[:, :cut], short)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_same_bits_every_run_and_in_any_batch(dtype, device):
    size = (40, 300, 2, 4, 64, 128) if device.type == "cuda" else (3, 100, 1, 2, 24, 40)
    x = gdn_inputs(*size, dtype=dtype, device=device, initial_state=True)
    runs = [
        chunk_gated_delta_rule(**x.asdict(), output_final_state=True, impl="triton")
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    one = {n: t[1:2] for n, t in x.asdict().items()}
    alone = chunk_gated_delta_rule(**one, output_final_state=True, impl="triton")
    assert all(torch.equal(a[1:2], b) for a, b in zip(runs[0], alone, strict=True))


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_non_contiguous_arguments_are_copied(impl, device):
    x = gdn_inputs(1, 20, 2, 2, 16, 24, device=device, initial_state=True)
    strided = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in x.asdict().items()}
    assert not strided["q"].is_contiguous()
    got, _ = chunk_gated_delta_rule(**strided, impl=impl)
    want, _ = chunk_gated_delta_rule(**x.asdict(), impl=impl)
    assert torch.equal(got, want)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_values_too_small_for_float16(impl, device):
    """A quarter wrong, as the documentation says; a power of two lifts them exactly."""
    x = gdn_inputs(1, 70, 1, 2, 24, 40, dtype=torch.float16, device=device)
    x.v, lift = (1e-6 * x.v.double()).half(), 2.0**20
    want, S = recurrent(**x.double().asdict())
    options = {"output_final_state": True, "impl": impl}
    got, _ = chunk_gated_delta_rule(**x.asdict(), **options)
    assert 0.01 < relative_rms(got, want) < 0.5
    x.v = x.v * lift
    got, state = chunk_gated_delta_rule(**x.asdict(), **options)
    assert_close("o", got.double() / lift, want, TOLERANCE[torch.float16])
    assert_close("final_state", state.double() / lift, S, TOLERANCE[torch.float16])


def test_state_is_returned_only_on_request(device):
    x = gdn_inputs(1, 8, 1, 1, 8, 8, device=device)
    assert chunk_gated_delta_rule(**x.asdict())[1] is None


def test_scale_is_a_factor_of_the_output(device):
    x = gdn_inputs(1, 40, 1, 1, 16, 8, device=device)
    o, _ = chunk_gated_delta_rule(**x.asdict())
    doubled, _ = chunk_gated_delta_rule(**x.asdict(), scale=2 * 16**-0.5)
    assert_close("o", doubled, 2 * o, 1e-6)


@settings(
    max_examples=40 if torch.cuda.is_available() else 15,  # each new shape is compiled there
    derandomize=not torch.cuda.is_available(),
    deadline=None,
)
@given(
    T=st.integers(1, 70),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    K=st.integers(1, 40),
    V=st.integers(1, 40),
    C=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    gate=st.sampled_from(GATES),
    beta=st.sampled_from([None, 0.0, 1.0]),
    repeated=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_valid_arguments(T, heads, K, V, C, dtype, gate, beta, repeated, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = gdn_inputs(
        1, T, *heads, K, V, dtype=dtype, device=device, initial_state=True, gate=gate, seed=seed
    )
    if beta is not None:
        x.beta[:] = beta
    if repeated:
        x.k[:] = x.k[:, :1]
    want = recurrent(**x.double().asdict())
    with poison():
        got = chunk_gated_delta_rule(**x.asdict(), output_final_state=True, chunk_size=C)
    # each reset adds 150 to the sum whose spacing later decays are rounded to (chapter 02)
    tol = max(TOLERANCE[dtype], 1e-3 if gate == "reset" else 0)
    sizes = (("o", K**-0.5), ("final_state", 1.0))  # what v and the initial state, of rms 1, give
    for (name, size), a, b in zip(sizes, got, want, strict=True):
        rms = b.square().mean().sqrt().item()
        assert_close(name, a, b, tol * max(1.0, size / rms if rms else size))
