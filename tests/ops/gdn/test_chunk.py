"""The public function: against the recurrence, and the properties a user relies on."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.reference.delta.recurrent import recurrent
from linattn_edu.testing import assert_close, gdn_inputs, poison, relative_rms

GATES = ("trained", "none", "reset", "closed")
# relative RMS of o against float64, for outputs of ordinary size
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


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
