"""The kernels in Gluon compiled for Hopper, which need not be present, and when they are chosen."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from grids import FULL
from kernels import kept
from kernels.workers import lines_of

from linattn_edu.reference.delta.gate_cumsum import gate_cumsum
from linattn_edu.testing import gdn_inputs

triton = pytest.importorskip("triton")
KEPT = kept.read(triton.__version__, kept.GLUON, kept.GluonResult)
support = import_module("linattn_edu.kernels.gluon.support")
by_load = import_module("linattn_edu.kernels.routes.by_load")
(
    forward_gluon, intra_gluon, scan_gluon, scans_gluon, channel_gluon, kda_fused_scans,
    channel_front, channel_intra, fused, fused_intra, fused_scans, fused_bwd, kda_fused,
    kda_scans, kda_fused_bwd,
) = (
    import_module(f"linattn_edu.kernels.{name}")
    for name in (
        "gluon.gdn_intra", "gluon.gdn_intra_bwd", "gluon.gdn_scan", "gluon.gdn_scans",
        "gluon.kda_scan", "gluon.kda_scans", "gluon.kda_intra", "gluon.kda_intra_bwd",
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
JOINED = 3 + 2 + 2 + 4  # blocks of the inverse: N, N^2 and N^3 without their zeros, and A


def test_the_launchers_have_them():
    """What fails to import is left out: it may be for another Triton."""
    assert fused.gdn_scan is scan_gluon and fused_intra.gdn_intra is forward_gluon
    assert kda_fused.kda_scan is channel_gluon and kda_fused.kda_intra is channel_front
    assert kda_scans.kda_scans is kda_fused_scans
    assert kda_fused_bwd.kda_intra_bwd_gluon is channel_intra
    assert fused_scans.gdn_scans is fused_bwd.gdn_scans is scans_gluon
    assert fused_bwd.gdn_intra_bwd is intra_gluon


def products_of(row):
    """Of 16 terms and 64 columns for 64 rows, in all groups of warps."""
    name = row["kernel"]
    if name == "scan_intra_bwd_gluon_kernel":  # of the scan and dQ; what is left, a half in a loop
        return 2 * 4 * ((2 + 2 + 4) + (2 + 1)) + 4 * (2 + 2) + 4 * (2 + 2 + 3)
    if name == "chunk_fwd_gluon_kernel":  # a group scans 64 values, another makes P and R
        halves = row["K"] // 64
        first = 4 * halves  # K K^T of the first chunk, before the loop
        return first + 2 * 4 * halves + JOINED + halves * 4 * (3 * halves + 2 + row["finds"])
    if name == "kda_prepare_gluon_kernel":  # a block of rows at a time; far ones; four of 64 terms
        return 4 * 4 * 2 + 4 * 2 * 4 * (not row["near"]) + JOINED + 4 * row["finds"]
    if name == "ssd_bwd_dx_gluon_kernel":  # scores; of a head, by tile, and what is of both
        return 3 * 8 + (4 + 8 + 4 + 4) + (4 + 8 + 4) + 3 * 4
    if name == "ssd_states_gluon_kernel":  # of each head, of both tiles of a chunk, h
        return 2 * 2 * 4
    if name == "ssd_bwd_dc_gluon_kernel":  # of each head, of each tile C h and dY h^T
        return 2 * (8 + 4)
    if name == "ssd_fwd_gluon_kernel":  # of each head C h, M x and h, which has 128 columns
        return 2 * (8 + 4 + 4)
    if name in PRODUCTS:
        # of 64 keys those of twice 64 terms or columns are half as many
        products = PRODUCTS[name] if row["K"] == 128 else 1 + (1 + 1 + 1 + 1 + 1)
        return 4 * products * row["workers"]
    if row.get("K") == 64 and name == "intra_chunk_bwd_gluon_kernel":
        return 9 * 4  # of 64 terms
    if name == "kda_intra_bwd_gluon_kernel":  # four more of 64 terms, of low halves
        if "halves" in row:
            return (2 + 3) * 8 + 2 * ((1 + 2 + 2) * 8 + 4 * 3 * 4)
        return 2 * (4 * 8 + 8 * 4)
    if name == "intra_chunk_bwd_gluon_kernel":
        if "halves" in row:  # both of each that has them
            return (2 + 3) * 8 + 2 * ((1 + 2 + 2) * 8 + 4 * 2 * 4)
        return 2 * (4 * 8 + 4 * 4)  # a half: four products of 128 terms and four of 64
    return 2 * (row["K"] // 16) + JOINED  # K K^T and Q K^T


def programs_of(row):
    """Of a multiprocessor, which share its memory."""
    if row["kernel"] == "intra_chunk_ring_gluon_kernel":
        return by_load.ring_programs(row["K"], 4 // row["G"], 4)
    if row["kernel"] in ("chunk_fwd_gluon_kernel", "intra_chunk_bwd_gluon_kernel"):
        return 128 // row.get("K", 128)
    return {"intra_chunk_gluon_kernel": 4, "kda_prepare_gluon_kernel": 2}.get(row["kernel"], 1)


# stores of a thread, in bytes; scans spill nothing
SPILLED = {
    "intra_chunk_bwd_gluon_kernel": 128 if support.THIS < (3, 9) else 160,
    "kda_intra_bwd_gluon_kernel": 512,
    "kda_prepare_gluon_kernel": 0 if support.THIS < (3, 9) else 12,  # of three numbers
    "scan_intra_bwd_gluon_kernel": 32,
    "chunk_fwd_gluon_kernel": 300,  # where states are given and returned; else 92, and 144 of 64
    "ssd_bwd_dx_gluon_kernel": 276,
    "ssd_bwd_dc_gluon_kernel": 0,
    "ssd_states_gluon_kernel": 0,
    "ssd_fwd_gluon_kernel": 640,  # before the loop, of the states of pieces; else 12
    "intra_chunk_gluon_kernel": 64,
    "intra_chunk_ring_gluon_kernel": 16,
}
# with low halves, of a head each and of heads that share keys
OF_HALVES = {
    "intra_chunk_bwd_gluon_kernel": (100, 552),
    "kda_intra_bwd_gluon_kernel": (384 if support.THIS < (3, 9) else 1024, None),
}
# of the chunks in a list, of a head each and of heads that share keys
LISTED = {
    "intra_chunk_bwd_gluon_kernel": (28, 308) if support.THIS < (3, 9) else (76, 576),
    "kda_intra_bwd_gluon_kernel": (104 if support.THIS < (3, 9) else 552, None),
}
# the same by the level of allocation that Triton gives to ptxas, where that spills more
AS_RUN = {
    "kda_intra_bwd_gluon_kernel": 664,
    "kda_prepare_gluon_kernel": 88,
    "ssd_bwd_dx_gluon_kernel": 708,
}


def test_compiled_for_hopper():
    """Products run beside one another, shared memory suffices, next to nothing is spilled; the
    results kept are those of today's kernels.
    """
    rows = lines_of("compile_gluon.py", *["--all"] * FULL)
    assert len(rows) == 80 and {row["kernel"] for row in rows} == {*PRODUCTS, *SPILLED}
    assert any(row["compiled"] for row in rows)
    for row in rows:
        result = row["compiled"] or row["kept"]
        if KEPT:
            assert row["kept"] == result, f"{row}: `make compile` compiles and keeps what changed"
        most = SPILLED.get(row["kernel"], 0)
        if row["kernel"] == "intra_chunk_bwd_gluon_kernel" and row["G"] == 1:
            most = 16 if support.THIS < (3, 9) else 64
        if "halves" in row:
            most = OF_HALVES[row["kernel"]][row["G"] > 1]
        if "listed" in row and not (row["kernel"].startswith("kda") and "halves" in row):
            most = LISTED[row["kernel"]][row["G"] > 1]
        # Triton 3.8's form of this one is the only one whose products ptxas has wait
        known = support.THIS == (3, 8) and row["kernel"] == "kda_intra_bwd_gluon_kernel"
        if row["kernel"] == "chunk_fwd_gluon_kernel":  # with 64 values registers are scarce
            known, most = row["K"] == 64, 144 if row["K"] == 64 else 300
        assert result["spilled"] <= most, row
        assert result["spilled_as_run"] <= max(most, AS_RUN.get(row["kernel"], 0)), row
        assert result["serialized"] == known, row
        assert 0 < result["shared"] + 1024 <= (228 << 10) // programs_of(row), row
        assert result["products"] == products_of(row), row


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


@support.attempt
def fails(ran):
    ran.append("fails")
    raise ValueError("no such\nlayout")


@support.attempt
def works(ran):
    ran.append("works")


def test_a_failure_with_a_triton_that_was_tried_is_an_error():
    with pytest.raises(ValueError, match="no such"):
        fails([])
    with pytest.raises(ImportError):
        support.left_out(ImportError("no such name"))


def test_a_newer_triton_is_tried(newer, recwarn):
    """What fails is off from then on, which is said once; what does not is on."""
    ran = []
    assert works(ran) and not recwarn
    assert not fails(ran)
    (said,) = recwarn
    assert "fails: ValueError: no such layout" in str(said.message)
    assert not fails(ran) and works(ran) and len(recwarn) == 1
    assert ran == ["works", "fails", "works"]
    assert support.available().usable and "3.1" in support.available("works").reason
    usable, reason = support.available("fails")
    assert not usable and "no such layout" in reason


def test_a_newer_triton_with_other_names(newer):
    """All are off, and why is kept."""
    with pytest.warns(UserWarning, match="no such name"):
        absent = support.left_out(ImportError("no such name"))
    assert not support.available().usable and not works([]) and not absent.scan_gluon(1, 2)


def test_plain_triton_takes_the_place(newer, monkeypatch, force, device):
    """Of a launch that fails: the same result, by the plain kernel."""
    x = gdn_inputs(1, 64, 1, 1, 16, 16, dtype=torch.float32, device=device, seed=0)
    gc = gate_cumsum(x.g, chunk_size=64)
    P, R, _ = want = fused_intra.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64)
    o, _ = fused.scan(x.q, x.k, x.v, gc, P, R, scale=1.0)
    monkeypatch.setattr(fused_intra, "gdn_intra", SimpleNamespace(intra_gluon=no_launch))
    monkeypatch.setattr(fused, "gdn_scan", SimpleNamespace(scan_gluon=no_launch))
    force(intra_chunk="gluon", scan="gluon")
    with pytest.warns(UserWarning, match="no_launch"):
        got = fused_intra.intra_chunk(x.q, x.k, x.beta, gc, chunk_size=64)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(fused.scan(x.q, x.k, x.v, gc, P, R, scale=1.0)[0], o)


@support.attempt
def no_launch(*_):
    raise ValueError("not with this Triton")
