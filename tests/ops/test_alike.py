"""Keys that are alike, and beta up to 2: errors beside what rounding the result alone costs."""

import grids
import pytest
import torch
import torch.nn.functional as F
from gdn_checks import cotangents, exact, run

from linattn_edu import chunk_gated_delta_rule, chunk_kda
from linattn_edu.testing import relative_rms

ONE, LIKE = 1.0, 0.97  # cosine of any two keys
DOUBLED = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
# the raw beta whose doubled sigmoid is the name
BETA = {1.0: 0.0, 1.5: 1.0986, 1.9: 2.9444, 1.99: 5.2933, 2.0: 40.0}
MOST = 3.0  # errors, in roundings of the result to its 16 bits


def most(name, beta, dtype, forgets=True):
    """dg, in float32, is a small difference of sums over states that are rounded to 16 bit; with
    beta near 1 a token erases what its gate has left, and next to nothing is left of dg. forgets:
    not so with one key, beta 2 and no gate, where every rounding stays.
    """
    if name != "dg":
        return MOST if forgets or dtype != torch.bfloat16 else 9.0
    return 8.0 if beta > 1 else 40.0


def inputs(cosine, beta, g, dtype, device, *, T=200, H=1, HV=2, K=32, V=24, channels=False, seed=0):
    """Unit keys whose common direction gives any two this cosine; a constant raw beta and g."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    common, own = F.normalize(randn(1, 1, H, K), dim=-1), randn(1, T, H, K)
    own = F.normalize(own - (own * common).sum(-1, keepdim=True) * common, dim=-1)
    x = {"q": F.normalize(randn(1, T, H, K), dim=-1), "k": cosine**0.5 * common}
    x["k"] = F.normalize(x["k"] + (1 - cosine) ** 0.5 * own, dim=-1)
    x["v"] = randn(1, T, HV, V)
    x = {n: t.to(dtype) for n, t in x.items()}
    gates = (1, T, HV, K) if channels else (1, T, HV)
    x["g"] = torch.full(gates, float(g), device=device)
    x["beta"] = torch.full((1, T, HV), BETA[beta], device=device)
    x["initial_state"] = randn(1, HV, K, V)
    return x


def roundings(got, want, dtype):
    """name -> the error of each result, in errors of the exact one rounded to dtype."""
    return {
        n: relative_rms(y, want[n]) / relative_rms(want[n].to(dtype), want[n])
        for n, y in got.items()
        if want[n].abs().max() > 0  # of beta = 2 the raw one changes nothing
    }


def check(f, x, beta, impl, dtype, **options):
    do, dht = cotangents(x)
    normal = {n: o for n, o in options.items() if n == "use_qk_l2norm_in_kernel"}
    want = exact(x, do, dht, **DOUBLED, **normal)
    got = run(x, do, dht, f, output_final_state=True, impl=impl, **DOUBLED, **options)
    with torch.no_grad():  # which keeps nothing for a backward pass, and must round no more
        o, ht = f(**x, output_final_state=True, impl=impl, **DOUBLED, **options)
    assert torch.equal(o, got["o"])
    assert torch.equal(ht, got["ht"])
    errors = roundings(got, want, dtype)
    one = (x["k"] == x["k"][:, :1]).all()
    forgets = not (one and beta == 2 and (x["g"] == 0).all())
    assert not {n: e for n, e in errors.items() if e > most(n, beta, dtype, forgets)}, errors


GRID = {
    "cosine": (ONE, LIKE), "beta": (1.0, 1.5, 1.9, 1.99, 2.0), "g": (0, -0.005, -0.02, -1),
    "dtype": (torch.bfloat16, torch.float16), "impl": ("triton", "reference"),
}  # fmt: skip


@grids.parametrize(**GRID)
def test_gdn_is_as_right_as_its_rounding(cosine, beta, g, dtype, impl, device):
    x = inputs(cosine, beta, g, dtype, device)
    check(chunk_gated_delta_rule, x, beta, impl, dtype)


@grids.parametrize(**GRID)
def test_kda_is_as_right_as_its_rounding(cosine, beta, g, dtype, impl, device):
    x = inputs(cosine, beta, g, dtype, device, T=100, channels=True)
    check(chunk_kda, x, beta, impl, dtype)


@pytest.mark.parametrize("impl", ["triton", "reference"])
def test_nothing_is_forgotten(impl, device):
    """One key, beta 2, no gate: a token only turns the state's sign under the key."""
    x = inputs(ONE, 2.0, 0, torch.bfloat16, device)
    check(chunk_gated_delta_rule, x, 2.0, impl, torch.bfloat16)


@pytest.mark.parametrize("f", [chunk_gated_delta_rule, chunk_kda])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [33, 136], ids=["odd K", "K past 128"])
def test_where_no_kernel_has_halves(size, dtype, f, device):
    x = inputs(ONE, 1.9, 0, dtype, device, T=66, K=size, HV=1, channels=f is chunk_kda)
    check(f, x, 1.9, "triton", dtype)


@pytest.mark.parametrize("impl", ["triton", "reference"])
@pytest.mark.parametrize("f", [chunk_gated_delta_rule, chunk_kda])
def test_a_beta_given_as_it_is(f, impl, device):
    """allow_neg_eigval says that it may be beyond 1; it is not doubled."""
    x = inputs(ONE, 1.9, 0, torch.bfloat16, device, T=100, HV=1, channels=f is chunk_kda)
    given = x | {"beta": 2 * x["beta"].sigmoid()}
    want, _ = f(**x, **DOUBLED, impl=impl)
    got, _ = f(**given, allow_neg_eigval=True, impl=impl)
    assert torch.equal(got, want)


@pytest.mark.parametrize("option", ["use_qk_l2norm_in_kernel", "disable_recompute"])
def test_halves_of_kda_with(option, device):
    """Keys that are divided by their length keep all digits; disable_recompute changes no bit."""
    x = inputs(ONE, 1.99, 0, torch.bfloat16, device, T=100, HV=1, channels=True)
    x["k"] = (3 * x["k"]).contiguous()
    if option != "use_qk_l2norm_in_kernel":
        x["k"] = F.normalize(x["k"].float(), dim=-1).to(torch.bfloat16)
    check(chunk_kda, x, 1.99, "triton", torch.bfloat16, **{option: True})


@pytest.mark.parametrize("f", [chunk_gated_delta_rule, chunk_kda])
def test_the_reference_is_right_without_being_told(f):
    x = inputs(ONE, 1.9, 0, torch.bfloat16, "cpu", T=100, HV=1, channels=f is chunk_kda)
    given = x | {"beta": 2 * x["beta"].sigmoid()}
    do, dht = cotangents(x)
    got = run(given, do, dht, f, output_final_state=True, impl="reference")
    errors = roundings(got, exact(given, do, dht), torch.bfloat16)
    assert not {n: e for n, e in errors.items() if e > most(n, 1.9, torch.bfloat16)}, errors


@pytest.mark.parametrize("f", [chunk_gated_delta_rule, chunk_kda])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_of_packed_sequences(dtype, f, device):
    """Each has the bits that it has alone, in both passes."""
    bounds, parts = [0, 100, 100, 164, 200], ((0, 100), (100, 164), (164, 200))
    x = inputs(LIKE, 1.99, -0.01, dtype, device, channels=f is chunk_kda)
    del x["initial_state"]
    options = DOUBLED | {"impl": "triton", "output_final_state": True}
    do, dht = cotangents(x, N=4)
    cu_seqlens = torch.tensor(bounds, device=device)
    got = run(x, do, dht, f, cu_seqlens=cu_seqlens, **options)
    for (a, b), n in zip(parts, (0, 2, 3), strict=True):
        one = {n: t[:, a:b].contiguous() for n, t in x.items()}
        want = run(one, do[:, a:b], dht[n : n + 1], f, **options)
        for name, y in want.items():
            part = got[name][n : n + 1] if name == "ht" else got[name][:, a:b]
            assert torch.equal(part, y), name


@pytest.mark.gpu
@grids.parametrize(
    name=("gdn", "kda"), beta=(1.0, 1.5, 1.9), g=(0, -0.02), dtype=(torch.bfloat16, torch.float16)
)
def test_one_key_over_many_chunks(name, beta, g, dtype, device):
    """flashinfer #3001, maxtext #4577, fla #389: heads of 128, of which the kernels have others."""
    f, sizes = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}[name], {"H": 4, "HV": 4}
    sizes |= {"T": 512, "K": 128, "V": 128}
    x = inputs(ONE, beta, g, dtype, device, **sizes, channels=name == "kda")
    check(f, x, beta, "triton", dtype)
    if beta == 1:  # of which nothing is said
        given = x | {"beta": torch.ones_like(x["beta"])}
        o, _ = f(**given, impl="triton")
        want = exact(given, *cotangents(x))["o"]
        assert relative_rms(o, want) < 5e-2
