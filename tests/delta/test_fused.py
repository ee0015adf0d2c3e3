"""The fused stages: kernels against references, and the fused forward against the staged one."""

import pytest
import torch
from delta.stage_checks import check_stage, grid, inputs

from linattn_edu.kernels.delta import fused as kernels
from linattn_edu.kernels.delta.gate_cumsum import gate_cumsum as gate_cumsum_kernel
from linattn_edu.kernels.tiles import device_of
from linattn_edu.ops.gdn import forward, fused_stages, stages
from linattn_edu.packing import pack
from linattn_edu.reference.delta import fused as references
from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.testing import assert_close, gdn_inputs

pytestmark = pytest.mark.usefixtures("poison")


@grid
def test_intra_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc = gate_cumsum(x.g, chunk_size=C)
    args = (x.q, x.k, x.beta, gc)
    check_stage(kernels.intra, references.intra, args, chunk_size=C)
    options = {"chunk_size": C, "return_inverse": True, "gated": True}
    check_stage(kernels.intra, references.intra, args, **options)


@grid
def test_scan_kernel_matches_reference(T, K, V, C, dtype, device):
    x = inputs(T, K, V, dtype, device)
    gc = gate_cumsum(x.g, chunk_size=C)
    P, R, _ = references.intra(x.q, x.k, x.beta, gc, chunk_size=C)
    args = (x.q, x.k, x.v, gc, P, R, x.initial_state)
    check_stage(kernels.scan, references.scan, args, scale=0.3, output_final_state=True)


@pytest.mark.parametrize(
    ("T", "K", "V", "packed"), [(150, 128, 128, False), (65, 100, 64, False), (130, 128, 128, True)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scan_transposed_gives_the_same_bits(T, K, V, packed, dtype, device, monkeypatch):
    """Which of the two runs follows from what fills the GPU, and must not be seen."""
    x = inputs(T, K, V, dtype, device)
    tensors, h0, own = (x.q, x.k, x.v, x.g, x.beta), x.initial_state, {}
    if packed:
        tensors, h0 = [y[:1] for y in tensors], h0[:1].repeat(3, 1, 1, 1)
        own["packing"] = pack(torch.tensor([0, 64, 64, T], device=device), 64)
    q, k, v, g, beta = tensors
    generation, _ = device_of(q)
    if generation not in ("hopper", "blackwell"):
        pytest.skip("made for Hopper")
    # as if it had one multiprocessor: tiles of 64 columns
    monkeypatch.setattr("linattn_edu.kernels.tiles.device_of", lambda _: (generation, 1))
    gc = gate_cumsum_kernel(g, chunk_size=64, **own)
    P, R, _ = kernels.intra(q, k, beta, gc, chunk_size=64, **own)
    got = []
    for crowded in (True, False):
        monkeypatch.setattr(kernels, "crowded", lambda *_, crowded=crowded: crowded)
        options = {"scale": 0.3, "output_final_state": True, **own}
        got.append(kernels.scan(q, k, v, gc, P, R, h0, **options))
    for name, a, b in zip(("o", "final_state"), *got, strict=True):
        assert_close(name, a, b, 0 if device.type == "cuda" else 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("B", "T", "HV"), [(1, 64, 1), (2, 128, 4), (1, 2048, 4)])
def test_scan_gluon_gives_the_same_bits(B, T, HV, dtype, device, monkeypatch):
    """With a state and without, twice: what is copied ahead must not be overtaken."""
    scan_gluon = kernels.scan_gluon
    if scan_gluon is None or not scan_gluon.triton.__version__.startswith("3.6."):
        pytest.skip("made for another Triton")
    monkeypatch.setattr(scan_gluon, "VERSIONS", ("3.6.",))
    if device_of(torch.empty(1, device=device))[0] != "hopper":
        pytest.skip("made for Hopper")
    x = gdn_inputs(B, T, max(1, HV // 2), HV, 128, 128, dtype=dtype, device=device, seed=0)
    gc = gate_cumsum_kernel(x.g, chunk_size=64)
    P, R, _ = kernels.intra(x.q, x.k, x.beta, gc, chunk_size=64)
    monkeypatch.setattr(kernels, "crowded", lambda *_: True)
    monkeypatch.setattr("linattn_edu.kernels.tiles.device_of", lambda _: ("hopper", 1))
    for h0 in (None, torch.randn(B, HV, 128, 128, device=device)):
        monkeypatch.setattr(scan_gluon, "LEAST", 1 << 30)
        options = {"scale": 0.3, "output_final_state": h0 is not None}
        want = kernels.scan(x.q, x.k, x.v, gc, P, R, h0, **options)
        monkeypatch.setattr(scan_gluon, "LEAST", 1)
        assert scan_gluon.fits(x.q, x.k, x.v, P, R, T, False)
        for _ in range(2):
            o, last = kernels.scan(x.q, x.k, x.v, gc, P, R, h0, **options)
            assert torch.equal(o, want[0])
            assert h0 is None or torch.equal(last, want[1])


@pytest.mark.parametrize("C", [16, 32, 64])
def test_fused_equals_staged_in_float64(C):
    x = inputs(130, 20, 12, torch.float64, "cpu")
    options = {"scale": 0.5, "output_final_state": True, "chunk_size": C}
    *got, _ = forward(fused_stages("reference"), **x.asdict(), **options)
    *want, _ = forward(stages("reference"), **x.asdict(), **options)
    for name, a, b in zip(("o", "final_state"), got, want, strict=True):
        assert_close(name, a, b, 1e-12)
