"""Long sequences of few heads in pieces: the scans give what they give on whole sequences."""

import itertools

import gdn_checks
import kda_checks as operator_checks
import pytest
import torch
from delta.stage_checks import backward_inputs, inputs
from fused import kda_checks
from grids import FULL

from linattn_edu import chunk_gated_delta_rule, chunk_kda
from linattn_edu.kernels import pieces
from linattn_edu.kernels.delta import cp_merge, cp_merge_bwd
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum
from linattn_edu.kernels.delta.kda_scans import kda_scans
from linattn_edu.kernels.delta.state import state
from linattn_edu.kernels.delta.state_bwd import state_bwd
from linattn_edu.kernels.fused import gdn_fwd, gdn_intra
from linattn_edu.kernels.routes import forced
from linattn_edu.packing import pack
from linattn_edu.testing import assert_close

pytestmark = pytest.mark.usefixtures("poison")
# T; and boundaries where several sequences are packed: short ones are not cut, one is empty
SHAPES = {
    "whole pieces": (128, None),
    "a rest": (150, None),
    "packed": (310, [0, 64, 64, 144, 310]),
    "packed, the last one whole": (310, [0, 64, 214, 310]),
}
shapes = pytest.mark.parametrize("shape", SHAPES)
# with states at the ends, or without
FEW = [("a rest", False), ("packed", False), *((s, True) for s in SHAPES if s != "a rest")]
cases = pytest.mark.parametrize(
    ("shape", "given"), itertools.product(SHAPES, (False, True)) if FULL else FEW
)


@pytest.fixture
def cut(force, monkeypatch):
    """Pieces of 32 tokens, of sequences of 128 and more."""
    force(LENGTH=32, MULTIPROCESSORS=1)
    counts = []
    launch = cp_merge.launch_merge

    def noted(*args, **kwargs):
        counts.append(args[0].shape)
        return launch(*args, **kwargs)

    monkeypatch.setattr(cp_merge, "launch_merge", noted)
    monkeypatch.setattr(cp_merge_bwd, "launch_merge", noted)
    return counts


def both(f):
    """f() in pieces and whole."""
    got = f()
    with forced(PROGRAMS=0):
        return got, f()


def packed(bounds, C, device):
    return {} if bounds is None else {"packing": pack(torch.tensor(bounds, device=device), C)}


def state_of(x, bounds):
    """x, or as many different states as there are sequences."""
    if bounds is None:
        return x
    numbers = torch.arange(1.0, len(bounds), device=x.device)
    return numbers.view(-1, 1, 1, 1) * x[:1]


def same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if b is None:
            assert a is None
        else:
            assert_close(f"output {i}", a, b, 5e-6)


@cases
def test_scan(shape, given, cut, device):
    T, bounds = SHAPES[shape]
    x = inputs(T, 20, 24, torch.float32, device)
    one = slice(0, 1 if bounds else None)
    q, k, v, beta, g = (t[one] for t in (x.q, x.k, x.v, x.beta, x.g))
    own = packed(bounds, 16, device)
    h0 = state_of(x.initial_state, bounds).contiguous() if given else None
    gc = gate_cumsum(g, chunk_size=16, **own)
    P, R, _ = gdn_intra.intra_chunk(q, k, beta, gc, chunk_size=16, **own)

    def run():
        return gdn_fwd.scan(q, k, v, gc, P, R, h0, scale=0.3, output_final_state=True, **own)

    same(*both(run))
    assert cut


@cases
def test_state_and_its_adjoint(shape, given, cut, device):
    T, bounds = SHAPES[shape]
    x, r = backward_inputs(T, 20, 24, 16, torch.float32, device)
    one = slice(0, 1 if bounds else None)
    own = {"chunk_size": 16, **packed(bounds, 16, device)}
    h0 = state_of(x.initial_state, bounds).contiguous() if given else None
    dht = state_of(r.dht, bounds).contiguous() if given else None
    forward = [t[one] for t in (x.k, r.w, r.u, r.gc)]
    back = [t[one] for t in (x.q, x.k, r.w, r.gc, r.do, r.dv_out)]

    def run():
        return (
            *state(*forward, h0, output_final_state=True, **own),
            *state_bwd(*back, dht, scale=0.3, **own),
        )

    same(*both(run))
    assert len(cut) == 2


@cases
def test_scans_of_channels(shape, given, cut, device):
    """Of Kimi Delta Attention, both at once; and state_bwd alone, where the states were kept."""
    T, bounds = SHAPES[shape]
    x, r = kda_checks.backward_parts(T, 20, 24, 16, torch.float32, device)
    one = slice(0, 1 if bounds else None)
    own = packed(bounds, 16, device)
    h0 = state_of(x.initial_state, bounds).contiguous() if given else None
    dht = state_of(r.dht, bounds).contiguous() if given else None
    qg, kg, w, u, gc, P, do = (t[one] for t in (r.qg, r.kg, r.w, r.u, r.gc, r.P, r.do))

    def run():
        alone = (qg, kg, w, gc, do, None, dht)
        return (
            *kda_scans(qg, kg, w, u, gc, P, do, h0, dht, scale=0.3, **own),
            *state_bwd(*alone, P=P, scale=0.3, chunk_size=16, **own),
        )

    same(*both(run))
    assert len(cut) == 3


@shapes
def test_without_a_correction(shape, cut, device):
    """As Mamba-2 uses them: a step in the exponent."""
    T, bounds = SHAPES[shape]
    x, r = backward_inputs(T, 20, 24, 16, torch.float32, device)
    one = slice(0, 1 if bounds else None)
    own = {"chunk_size": 16, **packed(bounds, 16, device)}
    h0, dht = (state_of(t, bounds).contiguous() for t in (x.initial_state, r.dht))
    k, q, u, gc, do = (t[one] for t in (x.k, x.q, r.u, r.gc, r.do))

    def run():
        h, _, last = state(k, None, u, gc, h0, gc + 0.5, output_final_state=True, **own)
        return h, last, *state_bwd(q, None, None, gc, do, None, dht, scale=0.3, **own)

    same(*both(run))
    assert len(cut) == 2


@pytest.mark.parametrize(("T", "bounds"), [(127, None), (96, None), (200, [0, 127, 127, 200])])
def test_short_sequences_stay_whole(T, bounds, cut, device):
    x, r = backward_inputs(T, 16, 16, 16, torch.float32, device)
    one = slice(0, 1 if bounds else None)
    args = (t[one] for t in (x.k, r.w, r.u, r.gc))
    state(*args, chunk_size=16, **packed(bounds, 16, device))
    assert not cut


def test_the_batch_changes_no_bits(cut, device):
    """A sequence that is cut gives the same bits alone, in a batch, and packed."""
    x, r = backward_inputs(160, 16, 16, 16, torch.float32, device)
    args = [t[:1] for t in (x.k, r.w, r.u, r.gc)]
    h, v_new, last = state(*args, chunk_size=16, output_final_state=True)
    twice = [torch.cat([t, t.flip(1)]) for t in args]
    batch = state(*twice, chunk_size=16, output_final_state=True)
    short = [torch.cat([t[:, :40], t, t[:, :70]], 1) for t in args]
    bounds = torch.tensor([0, 40, 200, 270], device=device)
    options = {"chunk_size": 16, "packing": pack(bounds, 16), "output_final_state": True}
    among = state(*short, **options)
    assert torch.equal(batch[0][:1], h)
    assert torch.equal(batch[2][:1], last)
    assert torch.equal(among[0][:, 3:13], h)
    assert torch.equal(among[1][:, 40:200], v_new)
    assert torch.equal(among[2][1:2], last)


@pytest.mark.parametrize("f, lengths", [
    (chunk_gated_delta_rule, [150]),
    (chunk_gated_delta_rule, [20, 0, 144, 50]),
    (chunk_kda, [130]),
])  # fmt: skip
def test_operators(f, lengths, cut, device):
    """Both passes in pieces against the recurrence in float64; packed ones too, the last whole."""
    checks = operator_checks if f is chunk_kda else gdn_checks
    N = len(lengths)
    x = checks.inputs(1, sum(lengths), 1, 1, 20, 16, torch.float32, device, N=N)
    given = gdn_checks.cotangents(x, N)
    own = {"cu_seqlens": gdn_checks.boundaries(lengths, device)}
    got = gdn_checks.triton(x, *given, f=f, chunk_size=32, **own)
    gdn_checks.check(got, gdn_checks.exact(x, *given, **own), torch.float32, 2e-5)
    assert cut


def test_where_pieces_begin(cut, device):
    """Of random packed batches: no more pieces than are launched, each at its token and chunk."""
    r = torch.Generator().manual_seed(3)
    L, C = 32, 16
    for n in torch.randint(1, 9, (50,), generator=r).tolist():
        lengths = torch.randint(0, 400, (n,), generator=r).tolist()
        bounds = [0, *itertools.accumulate(lengths)]
        if max(lengths) < 4 * L:
            continue
        packing = pack(torch.tensor(bounds, device=device), C)
        found = pieces.by_maps(torch.empty(1, bounds[-1], device=device), 2, 12, C, packing)
        begins, chains = found.cu_seqlens.tolist(), found.chains.tolist()
        assert chains[-1] <= found.N == n + bounds[-1] // L
        for s, T in enumerate(lengths):
            numbers = range(chains[s], chains[s + 1])
            assert len(numbers) == (-(-T // L) if T >= 4 * L else 1)
            for j, i in enumerate(numbers):
                assert begins[i] == bounds[s] + j * L
                assert found.chunk_offsets[i] == packing.chunk_offsets[s] + j * L // C
        assert {*begins[chains[-1] :]} == {bounds[-1]}
