"""The kernels in Gluon compiled for Hopper, which need not be present, and when they are chosen."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from kernels.workers import lines_of

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.testing import gdn_inputs

triton = pytest.importorskip("triton")
support = import_module("linattn_edu.kernels.gluon.support")
(
    forward_gluon, intra_gluon, scan_gluon, scans_gluon, channel_gluon, kda_fused_scans,
    channel_intra, fused, fused_bwd, kda_fused, kda_fused_bwd,
) = (
    import_module(f"linattn_edu.kernels.{name}")
    for name in (
        "gluon.gdn_intra", "gluon.gdn_intra_bwd", "gluon.gdn_scan", "gluon.gdn_scans",
        "gluon.kda_scan", "gluon.kda_scans", "gluon.kda_intra_bwd",
        "fused.gdn_fwd", "fused.gdn_bwd", "fused.kda_fwd", "fused.kda_bwd",
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
    """What fails to import is left out: it may be for another Triton."""
    assert fused.gdn_scan is scan_gluon and fused.gdn_intra is forward_gluon
    assert kda_fused.kda_scan is channel_gluon
    assert kda_fused_bwd.kda_scans is kda_fused_scans
    assert kda_fused_bwd.kda_intra_bwd_gluon is channel_intra
    assert fused_bwd.gdn_scans is scans_gluon and fused_bwd.gdn_intra_bwd is intra_gluon


def products_of(row):
    """Of 16 terms and 64 columns for 64 rows, in all groups of warps."""
    name = row["kernel"]
    if name in PRODUCTS:
        # of 64 keys those of twice 64 terms or columns are half as many
        products = PRODUCTS[name] if row["K"] == 128 else 1 + (1 + 1 + 1 + 1 + 1)
        return 4 * products * row["workers"]
    if name.endswith("intra_bwd_gluon_kernel") or name == "intra_chunk_bwd_gluon_kernel":
        return 2 * (4 * 8 + 4 * 4)  # a half: four products of 128 terms and four of 64
    return 2 * (row["K"] // 16) + 4 * 4  # K K^T and Q K^T, and four products of 64 terms


def programs_of(row):
    """Of a multiprocessor, which share its memory."""
    if row["kernel"] == "intra_chunk_ring_gluon_kernel":
        return forward_gluon.programs_of(row["K"], 4 // row["G"], 4)
    return 4 if row["kernel"] == "intra_chunk_gluon_kernel" else 1


# bytes a thread; scans spill nothing
SPILLED = {
    "intra_chunk_bwd_gluon_kernel": 128,
    "kda_intra_bwd_gluon_kernel": 512,
    "intra_chunk_gluon_kernel": 64,
    "intra_chunk_ring_gluon_kernel": 16,
}


def test_compiled_for_hopper():
    """Products run beside one another, shared memory suffices, next to nothing is spilled."""
    rows = lines_of("compile_gluon.py")
    assert len(rows) == 26 and {row["kernel"] for row in rows} == {*PRODUCTS, *SPILLED}
    for row in rows:
        lone = row["kernel"] == "intra_chunk_bwd_gluon_kernel" and row["G"] == 1
        assert row["spilled"] <= (16 if lone else SPILLED.get(row["kernel"], 0)), row
        assert not row["serialized"], row
        assert 0 < row["shared"] + 1024 <= (228 << 10) // programs_of(row), row
        assert row["products"] == products_of(row), row


LATER = (99, 0), (99, 9)  # versions, later than any that there is


@pytest.fixture
def newer(monkeypatch):
    """This Triton is newer than any that was tried."""
    monkeypatch.setattr(support, "VERSIONS", ((3, 0), (3, 1)))
    monkeypatch.setattr(support, "_off", {})


def test_versions():
    """This Triton is one that was tried; numbers are compared as numbers."""
    assert support.tried() and support.available().usable
    assert support.version("3.10.0+git12") == (3, 10) > support.version("3.9.0")


def test_an_older_triton(monkeypatch):
    monkeypatch.setattr(support, "VERSIONS", LATER)
    usable, reason = support.available()
    assert not usable and triton.__version__ in reason and "99.0" in reason


def test_a_failure_with_a_triton_that_was_tried_is_an_error():
    def launch():
        raise ValueError("no such layout")

    with pytest.raises(ValueError, match="no such layout"):
        support.attempt(launch)
    with pytest.raises(ImportError):
        support.left_out(ImportError("no such name"))


def test_a_newer_triton_is_tried(newer, recwarn):
    """What fails is off from then on, which is said once; what does not is on."""
    ran = []

    def works(x):
        ran.append(x)

    def fails(x):
        ran.append(-x)
        raise ValueError("no such\nlayout")

    assert support.attempt(works, 1) and not recwarn
    assert not support.attempt(fails, 2)
    (said,) = recwarn
    assert "fails is off" in str(said.message) and "no such layout" in str(said.message)
    assert not support.attempt(fails, 3) and support.attempt(works, 4) and len(recwarn) == 1
    assert ran == [1, -2, 4]
    assert support.available().usable and "3.1" in support.available("works").reason
    usable, reason = support.available("fails")
    assert not usable and "ValueError" in reason


def test_a_newer_triton_with_other_names(newer):
    """All are off, and why is kept."""
    with pytest.warns(UserWarning, match="no such name"):
        assert support.left_out(ImportError("no such name")) is None
    assert not support.available().usable and not support.attempt(print)


def test_plain_triton_takes_the_place(newer, monkeypatch):
    """Of a launch that fails: the same result, in the interpreter, by the plain kernel."""
    x = gdn_inputs(1, 64, 1, 1, 16, 16, dtype=torch.float32, device="cpu", seed=0)
    gc = gate_cumsum(x.g, chunk_size=64)
    want = fused.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64)
    stand_in = SimpleNamespace(fits=lambda *_: True, intra_gluon=no_launch)
    monkeypatch.setattr(fused, "gdn_intra", stand_in)
    with pytest.warns(UserWarning, match="no_launch is off"):
        got = fused.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    stand_in.fits = lambda *_: False
    monkeypatch.setattr(
        fused, "gdn_scan", SimpleNamespace(fits=lambda *_: True, scan_gluon=no_launch)
    )
    given = x.q, x.k, x.v, gc, *want[:2]
    o, _ = fused.scan(*given, scale=1.0)
    monkeypatch.setattr(fused, "gdn_scan", None)
    assert torch.equal(o, fused.scan(*given, scale=1.0)[0])


def no_launch(*_):
    raise ValueError("not with this Triton")


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
    monkeypatch.setattr(support, "VERSIONS", LATER)
    assert not fits()


def test_intra_fits(monkeypatch):
    """Each condition by itself turns it away; neither length nor batch does."""
    generation = ["hopper"]
    monkeypatch.setattr(forward_gluon, "device_of", lambda _: (generation[0], 132))

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
    monkeypatch.setattr(support, "VERSIONS", LATER)
    assert not fits()


def test_intra_bwd_fits(monkeypatch):
    """Each condition by itself turns it away."""
    generation = ["hopper"]
    monkeypatch.setattr(intra_gluon, "device_of", lambda _: (generation[0], 132))

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
    monkeypatch.setattr(support, "VERSIONS", LATER)
    assert not fits()


def test_channel_intra_fits(monkeypatch):
    """Each condition by itself turns it away."""
    generation = ["hopper"]
    monkeypatch.setattr(channel_intra, "device_of", lambda _: (generation[0], 132))

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
    monkeypatch.setattr(support, "VERSIONS", LATER)
    assert not fits()


def test_fused_channel_stages_fit(monkeypatch):
    """Each condition by itself turns a call of Kimi Delta Attention to the stages one by one."""
    generation = ["hopper"]
    for module in (kda_fused_bwd, fused_bwd, scan_gluon):
        monkeypatch.setattr(module, "device_of", lambda _: (generation[0], 132))

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
    monkeypatch.setattr(support, "VERSIONS", LATER)
    assert not fits()
