"""The fused forward stages of Kimi Delta Attention: kernels against references, and the stages
whose place they take.
"""

from types import SimpleNamespace

import pytest
import torch
from delta.stage_checks import DTYPES, check_rounded, check_stage
from fused.kda_checks import GATES, SCALE, gates, kda_stage_inputs, once
from gdn_checks import PAYS, exact_products, holds, launches, without_gluon

from linattn_edu.kernels.delta.kda_intra import kda_intra as kda_intra_kernel
from linattn_edu.kernels.fused import kda_fwd as kernels
from linattn_edu.kernels.fused.kda_scans import kda_gates
from linattn_edu.kernels.routes import forced
from linattn_edu.kernels.tiles import device_of
from linattn_edu.ops.kda import forward, fused_stages, stages
from linattn_edu.packing import pack
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.fused import kda_fwd as references
from linattn_edu.testing import assert_close, kda_inputs

pytestmark = pytest.mark.usefixtures("poison")


def prepared(T, K, V, C, dtype, device, **kinds):
    """(inputs, what kda_prepare reads and leaves), by the references."""
    x = kda_stage_inputs(T, K, V, dtype, device, **kinds)
    if x.q.is_cuda and not holds(x.q, x.v):
        pytest.skip("heads that the fused stages do not hold")
    r = SimpleNamespace(gc=gate_cumsum(x.g, chunk_size=C))
    r.P, r.A, r.kd, r.kg, r.qg = references.kda_prepare(x.q, x.k, x.beta, r.gc, chunk_size=C)
    return x, r


def scanned(x, r):
    return r.qg, r.kg, r.kd, x.v, x.beta, r.gc, r.P, r.A, x.initial_state


@once
def test_kernels_match_references(T, K, V, C, dtype, device):
    x, r = prepared(T, K, V, C, dtype, device)
    args = (x.q, x.k, x.beta, r.gc)
    check_stage(kernels.kda_prepare, references.kda_prepare, args, chunk_size=C)
    options = {"scale": SCALE, "output_final_state": True}
    check_stage(kernels.kda_fused_scan, references.kda_fused_scan, scanned(x, r), **options)


@gates
def test_any_gate(C, gate, dtype, device):
    """The scores and the inverse have the bits of kda_intra, the rows those of kda_gates."""
    x, r = prepared(33, 20, 24, C, dtype, device, H=2, gate=gate)
    options = {"chunk_size": C}
    gc, *rows = kda_gates(x.q, x.k, x.g, **options)
    args = (x.q, x.k, x.beta, gc)
    want = *kda_intra_kernel(*args, **options), *rows
    assert all(map(torch.equal, kernels.kda_prepare(*args, **options), want))
    *args, _ = scanned(x, r)
    check_rounded(kernels.kda_fused_scan, references.kda_fused_scan, args, 1.05, scale=SCALE)


def test_with_a_promise(device):
    x, r = prepared(70, 33, 16, 64, torch.bfloat16, device, gate="bounded")
    options = {"chunk_size": 64, "lower_bound": -5.0}
    args = (x.q, x.k, x.beta, r.gc)
    check_stage(kernels.kda_prepare, references.kda_prepare, args, **options)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (100, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_transposed_scan_gives_the_same_bits(K, V, dtype, device, force, monkeypatch):
    """Which of the two runs follows from what fills the GPU, and must not be seen."""
    x, r = prepared(150, K, V, 64, dtype, device)
    generation, _ = device_of(x.q)
    # as if it had one multiprocessor: tiles of 64 columns
    monkeypatch.setattr("linattn_edu.kernels.tiles.device_of", lambda _: (generation, 1))
    exact_products(monkeypatch)
    got = []
    for form in ("transposed", "upright"):
        force(transposed=form)
        got.append(kernels.kda_fused_scan(*scanned(x, r), scale=SCALE, output_final_state=True))
    for name, a, b in zip(("o", "final_state"), *got, strict=True):
        assert_close(name, a, b, 0)


def test_packed_sequences_have_the_bits_they_have_alone(device):
    """One of them is empty, one ends inside a chunk, each has a state of its own."""
    x, _ = prepared(150, 20, 24, 16, torch.bfloat16, device, H=2)
    bounds, C = [0, 40, 40, 41, 150], {"chunk_size": 16}
    tokens = [t[:1] for t in (x.q, x.k, x.v, x.g, x.beta)]
    h0 = torch.cat([n * x.initial_state[:1] for n in range(1, 5)])

    def run(q, k, v, g, beta, h0, **packed):
        gc = stages("triton").gate_cumsum(g, **C, **packed)
        P, A, kd, kg, qg = kernels.kda_prepare(q, k, beta, gc, **C, **packed)
        options = {"scale": SCALE, "output_final_state": True, **packed}
        o, last = kernels.kda_fused_scan(qg, kg, kd, v, beta, gc, P, A, h0, **options)
        return (P, A, kd, kg, qg, o), last

    rows, last = run(*tokens, h0, packing=pack(torch.tensor(bounds, device=device), 16))
    assert torch.equal(last[1], h0[1])  # of the empty one
    for n in (0, 2, 3):
        own = slice(*bounds[n : n + 2])
        want, end = run(*(t[:, own].contiguous() for t in tokens), h0[n : n + 1])
        assert all(map(torch.equal, [t[:, own] for t in rows], want)), n
        assert torch.equal(last[n : n + 1], end)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_map_of_a_piece(dtype, device):
    x, r = prepared(100, 32, 48, 32, dtype, device)
    args = (r.kg, r.kd, x.v, x.beta, r.gc, r.A, x.initial_state)
    check_rounded(kernels.kda_fused_scan_map, references.kda_fused_scan_map, args, 1.2)
    ext, none = kernels.kda_fused_scan_map(*args, transition=False)
    assert none is None
    assert torch.equal(ext, kernels.kda_fused_scan_map(*args)[0])


def test_the_map_takes_a_state_through_in_float64():
    x, r = prepared(130, 20, 12, 32, torch.float64, "cpu", H=2)
    ext, M = references.kda_fused_scan_map(r.kg, r.kd, x.v, x.beta, r.gc, r.A)
    _, last = references.kda_fused_scan(*scanned(x, r), scale=SCALE, output_final_state=True)
    assert_close("final_state", ext + M @ x.initial_state, last, 1e-13)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("C", [16, 32, 64])
def test_fused_equals_staged_in_float64(C, gate):
    x = kda_stage_inputs(130, 20, 12, torch.float64, "cpu", H=2, gate=gate)
    options = {"scale": 0.5, "output_final_state": True, "chunk_size": C}
    *got, less = forward(fused_stages("reference"), **x.asdict(), **options)
    *want, kept = forward(stages("reference"), **x.asdict(), **options)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)
    assert torch.equal(less.P, kept.P) and torch.equal(less.A, kept.A)
    assert [n for n, y in less._asdict().items() if y is not None] == ["P", "A"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("B", "T", "HV", "V"),
    [(1, 64, 1, 128), (2, 128, 4, 64), (1, 2048, 4, 128), (1, 1088, 2, 128), (2, 960, 2, 128)],
)
def test_channel_scan_in_gluon_gives_the_same_bits(
    B, T, HV, V, workers, given, dtype, device, force
):
    """For one tile of values or for two, of whole sequences and of pieces of 256 tokens, one of
    which is empty in the last case.
    """
    if why := without_gluon(device):
        pytest.skip(why)
    if V == 64 and workers == 2:
        pytest.skip("one tile of values")
    force(workers=workers, **PAYS)
    if T in (1088, 960):
        force(LENGTH=256, LEAST=2)
    x = kda_inputs(B, T, max(1, HV // 2), HV, 128, V, dtype=dtype, device=device, seed=0)
    h0 = torch.randn(B, HV, 128, V, device=device) if given else None
    gc = stages("triton").gate_cumsum(x.g, chunk_size=64)
    P, A, kd, kg, qg = kernels.kda_prepare(x.q, x.k, x.beta, gc, chunk_size=64)
    args = qg, kg, kd, x.v, x.beta, gc, P, A, h0
    options = {"scale": SCALE, "output_final_state": given}
    with forced(kda_scan="triton"):
        o, last = kernels.kda_fused_scan(*args, **options)
    for _ in range(2):  # what is copied ahead must not be overtaken
        with launches() as ran:
            got, end = kernels.kda_fused_scan(*args, **options)
        assert kernels.kda_scan.kda_scan_gluon_kernel in ran
        assert torch.equal(got, o)
        assert last is None or torch.equal(end, last)
