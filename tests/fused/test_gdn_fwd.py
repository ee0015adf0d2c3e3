"""The fused scan: kernels against references, and the fused forward against the staged one."""

import pytest
import stages as registry
import torch
from delta.stage_checks import inputs
from gdn_checks import PAYS, exact_products, launches, some_forget, without_gluon
from torch.nn.functional import normalize

from linattn_edu.kernels.delta import warm_up
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.fused import gdn_fwd as kernels
from linattn_edu.kernels.fused.gdn_intra import intra_chunk, intra_halves
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.routes import forced, limits
from linattn_edu.kernels.rows import device_of
from linattn_edu.packing import pack
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


def of_shared_keys(*sizes):
    """Of heads of 128 that share keys, where one kernel takes them: else last bits are others."""
    return sizes if support.THIS <= limits.SHARED_RING else ()


test_scan_kernel_matches_reference = registry.matches("scan", "gdn_fused")
test_chunk_fwd_kernels_match_reference = registry.matches("chunk_fwd", "gdn_fused")


@pytest.mark.parametrize(
    ("T", "K", "V", "packed"), [(150, 128, 128, False), (65, 100, 64, False), (130, 128, 128, True)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("halves", [False, True])
def test_scan_transposed_gives_the_same_bits(
    T, K, V, packed, halves, dtype, device, force, monkeypatch
):
    """Which of the two runs follows from what fills the GPU, and must not be seen."""
    x = inputs(T, K, V, dtype, device)
    tensors, h0, own = (x.q, x.k, x.v, x.g, x.beta), x.initial_state, {}
    if packed:
        tensors, h0 = [y[:1] for y in tensors], h0[:1].repeat(3, 1, 1, 1)
        own["packing"] = pack(torch.tensor([0, 64, 64, T], device=device), 64)
    q, k, v, g, beta = tensors
    generation, _ = device_of(q)
    if generation not in ("hopper", "blackwell"):
        pytest.skip("made for Hopper")
    gc = gate_cumsum_kernel(g, chunk_size=64, **own)
    if halves:
        P, R, *low = intra_halves(q, k, beta, gc, chunk_size=64, **own)
        written = beta, low
    else:
        (P, R, _), written = intra_chunk(q, k, beta, gc, chunk_size=64, **own), ()
    # as if it had one multiprocessor: tiles of 64 columns, with halves of 128; or 1000
    count = [1]
    for room in ("by_load", "choosing"):
        place = f"linattn_edu.kernels.routes.{room}.device_of"
        monkeypatch.setattr(place, lambda _: (generation, *count))
    exact_products(monkeypatch)
    got = []
    for form in ("transposed", "upright"):
        count[0] = 1000 if halves and form == "upright" else 1
        if not halves:
            force(transposed=form)
        options = {"scale": 0.3, "output_final_state": True, **own}
        with launches() as ran:
            got.append(kernels.scan(q, k, v, gc, P, R, h0, *written, **options))
        transposed = ran[-1].__name__ == "scan_transposed_kernel"
        assert transposed == (halves or form == "transposed")
    for name, a, b in zip(("o", "final_state"), *got, strict=True):
        assert_close(name, a, b, 0)


@pytest.fixture
def plain_and_gluon(device, force):
    """The scan of what `gdn_inputs` gives, in plain Triton, then in Gluon, twice."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)

    def scans(x, h0):
        gc = gate_cumsum_kernel(x.g, chunk_size=64)
        P, R, _ = intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64)
        args, options = (x.q, x.k, x.v, gc, P, R, h0), {"scale": 0.3}
        with forced(scan="triton"):
            want = kernels.scan(*args, **options, output_final_state=h0 is not None)
        yield want
        for _ in range(2):  # what is copied ahead must not be overtaken
            with launches() as ran:
                got = kernels.scan(*args, **options, output_final_state=h0 is not None)
            assert kernels.gdn_scan.scan_gluon_kernel in ran
            yield got

    return scans


def check_equal(want, *others):
    for o, last in others:
        assert torch.equal(o, want[0])
        assert want[1] is None or torch.equal(last, want[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("given", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize(
    ("B", "T", "HV", "K", "V"),
    [(1, 64, 1, 128, 128), (2, 128, 4, 64, 64), (1, 2048, 4, 128, 64), (1, 1024, 2, 64, 256)],
)
def test_scan_gluon_gives_the_same_bits(B, T, HV, K, V, given, dtype, device, plain_and_gluon):
    x = gdn_inputs(B, T, max(1, HV // 2), HV, K, V, dtype=dtype, device=device, seed=0)
    h0 = torch.randn(B, HV, K, V, device=device) if given else None
    check_equal(*plain_and_gluon(x, h0))


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize(
    ("B", "T", "H", "HV", "D"),
    [(3, 64, 1, 1, 128), (1, 128, 2, 2, 64), (9, 2048, 16, 32, 64),
     *of_shared_keys((2, 448, 2, 6, 128), (10, 2048, 8, 16, 128))],
)  # fmt: skip
def test_forward_in_one_kernel_gives_the_same_bits(B, T, H, HV, D, given, kept, device, force):
    """Twice: R and P stay in shared memory, where no chunk may overtake another."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    x = gdn_inputs(B, T, H, HV, D, D, dtype=torch.bfloat16, device=device, seed=0)
    gc = gate_cumsum_kernel(x.g, chunk_size=64)
    h0 = torch.randn(B, HV, D, D, device=device) if given else None
    args, options = (x.q, x.k, x.v, x.beta, gc, h0), {"scale": 0.3, "chunk_size": 64}
    options |= {"output_final_state": given, "keep": kept}
    force(chunk_fwd="two")
    want = kernels.chunk_fwd(*args, **options)
    force(chunk_fwd="one")
    for _ in range(2):
        with launches() as ran:
            got = kernels.chunk_fwd(*args, **options)
        assert ran == [kernels.gdn_fwd.chunk_fwd_gluon_kernel]
        for a, b in zip(got, want, strict=True):
            assert (a is b is None) or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("H", "D"), [(8, 128), (8, 64), *of_shared_keys((4, 128))])
def test_heads_that_cancel_are_found_in_one_kernel(H, D, kept, device, force):
    """Those that cancels_kernel finds, of many cosines and gates; others keep their bits."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    x = gdn_inputs(4, 2048, H, 8, D, D, dtype=torch.bfloat16, device=device, seed=0)
    share = torch.linspace(0, 1.5, H, device=device)[:, None]
    shared = normalize(torch.randn(D, device=device), dim=0)
    k = normalize(x.k + share * shared, dim=-1).bfloat16()
    g = x.g * torch.logspace(-3, 1, 4, device=device)[:, None, None]
    gc = gate_cumsum_kernel(g, chunk_size=64)
    args, options = (x.q, k, x.v, 2 * x.beta, gc), {"scale": 0.3, "chunk_size": 64}
    options |= {"keep": kept, "cancelling": True}
    force(chunk_fwd="two")
    want = kernels.chunk_fwd(*args, **options)
    force(chunk_fwd="one")
    with launches() as ran:
        got = kernels.chunk_fwd(*args, **options)
    assert ran == [kernels.gdn_fwd.chunk_fwd_gluon_kernel]
    few = want[-1] == 0
    assert torch.equal(got[-1], want[-1]) and few.any() and not few.all()
    assert torch.equal(*(y[0].movedim(2, 1)[few] for y in (got, want)))


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize("gates", ["forgotten", "slow", "mixed"])
@pytest.mark.parametrize(
    ("T", "H", "D"), [(1024, 4, 128), (960, 2, 64), *of_shared_keys((960, 2, 128))]
)
def test_forward_in_one_kernel_in_pieces(T, H, D, gates, given, device, force, monkeypatch):
    """Of 256 tokens, found forgotten in 128: the bits of two kernels, which run if a head does not
    forget.
    """
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS, intra_ring=2, PROGRAMS=0, PER_PROGRAM=256 // (4 * D // 64))
    monkeypatch.setattr(warm_up, "REACH", 128)
    x = gdn_inputs(2, T, H, 4, D, D, dtype=torch.bfloat16, device=device, seed=0)
    some_forget(x.g, gates)
    gc = gate_cumsum_kernel(x.g, chunk_size=64)
    h0 = torch.randn(2, 4, D, D, device=device) if given else None
    args, options = (x.q, x.k, x.v, x.beta, gc, h0), {"scale": 0.3, "chunk_size": 64}
    options |= {"output_final_state": given, "keep": True}
    force(chunk_fwd="two", scan="gluon")
    want = kernels.chunk_fwd(*args, **options)
    force(chunk_fwd="one")
    for _ in range(2):
        with launches() as ran:
            got = kernels.chunk_fwd(*args, **options)
        assert ran[-3:] == [
            kernels.gdn_fwd.chunk_fwd_gluon_kernel,
            kernels.gdn_intra.intra_chunk_ring_gluon_kernel,
            kernels.gdn_scan.scan_gluon_kernel,
        ]
        for a, b in zip(got, want, strict=True):
            assert (a is b is None) or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("gates", ["forgotten", "slow", "mixed", "maps"])
@pytest.mark.parametrize(("T", "K"), [(1024, 128), (960, 64)], ids=["whole pieces", "a rest"])
def test_scan_gluon_in_pieces(T, K, gates, given, device, plain_and_gluon, force, monkeypatch):
    """Pieces of 256 tokens, found forgotten in 128, or by their maps: the bits of scan_kernel."""
    force(**{"LENGTH": 256, "LEAST": 2} if gates == "maps" else {"PROGRAMS": 0, "PER_PROGRAM": 32})
    monkeypatch.setattr(warm_up, "REACH", 128)
    found = []

    def seen(*args, **options):
        found.append(warm_up.warm_up(*args, **options))
        return found[-1]

    monkeypatch.setattr(kernels, "warm_up", seen)
    x = gdn_inputs(2, T, 2, 4, K, 128, dtype=torch.bfloat16, device=device, seed=0)
    some_forget(x.g, gates)
    h0 = torch.randn(2, 4, K, 128, device=device) if given else None
    check_equal(*plain_and_gluon(x, h0))
    starts = [{*torch.stack(warmup).amax(0).unique().tolist()} for _, warmup in found]
    want = {"forgotten": {0, 1}, "slow": {-1, 0}, "mixed": {-1, 0, 1, 2}, "maps": None}[gates]
    assert starts == ([] if want is None else [want] * 3)
