"""Stage kda_scans: kernel against reference, and against the stages whose place it takes."""

import pytest
import stages
import torch
from delta.stage_checks import check_packed, check_stage
from fused.kda_checks import GATES, SCALE, backward_parts
from gdn_checks import launches

from linattn_edu.kernels.delta import kda_scans as kernels
from linattn_edu.kernels.delta.state import state
from linattn_edu.kernels.delta.state_bwd import state_bwd
from linattn_edu.reference.delta.kda_scans import kda_scans as reference
from linattn_edu.reference.delta.state import state as state_reference
from linattn_edu.reference.delta.state_bwd import state_bwd as state_bwd_reference
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")


def arguments(x, r):
    return r.qg, r.kg, r.w, r.u, r.gc, r.P, r.do, x.initial_state, r.dht


def check(*stage, **options):
    """In one launch."""
    with launches() as ran:
        check_stage(*stage, **options)
    assert ran == [kernels.kda_scans_kernel]


test_kernel_matches_reference = stages.matches("kda_scans", "kda", check=check)


@pytest.mark.parametrize("gate", GATES)
def test_without_states_at_the_ends(gate, device):
    sizes = (70, 33, 65, 32, torch.float32, device)
    stages.check("kda_scans", "kda", *sizes, H=2, gate=gate, without=["h0", "dht"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_state_and_state_bwd(dtype, device):
    """Whoever kept h and v_new, or has them made by another launch, gets the same gradients."""
    x, r = backward_parts(100, 48, 40, 32, dtype, device, H=2)
    got = kernels.kda_scans(*arguments(x, r), scale=SCALE)
    h, v_new, _ = state(r.kg, r.w, r.u, r.gc, x.initial_state, chunk_size=32)
    args = (r.qg, r.kg, r.w, r.gc, r.do, None, r.dht)
    back = state_bwd(*args, P=r.P, scale=SCALE, chunk_size=32)
    assert all(map(torch.equal, got, (h, v_new, *back)))


def test_packed_sequences_have_the_bits_they_have_alone(device):
    def run(tokens, _, states, **packed):
        h, v_new, dh, dv_new, dh0 = kernels.kda_scans(*tokens, *states, scale=SCALE, **packed)
        return (v_new, dv_new), (h, dh), (dh0,)

    r = stages.parts("kda", 150, 20, 24, 16, torch.float32, device, H=2)
    check_packed(run, (r.qg, r.kg, r.w, r.u, r.gc, r.P, r.do), states=(r.h0, r.dht))


def test_reference_is_the_two_stages_from_dv_new_in_float64():
    """With P in the place of scale P^T dO, which another stage would have made."""
    x, r = backward_parts(130, 20, 12, 32, torch.float64, "cpu", H=2)
    options = {"chunk_size": 32}
    dv_out = torch.empty_like(r.do)
    for first in range(0, 130, 32):  # P^T dO, chunk by chunk
        chunk = slice(first, first + 32)
        P = r.P[:, chunk].transpose(1, 2)[..., : r.do[:, chunk].shape[1]]
        dv_out[:, chunk] = SCALE * (P.mT @ r.do[:, chunk].transpose(1, 2)).transpose(1, 2)
    h, v_new, _ = state_reference(r.kg, r.w, r.u, r.gc, x.initial_state, **options)
    args = (r.qg, r.kg, r.w, r.gc, r.do, dv_out, r.dht)
    want = h, v_new, *state_bwd_reference(*args, scale=SCALE, **options)
    got = reference(*arguments(x, r), scale=SCALE)
    for name, a, b in zip(("h", "v_new", "dh", "dv_new", "dh0"), got, want, strict=True):
        assert_close(name, a, b, 1e-13)
