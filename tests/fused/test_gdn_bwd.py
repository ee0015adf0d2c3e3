"""The fused backward stages: kernels against references, and the composition against the staged."""

from types import SimpleNamespace

import pytest
import torch
from delta.stage_checks import DTYPES, check_rounded, check_stage, grid, inputs
from gdn_checks import launches

from linattn_edu.kernels import pieces
from linattn_edu.kernels.delta import warm_up
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.fused import gdn_bwd as kernels
from linattn_edu.kernels.fused.gdn_fwd import intra_chunk as intra_chunk_kernel
from linattn_edu.kernels.fused.gdn_fwd import scan_map as scan_map_kernel
from linattn_edu.kernels.gluon import support
from linattn_edu.ops.gdn import backward, forward, fused_stages, stages
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused import gdn_bwd as references
from linattn_edu.reference.fused.gdn_fwd import intra_chunk, scan_map
from linattn_edu.testing import assert_close, gdn_inputs, relative_rms

pytestmark = pytest.mark.usefixtures("poison")


def small(device):
    """A dtype that the kernels hold: on a GPU of 16 bits."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def arguments(T, K, V, C, dtype, device):
    """(inputs, everything the fused backward stages read), by the reference stages."""
    x = inputs(T, K, V, dtype, device)
    if x.q.is_cuda and not kernels.fits(x.q, x.v):
        pytest.skip("heads that the fused stages do not hold")
    r = SimpleNamespace(do=torch.randn_like(x.v), dht=torch.randn_like(x.initial_state))
    r.gc = gate_cumsum(x.g, chunk_size=C)
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    r.P, r.R, r.AG = intra_chunk(x.q, x.k, x.beta, r.gc, **options)
    r.h, r.v_new = references.scan_states(x.k, x.v, x.beta, r.gc, r.AG, x.initial_state)
    args = (x.q, x.k, x.beta, r.gc, r.P, r.AG, r.do, r.dht)
    r.dh, r.Z, *_ = references.scan_bwd(*args, scale=0.3)
    return x, r


@grid
def test_scan_states_kernel_matches_reference(T, K, V, C, dtype, device):
    x, r = arguments(T, K, V, C, dtype, device)
    args = (x.k, x.v, x.beta, r.gc, r.AG, x.initial_state)
    check_stage(kernels.scan_states, references.scan_states, args)


@grid
def test_scan_bwd_kernel_matches_reference(T, K, V, C, dtype, device):
    x, r = arguments(T, K, V, C, dtype, device)
    args = (x.q, x.k, x.beta, r.gc, r.P, r.AG, r.do, r.dht)
    check_stage(kernels.scan_bwd, references.scan_bwd, args, scale=0.3)


@grid
def test_scans_kernel_matches_reference(T, K, V, C, dtype, device, monkeypatch):
    """Both directions in one grid, where each alone would leave multiprocessors idle."""
    x, r = arguments(T, K, V, C, dtype, device)
    known = kernels.device_of(x.q)[0], 10**6  # multiprocessors
    monkeypatch.setattr(kernels, "device_of", lambda _: known)
    args = (x.q, x.k, x.v, x.beta, r.gc, r.P, r.AG, r.do, x.initial_state, r.dht)
    with launches() as ran:
        check_stage(kernels.scans, references.scans, args, scale=0.3)
    assert ran == [kernels.scans_kernel]


def test_scans_are_one_launch_or_two(device, monkeypatch):
    """The same bits, whichever way the number of programs decides."""
    x, r = arguments(100, 32, 48, 32, small(device), device)
    args = (x.q, x.k, x.v, x.beta, r.gc, r.P, r.AG, r.do, x.initial_state, r.dht)
    found = []
    for processors, ran in ((1, 2), (132, 1)):
        known = kernels.device_of(x.q)[0], processors
        monkeypatch.setattr(kernels, "device_of", lambda _, known=known: known)
        with launches() as names:
            found.append(kernels.scans(*args, scale=0.3))
        assert len(names) == ran
    assert all(map(torch.equal, *found))


@pytest.fixture
def plain_and_gluon(device, monkeypatch):
    """The scans of what `gdn_inputs` gives, in plain Triton, then in Gluon, twice."""
    scans_gluon = kernels.gdn_scans
    if scans_gluon is None:
        pytest.skip("made for another Triton")
    monkeypatch.setattr(scans_gluon.gdn_scan, "pays", lambda *_: True)
    kinds = scans_gluon.scans_gluon_kernel, scans_gluon.scan_bwd_gluon_kernel

    def run(x, h0, dht):
        gc = gate_cumsum_kernel(x.g, chunk_size=64)
        options = {"chunk_size": 64, "return_inverse": True, "gated": True}
        P, _, AG = intra_chunk_kernel(x.q, x.k, x.beta, gc, **options)
        if not scans_gluon.fits(x.q, x.k, x.v, P, AG, None):
            pytest.skip("made for Hopper and another Triton")
        torch.manual_seed(1)
        args = (x.q, x.k, x.v, x.beta, gc, P, AG, torch.randn_like(x.v), h0, dht)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "gdn_scans", None)
            want = kernels.scans(*args, scale=0.3)
        for _ in range(2):  # what is copied ahead must not be overtaken
            with launches() as ran:
                got = kernels.scans(*args, scale=0.3)
            assert {*kinds} & {*ran}
            assert all(map(torch.equal, got, want))

    return run


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize("full", [False, True], ids=["one launch", "two launches"])
@pytest.mark.parametrize(("B", "T", "HV"), [(1, 64, 1), (2, 128, 4), (1, 2048, 4)])
def test_scans_gluon_give_the_same_bits(
    B, T, HV, full, given, dtype, device, plain_and_gluon, monkeypatch
):
    if full:
        monkeypatch.setattr(kernels, "device_of", lambda _: ("hopper", 1))
    x = gdn_inputs(B, T, max(1, HV // 2), HV, 128, 128, dtype=dtype, device=device, seed=0)
    states = torch.randn(2, B, HV, 128, 128, device=device)
    plain_and_gluon(x, *(states if given else (None, None)))


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize("gates", ["forgotten", "slow", "mixed", "maps"])
@pytest.mark.parametrize("T", [1024, 960], ids=["whole pieces", "a rest"])
def test_scans_gluon_in_pieces(T, gates, given, device, plain_and_gluon, monkeypatch):
    """Pieces of 256 tokens, found forgotten in 128, or by their maps."""
    rule = {"LENGTH": 256, "LEAST": 2} if gates == "maps" else {"PROGRAMS": 0, "SPAN": 32}
    for name, value in rule.items():
        monkeypatch.setattr(pieces, name, value)
    monkeypatch.setattr(warm_up, "REACH", 128)
    found = []

    def seen(*args, **options):
        cut, warm = warm_up.warm_up(*args, **options)
        found.append([*warm])
        return cut, warm

    monkeypatch.setattr(kernels, "warm_up", seen)
    x = gdn_inputs(2, T, 2, 4, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    x.g.fill_(-0.01 if gates == "slow" else -3.0)
    if gates == "mixed":  # head 0 forgets in a chunk, 1 at one place, 2 never, 3 in two chunks
        x.g[..., 1:] = torch.tensor([-0.01, -0.01, -0.25], device=device)
        x.g[:, 500:524, 1] = -40.0
    states = torch.randn(2, 2, 4, 128, 128, device=device)
    plain_and_gluon(x, *(states if given else (None, None)))
    starts = [{*torch.stack(warm).amax(0).unique().tolist()} for warm in found]
    want = {"forgotten": {0, 1}, "slow": {-1, 0}, "mixed": {-1, 0, 1, 2}, "maps": None}[gates]
    assert starts == ([] if want is None else [want] * 6)


@grid
def test_intra_bwd_kernel_matches_reference(T, K, V, C, dtype, device):
    x, r = arguments(T, K, V, C, dtype, device)
    args = (x.q, x.k, x.v, x.beta, r.gc, r.h, r.v_new, r.do, r.dh, r.Z)
    check_stage(kernels.intra_chunk_bwd, references.intra_chunk_bwd, args, scale=0.3, chunk_size=C)


def test_intra_bwd_kernel_with_a_head_each(device):
    """Without heads to add up: the other branch of the kernel."""
    x, r = arguments(100, 32, 48, 32, small(device), device)
    q, k = (t.repeat_interleave(2, 2) for t in (x.q, x.k))
    args = (q, k, x.v, x.beta, r.gc, r.h, r.v_new, r.do, r.dh, r.Z)
    check_stage(kernels.intra_chunk_bwd, references.intra_chunk_bwd, args, scale=0.3, chunk_size=32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("HV", [4, 8, 16])
def test_intra_bwd_gluon(HV, dtype, device, monkeypatch):
    """No farther from float64 than the other kernel; twice, since programs reuse their places for
    chunk after chunk: what is copied ahead must not be overtaken.
    """
    gluon, B, T, H = kernels.gdn_intra_bwd, 2, 2560, 4  # three chunks a program, and two
    if gluon is None or not support.available().usable:
        pytest.skip("made for another Triton")
    if kernels.device_of(torch.empty(1, device=device))[0] != "hopper":
        pytest.skip("made for Hopper")
    x = gdn_inputs(B, T, H, HV, 128, 128, dtype=dtype, device=device, seed=0)
    gc, do = gate_cumsum(x.g, chunk_size=64), torch.randn_like(x.v)
    P, _, AG = intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64, return_inverse=True, gated=True)
    h, v_new = kernels.scan_states(x.k, x.v, x.beta, gc, AG)
    dh, Z, *_ = kernels.scan_bwd(x.q, x.k, x.beta, gc, P, AG, do, scale=0.3)
    args, options = (x.q, x.k, x.v, x.beta, gc, h, v_new, do, dh, Z), {"scale": 0.3}
    options["chunk_size"] = 64
    exact = references.intra_chunk_bwd(*(t.double() for t in args), **options)
    monkeypatch.setattr(gluon, "LEAST", 1 << 30)
    plain = kernels.intra_chunk_bwd(*args, **options)
    monkeypatch.setattr(gluon, "LEAST", 1)
    with launches() as ran:
        got, again = (kernels.intra_chunk_bwd(*args, **options) for _ in range(2))
    assert ran == [gluon.intra_chunk_bwd_gluon_kernel] * 2
    assert all(map(torch.equal, got, again))
    for name, a, b, want in zip(("dq", "dk", "dbeta", "dgc"), got, plain, exact, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert relative_rms(a, want) <= 1.01 * relative_rms(b, want), name


@pytest.mark.parametrize("V", [32, 48], ids=["in the place of v_new and Z", "apart"])
def test_heads_bwd_kernels_match_reference(V, device):
    x, r = arguments(100, 32, V, 32, small(device), device)
    q, k = (t.repeat_interleave(2, 2) for t in (x.q, x.k))
    args = (q, k, x.v, x.beta, r.gc, r.P, r.AG, r.do, x.initial_state, r.dht)
    check_stage(kernels.chunk_bwd, references.chunk_bwd, args, scale=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize(("T", "H", "HV"), [(256, 8, 8), (1024, 4, 8), (16384, 8, 8)])
def test_heads_bwd_in_parts_gives_the_same_bits(T, H, HV, given, device, monkeypatch):
    """Whole sequences, heads that share a key in pieces without maps, and pieces by their maps."""
    if kernels.gdn_intra_bwd is None:
        pytest.skip("made for another Triton")
    monkeypatch.setattr(kernels.gdn_scans.gdn_scan, "pays", lambda *_: True)
    monkeypatch.setattr(kernels.gdn_intra_bwd, "LEAST", 1)
    x = gdn_inputs(2, T, H, HV, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    if T == 1024:  # pieces that begin where all is forgotten
        monkeypatch.setattr(pieces, "PROGRAMS", 0)
        monkeypatch.setattr(pieces, "SPAN", 32)
        x.g.fill_(-3.0)
    gc, do = gate_cumsum(x.g, chunk_size=64), torch.randn_like(x.v)
    options = {"chunk_size": 64, "return_inverse": True, "gated": True}
    P, _, AG = intra_chunk_kernel(x.q, x.k, x.beta, gc, **options)
    if not kernels._in_gluon(x.q, x.k, x.v, P, AG, None):
        pytest.skip("made for Hopper and another Triton")
    states = torch.randn(2, 2, HV, 128, 128, device=device)
    args = (x.q, x.k, x.v, x.beta, gc, P, AG, do, *(states if given else (None, None)))
    found = {}
    for parts in (1, 2, 4):
        monkeypatch.setattr(kernels, "_parts", lambda *_, parts=parts: parts)
        with launches() as ran:
            found[parts] = kernels.chunk_bwd(*args, scale=0.3)
        assert ran.count(kernels.gdn_intra_bwd.intra_chunk_bwd_gluon_kernel) == parts
    for got in (found[2], found[4]):
        assert all(map(torch.equal, got, found[1]))


def test_parts_leave_no_more_idle(monkeypatch):
    monkeypatch.setattr(kernels, "device_of", lambda _: ("hopper", 132))
    monkeypatch.setattr(pieces, "device_of", lambda _: ("hopper", 132))
    for (B, T, H, HV), want in {
        (8, 4096, 16, 16): 2,  # 256 programs: two rounds of 128
        (32, 4096, 16, 16): 8,
        (1, 32768, 16, 32): 2,  # four pieces
        (4, 4096, 16, 16): 1,  # one round
        (8, 512, 16, 16): 1,  # small
        (6, 8192, 16, 16): 1,  # 384 programs of 12 pieces: halves would take four rounds, not three
    }.items():
        q, v = (torch.empty(B, T, n, 128, device="meta") for n in (H, HV))
        assert kernels._parts(q, v, 64) == want


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maps_of_a_piece(dtype, device):
    """Of 200 draws in bf16 the largest factor was 1.27 forwards, where the reference rounds R and
    beta as one operand, and 1.05 back in time; a gate that is rounded too makes at least 1.24.
    """
    x, r = arguments(100, 32, 48, 32, dtype, device)
    args = (x.k, x.v, r.gc, r.AG, x.initial_state, x.beta)
    check_rounded(scan_map_kernel, scan_map, args, 1.4)
    args = (x.q, x.k, x.beta, r.gc, r.P, r.AG, r.do, r.dht)
    check_rounded(kernels.scan_map_bwd, references.scan_map_bwd, args, 1.2, scale=0.3)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_fused_equals_staged_in_float64(C):
    x = inputs(130, 20, 12, torch.float64, "cpu")
    found = []
    for used, keep in ((fused_stages, ("gc", "P", "AG")), (stages, ("gc", "A"))):
        options = {"scale": 0.5, "output_final_state": True, "chunk_size": C, "keep": keep}
        o, last, residuals = forward(used("reference"), **x.asdict(), **options)
        torch.manual_seed(0)
        found.append(backward(
            used("reference"), x.q, x.k, x.v, x.g, x.beta, residuals, torch.randn_like(o),
            torch.randn_like(last), scale=0.5, initial_state=x.initial_state,
        ))  # fmt: skip
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(f"gradient {i}", a, b, 1e-12)
