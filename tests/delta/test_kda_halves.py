"""The stages with a gate for each channel, where fp32 is multiplied in two halves of bfloat16."""

import pytest
import stages
import torch
from delta.stage_checks import is_real, outputs
from fused.kda_checks import backward_parts, parametrize

from linattn_edu.kernels.routes import forced
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.testing import relative_rms

pytestmark = pytest.mark.usefixtures("poison")

# two numbers of bf16 keep 16 bits, and their product loses that of both second ones
CLOSE = {torch.float32: 2**-15, torch.bfloat16: 2**-9}


def halved(kernel, reference, args, **options):
    """Each output is as near the exact one as its numbers are, and of fp32 no nearer."""
    wide = [x.double() if is_real(x) else x for x in args]
    exact = outputs(reference(*wide, **options))
    errors = []
    for x, ref in zip(outputs(kernel(*args, precision="halves", **options)), exact, strict=True):
        errors.append(relative_rms(x, ref) / CLOSE[x.dtype])
    rounds = not any(x.dtype == torch.bfloat16 for x in args if is_real(x))
    assert 2**-6 * rounds <= max(errors) < 1


def rounded(r):
    """What a user gives, and dO, in bfloat16."""
    for name in ("q", "k", "v", "do"):
        setattr(r, name, getattr(r, name).bfloat16())


WAYS = {"change": (None, rounded)}


@parametrize(1, gate=("mixed", "shut", "open"), C=(64, 32), K=(72, 24), **WAYS)
def test_halves_are_near(gate, C, K, change, device):
    sizes = (70, K, 40, C, torch.float32, device)
    how = {"H": 2, "gate": gate, "check": halved, "change": change}
    stages.check("kda_intra kda_intra_bwd", "kda", *sizes, **how)


@parametrize(1, gate=("mixed", "open"), **WAYS)
def test_gates_for_what_is_erased_and_written(gate, change, device):
    names, sizes = "kda_intra kda_intra_bwd", (70, 36, 40, 64, torch.float32)
    how = {"H": 2, "gate": gate, "check": halved, "change": change}
    stages.check(names, "gdn2", *sizes, device, **how)


def test_near_and_far_channels_in_one_chunk(device):
    """Channels that are near are anchored once, by a kernel of their own; the others are not."""
    x, r = backward_parts(100, 72, 16, 64, torch.float32, device, H=2)
    g = -torch.rand(1, 100, 2, 72, device=device) / 8
    g[:, 64:, :, 64:] = -20
    g[:, 90:, 1, :64] = -200
    r.gc = gate_cumsum(g, chunk_size=64)
    args = x.q, x.k, x.beta, r.gc, r.dP, r.dL, r.dqg, r.dkb, r.dkg, r.dgl, r.dbeta
    stage = stages.find("kda_intra_bwd", "kda")
    halved(stage.kernel, stage.reference, args)
    anchored = stage.kernel(*args, precision="halves")
    with forced(kda_near="all"):
        halved(stage.kernel, stage.reference, args)
        others = stage.kernel(*args, precision="halves")
    assert not torch.equal(anchored[0], others[0])
