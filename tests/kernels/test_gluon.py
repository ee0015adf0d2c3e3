"""The scans in Gluon compiled for Hopper, which need not be present, and when they are chosen."""

import pytest
import torch
from kernels.workers import lines_of

pytest.importorskip("triton")
scan_gluon = pytest.importorskip("linattn_edu.kernels.scan_gluon")
scans_gluon = pytest.importorskip("linattn_edu.kernels.scans_gluon")


def test_compiled_for_hopper():
    """Nothing is spilled, the products run beside one another, and shared memory suffices."""
    rows = lines_of("compile_gluon.py")
    scan, scans = rows[:3], rows[3:]
    assert [row["K"] for row in scan] == [128, 128, 64]
    names = ["scan_states_gluon_kernel"] * 2 + ["scan_bwd_gluon_kernel"] * 2
    assert [row["kernel"] for row in scans] == names
    for row in rows:
        assert not row["spilled"], row
        assert not row["serialized"], row
        # a multiprocessor has 228 KB, of which a program takes one more
        programs = 1 if row["K"] == 128 else 2
        assert 0 < row["shared"] <= (228 // programs - 1) << 10, row
        assert row["threads"] * row["registers"] * programs <= 1 << 16, row
    for row in scan:
        # K S before the loop; then six products of 64 columns, of which K S, Q S have K terms, and
        # that of the state has K columns
        halves = row["K"] // 64
        assert row["from_registers"] == 4 * halves + 4 * (halves + halves + 1 + 1 + halves), row
    for row in scans:
        # K S before the loop and in it; v_new and the state; or P^T dO and Z, and the state twice
        others = 1 + 2 if "states" in row["kernel"] else 1 + 1 + 2 + 2
        assert row["from_registers"] == 4 * (2 + 2 + others), row


class Stand:
    """A tensor on a GPU, as far as `fits` asks."""

    is_cuda = True

    def __init__(self, T, columns, dtype, address):
        self.shape, self.dtype, self.address = (1, T, 2, columns), dtype, address

    def element_size(self):
        return self.dtype.itemsize

    def data_ptr(self):
        return self.address


def test_fits(monkeypatch):
    """Each condition by itself turns it away."""
    generation = ["hopper"]
    monkeypatch.setattr(scan_gluon, "device_of", lambda _: (generation[0], 132))
    monkeypatch.setattr(scan_gluon, "VERSIONS", (scan_gluon.triton.__version__,))

    def fits(T=4096, K=128, V=128, C=64, dtype=torch.bfloat16, packing=None, address=0):
        given = *(Stand(T, n, dtype, address) for n in (K, K, V, C, C)), packing
        fits = scan_gluon.fits(*given)
        assert scans_gluon.fits(*given) == (fits and K == 128)
        return fits

    assert fits()
    assert fits(dtype=torch.float16, T=2048)
    assert fits(K=64, V=64) and fits(V=256)
    for other in (
        {"T": 1984}, {"T": 4097}, {"K": 96}, {"K": 256}, {"V": 96}, {"C": 32},
        {"dtype": torch.float32}, {"packing": object()}, {"address": 8},
    ):  # fmt: skip
        assert not fits(**other), other
    generation[0] = "blackwell"
    assert not fits()
    generation[0] = "hopper"
    monkeypatch.setattr(scan_gluon, "VERSIONS", ("0.0.",))
    assert not fits()
