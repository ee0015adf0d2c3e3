"""What is left of a chunk in the fused backward pass of Kimi Delta Attention: kernel, reference."""

import pytest
import stages
import torch
from delta.stage_checks import CHUNKS, SIZES, TOKENS, check_packed, of_sequences
from fused.kda_checks import GATES, SCALE, needs_gluon
from gdn_checks import launches
from grids import combinations, parametrize

from linattn_edu.kernels.delta.kda_bwd import kda_output_bwd, kda_wy_bwd
from linattn_edu.kernels.delta.kda_intra import kda_intra as kda_intra_kernel
from linattn_edu.kernels.delta.kda_intra_bwd import kda_intra_bwd
from linattn_edu.kernels.fused import kda_bwd as kernels
from linattn_edu.kernels.fused.kda_scans import kda_fused_scans, kda_gates
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.fused import kda_bwd as references
from linattn_edu.reference.fused.kda_scans import kda_gated
from linattn_edu.testing import gdn_inputs, relative_rms

pytestmark = pytest.mark.usefixtures("poison")
HEADS = (16, 34, 64, 100, 128)


STAGE = ("kda_fused_intra_bwd", "kda_fused")
kda_fused_intra_bwd = stages.find(*STAGE).kernel  # on a copy of Z
GATED = ("kda_fused_intra_bwd", "gdn2_fused")
CASES = [(*case, torch.bfloat16) for case in combinations(1, T=TOKENS, K=HEADS, V=HEADS, C=CHUNKS)]

test_kernel_matches_reference = stages.matches(*STAGE, pytest.mark.parametrize(SIZES, CASES))
test_erase_and_write_gates = stages.matches(*GATED, pytest.mark.parametrize(SIZES, CASES[::3]))


few = pytest.mark.parametrize(SIZES, CASES[1::9])
test_products_with_states = stages.matches("kda_outer_bwd", "kda_fused", few)
test_products_with_two_gates = stages.matches("kda_outer_bwd", "gdn2_fused", few)
test_with_the_gate = stages.matches("kda_intra_gate_bwd", "kda_fused", few)
test_with_two_gates = stages.matches("kda_intra_gate_bwd", "gdn2_fused", few)


@parametrize(gate=GATES, C=CHUNKS)
def test_every_gate_and_chunk(gate, C, device):
    stages.check(*STAGE, 70, 34, 20, C, torch.bfloat16, device, H=2, gate=gate)


@pytest.mark.parametrize("V", [24, 64])
def test_packed_sequences_have_the_bits_they_have_alone(V, device):
    def run(tokens, chunks, _, **packed):
        (q, k, v, beta, gc, v_new, do, Z), (h, dh) = tokens, chunks
        args, options = (q, k, v, beta, gc, h, v_new, do, dh, Z), {"scale": SCALE, "chunk_size": 16}
        return kda_fused_intra_bwd(*args, **options, **packed), (), ()

    r = stages.parts("kda_fused", 150, 20, V, 16, torch.bfloat16, device, H=2)
    gc = of_sequences(lambda g: gate_cumsum(g, chunk_size=16), r.g)
    chunks = torch.randn(2, 1, 11, 2, 20, V, device=device).bfloat16()
    check_packed(run, (r.q, r.k, r.v, r.beta, gc, r.v_new, r.do, r.Z), chunks)


@pytest.mark.parametrize(("K", "V", "C"), [(128, 128, 64), (100, 64, 32), (150, 16, 64)])
def test_near_and_far_channels_in_one_chunk(K, V, C, device):
    """Groups of channels that close at one place of a chunk, or are shut; with dP and dL in the
    place of Z, and by themselves.
    """
    g = -torch.rand(1, 100, 2, K, device=device) / 8
    g[:, 64:, :, 64:] = -20
    g[:, 90:, 1, :64] = -200
    g[:, :30, 0, 64:128] = -1e4
    stages.check(*STAGE, 100, K, V, C, torch.bfloat16, device, H=2, g=g)


@pytest.mark.gpu
@pytest.mark.parametrize("far", [False, True], ids=["near", "near and far"])
@pytest.mark.parametrize(("T", "HV"), [(64, 4), (2560, 8)])
def test_kda_intra_bwd_gluon(T, HV, far, device, force):
    """No farther from float64 than the two stages; twice, since programs reuse their places for
    chunk after chunk.
    """
    needs_gluon(device)
    gluon = kernels.kda_intra_bwd_gluon
    x = gdn_inputs(2, T, HV, HV, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    g = -torch.rand(2, T, HV, 128, device=device) / 8
    if far:
        g[:, :64, ::2, 64:] = -20
        g[:, ::7, 1] = -30
        g[:, 20:40, 2, :64] = -1e4
    gc, options = gate_cumsum(g, chunk_size=64), {"chunk_size": 64}
    P, A = kda_intra(x.q, x.k, x.beta, gc, **options)
    kd, kg, qg = kda_gated(x.q, x.k, gc, **options)
    do, options["scale"] = torch.randn_like(x.v), SCALE
    scans = kda_fused_scans(qg, kg, kd, x.v, x.beta, gc, P, A, do, scale=SCALE)
    h, v_new, dh, Z, *_ = scans
    args = x.q, x.k, x.v, x.beta, gc, h, v_new, do, dh, Z
    exact = references.kda_fused_intra_bwd(*(t.double() for t in args), **options)
    dqg, dP = kda_output_bwd(v_new, h, do, **options)
    one = torch.eye(64, dtype=x.v.dtype, device=device).repeat(T // 64, 1)  # dv_new is Z already
    one = one[:, None].expand(2, -1, HV, -1).contiguous()
    dkb, dkg, _, dL, dbeta, dgl = kda_wy_bwd(x.v, x.beta, one, h, v_new, dh, Z)
    staged = kda_intra_bwd(*args[:2], *args[3:5], dP, dL, dqg, dkb, dkg, dgl, dbeta)
    force(ENOUGH=1)
    with launches() as ran:
        got, again = (kda_fused_intra_bwd(*args, **options) for _ in range(2))
    assert gluon.kda_intra_bwd_gluon_kernel in ran
    assert all(map(torch.equal, got, again))
    for name, a, b, want in zip(("dq", "dk", "dbeta", "dgc"), got, staged, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert relative_rms(a, want) <= 1.02 * relative_rms(b, want), name


@pytest.mark.gpu
@pytest.mark.parametrize("far", [False, True], ids=["near", "near and far"])
def test_kda_intra_bwd_gluon_in_halves(far, device, force):
    """No farther from float64 than the plain kernels, but for rows of channels that are not near,
    which are rounded as the states are; twice. A beta of 0, and beyond 1.
    """
    needs_gluon(device)
    x = gdn_inputs(2, 2560, 4, 4, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    g = -torch.rand(2, 2560, 4, 128, device=device) / 8
    if far:
        g[:, :64, ::2, 64:] = -20
        g[:, ::7, 1] = -30
    beta, do = 2 * torch.rand(2, 2560, 4, device=device), torch.randn_like(x.v)
    beta[:, ::9] = 0
    halves, options = {"chunk_size": 64, "fine": True}, {"chunk_size": 64, "scale": SCALE}
    gc, kd, kg, qg = kda_gates(x.q, x.k, g, **halves)
    P, A = kda_intra_kernel(x.q, x.k, beta, gc, chunk_size=64, precision="halves")
    given = qg, kg, kd, x.v, beta, gc, P, A, do
    h, v_new, dh, Z, *_ = kda_fused_scans(*given, scale=SCALE, fine=True)
    args = [x.q, x.k, x.v, beta, gc, h, v_new, do, dh, Z]
    wide = [t.double() for t in args]
    wide[6], wide[9] = (sum(t.chunk(2, -1)) for t in (wide[6], wide[9]))
    exact = references.kda_fused_intra_bwd(*wide, **options)
    with forced(kda_fused_intra_bwd="triton"):
        plain = kda_fused_intra_bwd(*args, **options, fine=True)
    force(ENOUGH=1)
    with launches() as ran:
        got, again = (kda_fused_intra_bwd(*args, **options, fine=True) for _ in range(2))
    assert kernels.kda_intra_bwd_gluon.kda_intra_bwd_gluon_kernel in ran
    assert all(map(torch.equal, got, again))
    for name, a, b, want in zip(("dq", "dk", "dbeta", "dgc"), got, plain, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        # of rounded states float64 has another dbeta
        most = 2**-12 if name == "dbeta" else 2**-13 if far else 0
        assert relative_rms(a, want) <= max(1.02 * relative_rms(b, want), most), name
