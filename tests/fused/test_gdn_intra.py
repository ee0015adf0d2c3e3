"""What the fused passes need of a chunk by itself: kernels against references."""

import pytest
import stages
import torch
from delta.stage_checks import check_stage
from gdn_checks import launches, without_gluon

from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.fused import gdn_intra as kernels
from linattn_edu.kernels.gluon import support
from linattn_edu.kernels.routes import forced, limits
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused import gdn_intra as references
from linattn_edu.testing import gdn_inputs, relative_rms

pytestmark = pytest.mark.usefixtures("poison")


GATED, NO_INVERSE = {"gated": True}, {"return_inverse": False}
test_kernel_matches_reference = stages.matches("intra_chunk", "gdn_fused", more=GATED)
test_without_the_inverse = stages.matches("intra_chunk", "gdn_fused", more=NO_INVERSE)


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


@pytest.mark.parametrize("keys", ["unit", "alike", "the same"])
@pytest.mark.parametrize(("C", "T"), [(64, 100), (16, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_intra_halves(keys, C, T, dtype, device):
    """The sum of the halves has 16 bits and more, also where the rows of A alternate."""
    x = gdn_inputs(1, T, 1, 2, 32, 16, dtype=dtype, device=device, seed=C)
    k = KEYS[keys](torch.randn(1, 64, 1, 32, device=device))[0].repeat(1, 2, 1, 1)[:, :T].to(dtype)
    args = (x.q, k, torch.full_like(x.beta, 1.9), gate_cumsum(x.g / 64, chunk_size=C))
    P, AG, *low = kernels.intra_halves(*args, chunk_size=C)
    for a, b in zip((P, AG, *low), references.intra_halves(*args, chunk_size=C), strict=True):
        assert a.dtype == b.dtype == dtype
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    want, _, want_AG = references.intra_chunk(*(y.double() for y in args), **options)
    for high, rest, exact in ((P, low[0], want), (AG, low[1], want_AG)):
        assert relative_rms(high, exact) > 1e-4
        assert relative_rms(high.double() + rest, exact) < 1e-5


@pytest.fixture
def intra_gluon(device):
    if why := without_gluon(device):
        pytest.skip(why)
    return kernels.gdn_intra


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "T", "H", "HV"), [(2, 8192, 4, 4), (1, 6400, 4, 8), (2, 128, 1, 2), (1, 100, 2, 2)]
)
@pytest.mark.parametrize("K", [64, 128])
def test_intra_gluon(B, T, H, HV, K, device, intra_gluon):
    """Both kernels are right, and give the same bits."""
    x = gdn_inputs(B, T, H, HV, K, 16, dtype=torch.bfloat16, device=device, seed=T + K)
    args = (x.q, x.k, x.beta, gate_cumsum(x.g, chunk_size=64))
    for more in ({}, {"return_inverse": True}, {"return_inverse": True, "gated": True}):
        with launches() as ran:
            got = kernels.intra_chunk(*args, chunk_size=64, **more)
        shared = K == 128 and H < HV and support.THIS > limits.SHARED_RING
        chunks = T > 6000 and not shared
        assert ran == [
            intra_gluon.intra_chunk_ring_gluon_kernel
            if chunks
            else intra_gluon.intra_chunk_gluon_kernel
        ]
        check_stage(kernels.intra_chunk, references.intra_chunk, args, chunk_size=64, **more)
        with forced(intra_ring=0):
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
def test_intra_gluon_with_any_keys(keys, K, device, intra_gluon, force):
    """No worse than the kernel in plain Triton, whose products are in tf32."""
    torch.manual_seed(K)
    k, beta = KEYS[keys](torch.randn(1, 64, 64, K))
    k, beta = k.bfloat16().to(device), torch.as_tensor(beta).expand(1, 64, 64).to(device)
    beta, gc = beta.float().contiguous(), torch.zeros(1, 64, 64, device=device)
    options = {"chunk_size": 64, "return_inverse": True}
    want = references.intra_chunk(*(x.double() for x in (k, k, beta, gc)), **options)
    got = kernels.intra_chunk(k, k, beta, gc, **options)
    force(intra_chunk="one")
    plain = kernels.intra_chunk(k, k, beta, gc, **options)
    for a, b, c in zip(got, plain, want, strict=True):
        assert relative_rms(a, c) < 1.06 * relative_rms(b, c) + 1e-9
