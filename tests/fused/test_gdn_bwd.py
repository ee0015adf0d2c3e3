"""The fused backward stages: kernels against references, and the composition against the staged."""

import pytest
import stages as registry
import torch
from delta.stage_checks import check_stage
from fused.parts import small
from gdn_checks import PAYS, launches, without_gluon

from linattn_edu.choices import GPUS, ask
from linattn_edu.kernels.fused import gdn_bwd as kernels
from linattn_edu.kernels.fused.gdn_intra import intra_chunk as intra_chunk_kernel
from linattn_edu.kernels.fused.gdn_scans import scan_bwd, scan_states
from linattn_edu.kernels.routes import by_load, forced, kind_of, load_of
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused import gdn_bwd as references
from linattn_edu.reference.fused.gdn_intra import intra_chunk, intra_halves
from linattn_edu.testing import assert_close, gdn_inputs, relative_rms

pytestmark = pytest.mark.usefixtures("poison")


test_intra_bwd_kernel_matches_reference = registry.matches("intra_chunk_bwd", "gdn_fused")


def a_head_each(r):
    r.q, r.k = (t.repeat_interleave(2, 2) for t in (r.q, r.k))


def test_intra_bwd_kernel_with_a_head_each(device):
    """Without heads to add up: the other branch of the kernel."""
    sizes = ("gdn_fused", 100, 32, 48, 32, small(device), device)
    registry.check("intra_chunk_bwd", *sizes, change=a_head_each)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_no_gate_has_made_leaves_dgc(dtype, device):
    """Pairs of tokens of one chunk, by dL alone: what one gets another loses. A beta of 0 too."""
    x = gdn_inputs(1, 64, 1, 1, 32, 32, dtype=dtype, device=device, seed=0)
    x.beta[:, ::7], none = 0, torch.zeros(1, 1, 1, 32, 32, dtype=dtype, device=device)
    gc, nothing = gate_cumsum(x.g, chunk_size=64), torch.zeros_like(x.v)
    args = x.q, x.k, x.v, x.beta, gc, none, x.v, nothing, none, x.v.flip(1)
    options = {"scale": 0.3, "chunk_size": 64}
    dbeta, dgc = kernels.intra_chunk_bwd(*args, **options)[2:]
    assert dgc.sum().abs() < 1e-5 * dgc.abs().sum()
    want = references.intra_chunk_bwd(*args, **options)[2]
    assert_close("dbeta", dbeta, want, 2 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "halves"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
    ids=["bfloat16", "float16", "halves"],
)
@pytest.mark.parametrize("HV", [4, 8, 16])
def test_intra_bwd_gluon(HV, dtype, halves, device, force):
    """No farther from float64 than the other kernel; twice, since programs reuse their places for
    chunk after chunk: what is copied ahead must not be overtaken.
    """
    gluon, B, T, H = kernels.gdn_intra_bwd, 2, 2560, 4  # three chunks a program, and two
    if why := without_gluon(device):
        pytest.skip(why)
    x = gdn_inputs(B, T, H, HV, 128, 128, dtype=dtype, device=device, seed=0)
    gc, do, low = gate_cumsum(x.g, chunk_size=64), torch.randn_like(x.v), ()
    if halves:
        x.beta[:, ::9] *= 2
        P, AG, *low = intra_halves(x.q, x.k, x.beta, gc, chunk_size=64)
    else:
        options = {"return_inverse": True, "gated": True}
        P, _, AG = intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64, **options)
    h, v_new, *v_low = scan_states(x.k, x.v, x.beta, gc, AG, None, *low[1:])
    dh, Z, _, _, *Z_low = scan_bwd(x.q, x.k, x.beta, gc, P, AG, do, None, low or None, scale=0.3)
    args, options = [x.q, x.k, x.v, x.beta, gc, h, v_new, do, dh, Z], {"scale": 0.3}
    options["chunk_size"] = 64
    low = [*v_low, *Z_low]
    exact = references.intra_chunk_bwd(
        *(t.double() for t in args), [t.double() for t in low] or None, **options
    )
    args += [low] if halves else []
    with forced(intra_chunk_bwd="triton"):
        plain = kernels.intra_chunk_bwd(*args, **options)
    force(ENOUGH=1)
    with launches() as ran:
        got, again = (kernels.intra_chunk_bwd(*args, **options) for _ in range(2))
    assert ran == [gluon.intra_chunk_bwd_gluon_kernel] * 2
    assert all(map(torch.equal, got, again))
    for name, a, b, want in zip(("dq", "dk", "dbeta", "dgc"), got, plain, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert relative_rms(a, want) <= 1.01 * relative_rms(b, want), name


@pytest.mark.parametrize("V", [32, 48], ids=["in the place of v_new and Z", "apart"])
def test_chunk_bwd_kernels_match_reference(V, device):
    r = registry.parts("gdn_fused", 100, 32, V, 32, small(device), device)
    a_head_each(r)
    args = (r.q, r.k, r.v, r.beta, r.gc, r.P, r.AG, r.do, r.h0, r.dht)
    check_stage(kernels.chunk_bwd, references.chunk_bwd, args, scale=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize(("T", "H", "HV"), [(256, 8, 8), (1024, 4, 8), (16384, 8, 8)])
def test_chunk_bwd_in_head_groups_gives_the_same_bits(T, H, HV, given, device, force):
    """Whole sequences, heads that share a key, and pieces by their maps."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    x = gdn_inputs(2, T, H, HV, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    gc, do = gate_cumsum(x.g, chunk_size=64), torch.randn_like(x.v)
    options = {"chunk_size": 64, "return_inverse": True, "gated": True}
    P, _, AG = intra_chunk_kernel(x.q, x.k, x.beta, gc, **options)
    states = torch.randn(2, 2, HV, 128, 128, device=device)
    args = (x.q, x.k, x.v, x.beta, gc, P, AG, do, *(states if given else (None, None)))
    found = {}
    for groups in (1, 2, 4):
        force(head_groups=groups)
        with launches() as ran:
            found[groups] = kernels.chunk_bwd(*args, scale=0.3)
        assert ran.count(kernels.gdn_intra_bwd.intra_chunk_bwd_gluon_kernel) == groups
    for got in (found[2], found[4]):
        assert all(map(torch.equal, got, found[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize(
    ("B", "T", "H", "groups"), [(3, 64, 1, 1), (2, 448, 3, 3), (10, 2048, 16, 1), (16, 1024, 16, 2)]
)
def test_chunk_bwd_in_one_kernel_gives_the_same_bits(B, T, H, groups, given, dtype, device, force):
    """Twice: dS and Z stay in shared memory, where no chunk may overtake another."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS, head_groups=groups)
    x = gdn_inputs(B, T, H, H, 128, 128, dtype=dtype, device=device, seed=0)
    gc, do = gate_cumsum(x.g, chunk_size=64), torch.randn_like(x.v)
    options = {"chunk_size": 64, "return_inverse": True, "gated": True}
    P, _, AG = intra_chunk_kernel(x.q, x.k, x.beta, gc, **options)
    states = torch.randn(2, B, H, 128, 128, device=device)
    args = (x.q, x.k, x.v, x.beta, gc, P, AG, do, *(states if given else (None, None)))
    force(scan_intra_bwd="two")
    want = kernels.chunk_bwd(*args, scale=0.3)
    force(scan_intra_bwd="one")
    for _ in range(2):
        with launches() as ran:
            got = kernels.chunk_bwd(*args, scale=0.3)
        assert ran[1::2] == [kernels.gdn_bwd.scan_intra_bwd_gluon_kernel] * groups
        assert all(map(torch.equal, got, want))


@pytest.mark.gpu
def test_head_groups_hold_the_states_of_one_at_a_time(device, force):
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    x = gdn_inputs(2, 4096, 8, 8, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    gc, do = gate_cumsum(x.g, chunk_size=64), torch.randn_like(x.v)
    options = {"chunk_size": 64, "return_inverse": True, "gated": True}
    P, _, AG = intra_chunk_kernel(x.q, x.k, x.beta, gc, **options)
    args, peaks = (x.q, x.k, x.v, x.beta, gc, P, AG, do), {}
    for groups in (1, 4):
        force(head_groups=groups)
        kernels.chunk_bwd(*args, scale=0.3)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kernels.chunk_bwd(*args, scale=0.3)
        peaks[groups] = torch.cuda.max_memory_allocated() - before
    states = 2 * 2 * 4096 // 64 * 8 * 128 * 128 * 2  # bytes of h and dh of all heads
    assert peaks[1] - peaks[4] > states / 2


def test_head_groups_leave_no_more_idle():
    for (B, T, H, HV, one), want in {
        (8, 4096, 16, 16, False): 2,  # 256 programs: two rounds of 128
        (32, 4096, 16, 16, False): 8,
        (8, 4096, 16, 16, True): 1,  # 128 programs
        (32, 4096, 16, 16, True): 4,
        (1, 32768, 16, 32, False): 1,  # cut: a head that does not forget takes as long as all
        (4, 4096, 16, 16, False): 1,  # one round
        (8, 512, 16, 16, False): 1,  # small
        (12, 4096, 16, 16, False): 1,  # 384 programs: halves would take four rounds, not three
    }.items():
        q = torch.empty(B, T, H, 128, device="meta", dtype=torch.bfloat16)
        with ask(GPUS["h100"], lambda *_: None):
            load = load_of(kind_of(q, HV, 128, 64, None)._replace(gluon=""), q, None)
            assert by_load.head_groups(load, one).takes == want
