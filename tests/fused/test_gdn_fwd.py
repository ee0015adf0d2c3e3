"""The fused stages: kernels against references, and the fused forward against the staged one."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs
from gdn_checks import exact_products, launches

from linattn_edu.kernels import pieces
from linattn_edu.kernels.delta import warm_up
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.fused import gdn_fwd as kernels
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.tiles import device_of
from linattn_edu.ops.gdn import forward, fused_stages, stages
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused import gdn_fwd as references
from linattn_edu.testing import assert_close, gdn_inputs, relative_rms

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_intra_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc = gate_cumsum(x.g, chunk_size=C)
    args = (x.q, x.k, x.beta, gc)
    check_stage(kernels.intra_chunk, references.intra_chunk, args, chunk_size=C)
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    check_stage(kernels.intra_chunk, references.intra_chunk, args, **options)


@pytest.mark.parametrize("T", [64, 100], ids=["whole chunks", "a rest"])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_intra_in_one_kernel(T, K, dtype, device, monkeypatch):
    """What Hopper does in plain Triton where no value heads share a key."""
    if device_of(torch.empty(1, device=device))[0] not in ("hopper", "blackwell"):
        pytest.skip("made for Hopper")
    monkeypatch.setattr(kernels, "gdn_intra", None)
    x = gdn_inputs(1, T, 2, 2, K, 16, dtype=dtype, device=device, seed=T + K)
    args = (x.q, x.k, x.beta, gate_cumsum(x.g, chunk_size=64))
    options = {"chunk_size": 64, "return_inverse": True}
    for gated in (False, True):
        with launches() as ran:
            kernels.intra_chunk(*args, gated=gated, **options)
        assert ran == [kernels.intra_chunk_kernel]
        check_stage(kernels.intra_chunk, references.intra_chunk, args, gated=gated, **options)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


# keys [64, K] and their beta, with beta |k|^2 up to 2
KEYS = {
    "unit": lambda x: (unit(x), 1.0),
    "alike": lambda x: (unit(x[:, :1] + 0.05 * unit(x)), 2.0),
    "the same": lambda x: (unit(x[:, :1]).expand_as(x), 1.0),
    "some are zero": lambda x: (unit(x) * (torch.arange(64) % 3 > 0)[:, None, None], 1.0),
    "tiny": lambda x: (1e-18 * unit(x), 2.0),
    "any length": lambda x: (
        unit(x) * (x := 10.0 ** torch.linspace(-15, 15, 64)[:, None, None]), 1.5 / x[..., 0] ** 2
    ),
}  # fmt: skip


def tf32(x):
    """x rounded to the ten bits of a tensor core's tf32, and what fp32 has beside them."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def half(x):
    return x.half().float()


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("K", [64, 128])
def test_inverse_of_blocks_in_fp16(keys, K):
    """The sums of intra_gluon, step by step: no worse than those of solve's merges in tf32."""
    torch.manual_seed(K)
    k, beta = KEYS[keys](torch.randn(1, 64, 64, K))
    k = k.bfloat16().transpose(1, 2)
    beta = torch.as_tensor(beta).expand(1, 64, 64).mT.float().contiguous()
    exact = torch.eye(64, dtype=torch.float64)
    L = (beta.double()[..., None] * (k.double() @ k.double().mT)).tril(-1)
    exact = torch.linalg.solve_triangular(exact + L, exact.expand_as(L), upper=False)

    S, I = k.float() @ k.float().mT, torch.eye(64)
    block = torch.arange(64) // 16
    own = block[:, None] == block[None, :]
    D = torch.where(own, beta[..., None] * S, 0.0).tril(-1)
    X = torch.linalg.solve_triangular(I + D, I.expand_as(D), upper=False)

    merged, L = X.clone(), L.float()
    for size in (16, 32):
        for i in range(0, 64, 2 * size):
            one, two = slice(i, i + size), slice(i + size, i + 2 * size)
            x = tf32(merged[..., two, two]) @ tf32(L[..., two, one].contiguous())
            merged[..., two, one] = -tf32(x) @ tf32(merged[..., one, one])

    exponent = (S.diagonal(dim1=-2, dim2=-1).contiguous().view(torch.int32) >> 23) + 128 >> 1
    n, w = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    X = half(X * n[..., None] * w[..., None, :])
    N = X @ half(torch.where(own, 0.0, S * w[..., None, :] * -(beta * n)[..., None]).tril(-1))
    U = N + half(N) @ half(N)
    U = N + half(U) @ half(N)
    A = half(I + U) @ X * n[..., None, :] * w[..., None]
    for factor in (1.0, beta[..., None, :]):
        want = exact * factor
        error, other = (relative_rms((x * factor).bfloat16(), want) for x in (A, merged))
        assert error < 1.06 * other + 1e-9  # 2^-25 beside 1 is nothing in fp16


@pytest.fixture
def intra_gluon(device):
    module = kernels.gdn_intra
    if module is None or not support.available().usable:
        pytest.skip("a kernel for another Triton")
    if device_of(torch.empty(1, device=device))[0] != "hopper":
        pytest.skip("a kernel for Hopper")
    return module


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "HV"), [(2, 8192, 4, 4), (1, 6400, 4, 8), (2, 128, 1, 2), (1, 100, 2, 2)]
)
@pytest.mark.parametrize("K", [64, 128])
def test_intra_gluon(B, T, H, HV, K, device, intra_gluon, monkeypatch):
    """Both kernels are right, and give the same bits."""
    x = gdn_inputs(B, T, H, HV, K, 16, dtype=torch.bfloat16, device=device, seed=T + K)
    args = (x.q, x.k, x.beta, gate_cumsum(x.g, chunk_size=64))
    for more in ({}, {"return_inverse": True}, {"return_inverse": True, "gated": True}):
        with launches() as ran:
            got = kernels.intra_chunk(*args, chunk_size=64, **more)
        chunks = T > 6000
        assert ran == [
            intra_gluon.intra_chunk_ring_gluon_kernel
            if chunks
            else intra_gluon.intra_chunk_gluon_kernel
        ]
        check_stage(kernels.intra_chunk, references.intra_chunk, args, chunk_size=64, **more)
        with monkeypatch.context() as patch:
            patch.setattr(intra_gluon, "whole", lambda *_: False)
            alone = kernels.intra_chunk(*args, chunk_size=64, **more)
        for a, b in zip(got, alone, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("K", [64, 128])
def test_intra_gluon_of_packed_sequences(K, device, intra_gluon):
    """Each has the bits that it has alone."""
    bounds = [0, 100, 100, 164, 300, 301, 700]
    packing = pack(torch.tensor(bounds, device=device), 64)
    x = gdn_inputs(1, 700, 2, 4, K, 16, dtype=torch.bfloat16, device=device, seed=K)
    gc = gate_cumsum_kernel(x.g, chunk_size=64, packing=packing)
    options = {"chunk_size": 64, "return_inverse": True}
    together = kernels.intra_chunk(x.q, x.k, x.beta, gc, packing=packing, **options)
    for i in (slice(*bounds[n : n + 2]) for n in (0, 2, 3, 4, 5)):
        args = (t[:, i].contiguous() for t in (x.q, x.k, x.beta, gc))
        for a, b in zip(together, kernels.intra_chunk(*args, **options), strict=True):
            assert torch.equal(a[:, i], b)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("K", [64, 128])
def test_intra_gluon_with_any_keys(keys, K, device, intra_gluon, monkeypatch):
    """No worse than the kernel in plain Triton, whose products are in tf32."""
    torch.manual_seed(K)
    k, beta = KEYS[keys](torch.randn(1, 64, 64, K))
    k, beta = k.bfloat16().to(device), torch.as_tensor(beta).expand(1, 64, 64).to(device)
    beta, gc = beta.float().contiguous(), torch.zeros(1, 64, 64, device=device)
    options = {"chunk_size": 64, "return_inverse": True}
    want = references.intra_chunk(*(x.double() for x in (k, k, beta, gc)), **options)
    got = kernels.intra_chunk(k, k, beta, gc, **options)
    monkeypatch.setattr(kernels, "gdn_intra", None)
    plain = kernels.intra_chunk(k, k, beta, gc, **options)
    for a, b, c in zip(got, plain, want, strict=True):
        assert relative_rms(a, c) < 1.06 * relative_rms(b, c) + 1e-9


@grid
def test_scan_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc = gate_cumsum(x.g, chunk_size=C)
    P, R, _ = references.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=C)
    args = (x.q, x.k, x.v, gc, P, R, x.initial_state)
    check_stage(kernels.scan, references.scan, args, scale=0.3, output_final_state=True)


@pytest.mark.parametrize(
    ("T", "K", "V", "packed"), [(150, 128, 128, False), (65, 100, 64, False), (130, 128, 128, True)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scan_transposed_gives_the_same_bits(T, K, V, packed, dtype, device, monkeypatch):
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
    # as if it had one multiprocessor: tiles of 64 columns
    monkeypatch.setattr("linattn_edu.kernels.tiles.device_of", lambda _: (generation, 1))
    gc = gate_cumsum_kernel(g, chunk_size=64, **own)
    P, R, _ = kernels.intra_chunk(q, k, beta, gc, chunk_size=64, **own)
    exact_products(monkeypatch)
    got = []
    for crowded in (True, False):
        monkeypatch.setattr(kernels, "crowded", lambda *_, crowded=crowded: crowded)
        options = {"scale": 0.3, "output_final_state": True, **own}
        got.append(kernels.scan(q, k, v, gc, P, R, h0, **options))
    for name, a, b in zip(("o", "final_state"), *got, strict=True):
        assert_close(name, a, b, 0)


@pytest.fixture
def plain_and_gluon(device, monkeypatch):
    """The scan of what `gdn_inputs` gives, in plain Triton, then in Gluon, twice."""
    scan_gluon = kernels.gdn_scan
    if scan_gluon is None or not support.available().usable:
        pytest.skip("made for another Triton")
    if device_of(torch.empty(1, device=device))[0] != "hopper":
        pytest.skip("made for Hopper")
    monkeypatch.setattr(scan_gluon, "pays", lambda *_: True)

    def scans(x, h0):
        gc = gate_cumsum_kernel(x.g, chunk_size=64)
        P, R, _ = kernels.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64)
        args, options = (x.q, x.k, x.v, gc, P, R, h0), {"scale": 0.3}
        assert scan_gluon.fits(x.q, x.k, x.v, P, R, None)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "gdn_scan", None)
            yield kernels.scan(*args, **options, output_final_state=h0 is not None)
        for _ in range(2):  # what is copied ahead must not be overtaken
            yield kernels.scan(*args, **options, output_final_state=h0 is not None)

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
@pytest.mark.parametrize("given", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("gates", ["forgotten", "slow", "mixed", "maps"])
@pytest.mark.parametrize(("T", "K"), [(1024, 128), (960, 64)], ids=["whole pieces", "a rest"])
def test_scan_gluon_in_pieces(T, K, gates, given, device, plain_and_gluon, monkeypatch):
    """Pieces of 256 tokens, found forgotten in 128, or by their maps: the bits of scan_kernel."""
    rule = {"LENGTH": 256, "LEAST": 2} if gates == "maps" else {"PROGRAMS": 0, "SPAN": 32}
    for name, value in rule.items():
        monkeypatch.setattr(pieces, name, value)
    monkeypatch.setattr(warm_up, "REACH", 128)
    found = []

    def seen(*args, **options):
        found.append(warm_up.warm_up(*args, **options))
        return found[-1]

    monkeypatch.setattr(kernels, "warm_up", seen)
    x = gdn_inputs(2, T, 2, 4, K, 128, dtype=torch.bfloat16, device=device, seed=0)
    x.g.fill_(-0.01 if gates == "slow" else -3.0)
    if gates == "mixed":  # head 0 forgets in a chunk, 1 at one place, 2 never, 3 in two chunks
        x.g[..., 1:] = torch.tensor([-0.01, -0.01, -0.25], device=device)
        x.g[:, 500:510, 1] = -40.0
    h0 = torch.randn(2, 4, K, 128, device=device) if given else None
    check_equal(*plain_and_gluon(x, h0))
    starts = [{*torch.stack(warm).amax(0).unique().tolist()} for _, warm in found]
    want = {"forgotten": {0, 1}, "slow": {-1, 0}, "mixed": {-1, 0, 1, 2}, "maps": None}[gates]
    assert starts == ([] if want is None else [want] * 3)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_fused_equals_staged_in_float64(C):
    x = inputs(130, 20, 12, torch.float64, "cpu")
    options = {"scale": 0.5, "output_final_state": True, "chunk_size": C}
    *got, _ = forward(fused_stages("reference"), **x.asdict(), **options)
    *want, _ = forward(stages("reference"), **x.asdict(), **options)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)
