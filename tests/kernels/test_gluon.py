"""The kernels in Gluon compiled for Hopper, which need not be present, and when they are chosen."""

from importlib import import_module

import pytest
import torch
from kernels.workers import lines_of

triton = pytest.importorskip("triton")
if not triton.__version__.startswith(("3.6.", "3.7.")):
    pytest.skip("Gluon has other names in other versions", allow_module_level=True)

(
    forward_gluon, intra_gluon, scan_gluon, scans_gluon, channel_gluon, kda_fused_scans,
    channel_intra, fused, fused_intra, fused_scans, fused_bwd, kda_fused, kda_scans, kda_fused_bwd,
) = (
    import_module(f"linattn_edu.kernels.{name}")
    for name in (
        "gluon.gdn_intra", "gluon.gdn_intra_bwd", "gluon.gdn_scan", "gluon.gdn_scans",
        "gluon.kda_scan", "gluon.kda_scans", "gluon.kda_intra_bwd",
        "fused.gdn_fwd", "fused.gdn_intra", "fused.gdn_scans", "fused.gdn_bwd",
        "fused.kda_fwd", "fused.kda_scans", "fused.kda_bwd",
    )
)  # fmt: skip
# products of 64 terms and 64 columns, for the first chunk and in the loop: K S twice 64 terms, the
# state twice 64 columns; forward Q S, R W and P v_new, or v_new; back P^T dO, Z and the state again
PRODUCTS = {
    "scan_gluon_kernel": 2 + (2 + 2 + 1 + 1 + 2),
    "scan_states_gluon_kernel": 2 + (2 + 1 + 2),
    "scan_bwd_gluon_kernel": 2 + (2 + 1 + 1 + 2 + 2),
    "kda_scan_gluon_kernel": 2 + (2 + 2 + 1 + 1 + 2),
    "kda_scan_states_gluon_kernel": 2 + (2 + 1 + 2),
    "kda_scan_bwd_gluon_kernel": 3 + (2 + 1 + 1 + 2 + 2),
}
PRODUCTS["scans_gluon_kernel"] = (
    PRODUCTS["scan_states_gluon_kernel"] + PRODUCTS["scan_bwd_gluon_kernel"]
)
PRODUCTS["kda_scans_gluon_kernel"] = (
    PRODUCTS["kda_scan_states_gluon_kernel"] + PRODUCTS["kda_scan_bwd_gluon_kernel"]
)


def test_the_launchers_have_them():
    """What fails to import is left out in silence: it may be for another Triton."""
    assert fused.gdn_scan is scan_gluon and fused_intra.gdn_intra is forward_gluon
    assert kda_fused.kda_scan is channel_gluon
    assert kda_scans.kda_scans is kda_fused_bwd.kda_scans is kda_fused_scans
    assert kda_fused_bwd.kda_intra_bwd_gluon is channel_intra
    assert fused_scans.gdn_scans is fused_bwd.gdn_scans is scans_gluon
    assert fused_bwd.gdn_intra_bwd is intra_gluon


def test_compiled_for_hopper():
    """Nothing is spilled, the products run beside one another, and shared memory suffices."""
    rows = lines_of("compile_gluon.py")
    assert {row["kernel"] for row in rows} == {*PRODUCTS}
    for row in rows:
        assert not row["spilled"], row
        assert not row["serialized"], row
        assert 0 < row["shared"] <= 227 << 10, row
        # of 64 keys those of twice 64 terms or columns are half as many
        products = PRODUCTS[row["kernel"]] if row["K"] == 128 else 1 + (1 + 1 + 1 + 1 + 1)
        assert row["from_registers"] == 4 * products * row["workers"], row


class Stand:
    """A tensor on a GPU, as far as `fits` asks."""

    is_cuda = True

    def __init__(self, shape, dtype, address=0):
        self.shape, self.dtype, self.address = shape, dtype, address

    def element_size(self):
        return self.dtype.itemsize

    def data_ptr(self):
        return self.address


def test_fits(monkeypatch):
    """Each condition by itself turns it away."""
    generation = ["hopper"]
    monkeypatch.setattr(scan_gluon, "device_of", lambda _: (generation[0], 132))
    monkeypatch.setattr(scan_gluon, "VERSIONS", (scan_gluon.triton.__version__,))

    def fits(T=4096, K=128, V=128, C=64, HV=8, dtype=torch.bfloat16, packing=None, address=0):
        shapes = ((8, T, heads, n) for heads, n in ((2, K), (2, K), (HV, V), (HV, C), (HV, C)))
        given = *(Stand(shape, dtype, address) for shape in shapes), packing
        found = scan_gluon.fits(*given)
        assert scans_gluon.fits(*given) == (found and K == 128)
        assert channel_gluon.fits(given[1], *given[2:]) == (found and K == 128)
        return found

    assert fits()
    assert fits(dtype=torch.float16, HV=32, T=1024)
    assert fits(K=64, V=64) and fits(V=256)
    # a program for each multiprocessor at most: 2 ** 14 tokens times heads
    assert fits(T=256) and not fits(T=192)
    # more, or small keys: 2 ** 18, and no short sequences
    assert fits(HV=9) and not fits(HV=9, T=2048)
    assert not fits(K=64, V=64, T=2048)
    assert fits(HV=256, T=256) and not fits(HV=256, T=192)
    for other in (
        {"T": 4097}, {"K": 96}, {"K": 256}, {"V": 96}, {"C": 32},
        {"dtype": torch.float32}, {"packing": object()}, {"address": 8},
    ):  # fmt: skip
        assert not fits(**other), other
    generation[0] = "blackwell"
    assert not fits()
    generation[0] = "hopper"
    monkeypatch.setattr(scan_gluon, "VERSIONS", ("0.0.",))
    assert not fits()


def test_intra_bwd_compiled_for_hopper():
    """Products run beside one another, shared memory suffices, next to nothing is spilled."""
    rows = lines_of("compile_intra_gluon.py")
    rows, channel, forward = rows[:2], rows[2], rows[3:]
    assert [row["form"] for row in rows] == [["bf16", 1], ["fp16", 4]]
    for row in rows:
        assert row["spilled"] <= (16 if row["form"][1] == 1 else 128), row
        assert not row["serialized"], row
        assert 0 < row["shared"] <= 227 << 10, row
        # a half: four products of 128 terms and four of 64, 64 columns each
        assert row["products"] == 2 * (4 * 8 + 4 * 4), row
    assert channel["form"] == "channel" and not channel["serialized"], channel
    assert channel["spilled"] <= 512 and 0 < channel["shared"] <= 227 << 10, channel
    assert channel["products"] == 2 * (4 * 8 + 4 * 4), channel
    assert len(forward) == 7
    for row in forward:
        (form, K), chunks = row["form"], row["form"][0].startswith("chunks")
        assert row["spilled"] <= (16 if chunks else 64), row
        assert not row["serialized"], row
        programs = forward_gluon.programs_of(K, int(form.split()[1][0]), 4) if chunks else 4
        assert 0 < row["shared"] + 1024 <= (228 << 10) // programs, row
        # K K^T and Q K^T, and four products of 64 terms
        assert row["products"] == 2 * (K // 16) + 4 * 4, row


def test_intra_fits(monkeypatch):
    """Each condition by itself turns it away; neither length nor batch does."""
    generation = ["hopper"]
    monkeypatch.setattr(forward_gluon, "device_of", lambda _: (generation[0], 132))
    monkeypatch.setattr(forward_gluon, "VERSIONS", (forward_gluon.triton.__version__,))

    def fits(T=100, K=128, C=64, B=1, dtype=torch.bfloat16, address=0, of=0):
        tensors = [Stand((B, T, 2, K), dtype) for _ in range(2)]
        tensors[of].address = address
        return forward_gluon.fits(*tensors, C)

    assert fits() and fits(K=64, T=1, B=1000)
    for other in (
        {"K": 96}, {"K": 256}, {"C": 32}, {"dtype": torch.float16}, {"dtype": torch.float32},
        {"address": 8}, {"address": 8, "of": 1},
    ):  # fmt: skip
        assert not fits(**other), other
    generation[0] = "blackwell"
    assert not fits()
    generation[0] = "hopper"
    monkeypatch.setattr(forward_gluon, "VERSIONS", ("0.0.",))
    assert not fits()


def test_intra_bwd_fits(monkeypatch):
    """Each condition by itself turns it away."""
    generation = ["hopper"]
    monkeypatch.setattr(intra_gluon, "device_of", lambda _: (generation[0], 132))
    monkeypatch.setattr(intra_gluon, "VERSIONS", (intra_gluon.triton.__version__,))

    def fits(T=2048, K=128, V=128, C=64, HV=8, dtype=torch.bfloat16, packing=None, address=0, of=5):
        widths = (2, K), (2, K), *[(HV, V)] * 6
        tensors = [Stand((1, T, *width), dtype) for width in widths]
        tensors[of].address = address
        return intra_gluon.fits(*tensors, chunk_size=C, packing=packing)

    assert fits()
    assert fits(dtype=torch.float16, HV=1, T=1 << 14)
    for other in (
        {"T": 1984}, {"HV": 7}, {"T": 2049}, {"K": 64}, {"V": 256}, {"C": 32},
        {"dtype": torch.float32}, {"packing": object()},
        *({"address": 8, "of": i} for i in range(8)),
    ):  # fmt: skip
        assert not fits(**other), other
    generation[0] = "blackwell"
    assert not fits()
    generation[0] = "hopper"
    monkeypatch.setattr(intra_gluon, "VERSIONS", ("0.0.",))
    assert not fits()


def test_channel_intra_fits(monkeypatch):
    """Each condition by itself turns it away."""
    generation = ["hopper"]
    monkeypatch.setattr(channel_intra, "device_of", lambda _: (generation[0], 132))
    monkeypatch.setattr(channel_intra, "VERSIONS", (intra_gluon.triton.__version__,))

    def fits(
        T=16384, K=128, V=128, C=64, H=8, HV=8, dtype=torch.bfloat16, packed=False, address=0, of=5
    ):
        widths = (H, K), (H, K), *((HV, n) for n in (V, 1, K, V, V, V, V, V))
        tensors = [Stand((1, T, *width), dtype) for width in widths]
        tensors[of].address = address
        return channel_intra.fits(*tensors, C, packed)

    assert fits()
    assert fits(HV=4, H=4)
    assert fits(address=8, of=3)  # beta is not copied in tiles
    for other in (
        {"T": 960}, {"T": 16385}, {"K": 64}, {"V": 256},
        {"C": 32}, {"H": 4}, {"dtype": torch.float16}, {"packed": True},
        *({"address": 8, "of": i} for i in (0, 1, 2, 4, 5, 6, 7, 8, 9)),
    ):  # fmt: skip
        assert not fits(**other), other
    generation[0] = "blackwell"
    assert not fits()
    generation[0] = "hopper"
    monkeypatch.setattr(channel_intra, "VERSIONS", ("0.0.",))
    assert not fits()


def test_fused_channel_stages_fit(monkeypatch):
    """Each condition by itself turns a call of Kimi Delta Attention to the stages one by one."""
    generation = ["hopper"]
    for module in (kda_fused_bwd, fused_bwd, scan_gluon):
        monkeypatch.setattr(module, "device_of", lambda _: (generation[0], 132))
    monkeypatch.setattr(scan_gluon, "VERSIONS", (scan_gluon.triton.__version__,))

    def fits(T=4096, K=128, V=128, C=64, H=16, HV=16, B=8, dtype=torch.bfloat16, packed=False):
        tensors = (Stand((B, T, heads, n), dtype) for heads, n in ((H, K), (HV, V)))
        return kda_fused_bwd.fits(*tensors, C, packed)

    assert fits() and fits(B=1, H=4, HV=4, T=1 << 15) and fits(B=1, H=32, HV=32, T=1 << 15)
    for other in (
        {"T": 4032 + 1}, {"T": 960}, {"K": 64}, {"V": 64}, {"C": 32}, {"H": 8},
        {"dtype": torch.float16}, {"dtype": torch.float32}, {"packed": True},
    ):  # fmt: skip
        assert not fits(**other), other
    with monkeypatch.context() as patch:
        patch.setattr(kda_fused_bwd, "kda_scans", None)
        assert not fits()
    assert fits()
    generation[0] = "blackwell"
    assert not fits()
    generation[0] = "hopper"
    monkeypatch.setattr(scan_gluon, "VERSIONS", ("0.0.",))
    assert not fits()
