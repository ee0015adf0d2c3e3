"""Ranks whose forward pass of Gated DeltaNet is one kernel in Gluon: the results of two kernels.

For their maps R is made of a part's last chunks alone, and of all where a head does not forget.
"""

import functools

import pytest
import torch
from cp.cp_checks import compare, on_one, on_rank
from gdn_checks import PAYS, launches, without_gluon
from kernels.gluon_cases import NO_GPU

from linattn_edu import chunk_gated_delta_rule
from linattn_edu.cp import simulate
from linattn_edu.gluon_interpreter import interpreted
from linattn_edu.kernels.delta import cp_merge, warm_up
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.fused import gdn_fwd
from linattn_edu.kernels.routes import forced
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused.gdn_fwd import chunk_fwd
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")
# log decays, of which every other head has the second; "late" is slow but for a part's last chunks
GATES = {"forgotten": (-3.0, -1.0), "never": (0.0, 0.0), "some": (-3.0, 0.0), "late": (-3.0, -0.01)}
# bounds in parts or documents as long, entries of a batch, ranks; with zigzag a rank has two parts
CUTS = {
    "contiguous": ([0, 3], 1, 3),
    "zigzag": ([0, 4], 1, 2),
    "batch": ([0, 2], 2, 2),
    "alone": ([0, 1], 1, 1),
    "documents": ([0, 1, 3, 4], 1, 2),  # two a rank, of which one goes on in the other
}
MAP = ["intra_chunk", "intra_chunk_ring"]  # for a map; the second goes home if all heads forget
APART = ["intra_chunk_ring", "scan"]  # behind the one kernel, where a rank's sequence is cut


def drawn(cut, tokens, gates, near, device, heads=(1, 2), D=64):
    """(what cp_checks draws, options of on_rank), of parts of so many tokens."""
    bounds, B, _ = CUTS[cut]
    bounds, (H, HV) = [n * tokens for n in bounds], heads
    x = gdn_inputs(B, bounds[-1], H, HV, D, D, dtype=torch.bfloat16, device=device, seed=0)
    x.beta.mul_(0.1)  # else keys overwrite what a state holds
    x.g.copy_(torch.tensor(GATES[gates]).repeat(HV // 2))
    if gates == "late":
        x.g.unflatten(1, (-1, tokens))[:, :, -near:] = -3.0
    state, dht = torch.randn(2, B * (len(bounds) - 1), HV, D, D, device=device)
    tensors = {n: getattr(x, n) for n in ("q", "k", "v", "g", "beta")}
    f = functools.partial(chunk_gated_delta_rule, output_final_state=True, impl="triton")
    options = {"B": B, "layout": "zigzag" if cut == "zigzag" else "contiguous"}
    return (f, tensors, {}, state, torch.randn_like(x.v), dht), {"bounds": bounds, **options}


def on_ranks(cut, x, options):
    """Of each rank what cp_checks compares, both passes."""
    return simulate(CUTS[cut][2], lambda group: on_rank(x, group=group, **options))


def names(ran):
    """The kernels in Gluon of a forward pass, sorted."""
    found = [kernel.__name__.removesuffix("_gluon_kernel") for kernel in ran]
    return sorted(n for n in found if n in (*MAP, "chunk_fwd", "scan"))


def wanted(cut, cut_again=False):
    """Those that should have run, on all ranks: where sequences go on there are maps."""
    world = CUTS[cut][2]
    sources = world if cut == "zigzag" else world - 1
    return sorted(MAP * sources + (["chunk_fwd"] + APART * cut_again) * world)


@NO_GPU
@pytest.mark.parametrize(
    ("cut", "gates"),
    [("contiguous", "some"), ("zigzag", "forgotten"), ("batch", "never"), ("documents", "late")],
)
def test_interpreted(cut, gates, force, monkeypatch):
    """Both passes, the second from P and A * G of the one kernel, against one rank."""
    monkeypatch.setattr(cp_merge, "NEAR", 2)
    x, options = drawn(cut, 256, gates, 128, torch.device("cpu"))
    whole = on_one(x, options["bounds"], options["B"])
    force(**PAYS, chunk_fwd="one")
    with interpreted() as ran:
        parts = on_ranks(cut, x, options)
    compare(whole, parts, {}, 1e-2)
    assert names(ran) == wanted(cut)


# gates -> whether R of all chunks is made for the map, or behind the kernel, where pieces of 128
# tokens are to be forgotten in 128
MADE = {"forgotten": (False, False), "never": (True, False), "late": (False, True)}


@NO_GPU
@pytest.mark.parametrize("sends", [True, False])
@pytest.mark.parametrize("gates", MADE)
def test_what_is_made(gates, sends, force, monkeypatch):
    """P, R and A * G of all chunks are made where a head wants them, and once. The state is asked
    for when all is launched that needs none.
    """
    monkeypatch.setattr(cp_merge, "NEAR", 2)
    monkeypatch.setattr(warm_up, "REACH", 128)
    (_, x, _, state, *_), _ = drawn("alone", 384, gates, 128, torch.device("cpu"))
    gc, asked, went = gate_cumsum(x["g"], chunk_size=64), [], []
    args = x["q"], x["k"], x["v"], x["beta"], gc
    options = {"scale": 0.3, "chunk_size": 64, "output_final_state": True, "keep": True}
    made = gdn_fwd.gdn_intra.intra_gluon

    def intra(given, gated, packing, go=(None, None), *near):
        asked, done = (None if x is None else x.flatten()[0].item() >= 0 for x in go)
        went.append(asked and not done)
        return made(given, gated, packing, go, *near)

    def enter(make, given):
        out = torch.full((1, 2, 64, 128), torch.nan)
        if sends:
            rows = torch.tensor([0])
            asked.append(make(*given, None, rows=rows, out=out, transition=True))
        return lambda: state

    def refers(make, given):
        asked.append(make(*given, None))
        return state

    monkeypatch.setattr(gdn_fwd.gdn_intra, "intra_gluon", intra)
    force(**PAYS, chunk_fwd="one", PROGRAMS=0, PER_PROGRAM=64, MULTIPROCESSORS=1)
    with interpreted() as ran:
        found = gdn_fwd.chunk_fwd(*args, None, enter, **options)
    assert names(ran) == sorted(MAP * sends + ["chunk_fwd", *APART])
    want = chunk_fwd(*args, None, refers, **options)
    for a, b in zip(found[:-1], want[:-1], strict=True):
        assert_close("a result", a, b, 1e-2)
    far, behind = MADE[gates]
    assert went == ([None, far, behind] if sends else [far or behind])
    if sends:
        (S, M), (S_whole, M_whole) = asked
        assert_close("S_ext", S, S_whole, 1e-2)
        assert ((M - M_whole).abs().amax((2, 3)) <= (1e-2 if far else 2.0**-32 / 64)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("cut", [n for n in CUTS if n != "alone"])
def test_the_bits_of_two_kernels(cut, gates, pieces, device, force):
    """Of all results and gradients, also of heads that do not forget. A rank's chunks are so many
    that the ring makes all of them.
    """
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    if pieces:  # of 512 tokens
        force(PROGRAMS=0, PER_PROGRAM=64)
    x, options = drawn(cut, 64 * 70, gates, 1024 - 64, device, (4, 4), 128)
    with forced(chunk_fwd="two"):
        want = on_ranks(cut, x, options)
    with forced(chunk_fwd="one"), launches() as ran:
        got = on_ranks(cut, x, options)
    forth = [n for n in names(ran) if pieces or n != "scan"]
    assert forth == wanted(cut, pieces)
    for (*_, (o, final, gradients)), (*_, (o_two, final_two, gradients_two)) in zip(
        got, want, strict=True
    ):
        assert torch.equal(o, o_two) and torch.equal(final, final_two)
        assert all(torch.equal(g, gradients_two[n]) for n, g in gradients.items())


@pytest.mark.gpu
@pytest.mark.parametrize("pieces", [False, True])
def test_in_a_graph(pieces, device, force):
    """What a head forgets is found on the device: a graph is replayed with other gates."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(**PAYS)
    if pieces:
        force(PROGRAMS=0, PER_PROGRAM=64)
    (_, x, _, state, *_), _ = drawn("alone", 64 * 70, "forgotten", 0, device, (4, 4), 128)
    rows, out = torch.tensor([0], device=device), torch.empty(1, 4, 128, 256, device=device)
    options = {"scale": 0.3, "chunk_size": 64, "output_final_state": True, "keep": True}

    def enter(make, given):
        make(*given, None, rows=rows, out=out, transition=True)
        return lambda: state

    def call():
        gc = gate_cumsum_kernel(x["g"], chunk_size=64)
        args = x["q"], x["k"], x["v"], x["beta"], gc
        return (*gdn_fwd.chunk_fwd(*args, None, enter, **options)[:-1], out)

    want = []
    for gates in GATES.values():
        x["g"].copy_(torch.tensor(gates).repeat(2))
        with forced(chunk_fwd="two"):
            want.append([y.clone() for y in call()])
    force(chunk_fwd="one")
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for gates, results in zip(GATES.values(), want, strict=True):
        x["g"].copy_(torch.tensor(gates).repeat(2))
        graph.replay()
        assert all(map(torch.equal, found, results)), gates
