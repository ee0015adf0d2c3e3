"""A gate for each channel: heads whose numbers cancel are kept in halves, and no other is."""

import pytest
import torch
import torch.nn.functional as F
from gdn_checks import (
    PAYS,
    by_key_head,
    cotangents,
    exact,
    halves_run,
    launches,
    run,
    without_gluon,
)

from linattn_edu import chunk_gated_delta_rule, chunk_gdn2, chunk_kda
from linattn_edu.kernels.fused import kda_halves as kernels
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.fused import kda_halves as references
from linattn_edu.testing import relative_rms

pytestmark = pytest.mark.usefixtures("poison")
BF16 = torch.bfloat16
CALLS = {"kda": chunk_kda, "gdn2": chunk_gdn2}
calls = pytest.mark.parametrize("name", CALLS)
DECLARED = {"allow_neg_eigval": True, "impl": "triton", "output_final_state": True}
# of what is in fp32 the last tokens may be all, or a small difference
MOST = {"dbeta": 6.0, "db": 6.0, "dg": 8.0}


def inputs(name, T, H, HV, K, V, device, *, alike=((1, 1),), seed=0):
    """Two sequences: unit keys, beta up to 2, gates that fade; of (sequence, q/k head) in `alike`
    keys are, and the gates of one value head are weak.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v = randn(2, T, H, K), F.normalize(randn(2, T, H, K), dim=-1), randn(2, T, HV, V)
    g = -2.0 - randn(2, T, HV, K).sigmoid()
    g[..., K // 2 :] *= 0.2
    for n, h in alike:
        k[n, :, h] += 3 * k[n, :1, h]
        g[n, :, h * HV // H] *= 0.01
    x = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    x = {n: t.to(BF16) for n, t in x.items()} | {"g": g}
    if name == "kda":
        x["beta"] = 2 * randn(2, T, HV).sigmoid()
    else:
        x |= {"b": 2 * randn(2, T, HV, K).sigmoid(), "w": randn(2, T, HV, V).sigmoid()}
        x |= {n: x[n].to(BF16) for n in "bw"}
    return x | {"initial_state": randn(2, HV, K, V)}


def near(got, want, name):
    error = relative_rms(got, want) / relative_rms(want.to(BF16), want)
    assert error < MOST.get(name, 3.5), (name, error)


def both_rooms(x, raw=None):
    """The kernels' forward and backward pass, and the references'."""
    strength = (x["beta"], None) if "beta" in x else (x["b"], x["w"])
    given = x["q"], x["k"], x["v"], strength[0], x["g"]
    do, dht = cotangents(x)
    state, write = x["initial_state"], strength[1]
    options = {"scale": 0.3, "chunk_size": 64}
    made = []
    for of in (kernels, references):
        forth = of.kda_halves(
            *given, None, None, write, state, raw, output_final_state=True, **options
        )
        _, _, P, A, *fine, found = forth
        back = of.kda_halves_bwd(
            *given, (P, A), tuple(fine), found, do, None, None, write, state, dht, raw, **options
        )
        made.append((forth, back))
    return made


@calls
@pytest.mark.parametrize("alike", [(), ((1, 1),), ((0, 0), (0, 1), (1, 0), (1, 1))], ids=len)
@pytest.mark.parametrize(("T", "HV", "K", "V"), [(100, 2, 32, 48), (64, 4, 64, 16)])
def test_kernels_match_references(name, T, HV, K, V, alike, device):
    (got, back), (want, back_want) = both_rooms(inputs(name, T, 2, HV, K, V, device, alike=alike))
    assert torch.equal(got[-1], want[-1])
    assert {(n, h) for n, h in got[-1][:, :: HV // 2].nonzero().tolist()} == {*alike}
    for x, y in zip(got[:4], want[:4], strict=True):
        assert relative_rms(x, y) < 2**-7
    heads = (got[-1] == -1)[:, None, :, None]
    for x, y in zip(got[4:6], want[4:6], strict=True):  # anything for heads that do not cancel
        x, y = (torch.where(heads, t, 0.0) for t in (x, y))
        assert relative_rms(x, y) < 2**-13 if alike else not y.any()
    for i, (x, y) in enumerate(zip(back, back_want, strict=True)):
        assert (x is None and y is None) or relative_rms(x, y) < 2**-6, i


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("T", "K"), [(70, 40), (64, 128)])
def test_unit_rows(T, K, dtype, device):
    """Of the chunks that are listed; the others stay as they are."""
    x = (3 * torch.randn(2, T, 2, K, device=device)).to(dtype)
    chunks = torch.arange(2 * -(-T // 64), device=device)
    items = torch.cat([chunks[:1] + len(chunks), 2 * chunks + 1]).int()  # the second head
    y, want = (of.unit_rows(x, items, chunk_size=64) for of in (kernels, references))
    assert relative_rms(y[:, :, 1], want[:, :, 1]) < 1e-6
    assert y[:, :, 0].isnan().all() or not y[:, :, 0].any()  # as it was made


@calls
@pytest.mark.parametrize("HV", [2, 4])
def test_rows_that_were_divided_by_their_length(name, HV, device):
    """Heads that cancel read them before they were rounded."""
    x = inputs(name, 100, 2, HV, 32, 32, device)
    raw = [(3 * x[n].float()).to(BF16) for n in "qk"]
    x |= {n: F.normalize(t.float(), dim=-1).to(BF16) for n, t in zip("qk", raw, strict=True)}
    (got, back), (want, back_want) = both_rooms(x, raw)
    assert got[-1].any() and torch.equal(got[-1], want[-1])
    assert relative_rms(got[0], want[0]) < 2**-8
    for i, (y, other) in enumerate(zip(back, back_want, strict=True)):
        assert (y is None and other is None) or relative_rms(y, other) < 2**-6, i


@calls
def test_others_are_as_without(name, device):
    """A head that cancels has the bits of halves for all, another those of no declared beta."""
    halves_run(device)
    x = inputs(name, 128, 2, 4, 32, 32, device)
    do, dht = cotangents(x)
    f = CALLS[name]
    got = run(x, do, dht, f, **DECLARED)
    every = run(x, do, dht, f, **DECLARED, batch_invariant=True)
    with forced(kda_backward_stages="fused"):
        none = run(x, do, dht, f, impl="triton", output_final_state=True)
    for key, y in got.items():
        y, a, b = (by_key_head(key, t, 2) for t in (y, every[key], none[key]))
        for n, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
            assert torch.equal(y[n, h], (a if (n, h) == (1, 1) else b)[n, h]), (key, n, h)
        assert not torch.equal(a[0, 0], b[0, 0]) and not torch.equal(a[1, 1], b[1, 1]), key
    with torch.no_grad():
        o, ht = f(**x, **DECLARED)
    assert torch.equal(o, got["o"]) and torch.equal(ht, got["ht"])


@calls
def test_packed(name, device):
    """Each sequence has the bits that it has alone."""
    halves_run(device)
    x = inputs(name, 90, 2, 2, 32, 16, device)
    ends = [0, 90, 90, 160]
    own = [{n: t[i : i + 1] for n, t in x.items()} for i in range(2)]
    own[1] = {n: t if n == "initial_state" else t[:, :70] for n, t in own[1].items()}
    do, _ = cotangents(x)
    alone = [run(y, do[i : i + 1, : y["v"].shape[1]], None, CALLS[name], **DECLARED)
             for i, y in enumerate(own)]  # fmt: skip
    tokens = {n: torch.cat([y[n] for y in own], 1) for n in x if n != "initial_state"}
    states = torch.cat([own[0]["initial_state"], x["initial_state"][:1], own[1]["initial_state"]])
    packed = tokens | {"initial_state": states, "cu_seqlens": torch.tensor(ends, device=device)}
    together = torch.cat([do[:1], do[1:, :70]], 1)
    got = run(packed, together, None, CALLS[name], **DECLARED)
    for key, y in got.items():
        states = key in ("ht", "dinitial_state")
        parts = (y[:1], y[2:]) if states else (y[:, :90], y[:, 90:])
        assert all(torch.equal(a, one[key]) for a, one in zip(parts, alone, strict=True)), key


@pytest.mark.gpu
@calls
@pytest.mark.parametrize(("together", "normalise"), [(0, False), (1, False), (1, True)])
@pytest.mark.parametrize("alike", [(), ((1, 1),), ((0, 0), (0, 1), (1, 0), (1, 1))], ids=len)
def test_in_gluon(alike, together, normalise, name, device, force):
    """Heads of 128 in the kernels of Hopper; twice the same."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS, together=together)
    x = inputs(name, 2048, 2, 2, 128, 128, device, alike=alike)
    if normalise:
        x |= {n: 3 * x[n] for n in "qk"}
    norm, (do, dht) = {"use_qk_l2norm_in_kernel": normalise}, cotangents(x)
    with launches() as ran:
        got, again = (run(x, do, dht, CALLS[name], **DECLARED, **norm) for _ in range(2))
    names = {k.__name__ for k in ran}
    scans = {"kda_scans_gluon_kernel"} if together else {
        "kda_scan_states_gluon_kernel", "kda_scan_bwd_gluon_kernel"
    }  # fmt: skip
    scans |= {"kda_prepare_gluon_kernel", "kda_scan_gluon_kernel", "kda_intra_bwd_gluon_kernel"}
    assert scans <= names and "cancels_kernel" not in names
    want = exact(x, do, dht, **norm)
    for key, y in got.items():
        assert torch.equal(y, again[key]), key
        near(y, want[key], key)


@calls
@pytest.mark.parametrize("T", [192, 264], ids=["of one length", "and what is left"])
def test_in_pieces(T, name, device):
    """Sequences that scans cut: each piece is scanned as its sequence is kept."""
    halves_run(device)
    x = inputs(name, T, 2, 2, 32, 32, device)
    do, dht = cotangents(x)
    with forced(pieces_by_maps=64), launches() as ran:
        got = run(x, do, dht, CALLS[name], **DECLARED)
    assert {"kda_fused_scan_map_kernel", "cancels_kernel"} <= {k.__name__ for k in ran}
    want = exact(x, do, dht)
    for key, y in got.items():
        near(y, want[key], key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gdn", *CALLS])
def test_a_graph_is_replayed_with_heads_that_cancel(name, device):
    """Which heads do is found on the GPU: the host, which captured others, need not know."""
    if why := without_gluon(device):
        pytest.skip(why)
    f = CALLS.get(name, chunk_gated_delta_rule)
    given = []
    for alike in ((), ((0, 1), (1, 0))):
        x = inputs("gdn2" if name == "gdn2" else "kda", 256, 2, 2, 128, 128, device, alike=alike)
        if name == "gdn":
            x["g"] = x["g"][..., 0].contiguous()
        given.append(x)
    x, other = given
    kept = {n: t.clone().requires_grad_() for n, t in x.items()}
    do = cotangents(x)[0]

    def step():
        o, S = f(**kept, **DECLARED, use_qk_l2norm_in_kernel=True)
        return o, S, *torch.autograd.grad(o, list(kept.values()), do)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for y in (other, x):
        with torch.no_grad():
            for n, t in kept.items():
                t.copy_(y[n])
        graph.replay()
        found = [t.clone() for t in made]
        assert all(map(torch.equal, found, step()))
