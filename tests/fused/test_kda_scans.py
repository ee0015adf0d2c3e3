"""The fused backward stages of Kimi Delta Attention: kernels against references."""

from functools import partial

import pytest
import stages as registry
import torch
from delta.stage_checks import check_packed, check_rounded, check_stage, of_sequences
from fused.kda_checks import (
    GATES,
    RAW,
    SCALE,
    gates,
    kda_gate,
    kda_stage_inputs,
    needs_gluon,
    raw_gate,
)
from fused.parts import small
from gdn_checks import launches

from linattn_edu.kernels.fused import kda_bwd
from linattn_edu.kernels.fused import kda_scans as kernels
from linattn_edu.kernels.routes import forced
from linattn_edu.ops.kda.chunk import chunk_kda
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.reference.delta.kda_intra import kda_intra
from linattn_edu.reference.fused import kda_scans as references
from linattn_edu.testing import assert_close, gdn_inputs, kda_inputs

pytestmark = pytest.mark.usefixtures("poison")


def check_scans(*stage, **options):
    """In one launch."""
    with launches() as ran:
        check_stage(*stage, **options)
    assert ran == [kernels.kda_fused_scans_kernel]


def check_gates(kernel, reference, args, chunk_size, **options):
    """The rows are those of the kernel's own gates: a closed one's sum has few bits left."""
    q, k, *gates = args
    gates, erase = gates[:3], gates[3:]
    gc, *rows = kernel(*args, chunk_size=chunk_size, **options)
    want = gate_cumsum(*gates, chunk_size=chunk_size, **options)
    assert gc.dtype == want.dtype
    assert_close("gc", gc, want, 5e-6)

    def found(*_, **__):
        return tuple(rows)

    check_stage(found, references.kda_gated, (q, k, gc, *erase), chunk_size=chunk_size)


test_write_gates = registry.matches("kda_fused_scans", "gdn2_fused", check=check_scans)
test_kernel_matches_reference = registry.matches("kda_fused_scans", "kda_fused", check=check_scans)
test_gates_match_reference = registry.matches("kda_gates", "kda_fused", check=check_gates)
test_an_erase_gate = registry.matches("kda_gates", "gdn2_fused", check=check_gates)


@gates
def test_every_gate_and_chunk(gate, C, dtype, device):
    sizes = ("kda_fused", 70, 34, 20, C, dtype, device)
    registry.check("kda_gates", *sizes, H=2, gate=gate, check=check_gates)


@pytest.mark.parametrize("gate", GATES)
def test_without_states_at_the_ends(gate, device):
    sizes = ("kda_fused", 70, 34, 20, 32, small(device), device)
    registry.check("kda_fused_scans", *sizes, H=2, gate=gate, without=["h0", "dht"])


def test_packed_sequences_have_the_bits_they_have_alone(device):
    C = {"chunk_size": 16}

    def run(tokens, _, states, **packed):
        q, k, v, g, beta, do, P, A = tokens
        gc, kd, kg, qg = kernels.kda_gates(q, k, g, **C, **packed)
        args = (qg, kg, kd, v, beta, gc, P, A, do, *states)
        h, v_new, dh, Z, dv, dh0 = kernels.kda_fused_scans(*args, scale=SCALE, **packed)
        return (gc, kd, kg, qg, v_new, Z, dv), (h, dh), (dh0,)

    r = registry.parts("kda_fused", 150, 20, 24, 16, torch.bfloat16, device, H=2)
    gc = of_sequences(lambda g: gate_cumsum(g, **C), r.g)
    pairs = (
        of_sequences(lambda *x, i=i: kda_intra(*x, **C)[i], r.q, r.k, r.beta, gc) for i in (0, 1)
    )
    check_packed(run, (r.q, r.k, r.v, r.g, r.beta, r.do, *pairs), states=(r.h0, r.dht))


@pytest.mark.parametrize("family", ["kda_fused", "gdn2_fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_map_of_a_piece(dtype, family, device):
    sizes = ("kda_fused_scan_map_bwd", family, 100, 32, 48, 32, dtype, device)
    registry.check(*sizes, check=partial(check_rounded, factor=1.2))
    args, options = registry.arguments(*sizes), {"scale": SCALE}
    ext, none = kernels.kda_fused_scan_map_bwd(*args, transition=False, **options)
    assert none is None
    assert torch.equal(ext, kernels.kda_fused_scan_map_bwd(*args, **options)[0])


@pytest.mark.parametrize("family", ["kda_fused", "gdn2_fused"])
def test_the_map_takes_a_gradient_back_in_float64(family):
    sizes = (family, 130, 20, 12, 32, torch.float64, "cpu")
    *args, dht = registry.arguments("kda_fused_scan_map_bwd", *sizes, H=2)
    ext, M = references.kda_fused_scan_map_bwd(*args, scale=SCALE)
    args = registry.arguments("kda_fused_scans", *sizes, H=2)
    *_, dh0 = references.kda_fused_scans(*args, scale=SCALE)
    assert_close("dh0", ext + M @ dht, dh0, 1e-13)


@pytest.fixture
def hopper(device):
    needs_gluon(device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["zero", "states"])
@pytest.mark.parametrize("form", ["one launch", "two launches", "two tiles a program"])
@pytest.mark.parametrize(("B", "T", "HV"), [(1, 64, 1), (2, 128, 4), (1, 2048, 4), (2, 960, 2)])
def test_scans_gluon_give_the_same_bits(
    B, T, HV, form, given, dtype, device, hopper, force
):  # fmt: skip
    """Of whole sequences and, with 960 tokens, of pieces of 256, one of which is empty."""
    gluon = kernels.kda_scans
    kinds = (
        gluon.kda_scans_gluon_kernel, gluon.kda_scan_states_gluon_kernel,
        gluon.kda_scan_bwd_gluon_kernel,
    )  # fmt: skip
    if T == 960:
        force(LENGTH=256, LEAST=2)
    force(workers=1 + (form == "two tiles a program"), together=int(form == "one launch"))
    x = gdn_inputs(B, T, HV, HV, 128, 128, dtype=dtype, device=device, seed=0)
    x.g = kda_gate("mixed", *x.g.shape, 128, seed=0, device=device)
    gc, options = gate_cumsum(x.g, chunk_size=64), {"chunk_size": 64}
    P, A = kda_intra(x.q, x.k, x.beta, gc, **options)
    kd, kg, qg = references.kda_gated(x.q, x.k, gc, **options)
    states = torch.randn(2, B, HV, 128, 128, device=device) if given else (None, None)
    args = qg, kg, kd, x.v, x.beta, gc, P, A, torch.randn_like(x.v), *states
    with forced(kda_fused_scans="triton"):
        want = kernels.kda_fused_scans(*args, scale=SCALE)
    for _ in range(2):  # what is copied ahead must not be overtaken
        with launches() as ran:
            got = kernels.kda_fused_scans(*args, scale=SCALE)
        assert sum(kernel in kinds for kernel in ran) == 1 + (form != "one launch")
        assert kernels.kda_fused_scans_kernel not in ran
        assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("kind", RAW)
def test_kda_gates_of_raw_gates(kind, device):
    a, A_log, dt_bias, bound = raw_gate(kind, 70, 4, 20, device)
    x = kda_stage_inputs(70, 20, 16, torch.float32, device, H=2)
    x.q, x.k = (torch.cat([t, t], 2)[:1] for t in (x.q, x.k))
    args = (x.q, x.k, a[:1], A_log, dt_bias)
    check_gates(kernels.kda_gates, references.kda_gates, args, chunk_size=32, **bound)


def test_kda_gates_reference_is_gate_cumsum_and_kda_gated():
    x = kda_stage_inputs(70, 20, 16, torch.float64, "cpu", H=2)
    gc, *rows = references.kda_gates(x.q, x.k, x.g, chunk_size=32)
    assert torch.equal(gc, gate_cumsum(x.g, chunk_size=32))
    assert all(map(torch.equal, rows, references.kda_gated(x.q, x.k, gc, chunk_size=32)))


@pytest.mark.gpu
def test_the_operator_takes_them(device, hopper):
    """Near the stages one by one; the same bits when run again."""
    x = kda_inputs(1, 1024, 16, 16, 128, 128, dtype=torch.bfloat16, device=device, seed=0)
    do = torch.randn_like(x.v)

    def run(**options):
        leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.g, x.beta)]
        o, _ = chunk_kda(*leaves, **options)
        o.backward(do)
        return o.detach(), *(t.grad for t in leaves)

    with launches() as ran:
        first = run()
    assert kda_bwd.kda_intra_bwd_gluon.kda_intra_bwd_gluon_kernel in ran
    kept = run(disable_recompute=True)
    for keep, same in ((False, first), (True, kept), (False, first), (True, kept)):
        assert all(map(torch.equal, run(disable_recompute=keep), same))
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    with forced(kda_forward_stages="staged", kda_backward_stages="staged"):
        staged = run()
    for name, a, b, c in zip(names, first, kept, staged, strict=True):
        # of rows that another kernel has made, in the forward pass
        assert_close(name, b, a, 4e-3)
        assert_close(name, a, c, 1e-2)
