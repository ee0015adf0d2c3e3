"""The affine map of a piece under its public names: what it means, its gradients, refusals."""

from itertools import pairwise

import pytest
import torch
from torch.autograd import gradcheck

from linattn_edu import chunk_gated_delta_rule, chunk_kda, mamba_chunk_scan_combined
from linattn_edu.cp import state_and_map, state_and_number
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs, ssd_inputs

BOUNDS = [0, 20, 20, 37, 90]


def delta(family, T=90, B=1, **options):
    make = {"gdn": gdn_inputs, "kda": kda_inputs}[family]
    x = make(B, T, 1, 2, 8, 6, **options)
    f = {"gdn": chunk_gated_delta_rule, "kda": chunk_kda}[family]
    return x, (x.k, x.v, x.g, x.beta), f


families = pytest.mark.parametrize("family", ["gdn", "kda"])


@families
def test_pieces_make_the_whole(family):
    """In float64: state by state, from the maps of packed pieces alone; and their product."""
    x, given, f = delta(family, dtype=torch.float64, initial_state=True)
    S_ext, M = state_and_map(*given, cu_seqlens=torch.tensor(BOUNDS), chunk_size=16)
    assert S_ext.dtype == M.dtype == torch.float64
    S, total = x.initial_state[0], torch.eye(8, dtype=torch.float64)
    for n, (_, b) in enumerate(pairwise(BOUNDS)):
        S, total = M[n] @ S + S_ext[n], M[n] @ total
        first = [t[:, :b] for t in (x.q, *given)]
        _, want = f(*first, initial_state=x.initial_state, output_final_state=True)
        assert_close(f"state at {b}", S, want[0], 1e-12)
    _, whole = state_and_map(*given)
    assert_close("M", total, whole[0], 1e-12)
    assert torch.equal(M[1], torch.eye(8, dtype=torch.float64).expand(2, 8, 8))  # no tokens
    assert (S_ext[1] == 0).all()


@families
@pytest.mark.parametrize("packed", [False, True])
def test_gradients(family, packed):
    T, B = (7, 1) if packed else (5, 2)
    _, given, _ = delta(family, T, B, dtype=torch.float64)
    bounds = {"cu_seqlens": torch.tensor([0, 3, 7])} if packed else {}
    given = [t.detach().clone().requires_grad_() for t in given]
    given[2].data.sub_(0.01)  # a step must not make it positive
    assert gradcheck(lambda *x: state_and_map(*x, **bounds), given, fast_mode=True)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels(family, dtype, device):
    """Against float64, with gradients, both rounded at most as the operators' final states are."""
    _, given, _ = delta(family, 40, 2, dtype=dtype, device=device)
    found = []
    for impl, one in (("triton", given), ("reference", [t.double() for t in given])):
        one = [t.detach().clone().requires_grad_() for t in one]
        S_ext, M = state_and_map(*one, impl=impl, chunk_size=16)
        torch.manual_seed(0)
        into = [torch.randn(x.shape).to(x) for x in (S_ext, M)]
        found.append((S_ext, M, *torch.autograd.grad([S_ext, M], one, into)))
    tol = {torch.float32: 3e-5, torch.bfloat16: 2e-2}[dtype]
    assert found[0][0].dtype == found[0][1].dtype == torch.float32
    for name, x, y in zip(("S_ext", "M", "dk", "dv", "dg", "dbeta"), *found, strict=True):
        assert_close(name, x, y, tol)


def test_mamba_2():
    x = ssd_inputs(1, 90, 2, 1, 6, 8, dtype=torch.float64)
    given, options = (x.x, x.dt, x.A, x.B, 16, x.dt_bias), {"dt_softplus": True}
    S_ext, m = state_and_number(*given, cu_seqlens=torch.tensor(BOUNDS), **options)
    assert (S_ext.shape, m.shape) == ((4, 2, 6, 8), (4, 2))
    start = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    S = start[0]
    for n in range(4):
        S = m[n, :, None, None] * S + S_ext[n]
    _, want = mamba_chunk_scan_combined(
        *given[:4], x.C, 16, dt_bias=x.dt_bias, initial_states=start, return_final_states=True,
        **options,
    )  # fmt: skip
    assert_close("state", S, want[0], 1e-12)
    step = torch.nn.functional.softplus(x.dt + x.dt_bias)
    assert_close("m", m.prod(0), (step * x.A).sum(1).exp()[0], 1e-12)
    few = [t[:, :5].detach().clone().requires_grad_() for t in (x.x, x.dt, x.B)]
    A, bias = (t.detach().clone().requires_grad_() for t in (x.A, x.dt_bias))

    def f(values, dt, B, A, bias):
        return state_and_number(values, dt, A, B, 16, bias, **options)

    assert gradcheck(f, (*few, A, bias), fast_mode=True)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("k", lambda t: t[0], ValueError),
        ("v", lambda t: t.half(), TypeError),
        ("g", lambda t: t[..., :1], ValueError),
        ("g", lambda t: -t, ValueError),
        ("beta", lambda t: t[:, 1:], ValueError),
        ("k", lambda t: None, TypeError),
    ],
)
def test_refusals(name, change, error):
    _, given, _ = delta("gdn", 20)
    given = dict(zip(["k", "v", "g", "beta"], given, strict=True))
    given[name] = change(given[name])
    with pytest.raises(error, match=f"^{name} must"):
        state_and_map(**given)
