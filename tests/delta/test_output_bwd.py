"""Stage output_bwd: kernel against reference."""

import pytest
import stages
import torch

from linattn_edu.kernels.delta.output_bwd import output_bwd
from linattn_edu.ops import gdn
from linattn_edu.packing import pack
from linattn_edu.reference.delta import output_bwd as reference
from linattn_edu.testing import assert_close, gdn_inputs

test_kernel_matches_reference = stages.matches("output_bwd")
pytestmark = pytest.mark.usefixtures("poison")


def test_one_value_head_a_key_head(device):
    stages.check("output_bwd", "gdn", 70, 33, 65, 32, torch.float32, device, H=2)


def arguments(x, C):
    """q, k, v_new, h, gc, do, by the reference's stages."""
    s, own = gdn.stages("reference"), {"chunk_size": C}
    gc = s.gate_cumsum(x.g, **own)
    w, u = s.wy(x.k, x.v, x.beta, gc, s.solve(x.k, x.beta, **own))
    h, v_new, _ = s.state(x.k, w, u, gc, x.initial_state, **own)
    return x.q, x.k, v_new, h, gc, torch.randn_like(x.v)


@pytest.mark.parametrize(
    "gate, K, V", [("trained", 200, 100), ("reset", 40, 40), ("closed", 40, 40)]
)
def test_gates(gate, K, V, device):
    """Several tiles of keys and values; gates of which some or all close.

    Where all do, dgc is smaller than any number of float32: 0, as the diagonal is left out.
    """
    x = gdn_inputs(1, 70, 2, 2, K, V, seed=15, gate=gate, device=device, initial_state=True)
    args, options = arguments(x, 32), {"scale": 0.2, "chunk_size": 32}
    want = reference.output_bwd(*(t.double() for t in args), **options)
    got = output_bwd(*args, **options)
    for name, a, b in zip(("dq", "dk", "dv_new", "dgc"), got, want, strict=True):
        assert_close(name, a, b.where(b.abs() > 2.0**-126, 0.0), 5e-6)


def test_packed_sequences_keep_their_bits(device):
    alone, options = [], {"scale": 0.2, "chunk_size": 64}
    for T in (70, 3, 77):
        x = gdn_inputs(1, T, 1, 2, 33, 20, seed=T, dtype=torch.bfloat16, device=device,
                       initial_state=True)  # fmt: skip
        alone.append(arguments(x, 64))
    want = [torch.cat(t, 1) for t in zip(*(output_bwd(*y, **options) for y in alone), strict=True)]
    packing = pack(torch.tensor([0, 70, 73, 150], device=device), 64)
    together = (torch.cat(t, 1) for t in zip(*alone, strict=True))
    for a, b in zip(output_bwd(*together, packing=packing, **options), want, strict=True):
        assert torch.equal(a, b)
