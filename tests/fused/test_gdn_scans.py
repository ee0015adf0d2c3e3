"""The scans of the fused backward pass: kernels against references, one launch or two."""

from functools import partial

import pytest
import stages
import torch
from delta.stage_checks import DTYPES, check_rounded, check_stage
from fused.parts import small
from gdn_checks import PAYS, launches, without_gluon
from grids import ONE_ORDER

from linattn_edu.kernels.delta import warm_up
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.fused import gdn_fwd
from linattn_edu.kernels.fused import gdn_scans as kernels
from linattn_edu.kernels.fused.gdn_fwd import scan_map as scan_map_kernel
from linattn_edu.kernels.fused.gdn_intra import intra_chunk as intra_chunk_kernel
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.fused.gdn_fwd import scan_map
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


@pytest.fixture
def together(force):
    """Both directions in one grid, where each alone would leave multiprocessors idle."""
    force(together=1)


def check_together(*stage, **options):
    with launches() as ran:
        check_stage(*stage, **options)
    assert ran == [kernels.scans_kernel]


test_scan_states_kernel_matches_reference = stages.matches("scan_states", "gdn_fused")
test_scan_bwd_kernel_matches_reference = stages.matches("scan_bwd", "gdn_fused")
test_scans_kernel_matches_reference = pytest.mark.usefixtures("together")(
    stages.matches("scans", "gdn_fused", check=check_together)
)


def test_scans_are_one_launch_or_two(device, force):
    """The same bits, whichever way the number of programs decides."""
    args = stages.arguments("scans", "gdn_fused", 100, 32, 48, 32, small(device), device)
    found = []
    for together, ran in ((0, 2), (1, 1)):
        force(together=together)
        with launches() as names:
            found.append(kernels.scans(*args, scale=0.3))
        assert len(names) == ran
    if device.type == "cuda" or ONE_ORDER:
        assert all(map(torch.equal, *found))
    for one, other in zip(*found, strict=True):
        assert_close("either way", one, other.double(), 1e-6)


def test_wide_and_narrow_tiles_of_halves(device, monkeypatch):
    """The same bits, whichever the number of programs decides."""
    args = stages.arguments("scan_bwd", "gdn_fused", 100, 32, 96, 32, small(device), device)
    P, AG = args[4:6]
    low = (1e-3 * P).to(P.dtype), (1e-3 * AG).to(AG.dtype)
    wide, narrow = kernels.HALVES_BACK
    assert wide.launch(V=96)["BV"] > narrow.launch(V=96)["BV"]
    found = []
    for rows in ((wide,), (narrow,)):
        monkeypatch.setattr(kernels, "HALVES_BACK", rows)
        found.append(kernels.scan_bwd(*args, low, scale=0.3))
    if device.type == "cuda" or ONE_ORDER:
        assert all(map(torch.equal, *found))
    for one, other in zip(*found, strict=True):
        assert_close("either way", one, other.double(), 1e-6)


@pytest.fixture
def plain_and_gluon(device, force):
    """The scans of what `gdn_inputs` gives, in plain Triton, then in Gluon, twice."""
    if why := without_gluon(device):
        pytest.skip(why)
    scans_gluon = kernels.gdn_scans
    force(**PAYS)
    kinds = scans_gluon.scans_gluon_kernel, scans_gluon.scan_bwd_gluon_kernel

    def run(x, h0, dht):
        gc = gate_cumsum_kernel(x.g, chunk_size=64)
        options = {"chunk_size": 64, "return_inverse": True, "gated": True}
        P, _, AG = intra_chunk_kernel(x.q, x.k, x.beta, gc, **options)
        torch.manual_seed(1)
        args = (x.q, x.k, x.v, x.beta, gc, P, AG, torch.randn_like(x.v), h0, dht)
        with forced(scans="triton"):
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
    B, T, HV, full, given, dtype, device, plain_and_gluon, force
):
    if full:
        force(together=0)
    x = gdn_inputs(B, T, max(1, HV // 2), HV, 128, 128, dtype=dtype, device=device, seed=0)
    states = torch.randn(2, B, HV, 128, 128, device=device)
    plain_and_gluon(x, *(states if given else (None, None)))


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize("gates", ["forgotten", "slow", "mixed", "maps"])
@pytest.mark.parametrize("T", [1024, 960], ids=["whole pieces", "a rest"])
def test_scans_gluon_in_pieces(T, gates, given, device, plain_and_gluon, force, monkeypatch):
    """Pieces of 256 tokens, found forgotten in 128, or by their maps."""
    force(**{"LENGTH": 256, "LEAST": 2} if gates == "maps" else {"PROGRAMS": 0, "PER_PROGRAM": 32})
    monkeypatch.setattr(warm_up, "REACH", 128)
    found = []

    def seen(*args, **options):
        cut, warmup = warm_up.warm_up(*args, **options)
        found.append([*warmup])
        return cut, warmup

    monkeypatch.setattr(gdn_fwd, "warm_up", seen)
    x = gdn_inputs(2, T, 2, 4, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    x.g.fill_(-0.01 if gates == "slow" else -3.0)
    if gates == "mixed":  # head 0 forgets in a chunk, 1 at one place, 2 never, 3 in two chunks
        x.g[..., 1:] = torch.tensor([-0.01, -0.01, -0.25], device=device)
        x.g[:, 500:524, 1] = -40.0
    states = torch.randn(2, 2, 4, 128, 128, device=device)
    plain_and_gluon(x, *(states if given else (None, None)))
    starts = [{*torch.stack(warmup).amax(0).unique().tolist()} for warmup in found]
    want = {"forgotten": {0, 1}, "slow": {-1, 0}, "mixed": {-1, 0, 1, 2}, "maps": None}[gates]
    assert starts == ([] if want is None else [want] * 6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_maps_of_a_piece(dtype, device):
    """Of 200 draws in bf16 the largest factor was 1.27 forwards, where the reference rounds R and
    beta as one operand, and 1.05 back in time; a gate that is rounded too makes at least 1.24.
    """
    sizes = ("gdn_fused", 100, 32, 48, 32, dtype, device)
    r = stages.parts(*sizes)
    args = (r.k, r.v, r.gc, r.AG, r.h0, r.beta)
    check_rounded(scan_map_kernel, scan_map, args, 1.4)
    stages.check("scan_map_bwd", *sizes, check=partial(check_rounded, factor=1.2))
