"""Where numbers of 16 bit cancel: which heads are kept in halves, and that no other is."""

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

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.kernels.fused import cancel as kernels
from linattn_edu.kernels.routes import forced
from linattn_edu.packing import pack, room
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused import cancel as references
from linattn_edu.reference.fused.gdn_intra import intra_chunk
from linattn_edu.testing import relative_rms

pytestmark = pytest.mark.usefixtures("poison")
BF16 = torch.bfloat16


def inputs(T, HV, K, V, dtype, device, *, alike=((1, 1),), seed=0):
    """Two sequences of two q/k heads: unit keys, beta up to 2, gates that fade in some tokens; of
    (sequence, head) in `alike` keys are, and the gate of one value head is weak.
    """
    generator = torch.Generator(device=device).manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v = randn(2, T, 2, K), F.normalize(randn(2, T, 2, K), dim=-1), randn(2, T, HV, V)
    g, beta = -2.0 - randn(2, T, HV).sigmoid(), 2 * randn(2, T, HV).sigmoid()
    for n, h in alike:
        k[n, :, h] += 3 * k[n, :1, h]
        g[n, :, h * HV // 2] *= 0.01
    x = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    x = {n: t.to(dtype) for n, t in x.items()} | {"g": g, "beta": beta}
    return x | {"initial_state": randn(2, HV, K, V)}


def parts(x, C):
    gc = gate_cumsum(x["g"], chunk_size=C)
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    P, _, AG = intra_chunk(x["q"], x["k"], x["beta"], gc, **options)
    return P, AG, x["beta"], 2


@pytest.mark.parametrize("alike", [(), ((1, 1),), ((0, 0), (0, 1))], ids=len)
@pytest.mark.parametrize(("T", "C", "HV"), [(150, 64, 4), (100, 16, 2), (64, 32, 6)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
def test_kernels_match_reference(alike, T, C, HV, dtype, device):
    """cancels, and the heads and chunks that those names."""
    x = inputs(T, HV, 32, 16, dtype, device, alike=alike)
    got, want = (of.cancels(*parts(x, C)) for of in (kernels, references))
    assert got.dtype == torch.int32 and torch.equal(got, want)
    assert {(n, h) for n, h in got[:, :: HV // 2].nonzero().tolist()} == {*alike}
    assert torch.equal(got, got[:, :: HV // 2].repeat_interleave(HV // 2, 1))
    ways, *lists = kernels.those(got, x["k"], chunk_size=C)
    other, *wanted = references.those(want, x["k"], chunk_size=C)
    assert torch.equal(ways, other) and torch.equal(ways == 0, got == -1)
    for items, listed, heads in zip(lists, wanted, (len(alike), 4 - len(alike)), strict=True):
        assert torch.equal(items[: len(listed)], listed)
        assert items[0] == len(listed) - 1 == heads * -(-T // C)


@pytest.mark.parametrize("T", [64, 150])
def test_an_erase_gate_in_the_place_of_beta(T, device):
    """A has it: as with a beta of 1, but behind the last token."""
    x = inputs(T, 2, 32, 16, BF16, device)
    P, AG, beta, _ = parts(x, 64)
    for of in (kernels, references):
        ones = of.cancels(P, AG, torch.ones_like(beta), 2)
        assert torch.equal(of.cancels(P, AG, None, 2), ones)
        assert ones.tolist() == [[0, 0], [0, -1]]


@pytest.mark.parametrize("which", ["what is read", "what the state takes"])
def test_either_bound_is_enough(which, device):
    """P of ones and an inverse whose columns take from each other little by little; or an inverse
    whose rows alternate, and P with a diagonal alone.
    """
    one = torch.eye(64, device=device)
    below = torch.ones_like(one).tril(-1)
    P, A = (one + below, one - 0.02 * below) if which == "what is read" else (one, one - below)
    P, A = (x[None, :, None].to(BF16) for x in (P, A))
    beta = torch.ones(1, 64, 1, device=device)
    for of in (kernels, references):
        assert of.cancels(P, A, beta, 1).item() == -1
        assert of.cancels(P, one[None, :, None].to(BF16), beta, 1).item() == 0


def test_behind_the_last_token_nothing_is_written(device):
    """A chunk of two tokens, of which the second takes the first away."""
    one = torch.eye(64, device=device, dtype=BF16)[:2]
    P, A = (x[None, :, None].clone() for x in (one, one))
    A[0, 1, 0, 0] = -1
    for of in (kernels, references):
        assert of.cancels(P, A, None, 1).item() == -1
        assert of.cancels(P, P, None, 1).item() == 0


def test_what_is_no_number_cancels(device):
    x = inputs(64, 2, 32, 16, BF16, device, alike=())
    P, *others = parts(x, 64)
    P[0, 40, 1, 3] = float("nan")
    assert kernels.cancels(P, *others).tolist() == [[0, -1], [0, 0]]
    assert references.cancels(P, *others).tolist() == [[0, -1], [0, 0]]


def test_nothing_is_written(device):
    """beta of 0, and queries of 0: nothing is rounded, so nothing cancels."""
    x = inputs(64, 2, 32, 16, BF16, device, alike=())
    for n in ("beta", "q"):
        P, AG, beta, _ = parts(x | {n: torch.zeros_like(x[n])}, 64)
        assert not kernels.cancels(P, AG, beta, 2).any()
        assert not references.cancels(P, AG, beta, 2).any()


def test_packed(device):
    """Each sequence has the bits, and the chunks, that it has alone; an empty one has none."""
    bounds = [0, 70, 70, 150]
    x = inputs(150, 4, 32, 16, BF16, device, alike=((0, 1),))
    x["k"][0, 70:, 0] = F.normalize(x["k"][0, 70:, 0] + 3 * x["k"][0, 70:71, 0], dim=-1)
    x["g"][0, 70:, 0] *= 0.01
    x = {n: t[:1] for n, t in x.items()}
    own = [{n: t[:, a:b] for n, t in x.items()} for a, b in ((0, 70), (70, 150))]
    each = [parts(y, 64) for y in own]
    tokens = [torch.cat(t, 1) for t in list(zip(*each, strict=True))[:3]]
    packing = pack(torch.tensor(bounds, device=device), 64)
    got = kernels.cancels(*tokens, 2, packing=packing)
    first, second = (kernels.cancels(*y)[0] for y in each)
    assert got.tolist() == [first.tolist(), [0] * 4, second.tolist()]
    assert got.tolist() == [[0, 0, -1, -1], [0] * 4, [-1] * 4]
    _, items, others = kernels.those(got, x["k"], chunk_size=64, packing=packing)
    assert items[: items[0] + 1].tolist() == [6, 1, 3, 4, 5, 6, 7]
    assert others[: others[0] + 1].tolist() == [2, 0, 2]


@pytest.mark.parametrize("ends", [[0, 70, 150], [0, 30, 40]])
def test_packed_in_room_for_more(ends, device):
    """Chunks of no sequence, of which a launch that knows no boundaries has some, are not listed,
    whatever lies behind the heads.
    """
    x = inputs(150, 4, 32, 16, BF16, device, alike=((0, 1),))
    x = {n: t[:1] for n, t in x.items()}
    cu_seqlens = torch.tensor(ends, device=device)
    chunks = room(cu_seqlens, 150, 64)
    packing = pack(cu_seqlens, 64, tokens=150, chunk_indices=chunks)
    memory = torch.full((64,), -1, dtype=torch.int32, device=device)
    memory[:8] = torch.tensor([0, 0, -1, -1, 0, 0, 0, 0])
    ways = memory[:8].view(2, 4)
    _, items, others = kernels.those(ways, x["k"], chunk_size=64, packing=packing)
    used = chunks[:, 0].tolist().count(0)
    assert len(chunks) > used and items[: items[0] + 1].tolist() == [used, 1, 3][: used + 1]
    rest = [0, 2, 4, 5, 6, 7] if used == 2 else [0, 2, 3]
    assert others[: others[0] + 1].tolist() == [len(rest), *rest]


# -- the operator --------------------------------------------------------------------------------
DECLARED = {"allow_neg_eigval": True, "impl": "triton", "output_final_state": True}


@pytest.mark.parametrize(
    ("T", "HV", "K", "V", "dtype"), [(70, 4, 32, 32, BF16), (64, 2, 64, 32, torch.float16)]
)
def test_the_others_are_as_without(T, HV, K, V, dtype, device):
    """A head that cancels has the bits of halves for all, another those of halves for none; and
    where nothing is kept for a backward pass they are the same.
    """
    halves_run(device)
    x = inputs(T, HV, K, V, dtype, device)
    do, dht = cotangents(x)
    got = run(x, do, dht, **DECLARED)
    every = run(x, do, dht, **DECLARED, batch_invariant=True)
    none = run(x, do, dht, impl="triton", output_final_state=True)
    for name, y in got.items():
        y, a, b = (by_key_head(name, t, 2) for t in (y, every[name], none[name]))
        for n, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
            assert torch.equal(y[n, h], (a if (n, h) == (1, 1) else b)[n, h]), (name, n, h)
        assert not torch.equal(a[0, 0], b[0, 0]) and not torch.equal(a[1, 1], b[1, 1]), name
    with torch.no_grad():
        o, ht = chunk_gated_delta_rule(**x, **DECLARED)
    assert torch.equal(o, got["o"]) and torch.equal(ht, got["ht"])


@pytest.mark.parametrize(("g", "dtype"), [(-0.2, BF16), (-1.0, torch.float16)])
def test_no_head_cancels_where_errors_are_small(g, dtype, device):
    """Keys of random directions and gates that fade: three roundings of o, the state and the
    gradients of what has 16 bit; six of beta's, which the last tokens alone may make up.
    """
    halves_run(device)
    x = inputs(192, 2, 128, 64, dtype, device, alike=())
    drawn = torch.rand(x["g"].shape, generator=torch.Generator().manual_seed(0))
    x["g"] = (g * 2 * drawn).to(device)
    assert not kernels.cancels(*parts(x, 64)).any()
    do, dht = cotangents(x)
    got, want = run(x, do, dht, **DECLARED), exact(x, do, dht)
    for name, y in got.items():
        error = relative_rms(y, want[name]) / relative_rms(want[name].to(dtype), want[name])
        assert error < {"dbeta": 6.0, "dg": 8.0}.get(name, 3.0), name


@pytest.mark.gpu
@pytest.mark.parametrize(("HV", "kernels"), [(2, "one"), (2, "two"), (4, "two")])
@pytest.mark.parametrize("alike", [(), ((1, 1),), ((0, 0), (0, 1), (1, 0), (1, 1))], ids=len)
def test_in_gluon(alike, HV, kernels, device, force):
    """Heads of 128 in the kernels of Hopper, each in the place of others; twice the same."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS, scan_intra_bwd=kernels, chunk_fwd=kernels)
    x = inputs(2048, HV, 128, 128, BF16, device, alike=alike)
    x["q"], x["k"] = (x[n].repeat_interleave(2, 2) for n in ("q", "k"))
    x |= {n: x[n].repeat_interleave(2, 2) for n in ("v", "g", "beta")}
    x["initial_state"] = x["initial_state"].repeat_interleave(2, 1)
    do, dht = cotangents(x)
    with launches() as ran:
        got, again = (run(x, do, dht, **DECLARED) for _ in range(2))
    names = {k.__name__ for k in ran}
    one = {"chunk_fwd_gluon_kernel", "scan_intra_bwd_gluon_kernel"}
    two = {"cancels_kernel", "scan_gluon_kernel"}
    assert names & (one | two) == (one if kernels == "one" else two)
    assert "intra_chunk_bwd_gluon_kernel" in names
    want = exact(x, do, dht)
    for name, y in got.items():
        assert torch.equal(y, again[name]), name
        error = relative_rms(y, want[name]) / relative_rms(want[name].to(BF16), want[name])
        assert error < {"dbeta": 6.0, "dg": 8.0}.get(name, 3.0), name


# pieces of 64 tokens, entered by their maps; or found forgotten in 64
PIECES = {
    "scan_map_kernel": {"pieces_by_maps": 64},
    "bound_kernel": {"PROGRAMS": 0, "PER_PROGRAM": 32, "MULTIPROCESSORS": 1},
}


@pytest.mark.parametrize("by", PIECES)
def test_in_pieces(by, device):
    """Sequences that the scans of 16 bit cut, those of halves do not."""
    halves_run(device)
    x = inputs(192, 2, 32, 32, BF16, device)
    do, dht = cotangents(x)
    with forced(**PIECES[by]), launches() as ran:
        got = run(x, do, dht, **DECLARED)
    names = {k.__name__ for k in ran}
    assert {by, "cancels_kernel", "scan_transposed_kernel"} <= names
    want = exact(x, do, dht)
    for name, y in got.items():
        error = relative_rms(y, want[name]) / relative_rms(want[name].to(BF16), want[name])
        assert error < {"dbeta": 6.0, "dg": 8.0}.get(name, 3.0), name


def test_forced_stages(device):
    """The same bits with scans that are launched together, and one after the other."""
    halves_run(device)
    x = inputs(80, 2, 32, 16, BF16, device)
    do, dht = cotangents(x)
    results = []
    for together in (0, 1):
        with forced(together=together):
            results.append(run(x, do, dht, **DECLARED))
    assert all(torch.equal(y, results[1][n]) for n, y in results[0].items())
