"""The fused forward stages of Kimi Delta Attention: kernels against references, and the stages
whose place they take.
"""

from functools import partial

import pytest
import stages as registry
import torch
from delta.stage_checks import DTYPES, check_packed, check_rounded
from fused.kda_checks import GATES, SCALE, gates, kda_stage_inputs
from gdn_checks import PAYS, exact_products, launches, without_gluon

from linattn_edu.kernels.delta.kda_intra import kda_intra as kda_intra_kernel
from linattn_edu.kernels.fused import kda_fwd as kernels
from linattn_edu.kernels.fused.kda_scans import kda_gates
from linattn_edu.kernels.routes import forced
from linattn_edu.kernels.rows import device_of
from linattn_edu.ops.kda import stages
from linattn_edu.reference.fused import kda_fwd as references
from linattn_edu.testing import assert_close, kda_inputs

pytestmark = pytest.mark.usefixtures("poison")


STAGES = "kda_prepare kda_gate_prepare kda_fused_scan"
test_kernels_match_references = registry.matches(STAGES, "kda_fused")
test_erase_and_write_gates = registry.matches(STAGES, "gdn2_fused")


@gates
def test_any_gate(C, gate, dtype, device):
    """The scores and the inverse have the bits of kda_intra, the rows those of kda_gates."""
    sizes, kinds = ("kda_fused", 33, 20, 24, C, dtype, device), {"H": 2, "gate": gate}
    r = registry.parts(*sizes, **kinds)
    gc, *rows = kda_gates(r.q, r.k, r.g, **r.chunks)
    args = (r.q, r.k, r.beta, gc)
    want = *kda_intra_kernel(*args, **r.chunks), *rows
    assert all(map(torch.equal, kernels.kda_prepare(*args, **r.chunks), want))
    kinds |= {"without": ["h0"], "more": {"output_final_state": False}}
    registry.check("kda_fused_scan", *sizes, check=partial(check_rounded, factor=1.05), **kinds)


def test_with_a_promise(device):
    sizes, promised = (70, 33, 16, 64, torch.bfloat16, device), {"lower_bound": -5.0}
    registry.check("kda_prepare", "kda_fused", *sizes, gate="bounded", more=promised)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (100, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_transposed_scan_gives_the_same_bits(K, V, dtype, device, force, monkeypatch):
    """Which of the two runs follows from what fills the GPU, and must not be seen."""
    q, *args = registry.arguments("kda_fused_scan", "kda_fused", 150, K, V, 64, dtype, device)
    generation, _ = device_of(q)
    # as if it had one multiprocessor: tiles of 64 columns
    place = "linattn_edu.kernels.routes.by_load.device_of"
    monkeypatch.setattr(place, lambda _: (generation, 1))
    exact_products(monkeypatch)
    got = []
    for form in ("transposed", "upright"):
        force(transposed=form)
        got.append(kernels.kda_fused_scan(q, *args, scale=SCALE, output_final_state=True))
    for name, a, b in zip(("o", "final_state"), *got, strict=True):
        assert_close(name, a, b, 0)


def test_packed_sequences_have_the_bits_they_have_alone(device):
    def run(tokens, _, states, **packed):
        (q, k, v, g, beta), C = tokens, {"chunk_size": 16}
        gc = stages("triton").gate_cumsum(g, **C, **packed)
        P, A, kd, kg, qg = kernels.kda_prepare(q, k, beta, gc, **C, **packed)
        options = {"scale": SCALE, "output_final_state": True, **packed}
        o, last = kernels.kda_fused_scan(qg, kg, kd, v, beta, gc, P, A, *states, **options)
        return (P, A, kd, kg, qg, o), (), (last,)

    x = kda_stage_inputs(150, 20, 24, torch.bfloat16, device, H=2)
    check_packed(run, (x.q, x.k, x.v, x.g, x.beta), states=(x.initial_state,))


@pytest.mark.parametrize("family", ["kda_fused", "gdn2_fused"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_map_of_a_piece(dtype, family, device):
    sizes = ("kda_fused_scan_map", family, 100, 32, 48, 32, dtype, device)
    registry.check(*sizes, check=partial(check_rounded, factor=1.2))
    args = registry.arguments(*sizes)
    ext, none = kernels.kda_fused_scan_map(*args, transition=False)
    assert none is None
    assert torch.equal(ext, kernels.kda_fused_scan_map(*args)[0])


@pytest.mark.parametrize("family", ["kda_fused", "gdn2_fused"])
def test_the_map_takes_a_state_through_in_float64(family):
    sizes = (family, 130, 20, 12, 32, torch.float64, "cpu")
    *args, h0 = registry.arguments("kda_fused_scan_map", *sizes, H=2)
    ext, M = references.kda_fused_scan_map(*args)
    _, last = references.kda_fused_scan(
        *registry.arguments("kda_fused_scan", *sizes, H=2), scale=SCALE, output_final_state=True
    )
    assert_close("final_state", ext + M @ h0, last, 1e-13)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", [None, *GATES])
@pytest.mark.parametrize("family", ["kda_fused", "gdn2_fused"])
@pytest.mark.parametrize("T", [64, 1000])
def test_gate_and_scores_in_one_kernel(T, family, gate, device, force):
    """Its results are the reference's, twice the same, and a later token changes no earlier row."""
    if why := without_gluon(device):
        pytest.skip(why)
    force(kda_gate_prepare="gluon")
    kinds = {} if gate is None else {"gate": gate}
    sizes = ("kda_gate_prepare", family, T, 128, 64, 64, torch.bfloat16, device)
    with launches() as ran:
        registry.check(*sizes, **kinds)
    assert ran == [kernels.kda_intra.kda_prepare_gluon_kernel]
    registry.check(*sizes, **kinds, change=lambda r: r.g.fill_(-4.9), more={"safe_bound": -5.0})
    q, k, beta, g = registry.arguments(*sizes, **kinds)
    coarse = g.bfloat16()
    want = kernels.kda_gate_prepare(q, k, beta, coarse.float(), chunk_size=64)
    got = kernels.kda_gate_prepare(q, k, beta, coarse, chunk_size=64)
    assert all(map(torch.equal, got, want))
    first = kernels.kda_gate_prepare(q, k, beta, g, chunk_size=64)
    assert all(map(torch.equal, first, kernels.kda_gate_prepare(q, k, beta, g, chunk_size=64)))
    for x in (q, k, beta):
        x[:, 37:] = -x[:, 37:].flip(1)
    g[:, 37:] = -30.0  # far rows, after near ones
    later = kernels.kda_gate_prepare(q, k, beta, g, chunk_size=64)
    names = ("gc", "P", "A", "kd", "kg", "qg")
    for name, a, b in zip(names, first, later, strict=True):
        assert name == "kg" or torch.equal(a[:, :37], b[:, :37]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["zero", "state"])
@pytest.mark.parametrize(
    ("B", "T", "HV", "V", "workers"),
    [(2, 128, 4, 64, 1), *((*sizes, workers) for workers in (1, 2) for sizes in
     ((1, 64, 1, 128), (1, 2048, 4, 128), (1, 1088, 2, 128), (2, 960, 2, 128)))],
)  # fmt: skip
def test_kda_scan_gluon_gives_the_same_bits(B, T, HV, V, workers, given, dtype, device, force):
    """For one tile of values or for two, of whole sequences and of pieces of 256 tokens, one of
    which is empty in the last case.
    """
    if why := without_gluon(device):
        pytest.skip(why)
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
