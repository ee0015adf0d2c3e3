"""Stage kda_intra_bwd: kernel against reference, and what cancels to the bit."""

import pytest
import stages
import torch
from delta.stage_checks import DTYPES, check_stage
from fused.kda_checks import backward_parts, gates, once

from linattn_edu.kernels.delta.kda_intra_bwd import CONFIGS, kda_intra_bwd
from linattn_edu.kernels.rows import entry
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra_bwd import kda_intra_bwd as reference

pytestmark = pytest.mark.usefixtures("poison")


def kernel(*args):
    """The kernel on a copy of dbeta, to which it adds in place."""
    *args, dbeta = args
    return kda_intra_bwd(*args, dbeta.clone())


def arguments(x, r):
    return x.q, x.k, x.beta, r.gc, r.dP, r.dL, r.dqg, r.dkb, r.dkg, r.dgl, r.dbeta


test_kernel_matches_reference = stages.matches("kda_intra_bwd", "kda", once)

test_an_erase_gate = stages.matches("kda_intra_bwd", "gdn2")


def test_an_erase_gate_leaves_the_row_of_others(device):
    """Its own is narrower; every launch with these keys has the same row."""
    k = torch.empty(1, dtype=torch.bfloat16, device=device)
    before = dict(entry(CONFIGS, k).launch(36))
    stages.check("kda_intra_bwd", "gdn2", 40, 36, 16, 32, torch.bfloat16, device)
    assert entry(CONFIGS, k).launch(36) == before


@gates
def test_any_gate(C, gate, dtype, device):
    """One value head a key head; channels that are shut, open, or decay by any factor."""
    for family in ("kda", "gdn2"):
        stages.check("kda_intra_bwd", family, 33, 20, 16, C, dtype, device, H=2, gate=gate)


@pytest.mark.parametrize("C", [64, 32])
@pytest.mark.parametrize("K", [128, 100])
def test_near_and_far_channels_in_one_chunk(K, C, device):
    """Two groups of channels: the second closes in one chunk, and the first at a chunk's end."""
    x, r = backward_parts(150, K, 16, C, torch.bfloat16, device, H=2)
    g = -torch.rand(1, 150, 2, K, device=device) / 8
    g[:, 64:128, :, 64:] = -20
    g[:, 140:, 1, :64] = -200
    r.gc = gate_cumsum(g, chunk_size=C)
    check_stage(kernel, reference, arguments(x, r))


def test_far_channels_between_near_ones(device):
    """Three groups of channels, the last of them not whole: what a far one overflows stays there,
    in dbeta too, to which all groups add."""
    x, r = backward_parts(70, 150, 16, 64, torch.bfloat16, device, H=2)
    g = -torch.rand(1, 70, 2, 150, device=device) / 8
    g[:, :, 0, 64:128] = -200
    g[:, 40:, 1, 128:] = -1e4
    r.gc = gate_cumsum(g, chunk_size=64)
    check_stage(kernel, reference, arguments(x, r))


def test_dbeta_is_added_to(device):
    x, r = backward_parts(40, 16, 16, 32, torch.float32, device)
    *args, dbeta = arguments(x, r)
    _, _, alone, _ = kernel(*args, torch.zeros_like(dbeta))
    _, _, got, _ = kernel(*args, dbeta)
    torch.testing.assert_close(got, alone + dbeta, rtol=0, atol=1e-5)


def test_beta_zero_leaves_no_key_s_own_read(device):
    sizes = (70, 16, 16, 32, torch.float32, device)
    stages.check("kda_intra_bwd", "kda", *sizes, change=lambda r: r.beta.zero_())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_pair_gives_and_takes_the_same(dtype, device):
    """A pair's part of dgc is +x at the later token and -x at the earlier one. With one channel
    and dP at one pair alone nothing is added to either: the two are equal to the bit, but for
    float32 on a GPU, where a factor of a product is two numbers of TF32, 22 bits.
    """
    x, r = backward_parts(64, 1, 16, 64, dtype, device, H=2)
    *args, dbeta = arguments(x, r)
    x.q, x.k, x.beta, _, _, *others = (y[:, :, :1].contiguous() for y in args)
    r.gc = gate_cumsum(-torch.rand(1, 64, 1, 1, device=device) / 8, chunk_size=64)
    zeros = [torch.zeros_like(y) for y in (*others, dbeta[:, :, :1])]
    for i, j in ((1, 0), (17, 3), (63, 31)):
        dP = torch.zeros_like(zeros[0], dtype=torch.float32)
        dP[:, i, :, j] = 1
        *_, dgc = kernel(x.q, x.k, x.beta, r.gc, dP, *zeros)
        given, taken = dgc[:, i].clone(), -dgc[:, j]
        exact = 2**-21 if dgc.is_cuda and dtype == torch.float32 else 0
        assert given.all() and ((given - taken).abs() <= exact * given.abs()).all(), (given, taken)
        dgc[:, [i, j]] = 0
        assert not dgc.any()
